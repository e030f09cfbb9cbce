"""Queue statistics that an engine core shares with the other processes of its run: its load, and counts per label.

A memory-mapped file beside the process's record: publishing does no input or output, and what was published outlives a
crash. There are no locks. The head, the load and each row carry a checksum, and a reader that meets one half written
reads it again.

    head   the writing process, and whether it ended cleanly
    load   waiting, running, rate, and the time of the step
    rows   ``ROWS`` packed ``LabelStatistics``
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import time
import weakref
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from struct import Struct
from typing import Final, TypedDict

from vllm_graft.contracts import Load
from vllm_graft.ledger.record import lives, start_ticks

SUFFIX: Final = ".queue"  # the suffix of the file, beside the process's record
ROWS: Final = 1000  # the rows of a file

EDGES: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""The upper bounds of the buckets of waits, in seconds; one more bucket holds all longer waits."""

SHARE_WINDOW_S: Final = 60.0  # the seconds over which shares of tokens are computed

RECENT_S: Final = 10.0
"""A load that is older counts only while its process lives. An idle engine publishes nothing, and its load holds."""

OTHERS: Final = "(others)"  # the value of the row into which evicted rows of a label are merged

LABEL_BYTES: Final = 32
VALUE_BYTES: Final = 128
"""The columns' widths in UTF-8. Values are clients' words, of any length."""

_LOOK_S: Final = 1.0
_TRIES: Final = 50

_MAGIC: Final = b"graft-1\0"
_HEAD: Final = Struct("=8sqqqq64s")
_LOAD: Final = Struct("=qqddq")
_ROW: Final = Struct(f"={LABEL_BYTES}s{VALUE_BYTES}s8q2d{len(EDGES) + 1}q")
_CHECK: Final = Struct("=Q")
_ROW_SIZE: Final = _ROW.size + _CHECK.size
_LOAD_AT: Final = 128
_ROWS_AT: Final = 256
_TOTAL: Final = _ROWS_AT + ROWS * _ROW_SIZE

assert _HEAD.size + _CHECK.size <= _LOAD_AT

_SUMS: Final = ("waiting", "running", "admitted", "refused", "ended", "aborted", "tokens", "recent", "wait_sum")
_NUMBERS: Final = attrgetter(*_SUMS, "wait_max")


class QueueRow(TypedDict):
    """The statistics of one value of one label in the queue of one engine, as a status document shows them."""

    engine: int
    pid: int
    item: str
    label: str
    value: str
    waiting: int
    running: int
    admitted: int
    refused: int
    ended: int
    aborted: int
    wait_mean_s: float | None
    wait_p50_s: float | None
    wait_p99_s: float | None
    wait_max_s: float | None
    tokens: int
    share: float


@dataclass(slots=True, eq=False)
class LabelStatistics:
    """The statistics of one value of one label, such as tenant "acme".

    waiting:  requests that wait now
    running:  requests that were admitted and have neither ended nor been put back
    admitted: requests that were admitted, each counted once even if it was preempted
    refused:  requests that engine core refused
    ended:    requests that ended after they were admitted
    aborted:  requests that ended before they were admitted
    tokens:   tokens that were scheduled for them, of prompts and outputs
    recent:   tokens of the last ``SHARE_WINDOW_S`` of the engine's work
    buckets:  the waits from arrival to the first admission, by ``EDGES``
    """

    label: str
    value: str
    waiting: int = 0
    running: int = 0
    admitted: int = 0
    refused: int = 0
    ended: int = 0
    aborted: int = 0
    tokens: int = 0
    recent: int = 0
    wait_sum: float = 0.0
    wait_max: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))

    def add_wait(self, seconds: float) -> None:
        """Count the first admission of a request, this long after its arrival."""
        self.admitted += 1
        self.wait_sum += seconds
        if seconds > self.wait_max:
            self.wait_max = seconds
        self.buckets[bisect_left(EDGES, seconds)] += 1

    def add(self, other: LabelStatistics) -> None:
        """Add the counts of another row."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wait_max = max(self.wait_max, other.wait_max)
        self.buckets = [one + two for one, two in zip(self.buckets, other.buckets, strict=True)]

    def percentile(self, share: float) -> float | None:
        """Return the wait that this share did not exceed: the bound of its bucket, or the longest; None without any."""
        wanted = share * self.admitted
        seen = 0
        for edge, number in zip((*EDGES, self.wait_max), self.buckets, strict=True):
            seen += number
            if number and seen >= wanted:
                return min(edge, self.wait_max)
        return None

    def pack(self) -> bytes:
        """Pack the row into bytes with a checksum, which exposes a read during a write."""
        data = _ROW.pack(self.label.encode(), self.value.encode(), *_NUMBERS(self), *self.buckets)
        return data + _CHECK.pack(zlib.crc32(data))

    @classmethod
    def unpack(cls, data: bytes) -> LabelStatistics | None:
        """Unpack what ``pack`` returned; None if it is empty or half written."""
        fields = data[: _ROW.size]
        if len(data) != _ROW_SIZE or not any(fields[:LABEL_BYTES]) or (zlib.crc32(fields),) != _CHECK.unpack(data[-8:]):
            return None
        label, value, *numbers = _ROW.unpack(fields)
        row = cls(_decode(label), _decode(value), *numbers[:10])
        row.buckets = numbers[10:]
        return row


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The statistics of one engine's queue: a row for each value of each label.

    engine: its index, as in vLLM's own metrics
    stamp:  the time of the engine's last step, in seconds since the epoch
    """

    pid: int
    engine: int
    item: str
    stamp: float
    rows: tuple[LabelStatistics, ...]

    def shares(self, now: float | None = None) -> list[float]:
        """Return each row's share of its label's tokens in the last minute; 0 in a minute without any."""
        moment = time.time() if now is None else now
        served: dict[str, int] = {}
        for row in self.rows if moment - self.stamp <= SHARE_WINDOW_S else ():
            served[row.label] = served.get(row.label, 0) + row.recent
        return [row.recent / served[row.label] if served.get(row.label) else 0.0 for row in self.rows]

    def as_dicts(self, now: float | None = None) -> list[QueueRow]:
        """Return the rows with stable lower-case keys, for ``--json`` and ``/graft/status``."""
        return [
            {
                "engine": self.engine,
                "pid": self.pid,
                "item": self.item,
                "label": row.label,
                "value": row.value,
                "waiting": row.waiting,
                "running": row.running,
                "admitted": row.admitted,
                "refused": row.refused,
                "ended": row.ended,
                "aborted": row.aborted,
                "wait_mean_s": _round(row.wait_sum / row.admitted) if row.admitted else None,
                "wait_p50_s": _round(row.percentile(0.50)),
                "wait_p99_s": _round(row.percentile(0.99)),
                "wait_max_s": _round(row.wait_max) if row.admitted else None,
                "tokens": row.tokens,
                "share": round(share, 4),
            }
            for row, share in zip(self.rows, self.shares(now), strict=True)
        ]


class StatisticsWriter:
    """Publishes the statistics of this process: in a file once ``move`` gave it one, in memory until then."""

    __slots__ = ("_engine", "_item", "_map")

    here: StatisticsWriter | None = None
    """The writer of this process, for a reader in the same process if there is no file."""

    def __init__(self, item: str = "", path: Path | None = None, engine: int = 0) -> None:
        self._item = item
        self._engine = engine
        self._map: mmap.mmap | bytearray = bytearray(_TOTAL)
        self.move(path)
        StatisticsWriter.here = self

    def move(self, path: Path | None) -> None:
        """Start over in another file, or in memory with None, as after a fork."""
        self._map = bytearray(_TOTAL) if path is None else _create(path)
        self._write_head(ended=False)

    def follow(self, path: Path) -> None:
        """Continue in another file with what was published so far; statistics in memory stay there."""
        if isinstance(self._map, mmap.mmap):
            created = _create(path)
            created[:] = self._map[:]
            self._map = created

    def publish(self, waiting: int, running: int, rate: float) -> None:
        """Publish the load after a step."""
        stamp = time.time()
        # Not a checksum of bytes: numbers hash alike in every process, and a step pays for one call only.
        _LOAD.pack_into(self._map, _LOAD_AT, waiting, running, rate, stamp, hash((waiting, running, rate, stamp)))

    def write(self, index: int, row: LabelStatistics | None) -> None:
        """Write one row, or clear it with None."""
        at = _ROWS_AT + index * _ROW_SIZE
        self._map[at : at + _ROW_SIZE] = row.pack() if row is not None else bytes(_ROW_SIZE)

    def end(self) -> None:
        """Mark the engine as ended cleanly: its load no longer counts."""
        self._write_head(ended=True)

    def load(self) -> Load:
        """Return the load that was published last."""
        return self._view().load() or Load()

    def snapshot(self) -> QueueSnapshot:
        """Return what was written."""
        return self._view().snapshot()

    def _view(self) -> _View:
        return _View(lambda at, size: bytes(self._map[at : at + size]))

    def _write_head(self, *, ended: bool) -> None:
        pid = os.getpid()
        item = truncate(self._item, 64).encode()
        data = _HEAD.pack(_MAGIC, pid, start_ticks(pid) or 0, int(ended), self._engine, item)
        self._map[: _HEAD.size + 8] = data + _CHECK.pack(zlib.crc32(data))


class StatisticsReader:
    """Reads the statistics in a run's folder repeatedly: files stay open, new engines are found within a second.

    Without a folder it reads those of this process, if it has any.
    """

    def __init__(self, home: Path | None) -> None:
        self._home = home
        self._views: dict[str, _View] = {}
        self._looked = -_LOOK_S

    def load(self, now: float | None = None) -> Load:
        """Return the combined load of the run's engines on this machine; empty if none has published any."""
        if self._home is None:
            return StatisticsWriter.here.load() if StatisticsWriter.here is not None else Load()
        self._look()
        moment = time.time() if now is None else now
        found = ((view, view.load()) for view in self._views.values())
        return Load.combine([load for view, load in found if load is not None and view.counts(moment)])

    def queues(self) -> list[QueueSnapshot]:
        """Return the statistics of every engine that has not ended cleanly, also those that a dead one wrote last."""
        if self._home is None:
            return [StatisticsWriter.here.snapshot()] if StatisticsWriter.here is not None else []
        self._look()
        found = [view.snapshot() for view in self._views.values() if not view.ended]
        return sorted(found, key=lambda each: (each.engine, each.pid))

    def _look(self) -> None:
        """Notice files that came or went, at most once a second."""
        clock = time.monotonic()
        if clock - self._looked < _LOOK_S:
            return
        self._looked = clock
        known, self._views = self._views, {}
        try:
            with os.scandir(self._home) as entries:
                # The inode tells a file from a later one of the same name.
                found = {f"{one.name} {one.inode()}": one.path for one in entries if one.name.endswith(SUFFIX)}
        except OSError:
            return
        for mark, path in found.items():
            # Something else may be in the file's place, or half of it.
            with contextlib.suppress(OSError, ValueError):
                view = known.get(mark) or _open(path)
                view.look()
                self._views[mark] = view


def read_snapshot(path: Path) -> QueueSnapshot | None:
    """Read the statistics that one process has written; None if it has none, OSError or ValueError if it is damaged."""
    try:
        view = _open(path)
    except FileNotFoundError:
        return None
    snapshot = view.snapshot()
    if view.damage:
        raise ValueError(view.damage)
    return snapshot


class _View:
    """A reader's view of one file.

    read:   returns this many bytes from a place on
    damage: what could not be read last, because it is damaged or was being written all the time; empty for nothing
    """

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self.damage = ""
        self.ended = False
        self._lives = True
        self._stamp = 0.0
        self._unpacked: dict[int, tuple[bytes, LabelStatistics]] = {}
        self._pid, self._started, self._engine, self._item = 0, 0, 0, ""
        self.look()

    def look(self) -> None:
        """Read the head, and check whether the writer lives."""
        for _ in range(_TRIES):
            data = self._read(0, _HEAD.size + 8)
            if _CHECK.unpack(data[_HEAD.size :])[0] == zlib.crc32(data[: _HEAD.size]):
                break
        else:
            self.damage = "the checksum of its head is wrong"
            return
        magic, self._pid, self._started, ended, self._engine, item = _HEAD.unpack(data[: _HEAD.size])
        self._item = _decode(item)
        if magic != _MAGIC:
            self.damage = "another version of vllm-graft wrote it"
        self.ended = bool(ended) or magic != _MAGIC
        self._lives = not self.ended and lives(self._pid, self._started)

    def counts(self, now: float) -> bool:
        """Return whether the load that was read last is that of an engine in service."""
        return not self.ended and (self._lives or now - self._stamp < RECENT_S)

    def load(self) -> Load | None:
        """Return the load that was published last; None if none was."""
        for _ in range(_TRIES):
            *numbers, check = _LOAD.unpack(self._read(_LOAD_AT, _LOAD.size))
            if not numbers[3]:
                return None
            if hash(tuple(numbers)) == check:
                self._stamp = numbers[3]
                return Load(*numbers[:3])
        self.damage = "the checksum of its load is wrong"
        return None

    def snapshot(self) -> QueueSnapshot:
        """Return every written row, by label and value; numbers by their size, ``OTHERS`` last."""
        self.load()
        rows = sorted(self._rows(), key=lambda row: (row.label, row.value == OTHERS, len(row.value), row.value))
        return QueueSnapshot(self._pid, self._engine, self._item, self._stamp, tuple(rows))

    def _rows(self) -> Iterator[LabelStatistics]:
        written = self._read(_ROWS_AT, ROWS * _ROW_SIZE)
        for at in range(_ROWS_AT, _TOTAL, _ROW_SIZE):
            data = written[at - _ROWS_AT : at - _ROWS_AT + _ROW_SIZE]
            for _ in range(_TRIES):
                if not data[0]:  # the first byte of the label: the row is free
                    break
                # The same object for an unchanged row: metrics keep its lines of text.
                known = self._unpacked.get(at)
                row = known[1] if known is not None and known[0] == data else LabelStatistics.unpack(data)
                if row is not None:
                    self._unpacked[at] = (data, row)
                    yield row
                    break
                data = self._read(at, _ROW_SIZE)
            else:
                self.damage = f"the checksum of its row {(at - _ROWS_AT) // _ROW_SIZE} is wrong"


def truncate(text: str, size: int) -> str:
    """Return as much of a text as fits into this many bytes of UTF-8."""
    if len(text) <= size and text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "replace").replace(b"\0", b" ")[:size].decode("utf-8", "ignore")


def busiest(rows: Sequence[QueueRow], number: int = 20) -> tuple[list[QueueRow], int]:
    """Return the rows with most requests and tokens of each engine and label, and how many were left out."""
    groups: dict[tuple[int, str], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault((row["pid"], row["label"]), []).append(index)
    chosen: list[int] = []
    for group in groups.values():
        group.sort(key=lambda at: (rows[at]["waiting"] + rows[at]["running"], rows[at]["tokens"]), reverse=True)
        chosen += sorted(group[:number])
    return [rows[index] for index in chosen], len(rows) - len(chosen)


def _create(path: Path) -> mmap.mmap:
    # A new file: truncating the old one would be a bus error for a reader that still has it mapped.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # A sparse file on a full disk would be a bus error at the first step, not an exception here.
        os.posix_fallocate(descriptor, 0, _TOTAL)
        return mmap.mmap(descriptor, _TOTAL)
    finally:
        os.close(descriptor)


def _open(path: Path | str) -> _View:
    """Open a file; OSError or ValueError for anything but a complete one."""
    # O_NONBLOCK because something else may be in the file's place: opening a FIFO would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is not a regular file")
        if facts.st_size != _TOTAL:
            raise ValueError(f"it has {facts.st_size} bytes instead of {_TOTAL}")
        # Read and not mapped: a file that is cut short would be a bus error. What is gone reads as zeros.
        view = _View(lambda at, size: os.pread(descriptor, size, at).ljust(size, b"\0"))
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(view, os.close, descriptor)
    return view


def _round(seconds: float | None) -> float | None:
    return round(seconds, 4) if seconds is not None else None


def _decode(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")
