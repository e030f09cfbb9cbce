"""The class of a request, from its priority, and the classes that are refused under load: 1 goes first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from vllm_graft.contracts import Item, Load, Refusal, WaitingRequest
from vllm_graft.plugins.schedulers.options import integer, number

_SLACK: Final = 1 + 1e-9
"""Rounding slack for clients that honour Retry-After."""


@dataclass(frozen=True, slots=True)
class PriorityClasses:
    """Classes 1 to ``number``; ``default`` is the class of vLLM's priority 0, that of clients that name none.

    Negative priorities are of that class too: vLLM itself lowers the priority by one in later turns of a conversation
    with tools.
    """

    number: int
    default: int

    @classmethod
    def of_options(cls, item: Item, who: str) -> PriorityClasses:
        """Read the options ``classes`` and ``default_class``."""
        number = integer(item, who, "classes", 1, 1000)
        return cls(number, integer(item, who, "default_class", 1, number))

    def of(self, request: WaitingRequest) -> int:
        """Return the class of a request."""
        return min(request.priority, self.number) if request.priority > 0 else self.default

    def refusal(self, request: WaitingRequest) -> Refusal | None:
        """Refuse a priority beyond the last class: that is the client's mistake."""
        if request.priority <= self.number:
            return None
        return Refusal(f"priority {request.priority} is not one of 1 (first) to {self.number} (last)", status=400)


@dataclass(frozen=True, slots=True)
class LoadShedding:
    """Graded load shedding: the longer the expected wait, the more classes are refused, the last one first.

    The expected wait is the length of the queue over the admission rate of the last seconds: what a new request would
    wait if all went in order. The last class is refused above ``limit`` seconds of it, the one before above ``limit +
    step``, and so on for ``shed`` classes.
    """

    classes: int
    limit: float
    step: float
    shed: int

    @classmethod
    def of_options(cls, item: Item, who: str, classes: PriorityClasses, max_wait: float) -> LoadShedding:
        """Read the options ``shed_after``, ``shed_step`` and ``shed_classes``."""
        limit = number(item, who, "shed_after", 0.0, 10.0, above=True)
        step = number(item, who, "shed_step", 0.0, 10.0)
        shed = integer(item, who, "shed_classes", 1, 1000)
        return cls(classes.number, limit * max_wait, step * max_wait, min(shed, classes.number))

    def limit_of(self, own: int) -> float:
        """Return the expected wait above which a class is refused; infinite for those that never are."""
        above_last = self.classes - own
        return self.limit + self.step * above_last if above_last < self.shed else math.inf

    def refusal(self, own: int, load: Load) -> Refusal | None:
        """Return why a request of a class is refused now; None if it is not, or the rate is unknown."""
        wait, limit = load.wait, self.limit_of(own)
        if wait <= limit * _SLACK:
            return None
        # A queue that nothing joins shrinks by a second per second, so it is within the limit after the difference.
        after = math.ceil(wait - limit)
        if wait > self.limit_of(1):
            return Refusal(f"the server is full: requests wait about {wait:.0f} s, and no class is let in", after, 503)
        reason = f"requests wait about {wait:.0f} s, and class {own} is let in up to {limit:.0f} s"
        # 429 while classes differ, 503 once none is let in: a gateway may then try another server.
        return Refusal(reason, after, 429)
