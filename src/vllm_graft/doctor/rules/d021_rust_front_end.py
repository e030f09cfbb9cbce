"""D021: plugins of the Python front end beside the Rust one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor import plans, server
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding, Level

CODE = "D021"
TITLE = "Front-end plugins beside the Rust front end"

_SWITCH: Final = "VLLM_USE_RUST_FRONTEND"
_KINDS: Final = {
    "vllm.stat_logger_plugins": "stat logger",
    "vllm.endpoint_plugins": "endpoint plugin",
    "vllm.io_processor_plugins": "IO processor",
}


def check(env: Environment) -> Iterator[Finding]:
    """Find plugins of API servers: ``vllm serve`` runs a binary in their place, which loads no Python plugin."""
    if not server.number(env, _SWITCH):
        return
    items = sorted(set().union(*plans.planned(env).values()))
    if items:
        what = f"names {', '.join(items)}, and vllm-graft refuses to start with the Rust front end: nothing runs in it"
        fix = f"unset {_SWITCH}, or set GRAFT_DISABLE=1 for a stock server"
        yield Finding(CODE, "error", "the plan", what, _SWITCH, fix)
    for entry in env.in_group(*_KINDS):
        if env.uses(entry):
            # What is installed may be there for another server; what is named is meant for this one.
            named = entry.name in (env.allowed or ()) or entry.group == "vllm.io_processor_plugins"
            subject, where = f"{_KINDS[entry.group]} {entry.name!r}", entry.origin
            yield _lost(subject, where, "error" if named else "warning")
    for name in server.active_resolvers(env) if server.switched_on(env, server.LORA_UPDATING) else ():
        yield _lost(f"LoRA resolver {name!r}", _SWITCH, "error")


def _lost(subject: str, where: str, level: Level) -> Finding:
    what = f"{_SWITCH}=1 replaces the Python API servers, and the Rust front end loads no Python plugin"
    fix = f"unset {_SWITCH}, or do without the plugin"
    return Finding(CODE, level, subject, what, where, fix)
