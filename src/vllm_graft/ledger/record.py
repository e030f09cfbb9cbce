"""The record of one process: its identity, the state of each planned item, and what went wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

from vllm_graft.fields import parse_dataclass
from vllm_graft.ledger.counters import LAST_BLOCK
from vllm_graft.points import PatchState, Role

SCHEMA: Final = 1
"""The version of the record's format; a record of another one is not read."""

_MAX_NUMBER: Final = 2**53  # the largest number in a record: from there on a float cannot tell neighbours apart

ItemStateName = Literal[PatchState, "dead", "drifted", "overwritten", "quarantined", "skipped"]
"""The states of ``PatchState``, which items of other points have too, and: dead: applied to code that this model runner
never calls; drifted: applied over code that was never reviewed; overwritten: applied, and something else has set the
same attribute since; quarantined: put aside after a failure; skipped: this engine cannot have it."""

Headless = Literal["", "engines", "workers"]
"""The processes of a node without a front end: engine cores with their workers, or workers of one that is elsewhere."""

GOOD: Final[tuple[ItemStateName, ...]] = ("applied", "armed")


@dataclass(slots=True)
class HookRecord:
    """One counted hook of an item, a patched method or a method of its contract, and its block of counters."""

    name: str
    cell: int
    budget_us: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.cell <= LAST_BLOCK or not 0 <= (self.budget_us or 0) <= 1e12:
            raise ValueError(f"the hook {self.name!r} has a cell or a budget out of bounds")


@dataclass(slots=True)
class FigureRecord:
    """One figure that an item reports, such as blocks that it holds, and the cell of its value."""

    name: str
    cell: int

    def __post_init__(self) -> None:
        if not 0 <= self.cell <= LAST_BLOCK:
            raise ValueError(f"the figure {self.name!r} has a cell out of bounds")


@dataclass(slots=True)
class ItemState:
    """The state of one planned item in this process."""

    point: str
    name: str
    state: ItemStateName
    reason: str = ""
    hooks: list[HookRecord] = field(default_factory=list)
    figures: list[FigureRecord] = field(default_factory=list)


@dataclass(slots=True)
class Stall:
    """Something that has held a process up for a while.

    what:  what makes no progress, as a clause without a subject
    since: when it began, in seconds since the epoch
    where: the line of code that the thread is at
    item:  the plugin that is being called, if one is
    """

    what: str
    since: float
    where: str = ""
    item: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.since <= _MAX_NUMBER:
            raise ValueError("'since' of a stall is out of bounds")


@dataclass(slots=True)
class Record:
    """The facts that one process records of itself.

    ready:   in a front end: its engine has started; in an engine core or worker: its loop runs
    headless: in the process that starts a node without a front end: what runs there
    failure: the error that ended the process
    stalls:  what holds it up at the moment
    """

    run: str
    plan: str
    model: str
    pid: int
    parent: int
    started: int
    namespace: str
    host: str
    name: str
    roles: list[Role]
    start_method: str
    vllm: str
    runner: str
    since: float
    items: list[ItemState] = field(default_factory=list)
    last_error: str = ""
    ready: bool = False
    headless: Headless = ""
    failure: str = ""
    stalls: list[Stall] = field(default_factory=list)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not self.roles:
            raise ValueError("'roles' is empty")
        # A damaged file may hold any number, and one that no float can hold would fail later, in arithmetic.
        for name in ("pid", "parent", "started", "since", "schema"):
            if not int(name == "pid") <= getattr(self, name) <= _MAX_NUMBER:
                raise ValueError(f"{name!r} is out of bounds")

    @classmethod
    def of_this_process(cls, run: str, plan: str, model: str, roles: list[Role], vllm: str, runner: str) -> Record:
        """Make the record of this process."""
        pid = os.getpid()
        return cls(
            run=run,
            plan=plan,
            model=model,
            pid=pid,
            parent=os.getppid(),
            started=start_ticks(pid) or 0,
            namespace=pid_namespace(),
            host=socket.gethostname(),
            name=process_name(),
            roles=roles,
            start_method=start_method(),
            vllm=vllm,
            runner=runner,
            since=time.time(),
        )

    def item(self, name: str) -> ItemState | None:
        """Return the state of one item; None if this process has none of it."""
        return next((item for item in self.items if item.name == name), None)

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Parse what ``to_json`` wrote; raise ValueError if a value is missing or of another type."""
        try:
            return parse_dataclass(cls, json.loads(text), "the record", required=("schema",))
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def process_name() -> str:
    """Return vLLM's name for a process that it started, and the program's name for a main process."""
    name = multiprocessing.current_process().name
    if name != "MainProcess":
        return name
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"


def start_method() -> str:
    """Return how this process was started: ``main``, ``fork``, ``spawn`` or ``forkserver``."""
    if multiprocessing.parent_process() is None:
        return "main"
    method = getattr(multiprocessing.current_process(), "_start_method", None)
    if isinstance(method, str):
        return method
    # A spawned child runs multiprocessing's own main module; a forked one has the parent's.
    return "spawn" if "--multiprocessing-fork" in sys.orig_argv else "fork"


def start_ticks(pid: int) -> int | None:
    """Return when the kernel started a process, in clock ticks since boot: it tells a process from a later one."""
    fields = process_stat(pid)
    # Counted from the state, which is field 3 of proc(5): 19 is starttime, 6 the flags, 3 the session.
    return int(fields[19]) if fields else None


def lives(pid: int, started: int) -> bool:
    """Return whether a process of this machine is still the one that was started then, and is not exiting."""
    fields = process_stat(pid)
    # A process closes its files a moment before it turns a zombie.
    return bool(fields) and int(fields[19]) == started and fields[0] not in "ZX" and not int(fields[6]) & _EXITING


_EXITING: Final = 0x4  # PF_EXITING, the flag by which Linux marks a process that is being taken apart


def process_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty if there is no such process."""
    try:
        # The name, which comes before, may hold blanks and brackets.
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def pid_namespace() -> str:
    """Return the namespace in which this process's ids are valid; empty if it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
