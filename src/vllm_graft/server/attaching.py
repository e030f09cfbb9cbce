"""Putting the gate into an application of vLLM's: with the planned queue's ``admit``, and the callers of the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from vllm_graft.bindings.making import make
from vllm_graft.contracts import AdmissionQueue, Load, Refusal, WaitingRequest
from vllm_graft.ledger import Guard, Ledger
from vllm_graft.ledger.board import Boards
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.plan.catalogue import load
from vllm_graft.points import point
from vllm_graft.server.callers import CallersFile
from vllm_graft.server.gate import Gate, admits

if TYPE_CHECKING:
    from fastapi import FastAPI

P = ParamSpec("P")
R = TypeVar("R")


def attach_gate(app: FastAPI, plan: Plan, book: Ledger) -> None:
    """Put the gate innermost, where the plan has something for it: whatever vLLM adds later stands before it."""
    item, queue = _queue(plan, book)
    callers = CallersFile(plan.callers) if plan.callers else None
    if callers is not None:
        book.set_item("endpoint", "callers", "applied")
    if queue is None and callers is None:
        return
    from starlette.middleware import Middleware

    gate: Any = Gate
    facts: dict[str, Any] = {"callers": callers}
    if item is not None and queue is not None:
        facts["load"] = Boards(book.home).load
        facts["admit"] = _guarded(item, queue.admit, _let_in, "admit", book)
        facts["refused"] = _counted(_guarded(item, queue.labels, _no_labels, "labels", book))
    app.user_middleware.append(Middleware(gate, **facts))
    book.save()


def _queue(plan: Plan, book: Ledger) -> tuple[PlanItem | None, AdmissionQueue | None]:
    """The planned queue where it turns anybody away: one of its own for this server, which never holds a request."""
    for item in plan.of("scheduler"):
        kind = load(item.target, item.name, item.package)
        if isinstance(kind, type) and issubclass(kind, AdmissionQueue) and kind.admit is not AdmissionQueue.admit:
            queue = make(item, AdmissionQueue, plan, book)
            if queue is not None and admits(queue):
                return item, queue
    return None, None


def _guarded(item: PlanItem, call: Callable[P, R], otherwise: Callable[P, R], name: str, book: Ledger) -> Guard[P, R]:
    meter = book.hook(item.name, name, point("scheduler").budget_us)
    return Guard(call, otherwise, meter, functools.partial(book.put_aside, item.name))


def _let_in(request: WaitingRequest, load: Load) -> Refusal | None:
    """What is called in the place of an ``admit`` that was put aside: engine core asks again."""
    return None


def _no_labels(request: WaitingRequest) -> Mapping[str, str]:
    return {}


def _counted(labels: Callable[[WaitingRequest], Mapping[str, str]]) -> Callable[[WaitingRequest, Refusal], None]:
    """Counts who was turned away, for Prometheus."""
    counter = _counter()

    def refused(request: WaitingRequest, refusal: Refusal) -> None:
        counter.labels(str(refusal.status), str(labels(request).get("class", ""))).inc()

    return refused


@functools.cache
def _counter() -> Any:
    from prometheus_client import Counter

    text = "Requests that this API server turned away before they were queued"
    return Counter("vllm_graft_gate_refused", text, ("status", "class"))
