"""Graded load shedding: the longer the expected wait, the more classes are refused, the last one first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from vllm_graft.contracts import Item, Load, Refusal
from vllm_graft.plugins.schedulers.options import integer, number
from vllm_graft.plugins.schedulers.priority_classes import PriorityClasses

_SLACK: Final = 1 + 1e-9
"""Rounding slack for clients that honour Retry-After."""


@dataclass(frozen=True, slots=True)
class LoadShedding:
    """The classes that are refused at which expected wait.

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
        return Refusal(reason, after, 429)
