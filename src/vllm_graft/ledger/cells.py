"""Counters in a memory-mapped file: one addition to count, no input or output, still readable after a crash.

The file is an array of unsigned 64-bit cells. A header says whether the process ended in order; each hook then owns a
block of cells (see ``meters.py`` for what they mean). Two threads that count at the same instant may lose a count:
these are statistics, and a lock would cost more than what is counted.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import Final

BLOCK: Final = 24
"""Cells per hook."""

HOOKS: Final = 340
"""Hooks one process can count; further ones share the last block."""

ENDED: Final = 0
"""The header's cell that is not 0 once the end of the process, when it comes, is in order."""

CLOSED: Final = 2
"""The value of that cell when the record was closed and the process lives on."""

_SIZE: Final = (1 + HOOKS) * BLOCK


class Cells:
    """The counters of this process.

    ``cells`` is replaced after a fork, so whoever counts must read the attribute at each call rather than keep it.
    """

    __slots__ = ("_keys", "_map", "cells")

    def __init__(self, path: Path | None = None) -> None:
        self._keys: dict[str, int] = {}
        self._map: mmap.mmap | None = None
        self.cells: memoryview = self._open(path)

    def allot(self, key: str) -> int:
        """The first cell of the block of that hook; the same key gives the same block."""
        if key not in self._keys:
            self._keys[key] = BLOCK * (1 + min(len(self._keys), HOOKS - 1))
        return self._keys[key]

    @property
    def keys(self) -> dict[str, int]:
        """Every hook that counts here, with its first cell."""
        return dict(self._keys)

    def renew(self, path: Path | None) -> None:
        """Count in another file from zero, the blocks unchanged: for a forked child, and when the folder is known."""
        self.cells = self._open(path)

    def move(self, path: Path) -> None:
        """Go on counting in a file, what was counted so far carried along."""
        counted = bytes(self.cells)
        self.renew(path)
        self.cells.cast("B")[:] = counted

    def end(self, value: int = 1) -> None:
        """Mark that the process ends in order, or with ``CLOSED`` that its record does."""
        self.cells[ENDED] = value

    def _open(self, path: Path | None) -> memoryview:
        if path is None:
            return memoryview(bytearray(8 * _SIZE)).cast("Q")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # A sparse file on a full disk would be a bus error at the first count, not an exception here.
            os.posix_fallocate(descriptor, 0, 8 * _SIZE)
            self._map = mmap.mmap(descriptor, 8 * _SIZE)
        finally:
            os.close(descriptor)
        return memoryview(self._map).cast("Q")


def mark_ended(path: Path) -> None:
    """Mark in another process's file that its end, when it comes, is in order."""
    with path.open("r+b") as file:
        file.seek(8 * ENDED)
        file.write((1).to_bytes(8, sys.byteorder))


def read(path: Path) -> memoryview | None:
    """The cells another process wrote, or None where there are none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return memoryview(data).cast("Q") if len(data) == 8 * _SIZE else None
