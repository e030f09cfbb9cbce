"""Putting the gate into an application of vLLM's: with the planned queue's ``admit``, and the callers of the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
        facts |= {"admit": _guarded(item, queue, book), "load": Boards(book.home).load, "refused": _counted(queue)}
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


def _guarded(item: PlanItem, queue: AdmissionQueue, book: Ledger) -> Callable[[WaitingRequest, Load], Refusal | None]:
    meter = book.hook(item.name, "admit", point("scheduler").budget_us)
    return Guard(queue.admit, _let_in, meter, functools.partial(book.put_aside, item.name))


def _let_in(request: WaitingRequest, load: Load) -> None:
    """What is called in the place of an ``admit`` that was put aside: engine core asks again."""


def _counted(queue: AdmissionQueue) -> Callable[[WaitingRequest, Refusal], None]:
    """Counts who was turned away, for Prometheus."""
    counter = _counter()

    def refused(request: WaitingRequest, refusal: Refusal) -> None:
        kind = queue.labels(request).get("class", "")
        counter.labels(str(refusal.status), str(kind)).inc()

    return refused


@functools.cache
def _counter() -> Any:
    from prometheus_client import Counter

    text = "Requests that this API server turned away before they were queued"
    return Counter("vllm_graft_gate_refused", text, ("status", "class"))
