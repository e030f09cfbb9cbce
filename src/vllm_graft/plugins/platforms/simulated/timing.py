"""When a step of the simulated accelerator ends: one step after another, each for its modelled time, on some clock.

The engine hands a step over and goes on with the next one, as it does with a real device; only whoever wants the
step's output waits. Three clocks: real time, real time divided by a factor, and virtual time, which jumps to the end
of a step as soon as somebody waits for it. Virtual time belongs to one process: everything that asks Python for the
time there is told the virtual one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

_EPOCH_NS: Final = 1_000_000_000 * 10**9
"""Where virtual time begins, the same in every run: seconds as floats are then the same to the last bit."""

_GRAIN_NS: Final = 128
"""More than the distance between two floats there."""

_REPLACED: Final = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns")


class RealClock:
    """The machine's time, on which modelled seconds pass ``speed`` times as fast."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed

    def now(self) -> float:
        """Modelled seconds since some moment."""
        return time.perf_counter() * self._speed

    def wait_until(self, moment: float) -> None:
        """Returns at that moment."""
        left = moment - self.now()
        if left > 0:
            time.sleep(left / self._speed)


class VirtualClock:
    """Time that passes only when somebody waits. ``install`` puts it in the place of Python's own clocks."""

    def __init__(self) -> None:
        self._ns = _EPOCH_NS
        self._originals: dict[str, Callable[[], float]] = {}
        self._holders: set[int] = set()

    def now(self) -> float:
        """Seconds, as ``time.time`` gives them while the clock is installed."""
        return self._ns / 1e9

    def wait_until(self, moment: float) -> None:
        """Lets the time up to that moment pass at once."""
        self._ns = max(self._ns, round(moment * 1e9))

    def reach(self, moment: float) -> None:
        """The same, and ``now`` is not before that moment: at this size a float cannot tell every nanosecond."""
        self.wait_until(moment)
        while self.now() < moment:
            self._ns += _GRAIN_NS

    def install(self, holder: object) -> None:
        """Have ``time.time`` and its like give this clock's time; threads and sockets keep to the real one."""
        self._holders.add(id(holder))
        if self._originals:
            return
        for name in _REPLACED:
            self._originals[name] = getattr(time, name)
            setattr(time, name, self._in_ns if name.endswith("_ns") else self.now)

    def release(self, holder: object) -> None:
        """Give Python its clocks back once nobody who installed this one needs it any more.

        An engine that is collected ends after the next one was made in its process.
        """
        if self._holders == {id(holder)}:
            self.remove()
        self._holders.discard(id(holder))

    def remove(self) -> None:
        """Give Python its clocks back, whoever needs this one."""
        self._holders.clear()
        for name, original in self._originals.items():
            setattr(time, name, original)
        self._originals.clear()

    def restart(self) -> None:
        """Begin again at the first moment, for a run that is to be the same as the one before."""
        self._ns = _EPOCH_NS

    @property
    def real(self) -> Callable[[], float]:
        """The machine's own ``perf_counter``."""
        return self._originals.get("perf_counter", time.perf_counter)

    def _in_ns(self) -> int:
        return self._ns


VIRTUAL_CLOCK: Final = VirtualClock()
"""The virtual clock of this process; a process has one time."""

Clock = RealClock | VirtualClock


class Timeline:
    """The device's queue of steps: a step passes through the pipeline's stages, each of which does one at a time."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = RealClock() if clock is None else clock
        self._free_at: list[float] = []
        self._known_at: dict[str, float] = {}
        self.steps = 0
        """Steps launched so far."""
        self.busy_s = 0.0
        """Modelled seconds of the slowest stage of each, together: what a device that never idles needs for them."""

    def launch(self, stages: Sequence[float], needs: Iterable[str] = (), gives: Iterable[str] = ()) -> float:
        """Queues a step that takes so many seconds in each stage, and returns the moment it ends.

        needs: the requests in it; the first stage waits for the tokens that earlier steps still owe them
        gives: those of them that get a token at its end
        """
        end = now = self._clock.now()
        self._free_at += [end] * (len(stages) - len(self._free_at))
        if len(stages) > 1:
            # With one stage the device itself is the queue; with several, a request must not overtake its own token.
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
        """Returns at the moment ``end``, or when all that was launched has ended."""
        self._clock.wait_until(max(self._free_at, default=0.0) if end is None else end)
