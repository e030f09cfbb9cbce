"""A thread that watches its process every two seconds: signs of life, stalls, patches that were overwritten.

Steps and calls of plugins pay nothing for it. What a thread is doing is read from its frames: a guard on the stack has
the plugin's name and the time at which the call began.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Final

from vllm_graft.ledger.guard import Guard, reason_of
from vllm_graft.ledger.ledger import Ledger
from vllm_graft.ledger.record import Stall

_LOG: Final = logging.getLogger("vllm.graft")

EVERY_S: Final = 2.0
PATIENCE_S: Final = 10.0
"""Seconds without progress that make a stall."""


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """The progress of an engine.

    mark:    an object that is another one after each step
    waiting: how many requests depend on it
    thread:  the thread that makes the steps
    """

    mark: object
    waiting: int
    thread: int


class Watch:
    """Watches one process. ``start`` may be called repeatedly, and after a fork.

    ledger:   the ledger of the process
    look:     checks whether something else has set an attribute that is patched
    progress: returns how far an engine has come; None while it has nothing to do
    """

    def __init__(
        self,
        ledger: Ledger,
        look: Callable[[], None] = lambda: None,
        *,
        every_s: float = EVERY_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._ledger = ledger
        self._look = look
        self._every_s = every_s
        self._patience_s = patience_s
        self._stop = threading.Event()
        self._pid = 0
        self._mark: object = None
        self._since = 0.0
        self._stall: Stall | None = None
        self.progress: Callable[[], Progress | None] | None = None

    def start(self) -> None:
        """Start the thread, unless it runs in this process."""
        # A thread does not survive a fork, so the child of a watched process starts its own.
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._ledger.beat()
        threading.Thread(target=self._run, args=(self._stop,), name="graft-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._pid = 0
        self.progress = None

    def _run(self, stop: threading.Event) -> None:
        told = ""
        while not stop.wait(self._every_s):
            try:
                self.tick()
            except Exception as error:
                # The next look may succeed: what is read here belongs to threads that go on meanwhile.
                reason = reason_of(error)
                if reason != told:
                    _LOG.warning("vllm-graft: the watch over this process could not look: %s", reason)
                told = reason

    def tick(self) -> None:
        """Look once."""
        self._ledger.beat()
        self._ledger.retry()
        self._look()
        self._ledger.set_stalls([*self._engine_stall(), *self._item_stalls()])

    def _engine_stall(self) -> list[Stall]:
        progress = self.progress() if self.progress is not None else None
        if progress is None or progress.mark is not self._mark:
            self._mark = progress.mark if progress is not None else None
            self._since = time.time()
            self._stall = None
        elif self._stall is None and time.time() - self._since >= self._patience_s:
            # Kept as it is from now on, so that the record is written once: how many wait changes all the time.
            frame = sys._current_frames().get(progress.thread)
            call = next(_guarded(frame), ("", 0))
            requests = "1 request waits" if progress.waiting == 1 else f"{progress.waiting} requests wait"
            self._stall = Stall(f"has not finished a step while {requests}", self._since, _place(frame), call[0])
        return [self._stall] if self._stall is not None else []

    def _item_stalls(self) -> list[Stall]:
        found = []
        for thread, frame in sys._current_frames().items():
            for item, began in _guarded(frame):
                seconds = (time.perf_counter_ns() - began) / 1e9
                if seconds < self._patience_s:
                    continue
                stalls = self._ledger.record.stalls if self._ledger.record is not None else []
                known = next((each for each in stalls if each.item == item and each.what == _NO_RETURN), None)
                since = known.since if known is not None else time.time() - seconds
                found.append(Stall(_NO_RETURN, since, _place(sys._current_frames().get(thread)), item))
        return found


_NO_RETURN: Final = "waits for a plugin that does not return"


def _guarded(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """Yield the calls through a guard on a stack: the plugin's item and hook, and when the call began."""
    while frame is not None:
        if frame.f_code is _CALL:
            names = frame.f_locals
            guard, began = names.get("self"), names.get("started")
            if isinstance(guard, Guard) and isinstance(began, int) and not guard.aside:
                yield guard.name, began
        frame = frame.f_back


def _place(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame is not None else ""


_CALL: Final = Guard.__call__.__code__
