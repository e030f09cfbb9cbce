"""D021: plugins of the Python front end beside the Rust one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor import engine, resolvers
from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.packages import Entry
from vllm_graft.findings import Finding

CODE = "D021"
TITLE = "Front-end plugins beside the Rust front end"

_SWITCH: Final = "VLLM_USE_RUST_FRONTEND"
_KINDS: Final = {
    "vllm.stat_logger_plugins": "stat logger",
    "vllm.endpoint_plugins": "endpoint plugin",
    "vllm.io_processor_plugins": "IO processor",
}


def check(facts: Facts) -> Iterator[Finding]:
    """``vllm serve`` then runs a binary in the place of its API servers, which is where these plugins are loaded."""
    if not engine.number(facts, _SWITCH):
        return
    for entry in facts.in_group(*_KINDS):
        if facts.loads(entry) and _is_wanted(facts, entry):
            yield _lost(f"{_KINDS[entry.group]} {entry.name!r}", f"{entry.package}: {entry.value}")
    for name in resolvers.active(facts) if engine.switched_on(facts, resolvers.UPDATING) else ():
        yield _lost(f"LoRA resolver {name!r}", _SWITCH)


def _is_wanted(facts: Facts, entry: Entry) -> bool:
    """An IO processor is used where an argument names it; that a model names it is not seen here."""
    return entry.group != "vllm.io_processor_plugins" or facts.arguments.value("--io-processor-plugin") == entry.name


def _lost(subject: str, where: str) -> Finding:
    return Finding(
        CODE,
        "error",
        subject,
        f"{_SWITCH}=1 replaces the Python API servers, and the Rust front end loads no Python plugin",
        where,
        f"unset {_SWITCH}, or do without the plugin",
    )
