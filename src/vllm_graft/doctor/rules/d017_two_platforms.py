"""D017: more than one platform plugin besides vLLM's own platforms."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import platforms
from vllm_graft.doctor.facts import Facts
from vllm_graft.findings import Finding

CODE = "D017"
TITLE = "Several platform plugins"


def check(facts: Facts) -> Iterator[Finding]:
    """vLLM asks them all, and refuses to start if two of them answer."""
    found = platforms.outside(facts)
    if len({entry.name for entry in found}) < 2 or platforms.cpu_is_ordered(facts):
        return
    ours = any(entry.package == "vllm-graft" for entry in found)
    fix = "uninstall all but the one you want, or set VLLM_PLUGINS to a list that names that one and not the others"
    yield Finding(
        CODE,
        "warning",
        "platform plugins",
        f"several are installed: {facts.names(found)}; if two of them find their hardware, vLLM refuses to start "
        "('Only one platform plugin can be activated')",
        f"entry points of {platforms.GROUP}",
        f"unset GRAFT_SIMULATE, or {fix}" if ours else fix,
    )
