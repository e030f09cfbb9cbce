"""Calls of plugins, guarded: counted, timed, and ended for good once a plugin raises or overruns repeatedly."""

from __future__ import annotations

import dis
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Generic, ParamSpec, TypeVar

from vllm_graft.ledger.counters import Meter
from vllm_graft.text import encodable

P = ParamSpec("P")
R = TypeVar("R")

OVERRUNS_IN_A_ROW: Final = 100
"""A plugin is put aside after this many calls in a row over budget: a slow phase passes, a slow plugin does not."""

LONG_CALL_NS: Final = 1_000_000_000
LONG_CALLS_WITHIN_NS: Final = 600_000_000_000
LONG_CALLS_IN_A_ROW: Final = 3
LONG_CALLS: Final = 5
"""A call is *long* if it exceeds its budget by a second. A plugin is put aside after three long calls with no in-budget
call between them, or after five, each within ten minutes of the one before. Fewer are forgiven: torch.compile compiles
once more for a second shape (which it then makes dynamic), a batch may have that shape at any time, and a machine may
be suspended."""

EXCESS_NS: Final = 1_000_000_000
"""A plugin is put aside once its calls have exceeded their budgets by this much in total. A tenth of the time between
calls is credited back, so this is a plugin that holds its process up for more than a tenth of the time."""

_PAY_BACK: Final = 10
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))
_LONGEST_MESSAGE: Final = 500


@dataclass(slots=True, eq=False)
class Guard(Generic[P, R]):
    """Calls one hook of one plugin, and stops calling it once it has failed.

    _call:     the plugin's method
    _fallback: what is called instead, with the same arguments, when the plugin fails and from then on
    _meter:    counts, times and knows the budget
    _on_aside: called once, with the reason, when the plugin is put aside
    aside:     the reason; empty while the plugin is called

    An exception puts the plugin aside at once, ``SystemExit`` and ``KeyboardInterrupt`` included unless a signal raised
    them: what the plugin left behind cannot be trusted. So do ``OVERRUNS_IN_A_ROW`` calls in a row over the budget,
    ``LONG_CALLS_IN_A_ROW`` or ``LONG_CALLS`` over it by ``LONG_CALL_NS``, and shorter ones by ``EXCESS_NS`` in total.
    """

    _call: Callable[P, R]
    _fallback: Callable[P, R]
    _meter: Meter
    _on_aside: Callable[[str], None]
    aside: str = ""
    _in_a_row: int = 0
    _long_calls: int = 0
    _long_in_a_row: int = 0
    _long_ended: int = 0
    _excess: int = 0
    _ended: int = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the plugin, or its fallback after it has been put aside."""
        if self.aside:
            return self._fallback(*args, **kwargs)
        forks = _forks
        started = time.perf_counter_ns()
        try:
            result = self._call(*args, **kwargs)
        except BaseException as error:
            end_copy(forks, error)
            if raised_by_signal(error):
                raise
            self._meter.count(time.perf_counter_ns() - started)
            self._meter.error()
            self.put_aside(reason_of(error))
            return self._fallback(*args, **kwargs)
        took = time.perf_counter_ns() - started
        if _forks != forks:
            end_copy(forks)
        if not self._meter.count(took):
            self._in_a_row = 0
        elif reason := self._overrun(started, took):
            self.put_aside(reason)
        return result

    def _overrun(self, started: int, took: int) -> str:
        """Count a call over budget; return why the plugin must be put aside, or an empty string."""
        over = took - self._meter.budget_ns
        self._in_a_row += 1
        if self._in_a_row == 1:
            self._long_in_a_row = 0
        if over >= LONG_CALL_NS:
            if started - self._long_ended >= LONG_CALLS_WITHIN_NS:
                self._long_calls = self._long_in_a_row = 0
            self._long_calls += 1
            self._long_in_a_row += 1
            self._long_ended = started + took
            if self._long_in_a_row >= LONG_CALLS_IN_A_ROW or self._long_calls >= LONG_CALLS:
                return f"{self._long_calls} calls each took more than {LONG_CALL_NS / 1e9:g} s over {self._budget()}"
            return ""
        paid_back = (started - self._ended) // _PAY_BACK if self._ended else 0
        # Two calls never suffice, however slow: they are forgiven, as long ones are.
        self._excess = max(0, self._excess - paid_back) + min(over, EXCESS_NS // 3 + 1)
        self._ended = started + took
        if self._excess >= EXCESS_NS:
            return f"its last calls together took {self._excess / 1e9:.1f} s over {self._budget()}"
        if self._in_a_row >= OVERRUNS_IN_A_ROW:
            return f"{self._in_a_row} calls in a row over {self._budget()}"
        return ""

    def _budget(self) -> str:
        reading = self._meter.reading()
        return f"the budget of {reading.budget_us:g} us (mean {reading.mean_us:.0f} us, max {reading.max_us:.0f} us)"

    @property
    def name(self) -> str:
        """The item and the hook that is called."""
        return self._meter.key.replace("\t", ".")

    def put_aside(self, reason: str) -> None:
        """Stop calling the plugin."""
        self.aside = reason
        self._on_aside(reason)


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def fork_count() -> int:
    """Return how many forks lie between this process and the one that imported this module, for ``end_copy``."""
    return _forks


def end_copy(forks: int, error: BaseException | None = None) -> None:
    """End this process if a plugin has forked it since: a copy of an engine or API server must not serve beside it.

    ``error`` is what the plugin raised, such as the SystemExit by which it meant to end its child.
    """
    if _forks == forks:
        return
    status = error.code if isinstance(error, SystemExit) else error
    # At once: the finalizers are those of the process that was copied.
    os._exit(status & 0xFF if isinstance(status, int) else int(status is not None))


def raised_by_signal(error: BaseException) -> bool:
    """Return whether a signal handler raised this while a plugin ran, so that it is not the plugin's fault.

    Python runs handlers in the main thread only. One written in Python has its own frame in the traceback. The one
    behind Ctrl-C is written in C: its KeyboardInterrupt appears at an instruction that raises nothing by itself.
    """
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return False
    frames = list(_frames(error.__traceback__))
    for number in _SIGNALS:
        # asyncio's handler is a bound method in a partial; one that is not written in Python has no code.
        handler: object = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if code is not None and any(frame.tb_frame.f_code == code for frame in frames):
            return True
    if not isinstance(error, KeyboardInterrupt) or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    raising = dis.opname[frames[-1].tb_frame.f_code.co_code[frames[-1].tb_lasti]] if frames else "RERAISE"
    return raising not in ("RAISE_VARARGS", "RERAISE")


def reason_of(error: BaseException) -> str:
    """Return an exception in one line, with the place that raised it; never raise, whatever its ``str`` does."""
    try:
        text = str(error)
    except BaseException as failure:
        if raised_by_signal(failure):
            raise
        text = f"(its message cannot be shown: str() raised {type(failure).__name__})"
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[:_LONGEST_MESSAGE]}..."
    frames = list(_frames(error.__traceback__))
    place = f" at {frames[-1].tb_frame.f_code.co_filename}:{frames[-1].tb_lineno}" if frames else ""
    # It is sent to clients and between processes.
    return encodable(f"{type(error).__name__}: {text}{place}")


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
