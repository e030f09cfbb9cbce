"""What is counted of one kind of requests: how many wait and run, how long they waited, what they were given."""

from __future__ import annotations

import time
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

EDGES: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""The upper ends of the buckets of waits, in seconds; one more bucket has all that waited longer."""

WINDOW_S: Final = 60.0
"""The seconds that a share of the tokens is taken over."""

OTHERS: Final = "(others)"
"""The value that those of which there is no room to keep figures have together."""

LABEL_BYTES: Final = 32
VALUE_BYTES: Final = 128
"""As much of a name is kept, in UTF-8: values are clients' words."""

_FIELDS: Final = Struct(f"={LABEL_BYTES}s{VALUE_BYTES}s8q2d{len(EDGES) + 1}q")
_CHECK: Final = Struct("=Q")
SIZE: Final = _FIELDS.size + _CHECK.size
"""The bytes of one packed row."""

Value = str | int | float | None


@dataclass(slots=True, eq=False)
class Figures:
    """The figures of one value of one label, such as tenant "acme".

    waiting:  requests that wait now
    running:  requests that were admitted and have not ended, nor wait again
    admitted: requests that were admitted, each counted once though it was preempted
    refused:  requests that engine core turned away
    ended:    requests that have ended after they were admitted
    aborted:  requests that were gone before they were admitted
    tokens:   tokens that were scheduled for them, of prompts and answers
    recent:   those of the last ``WINDOW_S`` of the engine's work
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

    def waited(self, seconds: float) -> None:
        """A request was admitted for the first time, so long after its arrival."""
        self.admitted += 1
        self.wait_sum += seconds
        if seconds > self.wait_max:
            self.wait_max = seconds
        self.buckets[bisect_left(EDGES, seconds)] += 1

    def add(self, other: Figures) -> None:
        """Count what another has counted too."""
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wait_max = max(self.wait_max, other.wait_max)
        self.buckets = [one + two for one, two in zip(self.buckets, other.buckets, strict=True)]

    def percentile(self, share: float) -> float | None:
        """The wait that such a share did not exceed: the upper end of its bucket, or the longest; None without any."""
        wanted = share * self.admitted
        seen = 0
        for edge, number in zip((*EDGES, self.wait_max), self.buckets, strict=True):
            seen += number
            if number and seen >= wanted:
                return min(edge, self.wait_max)
        return None

    def pack(self) -> bytes:
        """The row as bytes, with a checksum: what is read while it is written shows by it."""
        data = _FIELDS.pack(
            self.label.encode(),
            self.value.encode(),
            self.waiting,
            self.running,
            self.admitted,
            self.refused,
            self.ended,
            self.aborted,
            self.tokens,
            self.recent,
            self.wait_sum,
            self.wait_max,
            *self.buckets,
        )
        return data + _CHECK.pack(zlib.crc32(data))

    @classmethod
    def unpack(cls, data: bytes) -> Figures | None:
        """The row that ``pack`` gave; None where it is half written, or nothing was."""
        fields = data[: _FIELDS.size]
        if len(data) != SIZE or not any(fields[:LABEL_BYTES]) or (zlib.crc32(fields),) != _CHECK.unpack(data[-8:]):
            return None
        numbers = _FIELDS.unpack(fields)
        found = cls(_text(numbers[0]), _text(numbers[1]), *numbers[2:12])
        found.buckets = list(numbers[12:])
        return found


_ADDED: Final = ("waiting", "running", "admitted", "refused", "ended", "aborted", "tokens", "recent", "wait_sum")


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """The figures of one engine's queue: one row for each value of each label, all of them in ``rows``."""

    pid: int
    item: str
    stamp: float
    rows: tuple[Figures, ...]

    def shares(self, now: float | None = None) -> list[float]:
        """The share that each row had of its label's tokens in the last minute; 0 in a minute without any."""
        moment = time.time() if now is None else now
        served: dict[str, int] = {}
        for row in self.rows if moment - self.stamp <= WINDOW_S else ():
            served[row.label] = served.get(row.label, 0) + row.recent
        return [row.recent / served[row.label] if served.get(row.label) else 0.0 for row in self.rows]

    def as_dicts(self, now: float | None = None) -> list[dict[str, Value]]:
        """The rows with stable lower-case keys, for ``--json`` and ``/graft/status``."""
        return [self._row(row, share) for row, share in zip(self.rows, self.shares(now), strict=True)]

    def _row(self, row: Figures, share: float) -> dict[str, Value]:
        return {
            "engine": self.pid,
            "item": self.item,
            "label": row.label,
            "value": row.value,
            "waiting": row.waiting,
            "running": row.running,
            "admitted": row.admitted,
            "refused": row.refused,
            "ended": row.ended,
            "aborted": row.aborted,
            "wait_mean_s": round(row.wait_sum / row.admitted, 4) if row.admitted else None,
            "wait_p50_s": _rounded(row.percentile(0.50)),
            "wait_p99_s": _rounded(row.percentile(0.99)),
            "wait_max_s": _rounded(row.wait_max) if row.admitted else None,
            "tokens": row.tokens,
            "share": round(share, 4),
        }


def fitting(text: str, size: int) -> str:
    """As much of a text as so many bytes of UTF-8 hold."""
    if len(text) <= size and text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "replace").replace(b"\0", b" ")[:size].decode("utf-8", "ignore")


def in_order(rows: Sequence[Figures]) -> list[Figures]:
    """By label and value; numbers by their size, and what is summed up last."""
    return sorted(rows, key=lambda row: (row.label, row.value == OTHERS, len(row.value), row.value))


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 4) if seconds is not None else None


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")
