"""An admission queue behind vLLM's ``RequestQueue``: the author's methods, guarded, with a fallback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.instantiate import guard_method
from vllm_graft.bindings.scheduling.clock import AdmissionRate, SteadyClock
from vllm_graft.bindings.scheduling.request_fields import request_fields
from vllm_graft.bindings.scheduling.statistics import UNLABELLED, Labels, StatisticsCollector, normalize_labels
from vllm_graft.contracts import AdmissionQueue, Load, Refusal, WaitingHeap, WaitingRequest
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import PlanItem
from vllm_graft.text import encodable

if TYPE_CHECKING:
    from vllm.v1.request import Request

_REQUIRED: Final = ("push", "peek", "pop", "remove")
_OPTIONAL: Final = ("put_back", "served", "ended", "admit", "rank", "ready", "labels")

Waiting = dict[str, tuple["Request", WaitingRequest]]
"""Waiting requests by id: vLLM's request and what the author's queue sees of it."""


class AdmissionQueueAdapter:
    """Every operation of vLLM's ``RequestQueue``, on the author's methods.

    Each request in the author's queue is kept here too. So if that queue fails, no request is lost, removing one costs
    O(1), and removing an unknown one is not an error: vLLM removes aborted requests from every queue it has.

    running: returns the number of running requests, at most ``slots``
    engine:  the data-parallel index of this engine
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        item: PlanItem,
        ledger: Ledger,
        clock: SteadyClock | None = None,
        running: Callable[[], int] = int,
        slots: int = sys.maxsize,
        engine: int = 0,
    ) -> None:
        # One clock for queue and adapter, so that a wait is measured on the time scale of the arrivals.
        self._clock = queue.clock = clock or SteadyClock()
        self._running, self._slots = running, slots
        self._waiting: Waiting = {}
        self._popped: dict[str, WaitingRequest] = {}  # until they end; separate, because every step reads it
        self.refused: dict[str, tuple[Request, Refusal]] = {}
        self._peeked = ""
        self._reported: dict[str, int] = {}
        self._step = _StepAdmissions()
        self._statistics = StatisticsCollector(ledger.queue_statistics(item.name, engine))
        self._author = GuardedQueue(queue, item, ledger, self._waiting, self._report_served)
        self.ranks = self._author.implements("rank")

    def add_request(self, request: Request) -> None:
        """Queue a request that arrived, or the next turn of a streaming session."""
        name = request.request_id
        self._clock.tick()
        self._flush_served(name)
        waiting, before = WaitingRequest(**request_fields(request, self._clock)), self._popped.pop(name, None)
        if before is not None:
            # pop_request may have replaced the request's own priority by its rank.
            waiting = replace(waiting, priority=before.priority)
        elif self._author.implements("admit"):
            refusal = self._author.call("admit", waiting, self.load())
            if refusal is not None:
                self._statistics.count_refusal(self._labels(waiting))
                self.refused[name] = (request, refusal)
                return
        self._enqueue(request, "push", waiting)

    def load(self) -> Load:
        """Return how busy this engine is."""
        return Load(self._step.ready(len(self._waiting)), self._running(), self._step.rate.per_second)

    def peek_request(self) -> Request:
        """Return the request that goes next."""
        self._clock.tick()
        self._set_free_slots(self._running())
        return self._waiting[self._peek()][0]

    def pop_request(self) -> Request:
        """Take out the request that goes next: the one that was peeked at, even if time has passed since."""
        # vLLM peeks, decides for hundreds of lines whether the request fits, then pops and relies on the same one.
        name = self._peeked or self._peek()
        # Before the request leaves `_waiting`, from which a failing pop fills the fallback.
        self._author.pop(name)
        self._peeked = ""
        request, waiting = self._waiting.pop(name)
        self._popped[name] = waiting
        self._step.pop(name)
        self._statistics.start(name)
        if self._author.implements("rank"):
            rank = self._author.call("rank", waiting)
            # vLLM's preemption under SchedulingPolicy.PRIORITY picks the greatest `priority` among the running.
            request.priority = rank if isinstance(rank, int) else request.priority
        return request

    def prepend_request(self, request: Request) -> None:
        """Put back a request that vLLM preempted or could not take."""
        self._clock.tick()
        self._flush_served(request.request_id)
        waiting = self._popped.pop(request.request_id, None)
        self._step.put_back(request.request_id)
        self._enqueue(request, "put_back", waiting or WaitingRequest(**request_fields(request, self._clock)))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put back several; as in vLLM's own queue, the last of them was popped first."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        """Remove a request."""
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove several requests, some of which may not be here."""
        self._clock.tick()
        for request in requests:
            name = request.request_id
            self.refused.pop(name, None)
            # vLLM calls this on both of its queues with every aborted request, so most may be unknown here.
            entry = self._waiting.pop(name, None)
            if entry is not None:
                self._peeked = ""
                self._popped[name] = entry[1]
                self._statistics.remove(name)
                self._author.call("remove", entry[1])

    def end_step(self, tokens: Mapping[str, int], ended: Iterable[str]) -> None:
        """Account for a scheduled step: the tokens of each request in it, and the requests that ended before it."""
        for name in ended:
            self._flush_served(name)
            self._statistics.end(name)
            waiting = self._popped.pop(name, None)
            if waiting is not None and self._author.implements("ended"):
                self._author.call("ended", waiting)
        self._step.end(self._clock.tick(), len(self._waiting))
        self._statistics.end_step(self._clock.now, tokens, self.load())
        if self._author.implements("served"):
            self._author.call("served", self._statistics.tokens.next_batch())

    def __bool__(self) -> bool:
        if not self._waiting or not self._author.implements("ready"):
            return bool(self._waiting)
        running = self._running()
        if not running:
            # With nothing running no slot is ever freed, so a queue that is not ready would stay so.
            return True
        self._set_free_slots(running)
        return not self._author.implements("ready") or self._author.call("ready") is not False

    def __len__(self) -> int:
        # Refused requests count until their clients have the answer: engine core steps only while requests wait or run.
        return len(self._waiting) + len(self.refused)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._waiting.values())

    def _enqueue(self, request: Request, method: str, waiting: WaitingRequest) -> None:
        if not self._statistics.resume(request.request_id):
            self._statistics.add(waiting, self._labels(waiting))
        # Before the author's call, so that the fallback has the request if that call fails.
        self._waiting[request.request_id] = (request, waiting)
        self._peeked = ""
        self._author.call(method, waiting)

    def _labels(self, waiting: WaitingRequest) -> Labels:
        return (self._author.call("labels", waiting) or UNLABELLED) if self._author.implements("labels") else UNLABELLED

    def _peek(self) -> str:
        self._peeked = self._author.peek()
        return self._peeked

    def _set_free_slots(self, running: int) -> None:
        if not self._author.failed:
            self._author.set_free_slots(self._slots - running)

    def _flush_served(self, name: str) -> None:
        """Report the remaining tokens of a request that no longer runs."""
        if self._author.implements("served"):
            if self._statistics.tokens.total(name) != self._reported.get(name, 0):
                self._author.call("served", (name,))
            self._reported.pop(name, None)

    def _report_served(self, served: Callable[[WaitingRequest, int], None], names: Iterable[str]) -> None:
        """Call the author's ``served`` with the tokens of each request since the last report."""
        popped, reported, total = self._popped, self._reported, self._statistics.tokens.total
        for name in names:
            waiting, now, before = popped.get(name), total(name), reported.get(name, 0)
            if waiting is not None and now != before:
                reported[name] = now
                served(waiting, now - before)


class GuardedQueue:
    """The author's queue, each method metered and guarded; first come, first served once one of them has failed.

    waiting: every request in the queue, kept by the adapter, from which the fallback is filled
    report:  calls ``served`` for several requests, so that one guarded call covers a whole step
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        item: PlanItem,
        ledger: Ledger,
        waiting: Waiting,
        report: Callable[[Callable[[WaitingRequest, int], None], Iterable[str]], None],
    ) -> None:
        self.failed = ""
        self._queue, self._item, self._ledger, self._waiting = queue, item, ledger, waiting
        self._fallback = WaitingHeap()
        self._optional = {name for name in _OPTIONAL if getattr(type(queue), name) is not getattr(AdmissionQueue, name)}
        served = queue.served
        wrapped: dict[str, Callable[..., Any]] = {
            "served": lambda names: report(served, names),
            "admit": lambda *args: validate_refusal(queue.admit(*args)),
            "rank": lambda request: _validate_rank(queue.rank(request)),
            "labels": lambda request: normalize_labels(queue.labels(request)),
        }
        self._calls = {
            name: guard_method(item, name, wrapped.get(name) or getattr(queue, name), ledger, on_aside=self.fail)
            for name in (*_REQUIRED, *sorted(self._optional))
        }
        self._calls.setdefault("put_back", self._calls["push"])

    def implements(self, method: str) -> bool:
        """Return whether the author's queue has this optional method, and has not failed."""
        return method in self._optional and not self.failed

    def call(self, method: str, *args: Any) -> Any:
        """Call the author's method, or update the fallback queue; return None once the author's queue has failed."""
        if self.failed:
            if method == "remove":
                self._fallback.discard(*args)
            else:  # push or put_back: of an optional method the adapter asks first whether it is implemented
                self._fallback.add(args[0].arrival, args[0])
            return None
        answer = self._calls[method](*args)
        # A call that overran its budget once too often has an answer too, but the fallback decides from here on.
        return None if self.failed else answer

    def peek(self) -> str:
        """Return the id of the request that goes next."""
        if not self.failed:
            name = _request_id(self.call("peek"))
            if not self.failed and name in self._waiting:
                return name
            self.fail(f"peek returned {name!r}, which is not waiting")  # without effect if the call has failed
        return self._fallback.first().request_id

    def pop(self, name: str) -> None:
        """Take out the request that ``peek`` named."""
        if not self.failed:
            popped = _request_id(self.call("pop"))
            if not self.failed and popped != name:
                self.fail(f"pop returned {popped!r} after peek had returned {name!r}")
        if self.failed:
            self._fallback.discard(self._waiting[name][1])

    def set_free_slots(self, number: int) -> None:
        """Set ``free_slots``; the author's class may have a property of that name, or refuse attributes."""
        try:
            self._queue.free_slots = number
        except BaseException as error:
            if raised_by_signal(error):
                raise
            self.fail(f"free_slots cannot be set: {reason_of(error)}")

    def fail(self, reason: str) -> None:
        """Stop calling the author's queue, and order what waits by arrival from here on."""
        if self.failed:
            return
        self.failed = reason
        for _, waiting in self._waiting.values():
            self._fallback.add(waiting.arrival, waiting)
        self._ledger.put_aside(self._item.name, f"{reason}; waiting requests are served in order of arrival")


class _StepAdmissions:
    """The admissions of the current step, and the rate over the last ones.

    A request that is popped and put back in one step waits for something other than its turn: a grammar, an adapter's
    slot, KV blocks of another engine. It is neither an admission nor part of the queue's length.
    """

    def __init__(self) -> None:
        self.rate = AdmissionRate()
        self._admitted = 0
        self._popped: set[str] = set()
        self._blocked, self._blocked_before = 0, 0

    def pop(self, name: str) -> None:
        self._admitted += 1
        self._popped.add(name)

    def put_back(self, name: str) -> None:
        if name in self._popped:
            self._admitted -= 1
            self._blocked += 1

    def end(self, now: float, waiting: int) -> None:
        self._blocked, self._blocked_before = 0, self._blocked
        self.rate.end_step(now, self._admitted, waiting - self._blocked_before)
        self._admitted = 0
        self._popped.clear()

    def ready(self, waiting: int) -> int:
        """Return how many of the waiting requests wait for their turn, as of the last step."""
        return max(0, waiting - self._blocked_before)


def _request_id(answer: object) -> str:
    """Return the id of the request that an author's method returned; empty if it is not a request."""
    try:
        name = getattr(answer, "request_id", "")
    except BaseException as error:
        if raised_by_signal(error):
            raise
        return ""
    return name if type(name) is str else ""


def validate_refusal(answer: object) -> Refusal | None:
    """Validate what ``admit`` returned, inside its guard: anything but a Refusal would pass for consent."""
    if answer is None:
        return None
    if not isinstance(answer, Refusal):
        raise TypeError(f"admit must return a Refusal or None, but returned {type(answer).__name__}")
    # Made anew, so that attributes of a subclass raise here and not while the client is answered. The reason may repeat
    # a client's words, and what cannot be sent would end the engine.
    return Refusal(encodable(answer.reason), answer.retry_after, answer.status)


def _validate_rank(answer: object) -> int:
    """Check what ``rank`` returned inside its guard, so that a bad answer puts the queue aside."""
    if not isinstance(answer, int):
        raise TypeError(f"rank must return a whole number, but returned {type(answer).__name__}")
    # A plain one: vLLM compares ranks outside of the guard, and a class of the author's own may raise there.
    return int(answer)
