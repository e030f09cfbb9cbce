"""D017: more than one platform plugin besides vLLM's own platforms."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import server
from vllm_graft.doctor.environment import Environment, describe_entries
from vllm_graft.findings import Finding

CODE = "D017"
TITLE = "Several platform plugins"


def check(env: Environment) -> Iterator[Finding]:
    """Find several platform plugins: vLLM calls them all, and refuses to start if two of them answer."""
    found = server.platform_plugins(env)
    if len({entry.name for entry in found}) < 2 or server.cpu_is_ordered(env):
        return
    ours = any(entry.package == "vllm-graft" for entry in found)
    fix = "uninstall all but the one you want, or set VLLM_PLUGINS to a list that names that one but not the others"
    what = (
        f"several are installed: {describe_entries(found)}; if two of them find their hardware, vLLM refuses to start "
        "('Only one platform plugin can be activated')"
    )
    fix = f"unset GRAFT_SIMULATE, or {fix}" if ours else fix
    yield Finding(CODE, "warning", "platform plugins", what, f"entry points of {server.PLATFORMS}", fix)
