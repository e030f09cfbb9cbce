"""D020: adapters loaded at run time, and more than one API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor import server
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding

CODE = "D020"
TITLE = "Several API servers and LoRA resolvers"

_ONE_OR_NONE: Final = ("--enable-elastic-ep", "--headless")
_HYBRID: Final = ("--data-parallel-hybrid-lb", "--data-parallel-start-rank", "-dpr")
_ALONE: Final = (
    "--data-parallel-external-lb", "--data-parallel-rank", "-dpn", "--data-parallel-multi-port-external-lb",
)  # fmt: skip


def check(env: Environment) -> Iterator[Finding]:
    """Find several API servers: an adapter that one of them resolves is unknown to the others, so vLLM refuses."""
    count, said = _api_servers(env)
    if count < 2 or not server.switched_on(env, server.LORA_UPDATING):
        return
    lost = ", ".join(map(repr, server.active_resolvers(env)))
    what = f"{said} starts {count} API servers, and vLLM refuses that with {server.LORA_UPDATING} (ValueError)"
    fix = f"start with --api-server-count 1, or unset {server.LORA_UPDATING}"
    subject = f"LoRA resolvers {lost}" if lost else server.LORA_UPDATING
    yield Finding(CODE, "error", subject, what, said.partition(" ")[0], fix)


def _api_servers(env: Environment) -> tuple[int, str]:
    """Return how many API servers ``vllm serve`` would start, and the argument that decides: else one per engine."""
    told = env.arguments
    if server.number(env, "VLLM_USE_RUST_FRONTEND") or any(map(told.switched, _ONE_OR_NONE)):
        return 1, ""
    if any(map(told.given, ("--api-server-count", "-asc"))):
        return _count(env, "--api-server-count", "-asc")
    # Without a count vllm/entrypoints/cli/serve.py goes by how data parallelism is balanced: inside, hybrid, outside.
    if any(map(told.given, _HYBRID)):
        return _count(env, "--data-parallel-size-local", "-dpl")
    return (1, "") if any(map(told.given, _ALONE)) else _count(env, "--data-parallel-size", "-dp")


def _count(env: Environment, *names: str) -> tuple[int, str]:
    for name in names:
        value = env.arguments.value(name)
        if value and value.isdigit():
            return int(value), f"{name} {value}"
    return 1, ""
