"""One process's record: who it is, what it was to have, what it has."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar, get_args

from vllm_graft.ledger import cells
from vllm_graft.points import ROLES, PatchState, Role

T = TypeVar("T")

SCHEMA: Final = 1

_MISSING: Final = object()

State = Literal[PatchState, "dead", "drifted", "overwritten", "quarantined", "skipped"]
"""The states of ``PatchState``, which items of other points have too, and: dead: applied to code that this model runner
never calls; drifted: applied over code that was never reviewed; overwritten: applied, and something else has set the
same attribute since; quarantined: put aside after a failure; skipped: this engine cannot have it."""

Headless = Literal["", "engines", "workers"]
"""What a node without a front end runs: engine cores with their workers, or workers of an engine core elsewhere."""

GOOD: Final[tuple[State, ...]] = ("applied", "armed")


@dataclass(slots=True)
class Hook:
    """One counted place of an item: the patched method, or the contract's method."""

    name: str
    cell: int
    budget_us: float | None = None


@dataclass(slots=True)
class ItemState:
    """One planned item as this process has it."""

    point: str
    name: str
    state: State
    reason: str = ""
    hooks: list[Hook] = field(default_factory=list)


@dataclass(slots=True)
class Stall:
    """Something that a process has been held up by for a while.

    what:  what does not go on, as a clause without a subject
    since: when it began, in seconds since the epoch
    where: the line of code that the thread is at
    item:  the plugin that is being called, where one is
    """

    what: str
    since: float
    where: str = ""
    item: str = ""


@dataclass(slots=True)
class Record:
    """What one process says of itself.

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

    @classmethod
    def of_this_process(cls, run: str, plan: str, model: str, roles: list[Role], vllm: str, runner: str) -> Record:
        """A record with everything the process can say of itself."""
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
        """The state of one item, or None where this process says nothing of it."""
        return next((item for item in self.items if item.name == name), None)

    def to_json(self) -> str:
        """The record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Parse what ``to_json`` wrote; ValueError where a value is missing or of the wrong kind.

        Keys that this version does not know are left out: the writer may be newer.
        """
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        row = Row(data, "the record")
        return cls(
            run=row.text("run"),
            plan=row.text("plan"),
            model=row.text("model"),
            pid=row.integer("pid", 1, _LARGEST),
            parent=row.integer("parent", 0, _LARGEST),
            started=row.integer("started", 0, _LARGEST),
            namespace=row.text("namespace"),
            host=row.text("host"),
            name=row.text("name"),
            start_method=row.text("start_method"),
            vllm=row.text("vllm"),
            runner=row.text("runner"),
            schema=row.integer("schema", 0, _LARGEST),
            roles=[row.choice("roles", role, ROLES) for role in row.list("roles")],
            since=row.number("since", 0, _LARGEST),
            items=[_item(Row(each, "an item")) for each in row.list("items")],
            last_error=row.text("last_error", ""),
            ready=row.get("ready", False) is True,
            headless=row.choice("headless", row.get("headless", ""), get_args(Headless)),
            failure=row.text("failure", ""),
            stalls=[_stall(Row(each, "a stall")) for each in row.list("stalls", [])],
        )


_LARGEST: Final = 2**53


class Row:
    """A JSON object whose values are checked as they are read; ValueError names the one that is wrong."""

    def __init__(self, data: object, what: str) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{what} is {_kind(data)} instead of an object")
        self._data = data

    def get(self, name: str, default: object = _MISSING) -> object:
        """A value of any kind."""
        found = self._data.get(name, default)
        if found is _MISSING:
            raise ValueError(f"{name!r} is missing")
        return found

    def text(self, name: str, default: object = _MISSING) -> str:
        """A string."""
        found = self.get(name, default)
        if not isinstance(found, str):
            raise ValueError(f"{name!r} is {_kind(found)} instead of a string")
        return found

    def list(self, name: str, default: object = _MISSING) -> Sequence[object]:
        """A list."""
        found = self.get(name, default)
        if not isinstance(found, list):
            raise ValueError(f"{name!r} is {_kind(found)} instead of a list")
        return found

    def number(self, name: str, least: float, most: float) -> float:
        """A number within bounds."""
        found = self.get(name)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ValueError(f"{name!r} is {_kind(found)} instead of a number")
        if not least <= found <= most:
            raise ValueError(f"{name!r} is not between {least} and {most}")
        return found

    def integer(self, name: str, least: int, most: int) -> int:
        """A whole number within bounds."""
        found = self.number(name, least, most)
        if not isinstance(found, int):
            raise ValueError(f"{name!r} is not a whole number")
        return found

    def choice(self, name: str, found: object, among: tuple[T, ...]) -> T:
        """One of several values."""
        for each in among:
            if found == each:
                return each
        raise ValueError(f"{name!r} has a value that is not among {', '.join(map(str, among))}")


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _item(row: Row) -> ItemState:
    state = row.choice("state", row.get("state"), get_args(State))
    hooks = [_hook(Row(each, "a hook")) for each in row.list("hooks")]
    return ItemState(row.text("point"), row.text("name"), state, row.text("reason"), hooks)


def _hook(row: Row) -> Hook:
    budget = None if row.get("budget_us") is None else row.number("budget_us", 0, 1e12)
    return Hook(row.text("name"), row.integer("cell", 0, cells.LAST), budget)


def _stall(row: Row) -> Stall:
    return Stall(row.text("what"), row.number("since", 0, _LARGEST), row.text("where"), row.text("item"))


def write(text: str, path: Path) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it, and only its owner can.

    The file is padded with blanks. On a full disk it is then written in place, which needs no more room: a reader may
    meet half of it for a moment, which is better than one that never hears of a change.
    """
    data = text.encode()
    size = _PAGE * (2 + len(data) // _PAGE)
    temporary = path.with_suffix(f".{os.getpid()}.new")
    try:
        try:
            _fill(temporary, os.O_CREAT | os.O_TRUNC, data.ljust(size))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        temporary.replace(path)
    except OSError as error:
        if error.errno not in FULL or not path.exists() or path.stat().st_size < len(data):
            raise
        _fill(path, 0, data.ljust(path.stat().st_size))


FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk, a quota or a limit that is used up."""

_PAGE: Final = 4096


def _fill(path: Path, flags: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def process_name() -> str:
    """The name the process goes by: vLLM's name for its children, the program for a main process."""
    name = multiprocessing.current_process().name
    if name != "MainProcess":
        return name
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"


def start_method() -> str:
    """How the process came to be: ``main``, ``fork``, ``spawn`` or ``forkserver``."""
    process = multiprocessing.current_process()
    if multiprocessing.parent_process() is None:
        return "main"
    popen = getattr(process, "_start_method", None)
    if isinstance(popen, str):
        return popen
    # A spawned child runs multiprocessing's own main module; a forked one has the parent's.
    return "spawn" if "--multiprocessing-fork" in sys.orig_argv else "fork"


def start_ticks(pid: int) -> int | None:
    """When the kernel started that process, in clock ticks since boot: tells a process from a later one of its id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def lives(pid: int, started: int) -> bool:
    """Whether a process of this machine is still the one that was started then, and not on its way out."""
    return start_ticks(pid) == started and not _leaving(pid)


def _leaving(pid: int) -> bool:
    """Whether a process is dead or past the point of no return: its files close a moment before it turns a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    fields = stat.rpartition(")")[2].split()
    return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)


_EXITING: Final = 0x4
"""The flag by which Linux marks a process that is being taken apart."""


def pid_namespace() -> str:
    """The namespace that process ids of this process mean something in."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
