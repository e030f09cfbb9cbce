"""The gate: identifies the caller of a request, and refuses it if the scheduler would, before vLLM reads it.

An ASGI middleware, the innermost, so that vLLM's own check of API keys comes first. It identifies callers by headers
alone (``callers.py`` stamps them on what the engine is sent), and calls the planned queue's ``admit`` with the load
that the engines publish. A refusal is an HTTP response with ``Retry-After``, and costs the engine nothing.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.instantiate import instantiate
from vllm_graft.bindings.scheduling.admission_queue import validate_refusal
from vllm_graft.bindings.scheduling.statistics import normalize_labels
from vllm_graft.contracts import AdmissionQueue, Load, Refusal, WaitingRequest
from vllm_graft.ledger import Guard, Ledger, StatisticsReader
from vllm_graft.ledger.queue_statistics import OTHERS
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.plan.catalogue import load as load_class
from vllm_graft.points import point
from vllm_graft.server.callers import CURRENT_CALLER, Caller, CallersFile, as_utf8
from vllm_graft.server.engine_request import EngineRequest

if TYPE_CHECKING:
    from fastapi import FastAPI

ASGIScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[ASGIScope, Receive, Send], Awaitable[None]]
Admit = Callable[[WaitingRequest, Load], Refusal | None]

UNSEEN_S: Final = 0.2
"""The time that an admitted request may be missing from the load that the engines publish."""

OPEN: Final = frozenset({"/health", "/ping", "/ready", "/readyz", "/load", "/version", "/metrics"})
"""Paths that need no caller: they show the state of the server, and nothing of any request."""

_UNKNOWN_CALLER: Final = Refusal("the API key is missing or unknown", status=401)

_ERROR_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}

_MAX_CLASSES: Final = 100
"""Prometheus keeps every label value for ever, so refusals of later classes count as others."""


class Gate:
    """The middleware. ``admit`` is the queue's, guarded; ``load`` returns what the engines publish."""

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
        self._unseen: deque[float] = deque()

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused; pass all others on as they came."""
        # Other scope types, such as lifespan, pass through.
        request = EngineRequest(scope) if scope["type"] in ("http", "websocket") else None
        if request is None or (self._callers is None and not request.is_work):
            await self._app(scope, receive, send)
            return
        caller = self._identify(request)
        if isinstance(caller, Refusal):
            await _refuse(scope, send, caller)
            return
        if self._admit is not None and request.is_work:
            # Uploads are not read: they name neither a priority nor a tenant.
            receive = await request.read(receive)
            refusal = None
            if not request.disconnected:
                waiting = request.waiting()
                if caller is not None:
                    # As the engine will see it: with the caller's tenant and priority.
                    key, found = caller
                    extra = {**waiting.extra, key: found.tenant}
                    waiting = replace(waiting, priority=found.cap(waiting.priority), extra=extra)
                refusal = self._check(waiting)
            if refusal is not None:
                await _refuse(scope, send, refusal)
                return
        before = CURRENT_CALLER.set(caller)
        try:
            await self._app(scope, receive, send)
        finally:
            CURRENT_CALLER.reset(before)

    def _identify(self, request: EngineRequest) -> tuple[str, Caller] | Refusal | None:
        """Return the tenant's key in ``vllm_xargs`` and the caller; None if the request needs no caller.

        A ``Refusal`` means that the request must be refused: its caller is unknown, or a header is ambiguous.
        """
        if self._callers is None:
            return None
        callers = self._callers.now()
        for name in filter(None, (callers.key_header, callers.tenant_header)):
            # With two values we cannot tell which one the gateway set.
            if len(request.headers(name)) > 1:
                return Refusal(f"the header {name} is sent more than once", status=400)
        tenant = as_utf8(request.header(callers.tenant_header).strip()) if callers.tenant_header else ""
        if "," in tenant and tenant not in callers.by_tenant:
            # Some gateways join repeated headers.
            return Refusal(f"the header {callers.tenant_header} has more than one value", status=400)
        caller = callers.identify(request.header)
        if caller is not None:
            return callers.tenant_key, caller
        # The routes under /graft check the server's own key.
        is_open = request.path in OPEN or request.path.startswith("/graft/") or request.is_preflight
        return None if is_open else _UNKNOWN_CALLER

    def _check(self, request: WaitingRequest) -> Refusal | None:
        assert self._admit is not None
        now = self._clock()
        # Engines publish their load after a step; requests that were admitted since are added to it.
        unseen = self._unseen
        while unseen and now - unseen[0] > UNSEEN_S:
            unseen.popleft()
        load = self._load()
        refusal = self._admit(request, Load(load.waiting + len(unseen), load.running, load.rate))
        if not isinstance(refusal, Refusal):
            unseen.append(now)
            return None
        self._refused(request, refusal)
        return refusal


async def _refuse(scope: ASGIScope, send: Send, refusal: Refusal) -> None:
    if scope["type"] == "websocket":
        # 1008 is a policy violation. Closed before it is accepted, a websocket is refused with a 403.
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.reason})
    else:
        await respond(send, refusal)


async def respond(send: Send, refusal: Refusal) -> None:
    """Send the HTTP response of a refusal, in the shape of vLLM's own errors."""
    kind = _ERROR_TYPES.get(refusal.status, "RequestRefusedError")
    error = {"message": refusal.reason, "type": kind, "param": None, "code": refusal.status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.retry_after > 0:
        headers.append((b"retry-after", str(math.ceil(refusal.retry_after)).encode()))
    if refusal.status == 401:  # which must name a scheme (RFC 9110, 15.5.2)
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def install_gate(app: FastAPI, plan: Plan, ledger: Ledger) -> None:
    """Put the gate into vLLM's application, if the plan has callers or a queue that refuses requests."""
    callers = CallersFile(plan.callers, plan) if plan.callers else None
    if callers is not None:
        ledger.set_item("endpoint", "callers", "applied")
    options: dict[str, Any] = {"callers": callers}
    for item in plan.of("scheduler"):
        kind = load_class(item.target, item.name, item.package)
        if isinstance(kind, type) and issubclass(kind, AdmissionQueue) and kind.admit is not AdmissionQueue.admit:
            # An instance of this server's own, which never holds a request.
            queue = instantiate(item, AdmissionQueue, plan, ledger)
            if queue is not None:
                options |= _queue_options(item, queue, ledger)
    if callers is None and "admit" not in options:
        return
    from starlette.middleware import Middleware

    gate: Any = Gate
    # Innermost, because Starlette puts what vLLM adds later around it.
    app.user_middleware.append(Middleware(gate, **options))
    ledger.save()


def _queue_options(item: PlanItem, queue: AdmissionQueue, ledger: Ledger) -> dict[str, Any]:
    """Return the gate's arguments for a queue: its guarded ``admit``, the load, and a counter of refusals."""

    def guard(call: Callable[..., Any], otherwise: Any, name: str) -> Guard[..., Any]:
        meter = ledger.hook(item.name, name, point("scheduler").budget_us)
        return Guard(call, lambda *args: otherwise, meter, functools.partial(ledger.put_aside, item.name))

    def find_class(request: WaitingRequest) -> str:
        return dict(normalize_labels(queue.labels(request))).get("class", "")

    # Once `admit` has failed here, every request is passed on, and engine core decides.
    admit = guard(lambda *args: validate_refusal(queue.admit(*args)), None, "admit")
    find_class_guarded, counter, seen = guard(find_class, "", "labels"), _refusal_counter(), set[str]()

    def count(request: WaitingRequest, refusal: Refusal) -> None:
        name = find_class_guarded(request)
        if len(seen) < _MAX_CLASSES:
            seen.add(name)
        counter.labels(str(refusal.status), name if name in seen else OTHERS).inc()

    return {"admit": admit, "load": StatisticsReader(ledger.home).load, "refused": count}


@functools.cache
def _refusal_counter() -> Any:
    from prometheus_client import Counter

    text = "Requests that this API server turned away before they were queued"
    return Counter("vllm_graft_gate_refused", text, ("status", "class"))
