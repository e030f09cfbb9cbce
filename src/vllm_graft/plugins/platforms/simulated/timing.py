"""When a step of the simulated accelerator ends: one step after another, each for its modelled time.

The engine hands a step over and goes on with the next one, as it does with a real device; only whoever wants the
step's output waits. Here a step takes no time. A model of a device overrides ``SimulatedWorker.step_seconds``.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Timeline:
    """The device's queue of steps on a clock, which tests and virtual time may replace."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()

    def launch(self, seconds: float) -> float:
        """Queues a step of so many seconds and returns the moment it ends."""
        self._free_at = max(self._clock(), self._free_at) + seconds
        return self._free_at

    def wait(self, end: float | None = None) -> None:
        """Returns at the moment ``end``, or when all that was launched has ended."""
        left = (self._free_at if end is None else end) - self._clock()
        if left > 0:
            self._sleep(left)
