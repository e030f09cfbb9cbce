"""The items that processes of a run have put aside, for a front end that must not take requests for them.

A process replaces its record when it puts an item aside, which changes the time of the run's folder, and then counts
that in its cells. So a look costs one ``stat``, and one cell of each process, as long as nothing has happened. Records
that change all the time are read twenty times a second at most, but at once where a process has counted one more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from vllm_graft.ledger.cells import count_asides
from vllm_graft.ledger.ledger import Ledger
from vllm_graft.ledger.reading import read_run
from vllm_graft.ledger.record import ItemState

_EVERY_NS: Final = 50_000_000
_SETTLED_NS: Final = 100_000_000
"""A folder whose time is more recent may change again without another time: file systems count in ticks."""


class Asides:
    """What was put aside in a run: in this process by its own ledger, in others by their records on this machine."""

    def __init__(self, book: Ledger, clock: Callable[[], int] = time.time_ns) -> None:
        self._book = book
        self._clock = clock
        self._stamp: tuple[Path | None, int] = (None, 0)
        self._looked = 0
        self._counted: dict[Path, int] = {}
        self._reasons: dict[str, str] = {}

    def reasons(self) -> Mapping[str, str]:
        """Every item that some living process has put aside, with the reason."""
        own = self._book.record
        home = self._book.home
        found = self._read(home) if home is not None else {}
        return {**found, **_quarantined(own.items)} if own is not None else found

    def _read(self, home: Path) -> dict[str, str]:
        try:
            changed = os.stat(home).st_mtime_ns
        except OSError:
            # The folder is gone, and with it what could be known of other processes: what was known still holds.
            return self._reasons
        now = self._clock()
        due = self._stamp != (home, changed) and abs(now - self._looked) >= _EVERY_NS
        if due or any(count_asides(path) != number for path, number in self._counted.items()):
            self._looked = now
            # Counted before the records are read: one that is put aside meanwhile is met at the next look.
            self._counted = {path: count_asides(path) for path in home.glob("*.cells")}
            run = read_run(home, queues=False)
            processes = run.processes if run is not None else ()
            living = [each.record.items for each in processes if each.life in ("running", "unknown")]
            self._reasons = {name: reason for items in living for name, reason in _quarantined(items).items()}
            settled = now - changed > _SETTLED_NS
            self._stamp = (home, changed if settled else 0)
        return self._reasons


def _quarantined(items: Iterable[ItemState]) -> dict[str, str]:
    return {item.name: item.reason for item in items if item.state == "quarantined"}
