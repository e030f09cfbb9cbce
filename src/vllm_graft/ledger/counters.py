"""Counters in a memory-mapped file, and the meters that count and time the calls of hooks in them.

Counting is one addition and does no input or output; the file can still be read after a crash. It is an array of
unsigned 64-bit cells. A header says how the process ended, whether its record is up to date, and when it last gave a
sign of life; each hook then owns a block of cells. Two threads that count at the same instant may lose a count: these
are statistics, and a lock would cost more than what is counted.

A block holds calls, errors, overruns and a histogram. Its buckets are fractions and multiples of the budget, so that a
glance tells how near a hook is to it: bucket 0 holds calls up to 1/128 of the budget, each next one twice as much,
bucket 7 ends at the budget itself, and the last holds everything from 128 times the budget on. Hooks without a budget
are measured against a millisecond.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_graft.ledger.folder import read_file

SUFFIX: Final = ".cells"  # of the file, beside the process's record
BLOCK: Final = 24  # cells per hook
HOOKS: Final = 340  # hooks one process can count; further ones share the last block
LAST_BLOCK: Final = HOOKS * BLOCK  # its first cell
SIZE: Final = 8 * (1 + HOOKS) * BLOCK  # the bytes of the file

ENDED: Final = 0  # how the process ended; 0 while it runs, and after a crash
UNSAVED: Final = 1  # not 0 while the record on disk is older than what the process knows
BEAT: Final = 2  # the last sign of life, in milliseconds since the epoch; 0 if nothing watches
ASIDES: Final = 3  # the number of quarantined items, each counted once the record on disk says so
"""The cells of the header."""

ORDERLY: Final = 1  # a clean exit, requested or of its own accord
CLOSED: Final = 2  # the record was closed in a process that lives on
FAILED: Final = 3  # the process ends because of an error
"""The values of the cell ``ENDED``."""

HITS: Final = 0  # calls that are counted but not timed: a patched method's layer adds to it
ERRORS: Final = 1
TOTAL_NS: Final = 2
MAX_NS: Final = 3
FIRST_BUCKET: Final = 8
BUCKETS: Final = 16
"""The cells of a block, from its first."""

_AT_BUDGET: Final = 7
_DEFAULT_US: Final = 1000.0


class Cells:
    """The counters of this process.

    ``cells`` is replaced after a fork, so code that counts reads the attribute at each call and does not keep it.
    """

    __slots__ = ("_keys", "_map", "cells")

    def __init__(self, path: Path | None = None) -> None:
        self._keys: dict[str, int] = {}
        self._map: mmap.mmap | None = None
        self.cells: memoryview = self._open(path)

    def allot(self, key: str) -> int:
        """Return the first cell of a hook's block; the same key has the same block."""
        if key not in self._keys:
            # Block 0 is the header. Hooks beyond HOOKS share the last block rather than fail.
            self._keys[key] = BLOCK * (1 + min(len(self._keys), HOOKS - 1))
        return self._keys[key]

    def renew(self, path: Path | None) -> None:
        """Count in another file, or in memory, from zero with the same blocks: in a forked child."""
        self.cells = self._open(path)

    def move(self, path: Path) -> None:
        """Continue in a file with what was counted so far."""
        counted = bytes(self.cells)
        self.renew(path)
        self.cells.cast("B")[:] = counted

    def end(self, value: int = ORDERLY) -> None:
        """Mark how the process ended."""
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
    """Mark another process as stopped deliberately, unless it has marked its end itself."""
    with path.open("r+b") as file:
        if not any(file.read(8)):
            file.seek(8 * ENDED)
            file.write(ORDERLY.to_bytes(8, sys.byteorder))


def count_asides(path: Path) -> int:
    """Return how many items another process has quarantined; 0 if its file cannot be read."""
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


def read_cells(path: Path) -> memoryview:
    """Read the cells of another process; OSError or ValueError if that cannot be done."""
    data = read_file(path, SIZE)
    if len(data) != SIZE:
        raise ValueError(f"it has {len(data)} bytes instead of {SIZE}")
    cells = memoryview(data).cast("Q")
    if cells[ENDED] > FAILED:
        raise ValueError("it does not say how the process ended")
    return cells


class Meter:
    """Counts and times the calls of one hook in the block that begins at ``cell``."""

    __slots__ = ("_cells", "_first", "_max", "_total", "budget_ns", "budget_us", "cell", "key")

    def __init__(self, cells: Cells, key: str, budget_us: float | None) -> None:
        self._cells = cells
        self.key = key
        self.cell = cells.allot(key)
        self._total = self.cell + TOTAL_NS
        self._max = self.cell + MAX_NS
        self._first = self.cell + FIRST_BUCKET
        self.budget_us = budget_us
        self.budget_ns = _budget_ns(budget_us)

    def count(self, ns: int) -> bool:
        """Count a call that took ``ns`` nanoseconds; return whether it overran the budget."""
        cells = self._cells.cells
        bucket = (((ns - 1) << _AT_BUDGET) // self.budget_ns).bit_length()
        cells[self._first + (bucket if bucket < BUCKETS else BUCKETS - 1)] += 1
        cells[self._total] += ns
        if ns > cells[self._max]:
            cells[self._max] = ns
        return bucket > _AT_BUDGET and self.budget_us is not None

    def error(self) -> None:
        """Count a call that raised."""
        self._cells.cells[self.cell + ERRORS] += 1

    def reading(self) -> MeterReading:
        """Return what has been counted so far."""
        return read_block(self._cells.cells, self.cell, self.budget_us)


class Figure:
    """One number that an item reports, in the cell that a hook counts its calls in."""

    __slots__ = ("_cells", "cell")

    def __init__(self, cells: Cells, key: str) -> None:
        self._cells = cells
        self.cell = cells.allot(key)

    def set(self, value: int) -> None:
        """Report a number, 0 or more."""
        self._cells.cells[self.cell] = value


@dataclass(frozen=True, slots=True)
class MeterReading:
    """The counts of a meter. Times are microseconds; percentiles are the upper edge of their histogram bucket."""

    calls: int
    errors: int
    overruns: int
    mean_us: float
    p50_us: float
    p99_us: float
    max_us: float
    budget_us: float | None


def read_block(cells: Sequence[int], at: int, budget_us: float | None) -> MeterReading:
    """Return the reading of one block of cells."""
    hits, errors, total, largest = (cells[at + index] for index in (HITS, ERRORS, TOTAL_NS, MAX_NS))
    buckets = [cells[at + FIRST_BUCKET + index] for index in range(BUCKETS)]
    budget_ns = _budget_ns(budget_us)
    timed = sum(buckets)
    return MeterReading(
        calls=hits + timed,
        errors=errors,
        overruns=sum(buckets[_AT_BUDGET + 1 :]) if budget_us is not None else 0,
        mean_us=total / timed / 1000 if timed else 0.0,
        p50_us=_percentile(buckets, 0.50, budget_ns, largest),
        p99_us=_percentile(buckets, 0.99, budget_ns, largest),
        max_us=largest / 1000,
        budget_us=budget_us,
    )


def _budget_ns(budget_us: float | None) -> int:
    return max(1, int((budget_us or _DEFAULT_US) * 1000))


def _percentile(buckets: Sequence[int], share: float, budget_ns: int, largest: int) -> float:
    wanted = share * sum(buckets)
    seen = 0
    for index, number in enumerate(buckets):
        seen += number
        if number and seen >= wanted:
            edge = (budget_ns << index) >> _AT_BUDGET
            return (largest if index == BUCKETS - 1 else min(edge, largest)) / 1000
    return 0.0
