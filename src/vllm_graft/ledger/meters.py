"""What one hook costs: calls, errors, overruns and a fixed histogram, in one block of cells.

The histogram's buckets are fractions and multiples of the budget, so that a glance tells how near a hook is to it:
bucket 0 holds calls up to 1/128 of the budget, each next one twice as much, bucket 7 ends at the budget itself, and
the last holds everything from 128 times the budget on. Hooks without a budget are measured against a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from vllm_graft.ledger.cells import Cells

HITS: Final = 0  # calls that are counted and not timed: what a patched method's layer adds to
ERRORS: Final = 1
TOTAL_NS: Final = 2
MAX_NS: Final = 3
FIRST_BUCKET: Final = 8
BUCKETS: Final = 16

_AT_BUDGET: Final = 7
_DEFAULT_US: Final = 1000.0


class Meter:
    """Counts and times the calls of one hook. ``count`` takes well under a microsecond."""

    __slots__ = ("_at", "_first", "_max", "_tally", "_total", "budget_ns", "budget_us", "key")

    def __init__(self, tally: Cells, key: str, budget_us: float | None) -> None:
        self._tally = tally
        self.key = key
        self._at = tally.allot(key)
        self._total = self._at + TOTAL_NS
        self._max = self._at + MAX_NS
        self._first = self._at + FIRST_BUCKET
        self.budget_us = budget_us
        self.budget_ns = _budget_ns(budget_us)

    def count(self, ns: int) -> bool:
        """One call that took ``ns`` nanoseconds; returns whether it overran the budget."""
        cells = self._tally.cells
        bucket = (((ns - 1) << _AT_BUDGET) // self.budget_ns).bit_length()
        cells[self._first + (bucket if bucket < BUCKETS else BUCKETS - 1)] += 1
        cells[self._total] += ns
        if ns > cells[self._max]:
            cells[self._max] = ns
        return bucket > _AT_BUDGET and self.budget_us is not None

    def error(self) -> None:
        """One call that raised."""
        self._tally.cells[self._at + ERRORS] += 1

    @property
    def at(self) -> int:
        """The first cell of this meter's block."""
        return self._at

    def reading(self) -> Reading:
        """What has been counted so far."""
        return read_block(self._tally.cells, self._at, self.budget_us)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a meter shows. Times are microseconds; percentiles are the upper edge of their histogram bucket."""

    calls: int
    errors: int
    overruns: int
    mean_us: float
    p50_us: float
    p99_us: float
    max_us: float
    budget_us: float | None

    def as_dict(self) -> dict[str, float | int | None]:
        """The reading with stable lower-case keys."""
        return asdict(self)


def read_block(cells: Sequence[int], at: int, budget_us: float | None) -> Reading:
    """The reading of one block of cells."""
    hits, errors, total, largest = (cells[at + index] for index in (HITS, ERRORS, TOTAL_NS, MAX_NS))
    buckets = [cells[at + FIRST_BUCKET + index] for index in range(BUCKETS)]
    budget_ns = _budget_ns(budget_us)
    timed = sum(buckets)
    return Reading(
        calls=hits + timed,
        errors=errors,
        overruns=sum(buckets[_AT_BUDGET + 1 :]) if budget_us is not None else 0,
        mean_us=total / timed / 1000 if timed else 0.0,
        p50_us=_percentile(buckets, 0.50, budget_ns, largest),
        p99_us=_percentile(buckets, 0.99, budget_ns, largest),
        max_us=largest / 1000,
        budget_us=budget_us,
    )


def _budget_ns(budget_us: float | None) -> int:
    return max(1, int((budget_us or _DEFAULT_US) * 1000))


def _percentile(buckets: Sequence[int], share: float, budget_ns: int, largest: int) -> float:
    wanted = share * sum(buckets)
    seen = 0
    for index, number in enumerate(buckets):
        seen += number
        if number and seen >= wanted:
            edge = (budget_ns << index) >> _AT_BUDGET
            return (largest if index == BUCKETS - 1 else min(edge, largest)) / 1000
    return 0.0
