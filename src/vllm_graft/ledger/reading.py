"""Reading what every process wrote: the runs on this machine, who is alive, and what a process lacks."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeVar

from vllm_graft.findings import Finding, Level
from vllm_graft.ledger import cells, folder
from vllm_graft.ledger.meters import Reading, read_block
from vllm_graft.ledger.queue_statistics import SUFFIX, QueueSnapshot, read_snapshot
from vllm_graft.ledger.record import GOOD, SCHEMA, Hook, ItemState, Record, Row, lives, pid_namespace, start_ticks
from vllm_graft.plan.plan import Plan
from vllm_graft.points import ROLES, Role

T = TypeVar("T")

_LOG: Final = logging.getLogger("vllm.graft")

PLAN_FILE = "plan.json"
"""The file of a run's folder that holds its plan."""

SAME_PLAN: Final = (
    "start every node with the same vllm-graft and the same graft.toml, variables and --additional-config"
)
"""The next step where nodes differ."""

Life = Literal["running", "ended", "died", "unknown"]
"""running; ended in order; died: gone without having ended in order; unknown: of another machine or container."""

SILENT_S: Final = 30.0
"""A process that gave no sign of life for longer is worth a finding: it gives one every two seconds."""

STALLED_S: Final = 60.0
"""What is held up for longer is an error, before that a warning."""

REPORT_S: Final = 600.0
"""How long the first process of a headless node may take to report: each does so before it loads anything."""

_LARGEST: Final = 4 * 1024 * 1024
"""The bytes of a record or plan that are read at most."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process: its record, whether it lives, its counters, and the statistics of its queue if it has one.

    beat:    its last sign of life, in seconds since the epoch; 0 where nothing watches it
    unsaved: why its record is not on disk as it is; empty where it is
    """

    record: Record
    life: Life
    readings: dict[str, dict[str, Reading]] = field(default_factory=dict)
    queue: QueueSnapshot | None = None
    beat: float = 0.0
    unsaved: str = ""

    def calls(self, item: str) -> int:
        """How often the hooks of an item were called, together."""
        return sum(reading.calls for reading in self.readings.get(item, {}).values())

    def as_dict(self, *, live: bool = False) -> dict[str, object]:
        """The process with stable lower-case keys, for ``--json`` and ``/graft/status``.

        ``live`` says that the process itself made this of what it has in memory, which is never stale.
        """
        record, now = self.record, time.time()
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
            # In seconds, so that a reader on another machine need not have the same clock.
            "silent_s": round(max(0.0, now - self.beat), 1) if self.beat else None,
            "stalls": [
                {"what": each.what, "where": each.where, "item": each.item, "seconds": round(now - each.since, 1)}
                for each in record.stalls
            ],
            "unsaved": self.unsaved,
            "items": [self._item(item) for item in record.items],
            "queue": self.queue.as_dicts() if self.queue is not None and self.life != "ended" else [],
        }

    def _item(self, item: ItemState) -> dict[str, object]:
        hooks = self.readings.get(item.name, {})
        return {
            "point": item.point,
            "name": item.name,
            "state": item.state,
            "reason": item.reason,
            "calls": self.calls(item.name),
            "hooks": {name: reading.as_dict() for name, reading in hooks.items()},
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
        """Whether any of its processes lives."""
        return any(process.life == "running" for process in self.processes)

    def rows(self) -> list[dict[str, object]]:
        """Its processes with stable lower-case keys."""
        return [process.as_dict() for process in self.processes]

    def findings(self) -> list[Finding]:
        """What its processes lack, which of them died or are held up, and what cannot be read."""
        shortage = folder.shortage(self.home) if self.home is not None else ""
        return [*findings_of(self.rows(), self.plan, shortage), *self.damaged]

    def as_dict(self) -> dict[str, object]:
        """The run with stable lower-case keys."""
        processes, queues = queues_apart(self.rows())
        return {
            "run": self.run,
            "model": self.model,
            "running": self.running,
            "plan": self.plan.as_dict(),
            "processes": processes,
            "queues": queues,
            "findings": [finding.as_dict() for finding in self.findings()],
        }


def runs(state: Path | None = None) -> list[RunView]:
    """Every server that runs on this machine, and those that ended without order in the last 24 hours.

    A server of another container that shares the folder is shown too, as far as it can be judged from here.
    """
    state = state if state is not None else folder.state_folder()
    if state is None:
        return []
    views = [(home, read_run(home)) for home in folder.run_folders(state)]
    return [view for home, view in views if view is not None and _shown(view, home)]


def _shown(view: RunView, home: Path) -> bool:
    unclean = bool(view.damaged) or any(process.life != "ended" for process in view.processes)
    return view.running or (unclean and not _forgotten(view, home))


def read_run(home: Path, *, queues: bool = True) -> RunView | None:
    """The run recorded in a folder; None where nothing is in it yet. What cannot be read becomes a finding.

    ``queues`` reads their statistics too: tens of milliseconds for each engine that has a thousand tenants.
    """
    damaged: list[Finding] = []
    try:
        names = _recorded(home)
    except FileNotFoundError:
        return None
    except OSError as error:
        return RunView(home.name, Plan(), (), home, (_damaged(home, error, "error"),))
    found = [view for name in names if (view := _read_recorded(home / name, damaged, queues)) is not None]
    running = any(view.life == "running" for view in found)
    try:
        plan = _parse_plan(folder.read_file(home / PLAN_FILE, _LARGEST).decode())
    except (OSError, ValueError, RecursionError) as error:
        if not names and isinstance(error, FileNotFoundError):
            return None
        plan = Plan()
        damaged.append(_damaged(home / PLAN_FILE, error, "error" if running else "warning"))
    return RunView(home.name, plan, tuple(sorted(found, key=lambda view: view.record.since)), home, tuple(damaged))


def _read_recorded(path: Path, damaged: list[Finding], queues: bool) -> ProcessView | None:
    """One process's record and counters; what cannot be read is added to the findings."""
    level: Level = "error" if start_ticks(int(path.stem)) is not None else "warning"
    try:
        record = _parse_record(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        damaged.append(_damaged(path, error, level))
        return None
    try:
        counted = cells.read(path.with_suffix(".cells"))
    except (OSError, ValueError) as error:
        damaged.append(_damaged(path.with_suffix(".cells"), error, level))
        return ProcessView(record, _life(record, 0))
    queue = None
    board = path.with_suffix(SUFFIX)
    try:
        queue = _again(lambda: read_snapshot(board)) if queues else None
    except (OSError, ValueError) as error:
        damaged.append(_damaged(board, error, level))
    return _view(record, counted, queue)


class Records:
    """The processes of a run's folder, read again and again: a record is parsed when it has changed.

    Without the statistics of queues, which ``StatisticsReader`` has. ``damaged`` counts the records that could not be
    read last; a folder that cannot be listed counts as one.
    """

    def __init__(self, home: Path | None) -> None:
        self._home = home
        self.damaged = 0
        self._parsed: dict[str, tuple[tuple[int, int, int], Record]] = {}

    def views(self) -> list[ProcessView]:
        """Every process whose record can be read."""
        parsed: dict[str, tuple[tuple[int, int, int], Record]] = {}
        found: list[ProcessView] = []
        self.damaged = 0
        if self._home is None:
            return found
        try:
            names = _recorded(self._home)
        except OSError:
            self.damaged, self._parsed = 1, parsed
            return found
        for name in names:
            path = self._home / name
            try:
                facts = path.lstat()
                mark = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
                known = self._parsed.get(name)
                record = known[1] if known is not None and known[0] == mark else _parse_record(path)
                found.append(_view(record, cells.read(path.with_suffix(".cells"))))
            except (OSError, ValueError):
                self.damaged += 1
                continue
            parsed[name] = (mark, record)
        self._parsed = parsed
        return found


def _recorded(home: Path) -> list[str]:
    """The names of the records in a folder."""
    return sorted(name for name in os.listdir(home) if name.endswith(".json") and name[:-5].isdecimal())


def _parse_record(path: Path) -> Record:
    record = _again(lambda: Record.from_json(folder.read_file(path, _LARGEST).decode()))
    if record.schema != SCHEMA:
        raise ValueError(f"another version of vllm-graft wrote it (schema {record.schema}, this one has {SCHEMA})")
    return record


def _view(record: Record, counted: Sequence[int], queue: QueueSnapshot | None = None) -> ProcessView:
    unsaved = counted[cells.UNSAVED]
    return ProcessView(
        record,
        _life(record, counted[cells.ENDED]),
        readings(record.items, counted),
        queue,
        counted[cells.BEAT] / 1000,
        os.strerror(min(unsaved, 2**15)) if unsaved else "",
    )


def _again(read: Callable[[], T]) -> T:
    """Read a file that may be half written at this moment, as it is on a full disk."""
    for _ in range(2):
        try:
            return read()
        except ValueError:
            time.sleep(0.005)
    return read()


def _parse_plan(text: str) -> Plan:
    """Parse a plan; ValueError where a value is missing or of the wrong kind."""
    row = Row(json.loads(text), "the plan")
    for item in (Row(each, "an item") for each in row.list("items")):
        for name in ("point", "name", "target", "package", "origin"):
            item.text(name)
        for role in item.list("roles"):
            item.choice("roles", role, ROLES)
        Row(item.get("options"), "'options'")
    for finding in (Row(each, "a finding") for each in row.list("findings", [])):
        for name in ("code", "level", "subject", "what", "where", "fix"):
            finding.text(name)
    for name in ("on_failure", "model"):
        row.text(name)
    for name in ("callers", "unknown_keys"):
        row.text(name, "")
    row.list("other_keys", [])
    row.get("endpoint")
    Row(row.get("origins"), "'origins'")
    Row(row.get("left_out", {}), "'left_out'")
    try:
        return Plan.from_json(text)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it is no plan of this version: {type(error).__name__}: {error}") from error


def lost_folder(home: Path) -> Finding:
    """Say that a run's records are gone, so that nobody knows of processes that died before."""
    what = "is gone: processes that live write theirs again within seconds, of others nothing is known"
    return Finding("S018", "warning", f"record {home.name}", what, str(home), _NEXT["lost"])


def _damaged(path: Path, error: Exception, level: Level) -> Finding:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    what = f"cannot be read: {reason}"
    return Finding("S018", level, f"record {path.parent.name}/{path.name}", what, str(path), _NEXT["damaged"])


def queues_apart(rows: Iterable[Mapping[str, object]]) -> tuple[list[dict[str, object]], list[object]]:
    """Separate processes from the statistics of their queues, as a server shows them."""
    processes, queues = [], []
    for row in rows:
        found = row["queue"]
        assert isinstance(found, list)
        queues += found
        processes.append({key: value for key, value in row.items() if key != "queue"})
    return processes, queues


def readings(items: Iterable[ItemState], counted: Sequence[int] | None) -> dict[str, dict[str, Reading]]:
    """The counters of every hook of every item."""
    if counted is None:
        return {}
    return {item.name: {hook.name: _reading(counted, hook) for hook in item.hooks} for item in items}


def sweep(state: Path) -> None:
    """What a new start does first: records of servers that are gone are removed."""
    for home in folder.run_folders(state):
        try:
            view = read_run(home, queues=False)
        except Exception as error:
            # A fault of ours, met in the files of another run, is no reason to keep a server from starting.
            _LOG.warning("vllm-graft: the records in %s are left alone, they cannot be judged: %r", home, error)
            continue
        if view is not None and view.running:
            continue
        if _forgotten(view, home) or (view is not None and _gone(view)):
            folder.remove(home)


def _forgotten(view: RunView | None, home: Path) -> bool:
    """Say whether a run gave its last sign longer ago than records are kept.

    The files alone do not tell: counting through a memory map does not change a file's time on tmpfs, so a server of
    another container that is idle looks as old as its start.
    """
    beats = [process.beat for process in view.processes if process.life == "unknown"] if view is not None else []
    return folder.too_old(home) and not any(abs(time.time() - beat) < folder.KEPT_S for beat in beats)


def _gone(view: RunView) -> bool:
    """Whether every process of a run is known to be gone; a damaged record is judged by the process id in its name."""
    known = all(process.life != "unknown" for process in view.processes)
    return bool(view.processes) and known and all(finding.level != "error" for finding in view.damaged)


def missing(rows: Iterable[Mapping[str, object]], plan: Plan) -> list[Finding]:
    """What processes lack of their plan, as findings. ``rows`` are processes as ``ProcessView.as_dict`` gives them."""
    return [finding for row in rows if row["life"] != "ended" for finding in _missing_in(row, plan)]


def findings_of(rows: Sequence[Mapping[str, object]], plan: Plan, shortage: str = "") -> list[Finding]:
    """Everything worth saying of a server: what died, what is held up, what is not recorded, what is lacking.

    ``shortage`` says that the disk of the records is full, where it is.
    """
    died = [
        Finding("S006", "error", _who(row), _death(row), "", _NEXT["died"]) for row in rows if row["life"] == "died"
    ]
    others = [row for row in rows if row["life"] != "died"]
    # A run whose plan cannot be read has an empty one, with which nothing can be compared.
    lacking = missing(others, plan) + unproven(rows, plan, shortage) if plan else []
    if _starting(rows):
        lacking = [_while_starting(finding) for finding in lacking]
    held_up = [finding for row in others if row["life"] == "running" for finding in _held_up(row)]
    unsaved = [_unsaved(row, shortage) for row in others if row["life"] != "ended" and row.get("unsaved")]
    return died + held_up + unsaved + lacking


def _death(row: Mapping[str, object]) -> str:
    return f"crashed: {row['failure']}" if row.get("failure") else "is gone without having ended in order"


def _starting(rows: Iterable[Mapping[str, object]]) -> bool:
    """Whether a front end lives and none has its engine yet."""
    rows = list(rows)
    fronts = [row for row in rows if "frontend" in _roles(row) and row["life"] == "running"]
    return bool(fronts) and not any(_has_engine(row, rows) for row in fronts)


def _has_engine(front: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> bool:
    """Say whether a front end has its engine. A headless node has no client that would tell: its processes do."""
    if not front.get("headless"):
        return bool(front.get("ready", True))
    others = [row for row in rows if row is not front and row["life"] == "running"]
    since = front["since"]
    assert isinstance(since, float | int)
    return any(row.get("ready") for row in others) or (not others and time.time() - since > REPORT_S)


def _while_starting(finding: Finding) -> Finding:
    """What is missing while a server starts may yet come: say so, and do not blame anything."""
    if finding.code == "S007" and finding.fix == _NEXT["unproven"]:
        what = f"no {finding.where} process has reported yet: the server is still starting"
        return replace(finding, level="warning", what=what, fix=_NEXT["starting"])
    if finding.code == "S008":
        return replace(finding, level="warning", what=f"{finding.what}; the server is still starting")
    return finding


def _held_up(row: Mapping[str, object]) -> list[Finding]:
    """What a living process waits for, and whether it gives signs of life at all."""
    silent = row.get("silent_s")
    if isinstance(silent, float) and silent > SILENT_S:
        what = f"has given no sign of life for {silent:.0f} s: it is stopped, or held up in compiled code"
        return [Finding("S016", "error", _who(row), what, "", _NEXT["silent"])]
    stalls = row.get("stalls", [])
    assert isinstance(stalls, list)
    found = []
    for stall in stalls:
        level: Level = "error" if stall["seconds"] > STALLED_S else "warning"
        what = f"{stall['what']} ({stall['seconds']:.0f} s so far)"
        fix = _NEXT["item stalled" if stall["item"] else "stalled"]
        where = ", ".join(filter(None, [stall["where"], f"called for {stall['item']}" if stall["item"] else ""]))
        found.append(Finding("S016", level, _who(row), what, where, fix))
    return found


def _unsaved(row: Mapping[str, object], shortage: str) -> Finding:
    if row.get("live"):
        what = f"cannot write its record, so what is shown here is right and not what is recorded: {row['unsaved']}"
        return Finding("S019", "warning", _who(row), what, shortage, _NEXT["unsaved"])
    what = f"could not write its record, so what is shown may be out of date: {row['unsaved']}"
    return Finding("S019", "error", _who(row), what, shortage, _NEXT["unsaved"])


def unproven(rows: Sequence[Mapping[str, object]], plan: Plan, shortage: str = "") -> list[Finding]:
    """Roles that the plan has something for and of which no living process says anything."""
    living = [row for row in rows if row["life"] in ("running", "unknown")]
    seen = {role for row in living for role in _roles(row)}
    if "frontend" not in seen:
        return []
    # The engine core of a node that has workers alone is on another node.
    workers_only = all(row.get("headless") == "workers" for row in living if "frontend" in _roles(row))
    return [
        _silent_role(role, [row for row in rows if role in _roles(row)], plan, shortage)
        for role in _PROVEN
        if role not in seen and plan.needed_by({role}) and not (role == "engine" and workers_only)
    ]


def _silent_role(role: Role, gone: Sequence[Mapping[str, object]], plan: Plan, shortage: str) -> Finding:
    if gone:
        fates = ", ".join(f"{row['name']} (pid {row['pid']}) {row['life']}" for row in gone)
        what, fix = f"no {role} process runs any more: {fates}", _NEXT["gone"]
    elif shortage:
        what, fix = f"no {role} process has been recorded: {shortage}", _NEXT["unsaved"]
    else:
        what, fix = f"no {role} process has reported, so nothing is proven active there", _NEXT["unproven"]
    return Finding("S007", "error", f"plan {plan.hash}", what, role, fix)


def _roles(row: Mapping[str, object]) -> list[str]:
    roles = row["roles"]
    assert isinstance(roles, list)
    return roles


def row_without_record(
    name: str, roles: list[str], host: str = "", pid: int = 0, last_error: str = ""
) -> dict[str, object]:
    """Return the row of a process that has no record: it runs without a plan, or did not answer (``last_error``)."""
    return {
        "pid": pid,
        "host": host,
        "name": name,
        "roles": roles,
        "life": "unknown",
        "start_method": "-",
        "vllm": "",
        "runner": "",
        "plan": "",
        "since": 0.0,
        "live": False,
        "ready": True,
        "headless": "",
        "last_error": last_error,
        "failure": "",
        "silent_s": None,
        "stalls": [],
        "unsaved": "",
        "items": [],
        "queue": [],
    }


def _other_plan(row: Mapping[str, object], plan: Plan) -> Finding:
    """Say of a process on another node that its plan is not this server's."""
    needed = [item.name for item in plan.needed_by({role for role in ROLES if role in _roles(row)})]
    where = f"node {row['host']}" if row["host"] else ""
    if not row["plan"] and row["last_error"]:
        what = f"did not say what it has: {row['last_error']}"
        return Finding("S023", "error" if needed else "warning", _who(row), what, where, _NEXT["unanswered"])
    if not row["plan"]:
        lacks = f", and lacks {', '.join(needed)}" if needed else ""
        what = f"runs without a plan, where this server's is {plan.hash}{lacks}"
        return Finding("S022", "error" if needed else "warning", _who(row), what, where, _NEXT["apart"])
    items = row["items"]
    assert isinstance(items, list)
    own, planned = [str(item["name"]) for item in items], [item.name for item in plan]
    differences = [
        f"{verb} {', '.join(names)}"
        for verb, names in (
            ("lacks", [name for name in needed if name not in own]),
            ("has besides", [name for name in own if name not in planned]),
        )
        if names
    ]
    differs = f"; it {' and '.join(differences)}" if differences else ""
    what = f"has another plan: {row['plan']}, where this server's is {plan.hash}{differs}"
    return Finding("S021", "error", _who(row), what, where, _NEXT["apart"])


def _missing_in(row: Mapping[str, object], plan: Plan) -> list[Finding]:
    if row["plan"] != plan.hash:
        return [_other_plan(row, plan)]
    items = row["items"]
    assert isinstance(items, list)
    states = {str(item["name"]): item for item in items}
    found = []
    for planned in plan.needed_by({role for role in ROLES if role in _roles(row)}):
        subject = f"{planned.point} {planned.name}"
        item = states.get(planned.name)
        if item is None:
            what = "is planned and not active: this process never loaded it"
            found.append(Finding("S001", "error", subject, what, _who(row), _NEXT["absent"]))
        elif item["state"] == "armed" and planned.point not in _MAY_WAIT:
            what = f"is planned and not in use: {item['reason']}"
            found.append(Finding("S008", "error", subject, what, _who(row), _NEXT["unused"]))
        elif item["state"] not in GOOD:
            state = str(item["state"])
            level: Literal["error", "warning"] = "warning" if state in _GOES_ON else "error"
            what = f"is {state}: {item['reason']}"
            # The reason of a refusal is an error of ours, which has said its own next step.
            fix = "" if "Next: " in what else _NEXT[state]
            found.append(Finding(_CODES[state], level, subject, what, _who(row), fix))
    return found


def _who(row: Mapping[str, object]) -> str:
    place = f", pid {row['pid']} on {row['host']}" if row["pid"] else ""
    return f"{row['name']} ({'+'.join(_roles(row))}{place})"


_MAY_WAIT = ("patch", "stats")
"""Points that a process may rightly have armed: a module may never be imported there, a launcher makes no client."""

_GOES_ON = ("quarantined", "drifted", "skipped")
"""States that are worth a warning, with which a server goes on."""

_PROVEN: Final[tuple[Role, ...]] = ("engine", "worker")

_CODES = {
    "refused": "S002",
    "late": "S003",
    "dead": "S004",
    "quarantined": "S005",
    "drifted": "S009",
    "overwritten": "S010",
    "skipped": "S011",
}

_NEXT = {
    "apart": SAME_PLAN,
    "unanswered": "look for an error of this process in the log of its node",
    "lost": f"keep cleaners of temporary folders away from it, or point {folder.VARIABLE} elsewhere",
    "damaged": "remove it if its server is gone; ask a running server itself with --url",
    "gone": "look for the last lines of these processes in the server's log, and restart the server",
    "item stalled": "mend the plugin: a call of it does not return",
    "silent": "see what the process does with `py-spy dump` or a debugger; restart the server if it stays so",
    "stalled": "see what holds up the code named here; restart the server if it stays so",
    "starting": "wait until the server has started",
    "unsaved": f"free space there, or point {folder.VARIABLE} at a disk that has some",
    "absent": "look for an earlier error of this process in the server's log",
    "died": "look for its last lines in the server's log; restarting the server clears this",
    "unproven": "see that vllm-graft is installed there, and that VLLM_PLUGINS, if set, lists graft",
    "unused": "wait until the server has started; if it stays so, see what else chose that part of the engine",
    "refused": "do what the reason says, or take the item out of the plan",
    "late": "patch something that is called later, or let the engine be forked",
    "dead": "patch what this model runner calls, or choose the other runner with VLLM_USE_V2_MODEL_RUNNER",
    "drifted": "see `vllm-graft diff` with the patch's name; accept what upstream changed with `vllm-graft lock`",
    "skipped": "start the engine without what stands in the way, or take the item out of the plan",
    "overwritten": "leave out the other package's change, or the patch",
    "quarantined": "mend the plugin and restart the server",
}


def _reading(counted: Sequence[int], hook: Hook) -> Reading:
    return read_block(counted, hook.cell, hook.budget_us)


def _life(record: Record, ended: int) -> Life:
    if ended == cells.FAILED:
        return "died"
    if record.namespace != pid_namespace() or record.host != os.uname().nodename:
        return "ended" if ended else "unknown"
    if lives(record.pid, record.started) and ended != cells.CLOSED:
        return "running"
    return "ended" if ended else "died"
