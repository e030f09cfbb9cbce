"""``priority-fairness``: higher classes first, and a bound on every wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from vllm_graft.contracts import AdmissionQueue, Load, OptionError, OptionValue, Refusal, WaitingHeap, WaitingRequest
from vllm_graft.plugins.schedulers.options import integer, number
from vllm_graft.plugins.schedulers.priority_classes import LoadShedding, PriorityClasses
from vllm_graft.plugins.schedulers.urgent_lane import AdmissionWay, UrgentLane

_NAME: Final = "priority-fairness"
_FIRST: Final = 0
"""The rank of a request of the urgent lane: having waited so long, it is the last to be preempted."""


class PriorityFairness(AdmissionQueue):
    """Two orders of the same requests; ``docs/reference/schedulers.md`` has the mathematics.

    The class lane orders by ``arrival + level * (class - 1)`` with ``level = priority_weight / fairness_weight *
    max_wait_sec / classes``: a class is worth that many seconds of waiting. This is the score ``priority_weight *
    (classes + 1 - class) / classes + fairness_weight * waited / max_wait_sec`` in an order that time does not change.
    The urgent lane takes the oldest request once it has waited ``urgent_after`` of ``max_wait_sec``; while there are
    such, the first class goes first, and they get ``urgent_share`` of the admissions that it leaves.

    With ``admission`` the last classes are refused while the queue is too long for the bound to hold. Of the engine's
    slots, ``reserved_slots`` are left to the first ``reserved_classes``.
    """

    options: ClassVar[Mapping[str, OptionValue]] = {
        "max_wait_sec": 30.0,
        "priority_weight": 0.7,
        "fairness_weight": 0.3,
        "classes": 5,
        "default_class": 3,
        "urgent_after": 0.5,
        "urgent_share": 0.9,
        "admission": False,
        "shed_after": 0.6,
        "shed_step": 0.08,
        "shed_classes": 3,
        "reserved_slots": 0,
        "reserved_classes": 1,
    }

    def __init__(self, options: Mapping[str, OptionValue] | None = None) -> None:
        super().__init__(options)
        self._classes = PriorityClasses.of_options(self, _NAME)
        wait = number(self, _NAME, "max_wait_sec", 0.0, 86_400.0, above=True)
        weight = number(self, _NAME, "priority_weight", 0.0, 1e6)
        aging = number(self, _NAME, "fairness_weight", 1e-6, 1e6)
        self._level = weight / aging * wait / self._classes.number
        after = number(self, _NAME, "urgent_after", 0.0, 1.0)
        share = number(self, _NAME, "urgent_share", 0.01, 1.0)
        self._urgent = UrgentLane(after * wait, share)
        shedding = LoadShedding.of_options(self, _NAME, self._classes, wait)
        self._shedding = shedding if self.option("admission") else None
        self._reserved_slots = integer(self, _NAME, "reserved_slots", 0, 1_000_000)
        self._reserved_classes = integer(self, _NAME, "reserved_classes", 1, self._classes.number)
        self._reserved = WaitingHeap()
        self._by_class = WaitingHeap()
        self._first_class = WaitingHeap()
        self._way: AdmissionWay = "class"

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse what the constructor refuses."""
        cls(options)

    def check_slots(self, slots: int) -> None:
        """Refuse reserved slots that leave none to all."""
        if self._reserved_slots >= slots:
            what = f"must be below the {slots} requests that this engine runs at once, but is {self._reserved_slots}"
            fix = "reserve fewer, or raise --max-num-seqs"
            raise OptionError(what, option="reserved_slots", item=_NAME, fix=fix)

    def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
        """Refuse a priority beyond the last class, and the last classes while the queue is too long."""
        wrong = self._classes.refusal(request)
        if wrong is not None or self._shedding is None:
            return wrong
        return self._shedding.refusal(self._classes.of(request), load)

    def labels(self, request: WaitingRequest) -> Mapping[str, str]:
        """Label a request by its class."""
        return {"class": str(self._classes.of(request))}

    def ready(self) -> bool:
        """Return whether a slot is free for all, or a request waits that may have a reserved one."""
        return self.free_slots > self._reserved_slots or bool(self._reserved)

    def push(self, request: WaitingRequest) -> None:
        """Add a request to both lanes."""
        own = self._classes.of(request)
        # A fixed key: as scores of all requests grow alike with time, their order never changes, and a heap can hold
        # it.
        self._by_class.add(request.arrival + self._level * (own - 1), request)
        if own == 1:
            self._first_class.add(request.arrival, request)
        if self._reserved_slots and own <= self._reserved_classes:
            self._reserved.add(request.arrival + self._level * (own - 1), request)
        self._urgent.add(request)

    def peek(self) -> WaitingRequest:
        """Return the first class or the oldest in turn while some are urgent; else the first by class and age."""
        return self._next()[0]

    def pop(self) -> WaitingRequest:
        """Take the next request out of both lanes."""
        request, self._way = self._next()
        self._by_class.discard(request)
        self._first_class.discard(request)
        self._reserved.discard(request)
        # vLLM pops in every step what it then cannot take, so an admission may be undone by put_back.
        self._urgent.record_admission(request, self._way, self.clock())
        return request

    def put_back(self, request: WaitingRequest) -> None:
        """Put a request back into its old place, as if it had not been admitted."""
        self._urgent.undo_admission(request)
        self.push(request)

    def ended(self, request: WaitingRequest) -> None:
        """Forget a request."""
        self._urgent.forget(request)

    def remove(self, request: WaitingRequest) -> None:
        """Remove a request from both lanes."""
        self._by_class.discard(request)
        self._first_class.discard(request)
        self._reserved.discard(request)
        self._urgent.discard(request)

    def rank(self, request: WaitingRequest) -> int:
        """Rank a request by its class; an urgent one is preempted last."""
        return _FIRST if self._way == "urgent" else self._classes.of(request)

    def _next(self) -> tuple[WaitingRequest, AdmissionWay]:
        if self.free_slots <= self._reserved_slots and self._reserved:
            return self._reserved.first(), "reserved"
        if self._urgent.any(self.clock()):
            if self._first_class and self._urgent.first_class_goes():
                return self._first_class.first(), "first"
            due = self._urgent.due()
            if due is not None:
                return due, "urgent"
        return self._by_class.first(), "class"
