"""Graded admission control: the longer the wait, the more classes are turned away, the last one first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from vllm_graft.contracts import Item, Load, Refusal
from vllm_graft.plugins.schedulers.classes import Classes
from vllm_graft.plugins.schedulers.limits import count, number

_ROUNDED: Final = 1 + 1e-9
"""Who comes back when he was told to is not turned away for the last digit."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Who is turned away at which expected wait.

    The expected wait is what the requests that wait now need at the pace of the last seconds: what a request that
    arrives now would wait if all went in order. The last class is turned away above ``limit`` seconds of it, the one
    before above ``limit + step``, and so on for as many classes as ``shed``.
    """

    classes: int
    limit: float
    step: float
    shed: int

    @classmethod
    def of_options(cls, item: Item, who: str, classes: Classes, max_wait: float) -> Admission:
        """From the options ``shed_after``, ``shed_step`` and ``shed_classes``."""
        limit = number(item, who, "shed_after", 0.0, 10.0, above=True)
        step = number(item, who, "shed_step", 0.0, 10.0)
        shed = count(item, who, "shed_classes", 1, 1000)
        return cls(classes.number, limit * max_wait, step * max_wait, min(shed, classes.number))

    def limit_of(self, own: int) -> float:
        """The expected wait above which a class is turned away; infinite for those that never are."""
        above_last = self.classes - own
        return self.limit + self.step * above_last if above_last < self.shed else math.inf

    def refusal(self, own: int, load: Load) -> Refusal | None:
        """Why a request of a class is turned away now, if it is. While the pace is not known, nobody is."""
        wait, limit = load.wait, self.limit_of(own)
        if wait <= limit * _ROUNDED:
            return None
        # The queue is worked off at a second per second: so much later its end is within the limit.
        after = math.ceil(wait - limit)
        if wait > self.limit_of(1):
            return Refusal(f"the server is full: requests wait about {wait:.0f} s, and no class is let in", after, 503)
        reason = f"requests wait about {wait:.0f} s, and class {own} is let in up to {limit:.0f} s"
        return Refusal(reason, after, 429)
