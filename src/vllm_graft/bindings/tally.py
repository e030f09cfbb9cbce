"""Counting what waits, runs and was served, by the labels that the author's queue gives its requests.

Each label is counted for itself: a request of class 1 and tenant "acme" counts in the row of that class and in the row
of that tenant. Rows are objects of this process; some of those that have changed are written to the board in each step,
all of them once nothing is left to do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from vllm_graft.bindings.given import Given
from vllm_graft.bindings.rows import Row, Window
from vllm_graft.contracts import Load, WaitingRequest
from vllm_graft.ledger import Board
from vllm_graft.ledger.board import ROWS
from vllm_graft.ledger.figures import LABEL_BYTES, OTHERS, VALUE_BYTES, fitting

ALL: Final = (("all", ""),)
"""What requests count as that have no labels."""

LABELS: Final = 8
"""So many labels are counted, the first ones that are seen."""

_EVERY_S: Final = 0.5
_AT_ONCE: Final = 16
_TRIED: Final = 8

_WAITS: Final = "waiting"
_RUNS: Final = "running"
_GONE: Final = ""

Kinds = tuple[tuple[str, str], ...]
"""The labels of one request with their values, cut to what is kept of them."""


class Entry:
    """One request: the rows it counts in, where it stands, and how many of its tokens are counted there."""

    __slots__ = ("admitted", "arrival", "counted", "rows", "state")

    def __init__(self, arrival: float, rows: tuple[Row, ...]) -> None:
        self.arrival = arrival
        self.rows = rows
        self.state = _GONE
        self.admitted = False
        self.counted = 0


class Tally:
    """The figures of one queue. The times it is given are those of the queue's clock.

    ``given`` has the tokens of the requests that run: they begin and end here, and in each step.
    """

    def __init__(self, board: Board, rows: int = ROWS) -> None:
        self.given = Given()
        self._board = board
        self._rows: OrderedDict[tuple[str, str], Row] = OrderedDict()  # those whose requests came last are last
        self._free = list(range(rows - 1, -1, -1))
        self._values: dict[str, int] = {}
        self._few = rows // (2 * LABELS)
        self._entries: dict[str, Entry] = {}
        self._fresh: dict[str, Entry] = {}
        self._running: dict[str, Entry] = {}  # apart, for there are few and each step asks
        self._window = Window()
        self._changed: dict[Row, None] = {}
        self._to_write: list[Row] = []
        self._due = 0.0

    def again(self, name: str) -> bool:
        """A request that is known waits again; False where it is not known."""
        entry = self._entries.get(name)
        if entry is None:
            return False
        self._stop(name)
        self._move(entry, _WAITS)
        return True

    def arrived(self, request: WaitingRequest, kinds: Kinds) -> None:
        """A request waits that was not known."""
        rows = self._rows_of(kinds)
        entry = self._entries[request.request_id] = Entry(request.arrival, rows)
        for row in rows:
            row.live += 1
        self._move(entry, _WAITS)

    def refused(self, kinds: Kinds) -> None:
        """A request was turned away."""
        for row in self._rows_of(kinds):
            row.refused += 1
            self._changed[row] = None

    def taken(self, name: str) -> None:
        """A request was taken out to run; whether it does shows when the step is made."""
        entry = self._entries.get(name)
        if entry is not None:
            self._move(entry, _RUNS)
            self._running[name] = entry
            self.given.begin(name)
            entry.counted = 0
            if not entry.admitted:
                self._fresh[name] = entry

    def removed(self, name: str) -> None:
        """A request that waited is gone from the queue; what it was counts when it has ended."""
        entry = self._entries.get(name)
        if entry is not None:
            self._stop(name)
            self._move(entry, _GONE)

    def ended(self, name: str) -> None:
        """Nothing more happens to a request."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self._stop(name)
        self._move(entry, _GONE)
        for row in entry.rows:
            row.live -= 1
            self._changed[row] = None
            if entry.admitted:
                row.ended += 1
            else:
                row.aborted += 1

    def stepped(self, now: float, tokens: Mapping[str, int], load: Load) -> None:
        """A step was made, in which so many tokens were scheduled for each request: publish what has changed."""
        self.given.step(tokens)
        if self._fresh:
            self._settle(now)
        self._board.publish(load.waiting, load.running, load.rate)
        if now >= self._due or not self._entries:
            self._due = now + _EVERY_S
            self._collect(now)
        if self._to_write:
            self._write(_AT_ONCE if self._entries else len(self._to_write))

    def _count(self, name: str, entry: Entry) -> None:
        """Add what a running request was given to its rows."""
        total = self.given.total(name)
        if total != entry.counted:
            self._window.count(entry.rows, total - entry.counted)
            entry.counted = total

    def _stop(self, name: str) -> None:
        """A request does not run any more, if it did."""
        self._fresh.pop(name, None)
        entry = self._running.pop(name, None)
        if entry is not None:
            self._count(name, entry)
            self.given.end(name)

    def _settle(self, now: float) -> None:
        """Those that were taken out and not handed back are admitted."""
        for entry in self._fresh.values():
            entry.admitted = True
            for row in entry.rows:
                row.waited(max(0.0, now - entry.arrival))
        self._fresh.clear()

    def _collect(self, now: float) -> None:
        """Add up what was served; what has changed since the last time is to be written."""
        for row in self._window.move(now):
            self._changed[row] = None
        changed = self._changed
        for name, entry in self._running.items():
            self._count(name, entry)
            for row in entry.rows:
                changed[row] = None
        if not self._to_write or not self._entries:
            self._to_write = list({**dict.fromkeys(self._to_write), **changed})
            changed.clear()

    def _write(self, number: int) -> None:
        for row in self._to_write[-number:]:
            if row.index >= 0:  # else it was summed up since
                self._board.write(row.index, row)
        del self._to_write[-number:]

    def _move(self, entry: Entry, state: str) -> None:
        before, entry.state = entry.state, state
        if before == state:
            return
        for row in entry.rows:
            if before is _WAITS:
                row.waiting -= 1
            elif before is _RUNS:
                row.running -= 1
            if state is _WAITS:
                row.waiting += 1
            elif state is _RUNS:
                row.running += 1
            self._changed[row] = None

    def _rows_of(self, kinds: Kinds) -> tuple[Row, ...]:
        return tuple(row for kind in kinds if (row := self._row(kind)) is not None)

    def _row(self, kind: tuple[str, str]) -> Row | None:
        row = self._rows.get(kind)
        if row is not None:
            self._rows.move_to_end(kind)
            return row
        if kind[0] not in self._values:
            if len(self._values) == LABELS:
                return None
            self._values[kind[0]] = 0
        if len(self._free) <= LABELS and not self._make_room():
            return self._others(kind[0])
        return self._new(kind)

    def _new(self, kind: tuple[str, str]) -> Row:
        row = self._rows[kind] = Row(*kind, self._free.pop())
        self._values[row.label] += 1
        return row

    def _others(self, label: str) -> Row:
        kind = (label, OTHERS)
        return self._rows.get(kind) or self._new(kind)

    def _make_room(self) -> bool:
        """Sum up a row of those whose last request came longest ago, and has ended; False where none was found.

        A label of few values keeps them: a flood of tenants does not push out the classes.
        """
        for kind, row in [(kind, self._rows[kind]) for kind, _ in zip(self._rows, range(_TRIED), strict=False)]:
            if row.live or row.value == OTHERS or self._values[row.label] <= self._few:
                self._rows.move_to_end(kind)
                continue
            del self._rows[kind]
            self._values[row.label] -= 1
            others = self._others(row.label)
            others.add(row)
            self._window.hand_over(row, others)
            self._changed.pop(row, None)
            self._changed[others] = None
            self._board.write(row.index, None)
            self._free.append(row.index)
            row.index = -1
            return True
        return False


def kinds_of(labels: object) -> Kinds:
    """The labels that an author's queue has given, as they are counted; TypeError where they are none."""
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels() must give a mapping of names to values, and gave {type(labels).__name__}")
    found = ((fitting(str(label), LABEL_BYTES), fitting(str(value), VALUE_BYTES)) for label, value in labels.items())
    return tuple(kind for kind in found if kind[0]) or ALL
