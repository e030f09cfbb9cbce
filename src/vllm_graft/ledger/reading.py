"""Reading what every process wrote: the runs on this machine, and which of their processes live."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TypeVar, cast

from vllm_graft.findings import Finding, Level
from vllm_graft.ledger import counters, folder
from vllm_graft.ledger.comparison import damaged_file, findings_of
from vllm_graft.ledger.counters import MeterReading, read_block
from vllm_graft.ledger.queue_statistics import SUFFIX, QueueSnapshot, read_snapshot
from vllm_graft.ledger.record import SCHEMA, ItemState, Record, lives, pid_namespace, start_ticks
from vllm_graft.ledger.status import HookRow, ItemRow, Life, ProcessRow, StatusDocument, status_document
from vllm_graft.plan.plan import Plan

_T = TypeVar("_T")

_LOG: Final = logging.getLogger("vllm.graft")

PLAN_FILE = "plan.json"
"""The file of a run's folder that holds its plan."""

_MAX_FILE_BYTES: Final = 4 * 1024 * 1024  # the bytes of a record or plan that are read at most


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process: its record, whether it lives, its counters, and the statistics of its queue if it has one.

    beat:    its last sign of life, in seconds since the epoch; 0 if it is not watched
    unsaved: why its record on disk is out of date; empty if it is not
    """

    record: Record
    life: Life
    readings: dict[str, dict[str, MeterReading]] = field(default_factory=dict)
    queue: QueueSnapshot | None = None
    beat: float = 0.0
    unsaved: str = ""
    figures: dict[str, dict[str, int]] = field(default_factory=dict)

    def calls(self, item: str) -> int:
        """Return the number of calls of all hooks of an item."""
        return sum(reading.calls for reading in self.readings.get(item, {}).values())

    def as_dict(self, *, live: bool = False) -> ProcessRow:
        """Return the process as a row; ``live`` if the process itself made it from memory."""
        record, now = self.record, time.time()
        items: list[ItemRow] = [
            {
                "point": item.point,
                "name": item.name,
                "state": item.state,
                "reason": item.reason,
                "calls": self.calls(item.name),
                "hooks": {name: cast(HookRow, asdict(each)) for name, each in self.readings.get(item.name, {}).items()},
                "figures": self.figures.get(item.name, {}),
            }
            for item in record.items
        ]
        return {
            "pid": record.pid,
            "host": record.host,
            "name": record.name,
            "roles": list(record.roles),
            "life": self.life,
            "start_method": record.start_method,
            "vllm": record.vllm,
            "runner": record.runner,
            "plan": record.plan,
            "since": record.since,
            "live": live,
            "ready": record.ready,
            "headless": record.headless,
            "last_error": record.last_error,
            "failure": record.failure,
            # In seconds, so that a reader on another machine need not have the same clock. Of either sign: after the
            # clock is set back, the last sign of life lies ahead for hours, which must not hide that none follows.
            "silent_s": round(abs(now - self.beat), 1) if self.beat else None,
            "stalls": [
                {"what": each.what, "where": each.where, "item": each.item, "seconds": round(now - each.since, 1)}
                for each in record.stalls
            ],
            "unsaved": self.unsaved,
            "items": items,
            "queue": self.queue.as_dicts() if self.queue is not None and self.life != "ended" else [],
        }


@dataclass(frozen=True, slots=True)
class RunView:
    """One server: every process of one start.

    home:    the folder that it was read from
    damaged: what could not be read in it, as findings
    """

    run: str
    plan: Plan
    processes: tuple[ProcessView, ...]
    home: Path | None = None
    damaged: tuple[Finding, ...] = ()

    @property
    def model(self) -> str:
        """The model it serves."""
        return self.processes[0].record.model if self.processes else self.plan.model

    @property
    def running(self) -> bool:
        """True if any of its processes lives."""
        return any(process.life == "running" for process in self.processes)

    def rows(self) -> list[ProcessRow]:
        """Return its processes as rows."""
        return [process.as_dict() for process in self.processes]

    def findings(self) -> list[Finding]:
        """Return all findings about its processes and its files."""
        shortage = folder.disk_full_reason(self.home) if self.home is not None else ""
        return [*findings_of(self.rows(), self.plan, shortage), *self.damaged]

    def as_dict(self) -> StatusDocument:
        """Return its status document."""
        rows, findings = self.rows(), self.findings()
        return status_document(self.run, self.plan, rows, findings, model=self.model, running=self.running)


def runs(state: Path | None = None) -> list[RunView]:
    """Return every server that runs on this machine, and those that did not end cleanly in the last 24 hours.

    A server of another container that shares the folder is shown too, as far as it can be judged from here.
    """
    state = state if state is not None else folder.state_folder()
    if state is None:
        return []
    found = []
    for home in folder.run_folders(state):
        view = read_run(home)
        if view is not None:
            unclean = bool(view.damaged) or any(process.life != "ended" for process in view.processes)
            if view.running or (unclean and not _has_expired(view, home)):
                found.append(view)
    return found


def read_run(home: Path, *, queues: bool = True) -> RunView | None:
    """Read the run in a folder; None if nothing is in it yet. A file that cannot be read becomes a finding.

    ``queues`` reads their statistics too: tens of milliseconds for each engine that has a thousand tenants.
    """
    damaged: list[Finding] = []
    try:
        names = _recorded(home)
    except FileNotFoundError:
        return None
    except OSError as error:
        return RunView(home.name, Plan(), (), home, (damaged_file(home, error, "error"),))
    found = [view for name in names if (view := _read_recorded(home / name, damaged, queues)) is not None]
    running = any(view.life == "running" for view in found)
    try:
        plan = Plan.from_json(folder.read_file(home / PLAN_FILE, _MAX_FILE_BYTES).decode())
        if not plan:
            raise ValueError("it names nothing")  # no server without a plan records itself
    except (OSError, ValueError, RecursionError) as error:
        if not names and isinstance(error, FileNotFoundError):
            return None
        plan = Plan()
        damaged.append(damaged_file(home / PLAN_FILE, error, "error" if running else "warning"))
    return RunView(home.name, plan, tuple(sorted(found, key=lambda view: view.record.since)), home, tuple(damaged))


def _read_recorded(path: Path, damaged: list[Finding], queues: bool) -> ProcessView | None:
    """Read one process's record and counters; a file that cannot be read is added to the findings."""
    level: Level = "error" if start_ticks(int(path.stem)) is not None else "warning"
    try:
        record = _parse_record(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        damaged.append(damaged_file(path, error, level))
        return None
    try:
        counted = counters.read_cells(path.with_suffix(counters.SUFFIX))
    except (OSError, ValueError) as error:
        damaged.append(damaged_file(path.with_suffix(counters.SUFFIX), error, level))
        return ProcessView(record, _life(record, 0))
    queue = None
    statistics = path.with_suffix(SUFFIX)
    try:
        queue = _retry(lambda: read_snapshot(statistics)) if queues else None
    except (OSError, ValueError) as error:
        damaged.append(damaged_file(statistics, error, level))
    return _view(record, counted, queue)


def read_processes(home: Path | None) -> tuple[list[ProcessView], int]:
    """Read every process of a run's folder, without queue statistics; return the number of damaged records too.

    For repeated reading: a record is parsed only after it has changed. A folder that cannot be listed counts as one
    damaged record.
    """
    found: list[ProcessView] = []
    damaged = 0
    try:
        paths = [home / name for name in _recorded(home)] if home is not None else []
    except OSError:
        return found, 1
    for path in paths:
        try:
            facts = path.lstat()
            record = _parse_unchanged(path, facts.st_ino, facts.st_size, facts.st_mtime_ns)
            found.append(_view(record, counters.read_cells(path.with_suffix(counters.SUFFIX))))
        except (OSError, ValueError):
            damaged += 1
    return found, damaged


def _recorded(home: Path) -> list[str]:
    """Return the names of the records in a folder."""
    return sorted(name for name in os.listdir(home) if name.endswith(".json") and name[:-5].isdecimal())


def _retry(read: Callable[[], _T]) -> _T:
    """Read a file that may be half written at this moment, as on a full disk (folder.write_file)."""
    for _ in range(2):
        try:
            return read()
        except ValueError:
            time.sleep(0.005)
    return read()


def _parse_record(path: Path) -> Record:
    record = _retry(lambda: Record.from_json(folder.read_file(path, _MAX_FILE_BYTES).decode()))
    if record.schema != SCHEMA:
        raise ValueError(f"another version of vllm-graft wrote it (schema {record.schema}, this one has {SCHEMA})")
    return record


@functools.lru_cache(maxsize=256)
def _parse_unchanged(path: Path, inode: int, size: int, changed_ns: int) -> Record:
    """Parse a record once for each state of its file. Every change is a new file, or on a full disk a new time."""
    return _parse_record(path)


def _view(record: Record, counted: Sequence[int], queue: QueueSnapshot | None = None) -> ProcessView:
    unsaved = counted[counters.UNSAVED]
    return ProcessView(
        record,
        _life(record, counted[counters.ENDED]),
        readings(record.items, counted),
        queue,
        counted[counters.BEAT] / 1000,
        os.strerror(min(unsaved, 2**15)) if unsaved else "",
        figures(record.items, counted),
    )


def readings(items: Iterable[ItemState], counted: Sequence[int]) -> dict[str, dict[str, MeterReading]]:
    """Return the counters of every hook of every item."""
    found: dict[str, dict[str, MeterReading]] = {}
    for item in items:
        found[item.name] = {hook.name: read_block(counted, hook.cell, hook.budget_us) for hook in item.hooks}
    return found


def figures(items: Iterable[ItemState], counted: Sequence[int]) -> dict[str, dict[str, int]]:
    """Return the figures that items report."""
    return {item.name: {figure.name: counted[figure.cell] for figure in item.figures} for item in items}


def sweep(state: Path) -> None:
    """Remove the records of servers that are gone; every new start does."""
    for home in folder.run_folders(state):
        try:
            view = read_run(home, queues=False)
        except Exception as error:
            # A bug of our own, triggered by the files of another run, must not keep a server from starting.
            _LOG.warning("vllm-graft: the records in %s are left alone, they cannot be judged: %r", home, error)
            continue
        if view is not None and view.running:
            continue
        # A damaged record is an error while the process with the pid in its name lives.
        gone = (
            view is not None
            and bool(view.processes)
            and all(process.life != "unknown" for process in view.processes)
            and all(finding.level != "error" for finding in view.damaged)
        )
        if gone or _has_expired(view, home):
            # Another process may be removing it too.
            shutil.rmtree(home, ignore_errors=True)


def _has_expired(view: RunView | None, home: Path) -> bool:
    """Return whether a run gave its last sign of life longer ago than records are kept.

    The files alone do not tell: counting through a memory map does not change a file's time on tmpfs, so a server of
    another container that is idle looks as old as its start.
    """
    beats = [process.beat for process in view.processes if process.life == "unknown"] if view is not None else []
    return folder.too_old(home) and not any(abs(time.time() - beat) < folder.RETENTION_S for beat in beats)


def _life(record: Record, ended: int) -> Life:
    if ended == counters.FAILED:
        return "died"
    if record.namespace != pid_namespace() or record.host != os.uname().nodename:
        return "ended" if ended else "unknown"
    if lives(record.pid, record.started) and ended != counters.CLOSED:
        return "running"
    return "ended" if ended else "died"
