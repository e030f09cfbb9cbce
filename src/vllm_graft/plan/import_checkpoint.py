"""Survive an import that ends the process: ``os._exit`` in a module, or a crash in native code.

Neither raises anything that a command could report. So a command forks before it imports the first module of another
package: the child goes on with the command, and the parent waits as a checkpoint. If the child ends in the middle of an
import, the parent goes on from there and raises an ImportError that says how it ended. Nothing is imported twice if
all is well, and a fork costs milliseconds. A server does without: its process has threads, and its end is seen.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Final

_OURS: Final = __name__.partition(".")[0]
_FROM_OUTSIDE: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals sent from outside to end the command, whatever it was importing."""


class ImportCheckpoint:
    """The checkpoint of one process; inactive until a command calls ``start``."""

    def __init__(self) -> None:
        self._active = False
        self._forked = False
        self._endings: dict[str, str] = {}
        self._note: mmap.mmap | None = None

    def start(self) -> None:
        """Watch the imports that follow; only for a process that has no threads and ends with the command."""
        self._active = hasattr(os, "fork")

    @contextlib.contextmanager
    def importing(self, module: str) -> Iterator[None]:
        """Import a module inside; ImportError if that is known to end the process."""
        if not self._active or module in sys.modules or module.partition(".")[0] == _OURS:
            yield
            return
        if not self._forked:
            self._fork(module)
        if module in self._endings:
            raise ImportError(self._endings[module])
        self._write(module)
        try:
            yield
        finally:
            self._write("")

    def _fork(self, module: str) -> None:
        """Return in a child, or in this process if a child ended during the import of ``module``."""
        self._note = mmap.mmap(-1, 4096)
        while module not in self._endings:
            sys.stdout.flush()
            sys.stderr.flush()
            # A signal between the fork and the parent's handlers would end the parent alone, and orphan the child.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_OUTSIDE)
            child = os.fork()
            if child == 0:
                self._forked = True
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                return
            status = _wait(child, mask)
            ended_in = self._note[:].partition(b"\0")[0].decode(errors="replace")
            if not ended_in or -status in _FROM_OUTSIDE:
                # As the child did; what is registered to run at the end was run there.
                if status < 0:
                    signal.signal(-status, signal.SIG_DFL)
                    os.kill(os.getpid(), -status)
                os._exit(status)
            name = f"signal {-status}"
            with contextlib.suppress(ValueError):
                name = signal.Signals(-status).name
            how = f"it ends the process with status {status}" if status >= 0 else f"it is ended by {name}"
            self._endings[ended_in] = how
            self._write("")

    def _write(self, module: str) -> None:
        assert self._note is not None
        data = module.encode()[: len(self._note) - 1] + b"\0"
        self._note[: len(data)] = data


def _wait(child: int, mask: set[signal.Signals] | set[int]) -> int:
    """Wait for a child and return its status as ``subprocess`` writes it; hand a SIGTERM on to it.

    Signals are blocked until that is set up; ``mask`` is what was blocked before.
    """

    def hand_on(signum: int, frame: FrameType | None) -> None:
        os.kill(child, signum)

    # A terminal sends SIGINT to both; how the command ends then is the child's to say.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, hand_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


checkpoint = ImportCheckpoint()
"""The checkpoint of this process."""
