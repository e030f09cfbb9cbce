"""The clock of the waiting requests, and the pace at which they are admitted."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

OLDEST_S: Final = 60.0
"""A request that says it arrived longer ago, when it is first seen, comes from a host whose clock is off."""

WINDOW_S: Final = 10.0
"""The seconds of waiting that a pace is measured over."""

KNOWN_S: Final = 1.0
"""The least seconds of waiting that say something of a pace, where ``KNOWN`` were admitted in them."""

KNOWN: Final = 8

SLOW_S: Final = 5.0
"""The least seconds of waiting that say something of a pace, however few were admitted."""

LONGEST_S: Final = 5.0
"""A step that takes longer counts as one that takes so long."""

_IN_STEP_S: Final = 0.5
_TRIES: Final = 5
_AT_ONCE_S: Final = 0.001
_PARTS: Final = 20


class SteadyClock:
    """Seconds since the epoch that never go back, whatever happens to the machine's date; read until told to move."""

    def __init__(self) -> None:
        self._offset = _offset()
        self._drift = 0.0
        self.now = time.time()

    def __call__(self) -> float:
        """The time as it was taken last."""
        return self.now

    def move(self) -> float:
        """Take the time; it stands still until the next call."""
        self.now = max(self.now, self._offset + time.monotonic())
        return self.now

    def place(self, stamp: float) -> float:
        """A front end's time stamp on this clock: not in the future, and not further back than ``OLDEST_S``.

        A stamp is the date of the machine, which may have been set since this clock began. The drift is kept until the
        date is set again: measured anew for each stamp, its error would decide between two that are close.
        """
        drift = _offset() - self._offset
        if abs(drift - self._drift) > _IN_STEP_S:
            self._drift = drift
        return min(max(stamp - self._drift, self.now - OLDEST_S), self.now)


def _offset() -> float:
    """How far the date is from the monotonic clock, read at once: a busy machine may stop the process in between."""
    found: list[tuple[float, float]] = []
    for _ in range(_TRIES):
        before = time.monotonic()
        date = time.time()
        after = time.monotonic()
        found.append((after - before, date - before))
        if after - before < _AT_ONCE_S:
            break
    return min(found)[1]


class Pace:
    """Admissions per second in the time in which requests were left waiting: what an engine can take.

    A server that nobody waits for admits at the pace of its clients, which says nothing of what it could; so only the
    time from a step that leaves requests waiting to one that leaves none counts, the last ``WINDOW_S`` of it. After a
    while in which nobody waited what was seen before is forgotten: other requests may run now.
    """

    def __init__(self) -> None:
        self._parts: deque[tuple[float, int]] = deque([(0.0, 0)] * _PARTS)
        self._seconds = 0.0
        self._admitted = 0
        self._of_parts = (0.0, 0)
        self._before: float | None = None
        self._last = 0.0

    def stepped(self, now: float, admitted: int, waiting: int) -> None:
        """A step was scheduled, which admitted some and left others waiting."""
        if self._before is not None:
            # An engine that was paused has admitted nobody for that time, which says nothing either.
            self._seconds += min(now - self._before, LONGEST_S)
            self._admitted += admitted
            if self._seconds >= WINDOW_S / _PARTS:
                self._parts.append((self._seconds, self._admitted))
                self._parts.popleft()
                # Added up here rather than where it is asked for: that is in every step.
                self._of_parts = (sum(part[0] for part in self._parts), sum(part[1] for part in self._parts))
                self._seconds, self._admitted = 0.0, 0
        if waiting > 0 and self._before is None and now - self._last > WINDOW_S:
            self._forget()
        self._before = now if waiting > 0 else None
        self._last = now if waiting > 0 else self._last

    def _forget(self) -> None:
        self._parts = deque([(0.0, 0)] * _PARTS)
        self._seconds, self._admitted, self._of_parts = 0.0, 0, (0.0, 0)

    @property
    def rate(self) -> float:
        """Admissions per second; 0 while nobody waits, and while not enough has been seen.

        None in all that time counts as one.
        """
        if self._before is None:
            return 0.0
        seconds = self._seconds + self._of_parts[0]
        admitted = self._admitted + self._of_parts[1]
        if seconds < (KNOWN_S if admitted >= KNOWN else SLOW_S):
            return 0.0
        return max(1, admitted) / seconds
