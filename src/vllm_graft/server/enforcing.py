"""Who asks, carried from the gate to the engine: no request leaves an API server with a tenant of its client's choice.

Endpoints differ in what they hand on: beam search drops priorities and ``vllm_xargs``, uploads have neither, later
turns of a conversation with tools get another priority. So nothing is written into requests as they come in. The gate
notes who asks in the context of the task, which every task that vLLM starts for the request inherits, and what the
engine client sends to the engine is put right at the last moment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final

from vllm_graft.errors import StartError
from vllm_graft.server.callers import Caller

ASKING: Final[ContextVar[tuple[str, Caller] | None]] = ContextVar("vllm_graft_asking", default=None)
"""Who asks in this task, after the name under which the tenant travels."""


def enforce(client: Any) -> None:
    """Have an engine client's requests carry the tenant and the capped priority of whoever asks."""
    core = getattr(client, "engine_core", None)
    send = getattr(core, "add_request_async", None)
    if core is None or send is None:
        raise StartError(
            f"this vLLM's engine client ({type(client).__name__}) has no place where callers can be enforced",
            where="engine_core.add_request_async",
            fix="install a vLLM of the tested range, or take `callers` out of the configuration",
        )
    core.add_request_async = _put_right(send)


def _put_right(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def add_request_async(request: Any) -> Any:
        asking = ASKING.get()
        if asking is not None:
            put_right(request, *asking)
        return await send(request)

    return add_request_async


def put_right(request: Any, key: str, caller: Caller) -> None:
    """Write the tenant and the capped priority into what the engine is sent."""
    request.priority = caller.capped(request.priority)
    for params, name in ((request.sampling_params, "extra_args"), (request.pooling_params, "extra_kwargs")):
        if params is not None:
            setattr(params, name, {**(getattr(params, name) or {}), key: caller.tenant})
