"""D001: ``VLLM_PLUGINS`` names something that no installed package registers."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor.environment import Environment
from vllm_graft.errors import nearest
from vllm_graft.findings import Finding

CODE = "D001"
TITLE = "A name in VLLM_PLUGINS that nothing registers"


def check(env: Environment) -> Iterator[Finding]:
    """Find names that vLLM silently skips, because it compares names and logs no mismatch."""
    known = {entry.name for entry in env.plugins}
    for name in env.allowed or ():
        # Blanks have a rule of their own; an empty name is how the list is switched to nothing.
        if name.strip() and name.strip() not in known:
            what = f"VLLM_PLUGINS names it, but no installed package registers it{nearest(name.strip(), known)}"
            fix = "install the package that offers it, or correct the name"
            yield Finding(CODE, "error", f"plugin {name.strip()!r}", what, "VLLM_PLUGINS", fix)
