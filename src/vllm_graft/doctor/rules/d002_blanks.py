"""D002: blanks in ``VLLM_PLUGINS``, which vLLM does not strip."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding

CODE = "D002"
TITLE = "Blanks in VLLM_PLUGINS"


def check(env: Environment) -> Iterator[Finding]:
    """Find names with blanks around them, which to vLLM are other names."""
    known = {entry.name for entry in env.plugins}
    for name in env.allowed or ():
        if name != name.strip() and name.strip() in known:
            what = "VLLM_PLUGINS has it with blanks around it, which vLLM does not strip, so it is not loaded"
            fix = f"write VLLM_PLUGINS={','.join(each.strip() for each in env.allowed or ())}"
            yield Finding(CODE, "error", f"plugin {name.strip()!r}", what, "VLLM_PLUGINS", fix)
