"""Putting the gate into an application of vLLM's: with the planned queue's ``admit``, and the callers of the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from vllm_graft.bindings.instantiate import instantiate
from vllm_graft.bindings.scheduling.statistics import normalize_labels
from vllm_graft.contracts import AdmissionQueue, Load, Refusal, WaitingRequest
from vllm_graft.ledger import Guard, Ledger
from vllm_graft.ledger.queue_statistics import OTHERS, StatisticsReader
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.plan.catalogue import load
from vllm_graft.points import point
from vllm_graft.server.callers import CallersFile
from vllm_graft.server.gate import Gate

if TYPE_CHECKING:
    from fastapi import FastAPI

_CLASSES: Final = 100

P = ParamSpec("P")
R = TypeVar("R")


def attach_gate(app: FastAPI, plan: Plan, book: Ledger) -> None:
    """Put the gate innermost, where the plan has something for it: whatever vLLM adds later stands before it."""
    item, queue = _queue(plan, book)
    callers = CallersFile(plan.callers, plan) if plan.callers else None
    if callers is not None:
        book.set_item("endpoint", "callers", "applied")
    if queue is None and callers is None:
        return
    from starlette.middleware import Middleware

    gate: Any = Gate
    facts: dict[str, Any] = {"callers": callers}
    if item is not None and queue is not None:
        facts["load"] = StatisticsReader(book.home).load
        facts["admit"] = _guarded(item, queue.admit, _let_in, "admit", book)
        facts["refused"] = _counted(_guarded(item, lambda request: _class(queue, request), _unknown, "labels", book))
    app.user_middleware.append(Middleware(gate, **facts))
    book.save()


def _queue(plan: Plan, book: Ledger) -> tuple[PlanItem | None, AdmissionQueue | None]:
    """The planned queue where it turns anybody away: one of its own for this server, which never holds a request."""
    for item in plan.of("scheduler"):
        kind = load(item.target, item.name, item.package)
        if isinstance(kind, type) and issubclass(kind, AdmissionQueue) and kind.admit is not AdmissionQueue.admit:
            queue = instantiate(item, AdmissionQueue, plan, book)
            if queue is not None:
                return item, queue
    return None, None


def _guarded(item: PlanItem, call: Callable[P, R], otherwise: Callable[P, R], name: str, book: Ledger) -> Guard[P, R]:
    meter = book.hook(item.name, name, point("scheduler").budget_us)
    return Guard(call, otherwise, meter, functools.partial(book.put_aside, item.name))


def _let_in(request: WaitingRequest, load: Load) -> Refusal | None:
    """What is called in the place of an ``admit`` that was put aside: engine core asks again."""
    return None


def _class(queue: AdmissionQueue, request: WaitingRequest) -> str:
    return dict(normalize_labels(queue.labels(request))).get("class", "")


def _unknown(request: WaitingRequest) -> str:
    return ""


def _counted(kind: Callable[[WaitingRequest], str]) -> Callable[[WaitingRequest, Refusal], None]:
    """Counts who was turned away, for Prometheus, which keeps every value for ever: so only the first ones."""
    counter, seen = _counter(), set[str]()

    def refused(request: WaitingRequest, refusal: Refusal) -> None:
        name = kind(request)
        if len(seen) < _CLASSES:
            seen.add(name)
        counter.labels(str(refusal.status), name if name in seen else OTHERS).inc()

    return refused


@functools.cache
def _counter() -> Any:
    from prometheus_client import Counter

    text = "Requests that this API server turned away before they were queued"
    return Counter("vllm_graft_gate_refused", text, ("status", "class"))
