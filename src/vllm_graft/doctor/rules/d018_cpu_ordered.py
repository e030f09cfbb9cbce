"""D018: a platform plugin beside a vLLM that is told, or built, to run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import server
from vllm_graft.doctor.environment import Environment, describe_entries
from vllm_graft.findings import Finding

CODE = "D018"
TITLE = "A platform plugin beside a request for the CPU"


def check(env: Environment) -> Iterator[Finding]:
    """Find plugins beside the CPU: ``VLLM_TARGET_DEVICE`` leaves all out, a CPU build falls back if none answers."""
    found = server.platform_plugins(env)
    if not found:
        return
    subject = f"platform plugin {describe_entries(found)}"
    if server.cpu_is_ordered(env):
        ours = any(entry.package == "vllm-graft" for entry in found)
        what = "VLLM_TARGET_DEVICE=cpu makes vLLM take its own CPU platform without loading any platform plugin" + (
            ", the simulated device that GRAFT_SIMULATE asks for included" if ours else ""
        )
        fix = "unset VLLM_TARGET_DEVICE to have the plugin's platform"
        yield Finding(CODE, "error" if ours else "warning", subject, what, "VLLM_TARGET_DEVICE", fix)
    elif server.is_cpu_platform(env):
        what = (
            "this vLLM is a CPU build: the plugin's platform goes before the CPU if the plugin answers; if it answers "
            "nothing or raises, vLLM runs on the CPU and says so at DEBUG at most"
        )
        fix = "check in vLLM's log that the platform plugin is activated"
        yield Finding(CODE, "info", subject, what, f"entry points of {server.PLATFORMS}", fix)
