"""The clock of the waiting requests, and the rate at which they are admitted."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

OLDEST_S: Final = 60.0
"""The greatest age of a request when it is first seen; an older time stamp comes from a host whose clock is off."""

RATE_WINDOW_S: Final = 10.0
"""The seconds of waiting over which the rate is measured."""

KNOWN_S: Final = 1.0
KNOWN: Final = 8
"""The rate is known after ``KNOWN_S`` seconds of waiting with at least ``KNOWN`` admissions."""

SLOW_S: Final = 5.0
"""The rate is known after this many seconds of waiting, however few the admissions."""

LONGEST_S: Final = 5.0
"""The most that one step counts for: an engine that was paused admitted nothing, which says nothing of its rate."""

# A date that is off by less is taken for the error of the measurement.
_MAX_DRIFT_S: Final = 0.5
_TRIES: Final = 5
_AT_ONCE_S: Final = 0.001
_PARTS: Final = 20


class SteadyClock:
    """Seconds since the epoch that never go back, even if the machine's date is set; frozen between two ``tick``."""

    def __init__(self) -> None:
        self._offset = _date_offset()
        self._drift = 0.0
        self.now = time.time()

    def __call__(self) -> float:
        """Return the time of the last ``tick``."""
        return self.now

    def tick(self) -> float:
        """Read the time; it stands still until the next call."""
        self.now = max(self.now, self._offset + time.monotonic())
        return self.now

    def from_wall_time(self, stamp: float) -> float:
        """Convert a front end's time stamp to this clock: never in the future, at most ``OLDEST_S`` in the past."""
        # Front ends stamp requests with the machine's date, which may have been set since this clock was made. The
        # drift is kept until it is set again: measured for each stamp, its error would reorder stamps that are close.
        drift = _date_offset() - self._offset
        if abs(drift - self._drift) > _MAX_DRIFT_S:
            self._drift = drift
        return min(max(stamp - self._drift, self.now - OLDEST_S), self.now)


def _date_offset() -> float:
    """Return the difference of the date and the monotonic clock, read at the same moment."""
    found: list[tuple[float, float]] = []
    for _ in range(_TRIES):
        before = time.monotonic()
        date = time.time()
        after = time.monotonic()
        found.append((after - before, date - before))
        if after - before < _AT_ONCE_S:  # else a busy machine stopped the process in between
            break
    return min(found)[1]


class AdmissionRate:
    """Admissions per second while requests were left waiting: the capacity of the engine.

    An engine without a queue admits as fast as its clients send, which says nothing of its capacity. So time counts
    only from a step that leaves requests waiting to one that leaves none, the last ``RATE_WINDOW_S`` of it.
    Measurements are dropped after ``RATE_WINDOW_S`` without a queue: other requests may run by then.
    """

    def __init__(self) -> None:
        self._before: float | None = None
        self._last = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parts = deque([(0.0, 0)] * _PARTS)
        self._of_parts = (0.0, 0)
        self._seconds, self._admitted = 0.0, 0

    def end_step(self, now: float, admitted: int, waiting: int) -> None:
        """Count a step that admitted some requests and left others waiting."""
        if self._before is not None:
            self._seconds += min(now - self._before, LONGEST_S)
            self._admitted += admitted
            if self._seconds >= RATE_WINDOW_S / _PARTS:
                self._parts.append((self._seconds, self._admitted))
                # Always _PARTS of them, so that an old burst leaves the window step by step.
                self._parts.popleft()
                # Summed here, once per part, because the rate is read in every step.
                self._of_parts = (sum(part[0] for part in self._parts), sum(part[1] for part in self._parts))
                self._seconds, self._admitted = 0.0, 0
        if waiting > 0 and self._before is None and now - self._last > RATE_WINDOW_S:
            self._reset()
        self._before = now if waiting > 0 else None
        self._last = now if waiting > 0 else self._last

    @property
    def per_second(self) -> float:
        """Admissions per second; 0 while the queue is empty or too little was measured."""
        if self._before is None:
            return 0.0
        seconds = self._seconds + self._of_parts[0]
        admitted = self._admitted + self._of_parts[1]
        if seconds < (KNOWN_S if admitted >= KNOWN else SLOW_S):
            return 0.0
        # At least one: a rate of 0 means unknown, and would switch load shedding off where it is needed most.
        return max(1, admitted) / seconds
