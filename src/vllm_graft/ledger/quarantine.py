"""The items that failed in a process of a run, at its start or since: a front end must refuse requests for them.

A process replaces its record when it quarantines an item, which changes the time of the run's folder, and then counts
that in its cells. So polling costs one ``stat``, and one cell of each process, as long as nothing has happened. Records
that change all the time are read twenty times a second at most, but at once if a process has counted one more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from vllm_graft.ledger.counters import count_asides
from vllm_graft.ledger.ledger import Ledger
from vllm_graft.ledger.reading import read_run
from vllm_graft.ledger.record import ItemState
from vllm_graft.text import printable

_EVERY_NS: Final = 50_000_000
_SETTLED_NS: Final = 100_000_000
"""A folder whose time is more recent may change again without another time: file systems count in ticks."""


class QuarantineReader:
    """Reads what has failed in a run: this process from its own ledger, others from their records on this machine."""

    def __init__(self, ledger: Ledger, clock: Callable[[], int] = time.time_ns) -> None:
        self._ledger = ledger
        self._clock = clock
        self._stamp: tuple[Path | None, int] = (None, 0)
        self._looked = 0
        self._counted: dict[Path, int] = {}
        self._reasons: dict[str, str] = {}

    def reasons(self) -> Mapping[str, str]:
        """Return every item that a living process has refused or quarantined, with the reason."""
        own = self._ledger.record
        home = self._ledger.home
        found = self._read(home) if home is not None else {}
        return {**found, **_failed(own.items)} if own is not None else found

    def _read(self, home: Path) -> dict[str, str]:
        try:
            changed = os.stat(home).st_mtime_ns
        except OSError:
            # The folder is gone, and with it the records of other processes: what was read last still holds.
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
            self._reasons = {name: reason for items in living for name, reason in _failed(items).items()}
            # Only a settled time is remembered: within one tick of the file system another change has the same time.
            settled = now - changed > _SETTLED_NS
            self._stamp = (home, changed if settled else 0)
        return self._reasons


def _failed(items: Iterable[ItemState]) -> dict[str, str]:
    # A plan with on_failure = "warn" goes on without an item that was refused.
    return {item.name: printable(item.reason) for item in items if item.state in ("quarantined", "refused")}
