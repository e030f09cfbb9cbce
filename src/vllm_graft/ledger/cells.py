"""Counters in a memory-mapped file: one addition to count, no input or output, still readable after a crash.

The file is an array of unsigned 64-bit cells. A header says how the process ended, whether its record is up to date and
when it last gave a sign of life; each hook then owns a
block of cells (see ``meters.py`` for what they mean). Two threads that count at the same instant may lose a count:
these are statistics, and a lock would cost more than what is counted.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import Final

from vllm_graft.ledger.folder import read_file

BLOCK: Final = 24
"""Cells per hook."""

HOOKS: Final = 340
"""Hooks one process can count; further ones share the last block."""

ENDED: Final = 0
"""The header's cell that says how the process ends; 0 while nobody has said anything."""

ORDERLY: Final = 1
"""The value of that cell once the end of the process, when it comes, is in order."""

CLOSED: Final = 2
"""The value of that cell when the record was closed and the process lives on."""

FAILED: Final = 3
"""The value of that cell when the process ends because of an error."""

UNSAVED: Final = 1
"""The header's cell that is not 0 while the record on disk is older than what the process knows."""

BEAT: Final = 2
"""The header's cell with the last sign of life, in milliseconds since the epoch; 0 where nothing watches."""

ASIDES: Final = 3
"""The header's cell that counts the items put aside, each when the record on disk says so."""

LAST: Final = HOOKS * BLOCK
"""The first cell of the last block."""

SIZE: Final = 8 * (1 + HOOKS) * BLOCK
"""The bytes of the file."""


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

    def end(self, value: int = ORDERLY) -> None:
        """Mark how the process ends, or with ``CLOSED`` that only its record does."""
        self.cells[ENDED] = value

    def _open(self, path: Path | None) -> memoryview:
        if path is None:
            return memoryview(bytearray(SIZE)).cast("Q")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # A sparse file on a full disk would be a bus error at the first count, not an exception here.
            os.posix_fallocate(descriptor, 0, SIZE)
            self._map = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        return memoryview(self._map).cast("Q")


def mark_ended(path: Path) -> None:
    """Mark in another process's file that its end, when it comes, is in order, unless it has said otherwise itself."""
    with path.open("r+b") as file:
        if not any(file.read(8)):
            file.seek(8 * ENDED)
            file.write(ORDERLY.to_bytes(8, sys.byteorder))


def count_asides(path: Path) -> int:
    """Return how many items another process has put aside; 0 where its file cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int.from_bytes(os.pread(descriptor, 8, 8 * ASIDES), sys.byteorder)
    except OSError:
        return 0
    finally:
        os.close(descriptor)


def read(path: Path) -> memoryview:
    """Read the cells that another process wrote; OSError or ValueError where that cannot be done."""
    data = read_file(path, SIZE)
    if len(data) != SIZE:
        raise ValueError(f"it has {len(data)} bytes instead of {SIZE}")
    return memoryview(data).cast("Q")
