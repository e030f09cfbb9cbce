"""One process's record: who it is, what it was to have, what it has."""

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

from vllm_graft.points import Role

SCHEMA: Final = 1

State = Literal["applied", "armed", "refused", "late", "dead", "drifted", "overwritten", "quarantined", "skipped"]
"""applied: in force; armed: will be, when its module is imported; refused: not, and why; late: applied after the
target already ran; dead: applied to code that this model runner never calls; drifted: applied over code that nobody
has reviewed; overwritten: applied, and somebody else has set the same attribute since; quarantined: put aside after
a failure; skipped: this engine cannot have it."""

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
class Record:
    """What one process says of itself."""

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
        """The record that ``to_json`` wrote."""
        data = json.loads(text)
        rows = data.pop("items")
        record = cls(**data)
        record.items = [ItemState(**{**row, "hooks": [Hook(**hook) for hook in row["hooks"]]}) for row in rows]
        return record


def write(text: str, path: Path) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it, and only its owner can."""
    temporary = path.with_suffix(f".{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


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
