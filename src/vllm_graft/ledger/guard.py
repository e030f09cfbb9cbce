"""Calling a plugin so that its failure is its own: count, time, and put aside what raises or overruns."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Final, Generic, ParamSpec, TypeVar

from vllm_graft.ledger.meters import Meter

P = ParamSpec("P")
R = TypeVar("R")

OVERRUNS_IN_A_ROW: Final = 100
"""A plugin is put aside after this many calls in a row over budget: a slow phase passes, a slow plugin does not."""


class Guard(Generic[P, R]):
    """Calls one hook of one plugin, and stops calling it once it has failed.

    call:     the plugin's method
    fallback: what is called instead, with the same arguments, when the plugin fails and from then on
    meter:    counts, times and knows the budget
    on_aside: told once, with the reason, when the plugin is put aside

    An exception puts the plugin aside at once: what it left behind cannot be trusted. So do
    ``OVERRUNS_IN_A_ROW`` calls in a row over the budget.
    """

    __slots__ = ("_call", "_fallback", "_in_a_row", "_meter", "_on_aside", "aside")

    def __init__(
        self,
        call: Callable[P, R],
        fallback: Callable[P, R],
        meter: Meter,
        on_aside: Callable[[str], None],
    ) -> None:
        self._call = call
        self._fallback = fallback
        self._meter = meter
        self._on_aside = on_aside
        self._in_a_row = 0
        self.aside = ""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the plugin, or what stands in for it once it has been put aside."""
        if self.aside:
            return self._fallback(*args, **kwargs)
        started = time.perf_counter_ns()
        try:
            result = self._call(*args, **kwargs)
        except Exception as error:
            self._meter.count(time.perf_counter_ns() - started)
            self._meter.error()
            self._put_aside(reason_of(error))
            return self._fallback(*args, **kwargs)
        if not self._meter.count(time.perf_counter_ns() - started):
            self._in_a_row = 0
        else:
            self._in_a_row += 1
            if self._in_a_row >= OVERRUNS_IN_A_ROW:
                reading = self._meter.reading()
                self._put_aside(
                    f"{self._in_a_row} calls in a row over the budget of {reading.budget_us:g} us "
                    f"(mean {reading.mean_us:.0f} us, max {reading.max_us:.0f} us)"
                )
        return result

    def _put_aside(self, reason: str) -> None:
        self.aside = reason
        self._on_aside(reason)


def reason_of(error: BaseException) -> str:
    """An exception in one line: what it is and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
