"""This process's own ledger: the record it keeps, the counters it hands out, and what a fork does to both."""

from __future__ import annotations

import logging
import multiprocessing.util
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vllm_graft.ledger import folder, reading, record
from vllm_graft.ledger.board import SUFFIX, Board
from vllm_graft.ledger.cells import CLOSED, Cells, mark_ended
from vllm_graft.ledger.meters import Meter
from vllm_graft.ledger.reading import ProcessView
from vllm_graft.ledger.record import Hook, ItemState, Record, State
from vllm_graft.plan.plan import Plan
from vllm_graft.points import Role

_LOG: Final = logging.getLogger("vllm.graft")


class Ledger:
    """The record of this process. ``open`` begins it; everything before that is kept and written then."""

    def __init__(self) -> None:
        self.cells = Cells()
        self.record: Record | None = None
        self._path: Path | None = None
        self._items: dict[str, ItemState] = {}
        self._lock = threading.Lock()
        self._board: Board | None = None

    @property
    def home(self) -> Path | None:
        """The folder of this run's records; None while there is none on disk."""
        return self._path.parent if self._path is not None else None

    def begin_run(self, run: str, plan: Plan) -> None:
        """In the process that starts a server: clear away servers that are gone, and leave the plan for readers."""
        state = folder.state_folder(create=True)
        if state is None:
            return
        try:
            reading.sweep(state)
            home = folder.make_run_folder(state, run)
            record.write(plan.to_json(), home / reading.PLAN_FILE)
        except OSError as error:
            self._stay_in_memory(error)

    def open(self, opened: Record) -> None:
        """Begin the record, on disk where a folder can be written, else in memory."""
        opened.items = list(self._items.values())
        self.record = opened
        state = folder.state_folder(create=True)
        try:
            if state is None:
                raise OSError("no folder can be written")
            path = folder.make_run_folder(state, opened.run) / f"{opened.pid}.json"
            self.cells.move(path.with_suffix(".cells"))
            self._path = path
        except OSError as error:
            self._stay_in_memory(error)
        self.save()
        multiprocessing.util.Finalize(None, self._end, args=(opened.pid,), exitpriority=0)

    def _stay_in_memory(self, error: OSError) -> None:
        _LOG.warning(
            "vllm-graft: this process's record stays in memory (%s); `vllm-graft status` cannot see it, "
            "GET /graft/status can. Next: set %s to a folder with room",
            error,
            folder.VARIABLE,
        )

    def set_item(self, point: str, name: str, state: State, reason: str = "") -> None:
        """Say how one planned item stands in this process."""
        known = self._items.get(name)
        if known is None:
            self._items[name] = ItemState(point, name, state, reason)
            if self.record is not None:
                self.record.items.append(self._items[name])
        else:
            known.state, known.reason = state, reason

    def knows(self, name: str) -> bool:
        """Whether this process has said anything of an item."""
        return name in self._items

    def forget_items(self) -> None:
        """Begin anew with what is active here: a forked child has another role than its parent."""
        self._items.clear()

    def hook(self, item: str, name: str, budget_us: float | None = None) -> Meter:
        """A meter for one hook of an item; asked again, it gives the same counters."""
        meter = Meter(self.cells, f"{item}\t{name}", budget_us)
        self.note_hook(item, name, meter.at, budget_us)
        return meter

    def note_hook(self, item: str, name: str, cell: int, budget_us: float | None = None) -> None:
        """Say that an item counts in a block of cells."""
        state = self._items.get(item)
        if state is not None and all(hook.name != name for hook in state.hooks):
            state.hooks.append(Hook(name, cell, budget_us))
            self.save()

    def board(self, item: str, engine: int = 0) -> Board:
        """Where this process publishes the load and the figures of a queue; in memory where there is no folder."""
        try:
            self._board = Board(item, self._path.with_suffix(SUFFIX) if self._path is not None else None, engine)
        except OSError as error:
            _LOG.warning("vllm-graft: what waits in %s cannot be published: %s", item, error)
            self._board = Board(item, None, engine)
        return self._board

    def add_role(self, role: Role) -> None:
        """This process turns out to play another part as well."""
        if self.record is not None and role not in self.record.roles:
            self.record.roles.append(role)
            self.save()

    def put_aside(self, item: str, reason: str) -> None:
        """An item failed while serving: show it as quarantined."""
        state = self._items.get(item)
        if state is not None:
            state.state, state.reason = "quarantined", reason
        self.note_error(item, f"is put aside, the server goes on without it: {reason}")

    def note_error(self, item: str, text: str) -> None:
        """Keep and log an error that happened while serving, without touching the disk on the caller's time."""
        if self.record is not None:
            self.record.last_error = f"{item}: {text}"
        _LOG.error("vllm-graft: %s: %s", item, text)
        threading.Thread(target=self.save, name="graft-ledger", daemon=True).start()

    def view(self) -> ProcessView | None:
        """This process as a reader would see it, counters up to date; None before ``open``."""
        if self.record is None:
            return None
        figures = self._board.figures() if self._board is not None else None
        return ProcessView(self.record, "running", reading.readings(self.record.items, self.cells.cells), figures)

    def rows(self) -> list[dict[str, object]]:
        """Return every process of this run that recorded on this machine; this one from memory, never stale."""
        own, home = self.view(), self.home
        if own is None:
            return []
        run = reading.read_run(home) if home is not None else None
        others = [row for row in run.rows() if row["pid"] != own.record.pid] if run is not None else []
        return [*others, own.as_dict()]

    def save(self) -> None:
        """Write the record. Never on the step path."""
        if self.record is None or self._path is None:
            return
        with self._lock:
            try:
                record.write(self.record.to_json(), self._path)
            except OSError as error:
                _LOG.warning("vllm-graft: the record %s cannot be written: %s", self._path, error)

    def take_down(self, pids: Iterable[int]) -> None:
        """These processes and their children are being stopped: those that live now are taken down, and do not die."""
        home, stopped = self.home, set(pids)
        view = reading.read_run(home) if home is not None else None
        for process in view.processes if view is not None else ():
            record = process.record
            if process.life == "running" and home is not None and stopped.intersection((record.pid, record.parent)):
                try:
                    mark_ended(home / f"{record.pid}.cells")
                except OSError as error:
                    _LOG.warning("vllm-graft: the end of %s cannot be recorded: %s", record.name, error)

    def close(self) -> None:
        """End the record in order while the process lives on."""
        if self.record is not None:
            self.save()
            self.cells.end(CLOSED)
        if self._board is not None:
            self._board.end()
        self.forget_items()
        self.forked()

    def forked(self) -> None:
        """In a forked child: let go of the parent's file before anything is counted into it."""
        self.cells.renew(None)
        if self._board is not None:
            self._board.move(None)
        self.record = None
        self._path = None
        self._lock = threading.Lock()

    def _end(self, pid: int) -> None:
        if self.record is not None and self.record.pid == pid:
            # An error of the last moments may still be on its way to the disk, by a thread that ends with the process.
            self.save()
            self.cells.end()
            if self._board is not None:
                self._board.end()


_current = Ledger()


def current() -> Ledger:
    """The ledger of this process."""
    return _current
