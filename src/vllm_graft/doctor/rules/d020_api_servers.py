"""D020: adapters loaded at run time, and more than one API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor import engine, resolvers
from vllm_graft.doctor.facts import Facts
from vllm_graft.findings import Finding

CODE = "D020"
TITLE = "Several API servers and LoRA resolvers"

_ONE_OR_NONE: Final = ("--enable-elastic-ep", "--headless")
_HYBRID: Final = ("--data-parallel-hybrid-lb", "--data-parallel-start-rank", "-dpr")
_ALONE: Final = (
    "--data-parallel-external-lb",
    "--data-parallel-rank",
    "-dpn",
    "--data-parallel-multi-port-external-lb",
)


def check(facts: Facts) -> Iterator[Finding]:
    """An adapter that one API server resolved would be unknown to the others, so vLLM refuses to start."""
    count, said = _api_servers(facts)
    if count < 2 or not engine.switched_on(facts, resolvers.UPDATING):
        return
    lost = ", ".join(map(repr, resolvers.active(facts)))
    yield Finding(
        CODE,
        "error",
        f"LoRA resolvers {lost}" if lost else resolvers.UPDATING,
        f"{said} starts {count} API servers, and vLLM refuses that with {resolvers.UPDATING} (ValueError)",
        said.partition(" ")[0],
        f"start with --api-server-count 1, or unset {resolvers.UPDATING}",
    )


def _api_servers(facts: Facts) -> tuple[int, str]:
    """How many API servers ``vllm serve`` would start, and what says so; the engines decide where nothing else does."""
    told = facts.arguments
    if engine.number(facts, "VLLM_USE_RUST_FRONTEND") or any(map(told.switched, _ONE_OR_NONE)):
        return 1, ""
    if any(map(told.given, ("--api-server-count", "-asc"))):
        return _count(facts, "--api-server-count", "-asc")
    if any(map(told.given, _HYBRID)):
        return _count(facts, "--data-parallel-size-local", "-dpl")
    return (1, "") if any(map(told.given, _ALONE)) else _count(facts, "--data-parallel-size", "-dp")


def _count(facts: Facts, *names: str) -> tuple[int, str]:
    for name in names:
        value = facts.arguments.value(name)
        if value and value.isdigit():
            return int(value), f"{name} {value}"
    return 1, ""
