"""What an engine core publishes for the other processes of its run: its load in each step, and its queue's figures.

A memory-mapped file beside the process's record, so publishing is no input or output, and what was published outlives
a crash. There are no locks: the head, the load and each row of figures carry a checksum, and a reader that meets one
half written reads it again.

    head   who writes, and whether it has ended in order
    load   waiting, running, rate, and when that was so
    rows   ``ROWS`` packed ``Figures``
"""

from __future__ import annotations

import functools
import mmap
import os
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final

from vllm_graft.contracts import Load
from vllm_graft.ledger.figures import SIZE, Figures, QueueFigures, fitting, in_order
from vllm_graft.ledger.record import lives, start_ticks

SUFFIX: Final = ".board"

ROWS: Final = 1000
"""Rows of figures that a board has room for."""

RECENT_S: Final = 10.0
"""What was published longer ago counts only while its process lives. An idle engine publishes nothing, and is right."""

_LOOK_S: Final = 1.0
_TRIES: Final = 50

_MAGIC: Final = b"graft-1\0"
_HEAD: Final = Struct("=8sqqqq64s")
_LOAD: Final = Struct("=qqddq")
_CHECK: Final = Struct("=Q")
_LOAD_AT: Final = 128
_ROWS_AT: Final = 256
_TOTAL: Final = _ROWS_AT + ROWS * SIZE

assert _HEAD.size + _CHECK.size <= _LOAD_AT


class Board:
    """This process's board. ``move`` gives it a file; until then, and after a fork, it is in memory."""

    __slots__ = ("_engine", "_item", "_map")

    here: Board | None = None
    """The board of this process, for a reader of the same process where there is no file."""

    def __init__(self, item: str = "", path: Path | None = None, engine: int = 0) -> None:
        self._item = item
        self._engine = engine
        self._map: mmap.mmap | bytearray = bytearray(_TOTAL)
        self.move(path)
        Board.here = self

    def move(self, path: Path | None) -> None:
        """Publish in another file from now on, or with None in memory; nothing is carried along."""
        self._map = bytearray(_TOTAL) if path is None else _made(path)
        self._sign(ended=False)

    def follow(self, path: Path) -> None:
        """Publish in another file from now on, what was published so far carried along; in memory it stays there."""
        if isinstance(self._map, mmap.mmap):
            made = _made(path)
            made[:] = self._map[:]
            self._map = made

    def publish(self, waiting: int, running: int, rate: float) -> None:
        """The load after a step."""
        stamp = time.time()
        # The hash of numbers is the same in every process, and one call is all that a step pays for.
        _LOAD.pack_into(self._map, _LOAD_AT, waiting, running, rate, stamp, hash((waiting, running, rate, stamp)))

    def write(self, index: int, row: Figures | None) -> None:
        """The figures of one row, or None for a row that is free again."""
        at = _ROWS_AT + index * SIZE
        self._map[at : at + SIZE] = row.pack() if row is not None else bytes(SIZE)

    def end(self) -> None:
        """The engine has ended in order: its load counts no more."""
        self._sign(ended=True)

    def load(self) -> Load:
        """What was published last."""
        return _View(self._map).load() or Load()

    def figures(self) -> QueueFigures:
        """What was written, rows in order."""
        return _View(self._map).figures()

    def _sign(self, *, ended: bool) -> None:
        pid = os.getpid()
        item = fitting(self._item, 64).encode()
        data = _HEAD.pack(_MAGIC, pid, start_ticks(pid) or 0, int(ended), self._engine, item)
        self._map[: _HEAD.size + 8] = data + _CHECK.pack(zlib.crc32(data))


class Boards:
    """The boards in a run's folder, read again and again: maps stay open, new engines are found within a second.

    Without a folder it is the board of this very process, where it has one.
    """

    def __init__(self, home: Path | None) -> None:
        self._home = home
        self._views: dict[str, _View] = {}
        self._looked = -_LOOK_S

    def load(self, now: float | None = None) -> Load:
        """The load of all engines of the run on this machine together; empty while none has published any."""
        if self._home is None:
            return Board.here.load() if Board.here is not None else Load()
        self._look()
        moment = time.time() if now is None else now
        found = ((view, view.load()) for view in self._views.values())
        return Load.together([load for view, load in found if load is not None and view.counts(moment)])

    def figures(self) -> list[QueueFigures]:
        """The figures of every engine that has not ended in order; those of one that died are what it wrote last."""
        if self._home is None:
            return [Board.here.figures()] if Board.here is not None else []
        self._look()
        found = [view.figures() for view in self._views.values() if not view.ended]
        return sorted(found, key=lambda each: (each.engine, each.pid))

    def _look(self) -> None:
        """Notice boards that came or went, at most once a second."""
        clock = time.monotonic()
        if clock - self._looked < _LOOK_S:
            return
        self._looked = clock
        known, found = self._views, {}
        for path, mark in _listed(self._home):
            view = known.get(mark) or _opened(path)
            if view is not None:
                view.look()
                found[mark] = view
        self._views = found


@functools.lru_cache(maxsize=8)
def _boards(home: Path | None) -> Boards:
    return Boards(home)


def read_load(home: Path | None, now: float | None = None) -> Load:
    """The load of a run's engines on this machine, as ``Boards`` reads it; the maps are kept between calls."""
    return _boards(home).load(now)


def read_figures(home: Path | None) -> list[QueueFigures]:
    """The figures of a run's queues on this machine, one entry for each engine."""
    return Boards(home).figures()


def read_board(path: Path) -> QueueFigures | None:
    """The figures that one process has written; None where it has no board."""
    view = _opened(path)
    return view.figures() if view is not None else None


class _View:
    """One board as a reader has it."""

    def __init__(self, data: mmap.mmap | bytearray) -> None:
        self._map = data
        self.ended = False
        self._lives = True
        self._stamp = 0.0
        self._unpacked: dict[int, tuple[bytes, Figures]] = {}
        self._pid, self._started, self._engine, self._item = 0, 0, 0, ""
        self.look()

    def look(self) -> None:
        """Read the head, and see whether the writer lives."""
        data = self._checked(0, _HEAD.size)
        if data is None:
            return
        magic, self._pid, self._started, ended, self._engine, item = _HEAD.unpack(data)
        self._item = item.rstrip(b"\0").decode("utf-8", "replace")
        self.ended = bool(ended) or magic != _MAGIC
        self._lives = not self.ended and lives(self._pid, self._started)

    def counts(self, now: float) -> bool:
        """Whether what was read last is the load of an engine that is there."""
        return not self.ended and (self._lives or now - self._stamp < RECENT_S)

    def load(self) -> Load | None:
        """What was published last; None where nothing was."""
        for _ in range(_TRIES):
            *numbers, check = _LOAD.unpack_from(self._map, _LOAD_AT)
            if not numbers[3]:
                return None
            if hash(tuple(numbers)) == check:
                self._stamp = numbers[3]
                return Load(*numbers[:3])
        return None

    def figures(self) -> QueueFigures:
        """Every row that is written."""
        self.load()
        return QueueFigures(self._pid, self._engine, self._item, self._stamp, tuple(in_order(list(self._rows()))))

    def _rows(self) -> Iterator[Figures]:
        for at in range(_ROWS_AT, _TOTAL, SIZE):
            for _ in range(_TRIES):
                if not self._map[at]:
                    break
                data = bytes(self._map[at : at + SIZE])
                known = self._unpacked.get(at)
                row = known[1] if known is not None and known[0] == data else Figures.unpack(data)
                if row is not None:
                    self._unpacked[at] = (data, row)
                    yield row
                    break

    def _checked(self, at: int, size: int) -> bytes | None:
        for _ in range(_TRIES):
            data = self._map[at : at + size + 8]
            if _CHECK.unpack(data[size:])[0] == zlib.crc32(data[:size]):
                return bytes(data[:size])
        return None


def _made(path: Path) -> mmap.mmap:
    # A new file rather than the old one cut to nothing, which would be a bus error for whoever still has that mapped.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # A sparse file on a full disk would be a bus error at the first step, not an exception here.
        os.posix_fallocate(descriptor, 0, _TOTAL)
        return mmap.mmap(descriptor, _TOTAL)
    finally:
        os.close(descriptor)


def _opened(path: Path | str) -> _View | None:
    try:
        # Without waiting: what lies in the place of a board may be a FIFO.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != _TOTAL:
            return None
        return _View(mmap.mmap(descriptor, _TOTAL, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _listed(home: Path | None) -> list[tuple[str, str]]:
    """Every board in a folder, with what tells it from a later one of the same name."""
    try:
        with os.scandir(home) as entries:
            return [(entry.path, f"{entry.name} {entry.inode()}") for entry in entries if entry.name.endswith(SUFFIX)]
    except OSError:
        return []
