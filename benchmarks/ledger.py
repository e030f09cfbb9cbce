"""What counting costs: one counted call, one timed call and one guarded call, against the bare call they stand around;
and one look of the thread that watches over a process.

    python benchmarks/ledger.py

Prints nanoseconds of CPU time per call, the best of many rounds, and whether each stays within the microsecond that a
counted call may cost. The cells lie in a memory-mapped file, as in a server. The look is at 40 threads with 25 frames
each.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_graft.ledger import Cells, Guard, Ledger, Meter, Watch
from vllm_graft.patching import Engine, VLLMPatch, wrap

LIMIT_NS = 1000
CALLS = 20_000
ROUNDS = 60


class Target:
    def method(self, value):
        return value

    def wrapped(self, value):
        return value


class Counted(VLLMPatch[Target], name="counted"):
    @wrap
    def wrapped(self, value):
        return self._original_wrapped(value)


def best(call: Callable[[int], object]) -> float:
    """CPU nanoseconds per call, the best round."""
    rounds = []
    for _ in range(ROUNDS):
        before = time.thread_time_ns()
        for number in range(CALLS):
            call(number)
        rounds.append((time.thread_time_ns() - before) / CALLS)
    return min(rounds)


def look_us() -> float:
    """CPU microseconds of one look at a process with many threads."""
    done = threading.Event()

    def wait(depth: int) -> None:
        if depth:
            wait(depth - 1)
        else:
            done.wait()

    for _ in range(40):
        threading.Thread(target=wait, args=(25,), daemon=True).start()
    watch = Watch(Ledger())
    rounds = []
    for _ in range(ROUNDS):
        before = time.thread_time_ns()
        watch.tick()
        rounds.append((time.thread_time_ns() - before) / 1000)
    done.set()
    return min(rounds)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        cells = Cells(Path(folder) / "1.cells")
        meter = Meter(cells, "meter", 500.0)
        guard = Guard(lambda value: value, lambda value: value, Meter(cells, "guard", 500.0), print)
        Engine(counter=cells).apply([Counted])
        target = Target()
        bare = best(target.method)
        added = {
            "a hit of a patched method (layer included)": best(target.wrapped) - bare,
            "a timed call (Meter.count)": best(meter.count) - best(lambda value: None),
            "a guarded plugin call (clock, meter, guard)": best(guard) - bare,
        }
    print(f"{'bare method call':<48}{bare:>8.0f} ns")
    for name, ns in added.items():
        print(f"{name:<48}{ns:>+8.0f} ns   {'within' if ns <= LIMIT_NS else 'OVER'} {LIMIT_NS} ns")
    print(f"{'a look of the watch, once in two seconds':<48}{look_us():>8.0f} us")
    return int(any(ns > LIMIT_NS for ns in added.values()))


if __name__ == "__main__":
    raise SystemExit(main())
