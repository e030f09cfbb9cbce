"""The gate: before vLLM reads a request, who asks is settled, and whom the scheduler would turn away is told so.

An ASGI middleware, the innermost: vLLM's own check of API keys comes first. It notes who asks, by the request's
headers alone (``enforcing.py`` sees to it that the engine hears of it), and asks the planned queue's ``admit`` with the
load that the engines publish. A refusal is an HTTP answer with a ``Retry-After``, and costs the engine nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any, Final

from vllm_graft.contracts import Load, Refusal, WaitingRequest
from vllm_graft.server.asked import Asked
from vllm_graft.server.callers import Caller, CallersFile
from vllm_graft.server.enforcing import ASKING

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Admit = Callable[[WaitingRequest, Load], Refusal | None]

UNSEEN_S: Final = 0.2
"""How long a request that was let in may be missing from the load that the engines publish."""

OPEN: Final = frozenset({"/health", "/ping", "/ready", "/readyz", "/load", "/version", "/metrics"})
"""What somebody who is no caller may ask: how the server is, and nothing of any request."""

_NOBODY: Final = Refusal("no caller of this server has that key", status=401)

_WORDS: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


class Gate:
    """The middleware. ``admit`` is the queue's, guarded; ``load`` what the engines publish."""

    def __init__(
        self,
        app: App,
        *,
        admit: Admit | None = None,
        load: Callable[[], Load] = Load,
        callers: CallersFile | None = None,
        refused: Callable[[WaitingRequest, Refusal], None] = lambda request, refusal: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._admit = admit
        self._load = load
        self._callers = callers
        self._refused = refused
        self._clock = clock
        self._let_in: deque[float] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is turned away; hand on all others as they came."""
        asked = Asked.of(scope)
        if asked is None or (self._callers is None and not asked.is_work):
            await self._app(scope, receive, send)
            return
        asking = self._who(asked)
        if isinstance(asking, Refusal):
            await _turn_away(scope, send, asking)
            return
        if self._admit is not None and asked.is_work:
            receive = await asked.read(receive)
            refusal = None if asked.gone else self._ask(_with(asked.waiting(), asking))
            if refusal is not None:
                await _turn_away(scope, send, refusal)
                return
        before = ASKING.set(asking)
        try:
            await self._app(scope, receive, send)
        finally:
            ASKING.reset(before)

    def _who(self, asked: Asked) -> tuple[str, Caller] | Refusal | None:
        """Say who asks, after the name under which the tenant travels; None where that does not matter."""
        if self._callers is None:
            return None
        callers = self._callers.now()
        for name in filter(None, (callers.key_header, callers.tenant_header)):
            # The first may be the client's and the last the gateway's, or the other way round.
            if len(asked.headers(name)) > 1:
                return Refusal(f"the header {name} is sent more than once", status=400)
        named = asked.header(callers.tenant_header).strip() if callers.tenant_header else ""
        if "," in named and named not in callers.by_tenant:
            # Some gateways join what comes more than once.
            return Refusal(f"the header {callers.tenant_header} has more than one value", status=400)
        caller = callers.who(asked.header)
        if caller is not None:
            return callers.tenant_key, caller
        # The routes under /graft ask for the server's own key.
        is_open = asked.path in OPEN or asked.path.startswith("/graft/") or asked.is_preflight
        return None if is_open else _NOBODY

    def _ask(self, request: WaitingRequest) -> Refusal | None:
        assert self._admit is not None
        now = self._clock()
        unseen = self._let_in
        while unseen and now - unseen[0] > UNSEEN_S:
            unseen.popleft()
        load = self._load()
        refusal = self._admit(request, Load(load.waiting + len(unseen), load.running, load.rate))
        if not isinstance(refusal, Refusal):
            unseen.append(now)
            return None
        self._refused(request, refusal)
        return refusal


def _with(request: WaitingRequest, asking: tuple[str, Caller] | None) -> WaitingRequest:
    """The request as the engine will see it: with its caller's tenant and priority."""
    if asking is None:
        return request
    key, caller = asking
    return replace(request, priority=caller.capped(request.priority), extra={**request.extra, key: caller.tenant})


async def _turn_away(scope: Scope, send: Send, refusal: Refusal) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.reason})
    else:
        await answer(send, refusal)


async def answer(send: Send, refusal: Refusal) -> None:
    """The HTTP answer of a refusal, shaped as vLLM's own errors."""
    kind = _WORDS.get(refusal.status, "RequestRefusedError")
    error = {"message": refusal.reason, "type": kind, "param": None, "code": refusal.status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.retry_after > 0:
        headers.append((b"retry-after", str(math.ceil(refusal.retry_after)).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
