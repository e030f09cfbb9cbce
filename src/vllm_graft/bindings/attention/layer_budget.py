"""The time of attention against its budget, taken without waiting for a device.

A layer of a decode step reads its KV cache once, so its budget follows from the bytes and from the bandwidth of the
device, which is measured once at the start. On a GPU one call in 67 is timed by a pair of events that are read when
they have passed; calls that are captured in a CUDA graph are not timed, and neither are its replays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.ledger.guard import OVERRUNS_IN_A_ROW
from vllm_graft.points import point

if TYPE_CHECKING:
    import torch

    from vllm_graft.ledger import Ledger, Meter

EVERY: Final = 67
"""On a GPU, one call in this many is timed. It is prime: otherwise only one of 32 layers would ever be timed."""

_RECENT: Final = 256
"""The layers of which the means are reported."""

_COPIED: Final = {"cpu": 32 << 20, "cuda": 256 << 20}
"""The bytes of a copy that measures a device: more than its caches hold."""


def layer_budget_us(read: int, bandwidth: float) -> float:
    """Return the microseconds that a layer may take to read these bytes at this bandwidth."""
    return max(point("attention").budget_us or 0.0, 1.25e6 * read / bandwidth + 10)


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes on a device: the best of three."""
    import torch

    size = _COPIED.get(device.type, _COPIED["cuda"])
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


@dataclass(slots=True)
class _Sample:
    begin: Any
    end: Any
    number: torch.Tensor | None
    """What was counted for it on the device, on its way to the host."""


class DeviceTimer:
    """Times calls: each one by the clock on the host, some by events on a GPU."""

    def __init__(self, note: Callable[[int, int], None]) -> None:
        self._note = note
        """Called with the nanoseconds of a call and the number that was counted for it."""
        self._calls = 0
        self._pending: deque[_Sample] = deque()

    def run(
        self, call: Callable[[], Any], device: torch.device, count: Callable[[], torch.Tensor] | None = None
    ) -> Any:
        """Call, and have the call timed. ``count`` returns a number of the call, on the device that it is timed on."""
        if device.type != "cuda":
            began = time.perf_counter_ns()
            result = call()
            took = time.perf_counter_ns() - began
            self._note(took, int(count()) if count is not None else 0)
            return result
        return self._run_on_gpu(call, count)

    def _run_on_gpu(self, call: Callable[[], Any], count: Callable[[], torch.Tensor] | None) -> Any:
        import torch

        self._calls += 1
        if (self._calls - 1) % EVERY or torch.cuda.is_current_stream_capturing():
            return call()
        self._read_passed()
        number = None
        if count is not None:
            number = torch.empty((), dtype=torch.long, pin_memory=True)
            number.copy_(count(), non_blocking=True)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call()
        end.record()
        self._pending.append(_Sample(begin, end, number))
        return result

    def _read_passed(self) -> None:
        while self._pending and self._pending[0].end.query():
            sample = self._pending.popleft()
            took = int(1e6 * sample.begin.elapsed_time(sample.end))
            self._note(took, int(sample.number) if sample.number is not None else 0)


class MeteredCall:
    """Meters calls that have the budget of the point, such as the tables of a step."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._timer = DeviceTimer(self._note)

    def run(self, call: Callable[[], Any], device: torch.device) -> Any:
        """Call, and count the time."""
        return self._timer.run(call, device)

    def _note(self, took: int, _: int) -> None:
        self._meter.count(took)


@dataclass
class LayerBudget:
    """The layers of a kernel against the budget of the bytes that each call reads.

    Nothing can take the place of a kernel in a running engine, whose KV cache is in its own order. So a kernel that
    overruns is reported, and goes on.
    """

    name: str
    ledger: Ledger
    bandwidth: float
    sampled: int = 0
    over: int = 0
    in_a_row: int = 0
    _recent: deque[tuple[float, float]] = field(default_factory=deque)
    _time: float = 0.0
    _budget: float = 0.0
    """The sums of what is in ``_recent``: a layer is too short to add them up each time."""

    def __post_init__(self) -> None:
        figures = ("layers timed", "layers over budget", "us per layer", "us of budget per layer", "GB/s by a copy")
        self._figures = [self.ledger.figure(self.name, each) for each in figures]
        self._timer = DeviceTimer(self.note)
        self._figures[-1].set(int(self.bandwidth / 1e9))

    def run(self, call: Callable[[], Any], device: torch.device, count: Callable[[], torch.Tensor]) -> Any:
        """Call a layer of a decode step; ``count`` returns the bytes that it reads and writes."""
        return self._timer.run(call, device, count)

    def _add(self, spent: float, budget: float) -> None:
        self._recent.append((spent, budget))
        gone = self._recent.popleft() if len(self._recent) > _RECENT else (0.0, 0.0)
        self._time += spent - gone[0]
        self._budget += budget - gone[1]

    def note(self, took: int, read: int) -> None:
        """Count a layer by the nanoseconds that it took and the bytes that it read."""
        budget, spent = layer_budget_us(read, self.bandwidth), took / 1000
        self._add(spent, budget)
        self.sampled += 1
        self.over += spent > budget
        self.in_a_row = self.in_a_row + 1 if spent > budget else 0
        number = len(self._recent)
        numbers = (self.sampled, self.over, self._time / number, self._budget / number)
        for figure, value in zip(self._figures, numbers, strict=False):
            figure.set(int(value))
        if self.in_a_row == OVERRUNS_IN_A_ROW:
            what = f"{self.in_a_row} layers in a row over budget ({numbers[2]:.0f} us, budget {numbers[3]:.0f} us)"
            self.ledger.note_error(self.name, f"{what}; a kernel cannot be replaced while it serves")
