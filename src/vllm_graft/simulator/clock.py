"""Modelled time: the clocks, and the queue of steps that determines when each of them ends.

The engine launches a step and goes on with the next one, as with a real device; reading a step's output waits for its
end. There are three clocks: real time, real time sped up by a factor, and virtual time, which jumps to the end of a
step as soon as its output is read. Virtual time works only in a single process, in which Python's own clocks show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

_EPOCH_NS: Final = 1_000_000_000 * 10**9
"""The start of virtual time, equal in every run so that seconds as floats are equal to the last bit."""

_GRAIN_NS: Final = 128
"""More than the distance between two neighbouring floats at the epoch, in seconds."""

# vLLM reads time by all of these; time.sleep, sockets and locks keep real time.
_REPLACED: Final = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns")


class RealClock:
    """The machine's time, with modelled seconds ``speed`` times as fast."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed

    def now(self) -> float:
        """Return modelled seconds since an arbitrary moment."""
        return time.perf_counter() * self._speed

    def wait_until(self, moment: float) -> None:
        """Sleep until that moment."""
        left = moment - self.now()
        if left > 0:
            time.sleep(left / self._speed)


class VirtualClock:
    """Time that passes only in ``wait_until``. ``install`` puts it in place of Python's own clocks."""

    def __init__(self) -> None:
        self._ns = _EPOCH_NS
        self._originals: dict[str, Callable[[], float]] = {}
        self._holders: set[int] = set()

    def now(self) -> float:
        """Return seconds, as ``time.time`` does while the clock is installed."""
        return self._ns / 1e9

    def wait_until(self, moment: float) -> None:
        """Jump to that moment."""
        self._ns = max(self._ns, round(moment * 1e9))

    def reach(self, moment: float) -> None:
        """Jump so that ``now`` is not before that moment: at this size a float does not resolve nanoseconds."""
        self.wait_until(moment)
        while self.now() < moment:
            self._ns += _GRAIN_NS

    def install(self, holder: object) -> None:
        """Have ``time.time`` and its like return this clock's time; timeouts of threads and sockets stay real."""
        self._holders.add(id(holder))
        if self._originals:
            return
        for name in _REPLACED:
            self._originals[name] = getattr(time, name)
            setattr(time, name, (lambda: self._ns) if name.endswith("_ns") else self.now)

    def release(self, holder: object) -> None:
        """Give Python its clocks back once the last holder has released this one.

        An engine that is garbage-collected ends after the next one of its process has started.
        """
        if self._holders == {id(holder)}:
            self.remove()
        self._holders.discard(id(holder))

    def remove(self) -> None:
        """Give Python its clocks back, whatever the holders."""
        self._holders.clear()
        for name, original in self._originals.items():
            setattr(time, name, original)
        self._originals.clear()

    def restart(self) -> None:
        """Go back to the epoch, for a run that is to repeat the one before."""
        self._ns = _EPOCH_NS

    @property
    def real(self) -> Callable[[], float]:
        """The machine's own ``perf_counter``, installed or not."""
        return self._originals.get("perf_counter", time.perf_counter)


VIRTUAL_CLOCK: Final = VirtualClock()
"""The virtual clock of this process."""

Clock = RealClock | VirtualClock


class Timeline:
    """The device's queue of steps: each step passes through the pipeline's stages, and a stage does one at a time."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = RealClock() if clock is None else clock
        self._free_at: list[float] = []
        self._known_at: dict[str, float] = {}
        self.steps = 0
        """Steps launched so far."""
        self.busy_s = 0.0
        """The sum of each step's slowest stage, in modelled seconds: the time of a device that never idles."""

    def launch(self, stages: Sequence[float], needs: Iterable[str] = (), gives: Iterable[str] = ()) -> float:
        """Queue a step with the seconds that it takes in each stage; return the moment of its end.

        needs: the requests in it; the first stage waits for the tokens that earlier steps still owe them
        gives: the requests that get a token at its end
        """
        # A launch does not wait: the engine schedules the next step while this one is computed.
        end = now = self._clock.now()
        # The number of stages is known with the first step.
        self._free_at += [end] * (len(stages) - len(self._free_at))
        if len(stages) > 1:
            # One stage is its own queue. With several, a request must not overtake its token in an earlier step.
            self._known_at = {name: moment for name, moment in self._known_at.items() if moment > now}
            end = max([now, *(self._known_at.get(name, now) for name in needs)])
        for stage, seconds in enumerate(stages):
            end = max(end, self._free_at[stage]) + seconds
            self._free_at[stage] = end
        if len(stages) > 1:
            self._known_at.update(dict.fromkeys(gives, end))
        self.steps += 1
        self.busy_s += max(stages)
        return end

    def wait(self, end: float | None = None) -> None:
        """Wait for the moment ``end``, or for the end of everything launched."""
        self._clock.wait_until(max(self._free_at, default=0.0) if end is None else end)
