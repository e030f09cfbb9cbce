"""``priority-fairness``: higher classes first, and a bound on how long anybody waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from vllm_graft.contracts import AdmissionQueue, Load, Refusal, WaitingHeap, WaitingRequest
from vllm_graft.contracts.item import OptionValue
from vllm_graft.errors import OptionError
from vllm_graft.plugins.schedulers.admission import Admission
from vllm_graft.plugins.schedulers.classes import Classes
from vllm_graft.plugins.schedulers.lanes import UrgentLane, Way
from vllm_graft.plugins.schedulers.limits import count, number

_NAME: Final = "priority-fairness"
_FIRST: Final = 0
"""The rank of a request that came through the urgent lane: having waited so long, it is the last to be preempted."""


class PriorityFairness(AdmissionQueue):
    """Two orders of the same requests; ``docs/reference/schedulers.md`` has the mathematics.

    The class lane orders by ``arrival + level * (class - 1)`` with ``level = priority_weight / fairness_weight *
    max_wait_sec / classes``: a class is worth that many seconds of waiting. This is the score ``priority_weight *
    (classes + 1 - class) / classes + fairness_weight * waited / max_wait_sec`` in an order that time does not change.
    The urgent lane takes the oldest request once it has waited ``urgent_after`` of ``max_wait_sec``; while there are
    such, the first class goes first, and they have ``urgent_share`` of the admissions that it leaves.

    With ``admission`` the last classes are turned away while the queue is too long for the bound to hold. With
    ``reserved_slots`` so many of the engine's slots are left to the first ``reserved_classes``.
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
        self._classes = Classes.of_options(self, _NAME)
        wait = number(self, _NAME, "max_wait_sec", 0.0, 86_400.0, above=True)
        weight = number(self, _NAME, "priority_weight", 0.0, 1e6)
        aging = number(self, _NAME, "fairness_weight", 1e-6, 1e6)
        self._level = weight / aging * wait / self._classes.number
        after = number(self, _NAME, "urgent_after", 0.0, 1.0)
        share = number(self, _NAME, "urgent_share", 0.01, 1.0)
        self._urgent = UrgentLane(after * wait, share)
        admission = Admission.of_options(self, _NAME, self._classes, wait)
        self._admission = admission if self.option("admission") else None
        self._reserved_slots = count(self, _NAME, "reserved_slots", 0, 1_000_000)
        self._reserved_classes = count(self, _NAME, "reserved_classes", 1, self._classes.number)
        self._reserved = WaitingHeap()
        self._by_class = WaitingHeap()
        self._first_class = WaitingHeap()
        self._way: Way = "class"

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """What the constructor refuses."""
        cls(options)

    def limited_to(self, slots: int) -> None:
        """At least one slot must be left to all."""
        if self._reserved_slots >= slots:
            what = f"must be below the {slots} requests that this engine runs at once, and is {self._reserved_slots}"
            fix = "reserve fewer, or raise --max-num-seqs"
            raise OptionError(what, option="reserved_slots", item=_NAME, fix=fix)

    def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
        """A priority beyond the last class is a mistake of the client's; a long queue turns the last classes away."""
        wrong = self._classes.refusal(request)
        if wrong is not None or self._admission is None:
            return wrong
        return self._admission.refusal(self._classes.of(request), load)

    def labels(self, request: WaitingRequest) -> Mapping[str, str]:
        """By class."""
        return {"class": str(self._classes.of(request))}

    def ready(self) -> bool:
        """Where only reserved slots are free, one of the classes they are for must wait."""
        return self.free_slots > self._reserved_slots or bool(self._reserved)

    def push(self, request: WaitingRequest) -> None:
        """Into both lanes."""
        own = self._classes.of(request)
        self._by_class.add(request.arrival + self._level * (own - 1), request)
        if own == 1:
            self._first_class.add(request.arrival, request)
        if self._reserved_slots and own <= self._reserved_classes:
            self._reserved.add(request.arrival + self._level * (own - 1), request)
        self._urgent.add(request)

    def peek(self) -> WaitingRequest:
        """Where some are urgent, the first class or the oldest as their turns are; else the first by class and age."""
        return self._next()[0]

    def pop(self) -> WaitingRequest:
        """Out of both lanes."""
        request, self._way = self._next()
        self._by_class.discard(request)
        self._first_class.discard(request)
        self._reserved.discard(request)
        self._urgent.admitted(request, self._way, self.clock())
        return request

    def put_back(self, request: WaitingRequest) -> None:
        """Into its old place, as if it had not been taken."""
        self._urgent.returned(request)
        self.push(request)

    def ended(self, request: WaitingRequest) -> None:
        """Nothing of it is kept."""
        self._urgent.ended(request)

    def remove(self, request: WaitingRequest) -> None:
        """Out of both lanes."""
        self._by_class.discard(request)
        self._first_class.discard(request)
        self._reserved.discard(request)
        self._urgent.discard(request)

    def rank(self, request: WaitingRequest) -> int:
        """The class; one that was urgent stands before all."""
        return _FIRST if self._way == "urgent" else self._classes.of(request)

    def _next(self) -> tuple[WaitingRequest, Way]:
        if self.free_slots <= self._reserved_slots and self._reserved:
            return self._reserved.first(), "reserved"
        if self._urgent.any(self.clock()):
            if self._first_class and self._urgent.first_class_goes():
                return self._first_class.first(), "first"
            due = self._urgent.due()
            if due is not None:
                return due, "urgent"
        return self._by_class.first(), "class"
