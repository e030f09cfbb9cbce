"""Count what waits, runs and was served, by the labels that an author's queue gives its requests.

Each label counts for itself: a request of class 1 and tenant "acme" counts in the row of that class and in the row of
that tenant. Rows are objects of this process. Each step writes some of the changed ones to the shared table, and all of
them once no request is left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

from vllm_graft.contracts import Load, WaitingRequest
from vllm_graft.ledger.queue_statistics import (
    LABEL_BYTES,
    OTHERS,
    ROWS,
    SHARE_WINDOW_S,
    VALUE_BYTES,
    LabelStatistics,
    StatisticsWriter,
    truncate,
)

Labels = tuple[tuple[str, str], ...]
"""The labels of one request with their values, truncated to the shared table's columns."""

UNLABELLED: Final = (("all", ""),)
"""The labels of a request that has none."""

MAX_LABELS: Final = 8
"""The number of labels that are counted, the first ones seen."""

REPORT_STEPS: Final = 16
"""Every running request is reported once per this many steps."""

# Readers of the shared table are /metrics and `status`: seconds apart, while steps are milliseconds apart.
_WRITE_EVERY_S: Final = 0.5
_WRITES_PER_STEP: Final = 16
_EVICTION_TRIES: Final = 8
_WINDOW_PARTS: Final = 12


class TokenCounts:
    """The tokens of each running request since it was started.

    Most requests of a step get the same number, one token as a rule. So the first request's number is added once for
    all, and each request keeps its offset from the sum: a step costs the requests that differ, not all of them.
    """

    def __init__(self) -> None:
        self._common = 0
        self._offsets: dict[str, int] = {}
        self._turns: Iterator[str] = iter(())

    def start(self, name: str) -> None:
        """Begin to count a request."""
        self._offsets[name] = -self._common

    def add_step(self, tokens: Mapping[str, int]) -> None:
        """Add the tokens of each request of a step."""
        if not tokens:
            return
        offsets = self._offsets
        common = next(iter(tokens.values()))
        self._common += common
        for name, number in tokens.items():
            if number != common and name in offsets:
                offsets[name] += number - common
        # Requests that were not in the step got nothing, so what was added for all is taken off again.
        if tokens.keys() != offsets.keys():
            for name in offsets.keys() - tokens.keys():
                offsets[name] -= common

    def total(self, name: str) -> int:
        """Return the tokens of a request; 0 if it does not run."""
        offset = self._offsets.get(name)
        return 0 if offset is None else self._common + offset

    def stop(self, name: str) -> None:
        """Stop counting a request, if it is counted."""
        self._offsets.pop(name, None)

    def next_batch(self) -> list[str]:
        """Return the next running requests to report; ``REPORT_STEPS`` calls cover all of them."""
        number = len(self._offsets) // REPORT_STEPS + 1
        found = list(islice((name for name in self._turns if name in self._offsets), number))
        if len(found) < number:
            self._turns = iter(list(self._offsets))
        return found


class StatisticsRow(LabelStatistics):
    """The statistics of one label value, its row in the shared table, and the number of its unfinished requests."""

    __slots__ = ("index", "unfinished")

    def __init__(self, label: str, value: str, index: int) -> None:
        super().__init__(label, value)
        self.index = index
        self.unfinished = 0


class TokenWindow:
    """The tokens of the last ``SHARE_WINDOW_S`` seconds, in parts; ``recent`` of a row is the sum of its parts."""

    def __init__(self) -> None:
        self._parts: deque[dict[StatisticsRow, int]] = deque([{}])
        self._until = 0.0

    def add(self, rows: Iterable[StatisticsRow], tokens: int) -> None:
        """Count tokens that were served now in each of the rows."""
        part = self._parts[-1]
        for row in rows:
            row.tokens += tokens
            row.recent += tokens
            part[row] = part.get(row, 0) + tokens

    def move(self, now: float) -> Iterable[StatisticsRow]:
        """Drop the parts that are too old, and return the rows that changed by that."""
        if now < self._until:
            return ()
        length = SHARE_WINDOW_S / _WINDOW_PARTS
        changed: dict[StatisticsRow, None] = {}
        for _ in range(min(_WINDOW_PARTS, 1 + int((now - self._until) // length))):
            self._parts.append({})
            dropped = self._parts.popleft() if len(self._parts) > _WINDOW_PARTS else {}
            for row, tokens in dropped.items():
                row.recent -= tokens
                changed[row] = None
        self._until = now + length
        return changed

    def merge(self, row: StatisticsRow, other: StatisticsRow) -> None:
        """Count the tokens of one row for another."""
        for part in self._parts:
            if row in part:
                part[other] = part.get(other, 0) + part.pop(row)


@dataclass(slots=True, eq=False)
class _RequestState:
    """One request: the rows it counts in, its state, and the tokens that are counted there so far."""

    arrival: float
    rows: tuple[StatisticsRow, ...]
    state: Literal["waiting", "running", ""] = ""
    admitted: bool = False
    counted: int = 0


class StatisticsCollector:
    """Collects the statistics of one queue and publishes them.

    Times are those of the queue's clock. ``tokens`` counts the requests that run.
    """

    def __init__(self, writer: StatisticsWriter, rows: int = ROWS) -> None:
        self.tokens = TokenCounts()
        self._writer = writer
        self._rows = _RowTable(writer, rows)
        self._requests: dict[str, _RequestState] = {}
        self._running: dict[str, _RequestState] = {}  # separate, because every step reads it
        self._popped: dict[str, _RequestState] = {}
        self._to_write: list[StatisticsRow] = []
        self._due = 0.0

    def add(self, request: WaitingRequest, labels: Labels) -> None:
        """Count a new request as waiting."""
        state = self._requests[request.request_id] = _RequestState(request.arrival, self._rows.find(labels))
        for row in state.rows:
            row.unfinished += 1
        self._set_state(state, "waiting")

    def resume(self, name: str) -> bool:
        """Count a known request as waiting again; return False if it is not known."""
        state = self._requests.get(name)
        if state is None:
            return False
        self._stop(name)
        self._set_state(state, "waiting")
        return True

    def count_refusal(self, labels: Labels) -> None:
        """Count a request that was refused."""
        for row in self._rows.find(labels):
            row.refused += 1
            self._rows.changed[row] = None

    def start(self, name: str) -> None:
        """Count a request as running; it counts as admitted at the end of the step, unless it is put back by then."""
        state = self._requests.get(name)
        if state is not None:
            self._set_state(state, "running")
            self._running[name] = state
            self.tokens.start(name)
            state.counted = 0
            if not state.admitted:
                self._popped[name] = state

    def remove(self, name: str) -> None:
        """Take a request out of the queue; it counts as aborted or ended once vLLM reports its end."""
        state = self._requests.get(name)
        if state is not None:
            self._stop(name)
            self._set_state(state, "")

    def end(self, name: str) -> None:
        """Count a request as ended, or as aborted if it was never admitted."""
        state = self._requests.pop(name, None)
        if state is None:
            return
        self._stop(name)
        self._set_state(state, "")
        for row in state.rows:
            row.unfinished -= 1
            self._rows.changed[row] = None
            if state.admitted:
                row.ended += 1
            else:
                row.aborted += 1

    def end_step(self, now: float, tokens: Mapping[str, int], load: Load) -> None:
        """Count the tokens of a step, publish the load, and write changed rows."""
        self.tokens.add_step(tokens)
        for state in self._popped.values():
            state.admitted = True
            for row in state.rows:
                row.add_wait(max(0.0, now - state.arrival))
        self._popped.clear()
        self._writer.publish(load.waiting, load.running, load.rate)
        if now >= self._due or not self._requests:
            self._due = now + _WRITE_EVERY_S
            changed = self._rows.changed
            changed.update(dict.fromkeys(self._rows.window.move(now)))
            for name, state in self._running.items():
                self._count_tokens(name, state)
                changed.update(dict.fromkeys(state.rows))
            # The next batch is begun once the last one is written.
            if not self._to_write or not self._requests:
                self._to_write = list({**dict.fromkeys(self._to_write), **changed})
                changed.clear()
        if self._to_write:
            # A thousand rows at once would cost a step several milliseconds.
            number = _WRITES_PER_STEP if self._requests else len(self._to_write)
            for row in self._to_write[-number:]:
                if row.index >= 0:  # negative: evicted since
                    self._writer.write(row.index, row)
            del self._to_write[-number:]

    def _count_tokens(self, name: str, state: _RequestState) -> None:
        total = self.tokens.total(name)
        if total != state.counted:
            self._rows.window.add(state.rows, total - state.counted)
            state.counted = total

    def _stop(self, name: str) -> None:
        self._popped.pop(name, None)
        state = self._running.pop(name, None)
        if state is not None:
            self._count_tokens(name, state)
            self.tokens.stop(name)

    def _set_state(self, request: _RequestState, state: Literal["waiting", "running", ""]) -> None:
        before, request.state = request.state, state
        if before == state:
            return
        for row in request.rows:
            row.waiting += (state == "waiting") - (before == "waiting")
            row.running += (state == "running") - (before == "running")
            self._rows.changed[row] = None


class _RowTable:
    """The rows by label and value, in the fixed number of rows that the shared table has.

    Values are clients' words and may be endless. So when the table is full, the row whose last request arrived longest
    ago is evicted, and merged into the row ``OTHERS`` of its label.
    """

    def __init__(self, writer: StatisticsWriter, size: int) -> None:
        self.changed: dict[StatisticsRow, None] = {}
        self.window = TokenWindow()
        self._writer = writer
        self._rows: OrderedDict[tuple[str, str], StatisticsRow] = OrderedDict()  # by last use
        self._free = list(range(size - 1, -1, -1))
        self._values: dict[str, int] = {}
        self._few = size // (2 * MAX_LABELS)

    def find(self, labels: Labels) -> tuple[StatisticsRow, ...]:
        """Return the rows of a request's labels; none for a label beyond ``MAX_LABELS``."""
        return tuple(row for key in labels if (row := self._row(key)) is not None)

    def _row(self, key: tuple[str, str]) -> StatisticsRow | None:
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
            return row
        if key[0] not in self._values:
            if len(self._values) == MAX_LABELS:
                return None
            self._values[key[0]] = 0
        # One row per label stays free, for its OTHERS.
        if len(self._free) <= MAX_LABELS and not self._evict():
            return self._others(key[0])
        return self._new(key)

    def _new(self, key: tuple[str, str]) -> StatisticsRow:
        row = self._rows[key] = StatisticsRow(*key, self._free.pop())
        self._values[row.label] += 1
        return row

    def _others(self, label: str) -> StatisticsRow:
        key = (label, OTHERS)
        return self._rows.get(key) or self._new(key)

    def _evict(self) -> bool:
        """Free a row without unfinished requests, among the least recently used; return False if there is none.

        A label with few values keeps them: a flood of tenants does not push out the classes.
        """
        for key, row in list(islice(self._rows.items(), _EVICTION_TRIES)):
            if row.unfinished or row.value == OTHERS or self._values[row.label] <= self._few:
                self._rows.move_to_end(key)
                continue
            del self._rows[key]
            self._values[row.label] -= 1
            others = self._others(row.label)
            others.add(row)
            self.window.merge(row, others)
            self.changed.pop(row, None)
            self.changed[others] = None
            self._writer.write(row.index, None)
            self._free.append(row.index)
            row.index = -1
            return True
        return False


def normalize_labels(labels: object) -> Labels:
    """Return an author's labels as they are counted; TypeError if they are not a mapping."""
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels() must return a mapping of names to values, but returned {type(labels).__name__}")
    found = ((truncate(str(label), LABEL_BYTES), truncate(str(value), VALUE_BYTES)) for label, value in labels.items())
    return tuple(label for label in found if label[0]) or UNLABELLED
