"""The ledger of this process: its record, its counters, and what a fork does to both."""

from __future__ import annotations

import errno
import logging
import multiprocessing.util
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from vllm_graft.errors import LedgerError
from vllm_graft.findings import Finding
from vllm_graft.ledger import counters, folder, queue_statistics, reading
from vllm_graft.ledger.comparison import lost_folder
from vllm_graft.ledger.counters import ASIDES, BEAT, CLOSED, ENDED, FAILED, UNSAVED, Cells, Figure, Meter, mark_ended
from vllm_graft.ledger.guard import reason_of
from vllm_graft.ledger.queue_statistics import StatisticsWriter
from vllm_graft.ledger.reading import ProcessView
from vllm_graft.ledger.record import FigureRecord, HookRecord, ItemState, ItemStateName, Record, Stall
from vllm_graft.ledger.status import ProcessRow
from vllm_graft.plan.export import inherited_plan
from vllm_graft.plan.plan import Plan

_LOG: Final = logging.getLogger("vllm.graft")

_ASIDE_S: Final = 0.05  # the seconds for which putting an item aside waits for its record


class Ledger:
    """The record of this process. ``open`` begins it; what was set before is written then."""

    def __init__(self) -> None:
        self.cells = Cells()
        self.record: Record | None = None
        self._path: Path | None = None
        self._items: dict[str, ItemState] = {}
        self._lock = threading.Lock()
        self._statistics: StatisticsWriter | None = None
        self._own_run: tuple[str, Plan] | None = None
        """The run that this process began, and its plan."""
        self._begun: tuple[str, Plan] | None = None
        """The run that this process began, until its plan is written."""
        self._unsaved = ""
        self.unfinished = ""
        """The failure to record if the process exits without an error before it is ready; empty once it is."""

    @property
    def home(self) -> Path | None:
        """The folder of this run's records; None while they are in memory."""
        return self._path.parent if self._path is not None else None

    def begin_run(self, run: str, plan: Plan) -> None:
        """Remove the records of servers that are gone, and write the plan of a new one; its first process does."""
        state = folder.state_folder(create=True)
        if state is None:
            return
        self._own_run = self._begun = (run, plan)
        try:
            reading.sweep(state)
            self._write_plan(state)
        except (OSError, LedgerError) as error:
            self._stay_in_memory(error, state)

    def _write_plan(self, state: Path) -> None:
        if self._begun is not None:
            run, plan = self._begun
            folder.write_file(plan.to_json(), folder.make_run_folder(state, run) / reading.PLAN_FILE)
            self._begun = None

    def open(self, opened: Record) -> None:
        """Begin the record, on disk if a folder can be written, else in memory."""
        opened.items = list(self._items.values())
        self.record = opened
        state = folder.state_folder(create=True)
        try:
            if state is None:
                raise OSError("no folder can be written")
            self._move_to(state, opened)
        except OSError as error:
            self._stay_in_memory(error, state)
        self.save()
        # Not atexit, which multiprocessing's children skip: they end with os._exit after their finalizers.
        multiprocessing.util.Finalize(None, self._end, args=(opened.pid,), exitpriority=0)

    def _move_to(self, state: Path, opened: Record) -> None:
        path = folder.make_run_folder(state, opened.run) / f"{opened.pid}.json"
        self.cells.move(path.with_suffix(counters.SUFFIX))
        self._path = path

    def _stay_in_memory(self, error: OSError | LedgerError, state: Path | None) -> None:
        reason = folder.disk_full_reason(state) if state is not None else ""
        self._unsaved = reason or str(error)
        what = f"this process's record stays in memory ({self._unsaved}); `vllm-graft status` cannot see it"
        _LOG.warning("vllm-graft: %s, GET /graft/status can. Next: set %s to a folder with room", what, folder.VARIABLE)

    def retry(self) -> None:
        """Write what could not be written before, or was removed since, if that is possible now."""
        path = self._path
        # Never made again while it is there: cutting a file that is mapped ends the process.
        lost = path is not None and not path.with_suffix(counters.SUFFIX).exists()
        # The first process to notice writes the plan: the one that began the run may be held up.
        planless = path is not None and not (path.parent / reading.PLAN_FILE).exists()
        run = self._own_run if planless else None
        if planless and run is None and self.record is not None and (plan := inherited_plan()) is not None:
            run = (self.record.run, plan)
        removed = lost or run is not None or (path is not None and not path.exists())
        if self.record is None or not (self._unsaved or self._begun or removed):
            return
        try:
            state = folder.state_folder(create=removed)
            if state is None or folder.disk_full_reason(state):
                return
            self._begun = run or self._begun
            self._write_plan(state)
            if path is None or lost:
                self._move_to(state, self.record)
            if lost and self._statistics is not None and self._path is not None:
                self._statistics.follow(self._path.with_suffix(queue_statistics.SUFFIX))
        except (OSError, LedgerError) as error:
            if removed and not self._unsaved:
                _LOG.warning("vllm-graft: the record %s is gone and cannot be written again: %s", path, error)
                self._unsaved = str(error)
            return
        self.save()
        if not self._unsaved:
            _LOG.info("vllm-graft: the record %s is written again", self._path)

    def set_item(self, point: str, name: str, state: ItemStateName, reason: str = "") -> None:
        """Set the state of one planned item in this process."""
        known = self._items.get(name)
        if known is None:
            self._items[name] = ItemState(point, name, state, reason)
            if self.record is not None:
                self.record.items.append(self._items[name])
        else:
            known.state, known.reason = state, reason

    def knows(self, name: str) -> bool:
        """Return whether an item has a state in this process."""
        return name in self._items

    def forget_items(self) -> None:
        """Drop the states of all items: a forked child has another role than its parent."""
        self._items.clear()

    def hook(self, item: str, name: str, budget_us: float | None = None) -> Meter:
        """Return a meter for one hook of an item; a second one has the same counters."""
        meter = Meter(self.cells, f"{item}\t{name}", budget_us)
        self.note_hook(item, name, meter.cell, budget_us)
        return meter

    def note_hook(self, item: str, name: str, cell: int, budget_us: float | None = None) -> None:
        """Record that a hook of an item counts in the block that begins at ``cell``."""
        state = self._items.get(item)
        if state is not None and all(hook.name != name for hook in state.hooks):
            state.hooks.append(HookRecord(name, cell, budget_us))
            self.save()

    def figure(self, item: str, name: str) -> Figure:
        """Return a figure that an item reports; a second one of the same name is the same."""
        figure = Figure(self.cells, f"{item}\t{name}\tfigure")
        state = self._items.get(item)
        if state is not None and all(known.name != name for known in state.figures):
            state.figures.append(FigureRecord(name, figure.cell))
            self.save()
        return figure

    def queue_statistics(self, item: str, engine: int = 0) -> StatisticsWriter:
        """Return the writer of a queue's load and statistics; in memory if there is no folder."""
        path = self._path.with_suffix(queue_statistics.SUFFIX) if self._path is not None else None
        try:
            self._statistics = StatisticsWriter(item, path, engine)
        except OSError as error:
            _LOG.warning("vllm-graft: what waits in %s cannot be published: %s", item, error)
            self._statistics = StatisticsWriter(item, None, engine)
        return self._statistics

    def set_ready(self) -> None:
        """Record that the engine of this front end has started, or that the loop of this engine or worker runs.

        An item that is missing from now on counts as missing, not as late.
        """
        if self.record is not None and not self.record.ready:
            self.record.ready = True
            self.save()

    def set_stalls(self, stalls: list[Stall]) -> None:
        """Record what holds this process up; written only if that has changed."""
        if self.record is not None and stalls != self.record.stalls:
            self.record.stalls = stalls
            self.save()

    def beat(self) -> None:
        """Give a sign of life."""
        self.cells.cells[BEAT] = int(time.time() * 1000)

    def fail(self, reason: str) -> None:
        """Record that an error ends this process; being stopped afterwards does not make that a clean end."""
        if self.record is None or self.cells.cells[ENDED]:
            return
        self.record.failure = reason
        self.cells.end(FAILED)
        self.save()

    def mark_asked_to_stop(self) -> None:
        """Mark that this process was asked to end, whatever ends it."""
        if not self.cells.cells[ENDED]:
            self.cells.end()

    def put_aside(self, item: str, reason: str) -> None:
        """Quarantine an item that failed while serving.

        Waits a moment for the record, once for each item: a client that gets the answer to the request that was being
        served and then sends another must meet a front end that knows. A slower disk does not hold the engine up.
        """
        state = self._items.get(item)
        if state is not None:
            state.state, state.reason = "quarantined", reason

        def save() -> None:
            self.save()
            # Readers of the record look at this cell first, so it must not be ahead of the record.
            self.cells.cells[ASIDES] += 1

        self.note_error(item, f"is put aside; the server continues without it: {reason}", save, _ASIDE_S)

    def note_error(self, item: str, text: str, save: Callable[[], None] | None = None, wait_s: float = 0.0) -> None:
        """Record and log an error that happened while serving; a thread writes the disk, by ``save`` if it is given."""
        save = save or self.save
        if self.record is not None:
            self.record.last_error = f"{item}: {text}"
        _LOG.error("vllm-graft: %s: %s", item, text)
        thread = threading.Thread(target=save, name="graft-ledger", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread can be started: too many run, or the interpreter is ending. Late is better than never.
            save()
        else:
            thread.join(wait_s)

    def view(self) -> ProcessView | None:
        """Return this process with up-to-date counters; None before ``open``."""
        if self.record is None:
            return None
        counted, statistics = self.cells.cells, self._statistics
        return ProcessView(
            self.record,
            "running",
            reading.readings(self.record.items, counted),
            statistics.snapshot() if statistics is not None else None,
            counted[BEAT] / 1000,
            self._unsaved,
            reading.figures(self.record.items, counted),
        )

    def rows(self) -> list[ProcessRow]:
        """Return every process of this run that recorded on this machine; this one from memory, never stale.

        Without the statistics of the other processes' queues: an engine or worker does no step while it answers, and
        each process reports its own.
        """
        return self.read_all_processes(queues=False)[0]

    def read_all_processes(self, *, queues: bool = True) -> tuple[list[ProcessRow], list[Finding]]:
        """Return every process of this run on this machine, and findings about files that could not be read."""
        own, home = self.view(), self.home
        if own is None:
            return [], []
        mine = own.as_dict(live=True)
        run = reading.read_run(home, queues=queues) if home is not None else None
        if run is None:
            return [mine], [lost_folder(home)] if home is not None else []
        others = [row for row in run.rows() if row["pid"] != own.record.pid]
        damaged = [each for each in run.damaged if not Path(each.where).name.startswith(f"{own.record.pid}.")]
        return [*others, mine], damaged

    def save(self) -> None:
        """Write the record. Never on the step path."""
        if self.record is None or self._path is None:
            return
        with self._lock:
            try:
                folder.write_file(self.record.to_json(), self._path)
            except OSError as error:
                if not self._unsaved:
                    _LOG.warning("vllm-graft: the record %s cannot be written: %s", self._path, error)
                self._unsaved = folder.disk_full_reason(self._path.parent) or str(error)
                self.cells.cells[UNSAVED] = error.errno or errno.EIO
            else:
                self._unsaved = ""
                self.cells.cells[UNSAVED] = 0

    def mark_stopped(self, pids: Iterable[int]) -> None:
        """Mark these processes and their children as stopped deliberately, not crashed."""
        home, stopped = self.home, set(pids)
        view = reading.read_run(home, queues=False) if home is not None else None
        for process in view.processes if view is not None else ():
            record = process.record
            if process.life == "running" and home is not None and stopped.intersection((record.pid, record.parent)):
                try:
                    mark_ended(home / f"{record.pid}{counters.SUFFIX}")
                except OSError as error:
                    _LOG.warning("vllm-graft: the end of %s cannot be recorded: %s", record.name, error)

    def close(self) -> None:
        """Close the record cleanly while the process lives on."""
        if self.record is not None:
            self.save()
            self.cells.end(CLOSED)
        if self._statistics is not None:
            self._statistics.end()
        self.forget_items()
        self.forked()

    def forked(self) -> None:
        """Drop the parent's record and files in a forked child, before anything is counted into them."""
        self.cells.renew(None)
        if self._statistics is not None:
            self._statistics.move(None)
        self.record = None
        self._path = None
        self._own_run = self._begun = None
        self._unsaved = ""
        self.unfinished = ""
        self._lock = threading.Lock()

    def _end(self, pid: int) -> None:
        if self.record is not None and self.record.pid == pid:
            # multiprocessing runs finalizers while the error that ends a child is still on its way out.
            error = sys.exc_info()[1]
            if error is not None and not is_orderly(error):
                self.fail(reason_of(error))
            elif error is None and self.unfinished:
                self.fail(self.unfinished)
            # An error of the last moments may still be on its way to the disk, by a thread that ends with the process.
            self.save()
            self.mark_asked_to_stop()
            if self._statistics is not None:
                self._statistics.end()


def is_orderly(error: BaseException) -> bool:
    """Return whether a process that ends by this exception was asked to end."""
    return error.code in (None, 0) if isinstance(error, SystemExit) else isinstance(error, KeyboardInterrupt)


_current = Ledger()


def current() -> Ledger:
    """Return the ledger of this process."""
    return _current
