"""Reading what every process wrote: the runs on this machine, who is alive, and what a process lacks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from vllm_graft.findings import Finding
from vllm_graft.ledger import cells, folder
from vllm_graft.ledger.board import SUFFIX, read_board
from vllm_graft.ledger.figures import QueueFigures
from vllm_graft.ledger.meters import Reading, read_block
from vllm_graft.ledger.record import GOOD, SCHEMA, Hook, ItemState, Record, lives, pid_namespace
from vllm_graft.plan.plan import Plan
from vllm_graft.points import ROLES, Role

PLAN_FILE = "plan.json"
"""The file of a run's folder that holds its plan."""

Life = Literal["running", "ended", "died", "unknown"]
"""running; ended in order; died: gone without having ended in order; unknown: of another machine or container."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process: its record, whether it lives, its counters, and the figures of its queue where it has one."""

    record: Record
    life: Life
    readings: dict[str, dict[str, Reading]] = field(default_factory=dict)
    figures: QueueFigures | None = None

    def calls(self, item: str) -> int:
        """How often the hooks of an item were called, together."""
        return sum(reading.calls for reading in self.readings.get(item, {}).values())

    def as_dict(self) -> dict[str, object]:
        """The process with stable lower-case keys, for ``--json`` and ``/graft/status``."""
        record = self.record
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
            "last_error": record.last_error,
            "items": [self._item(item) for item in record.items],
            "queue": self.figures.as_dicts() if self.figures is not None and self.life != "ended" else [],
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
    """One server: every process of one start."""

    run: str
    plan: Plan
    processes: tuple[ProcessView, ...]

    @property
    def model(self) -> str:
        """The model it serves."""
        return self.processes[0].record.model

    @property
    def running(self) -> bool:
        """Whether any of its processes lives."""
        return any(process.life == "running" for process in self.processes)

    def rows(self) -> list[dict[str, object]]:
        """Its processes with stable lower-case keys."""
        return [process.as_dict() for process in self.processes]

    def findings(self) -> list[Finding]:
        """What its processes lack, and which of them died."""
        return findings_of(self.rows(), self.plan)

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
    return view.running or (any(process.life != "ended" for process in view.processes) and not folder.too_old(home))


def read_run(home: Path) -> RunView | None:
    """The run recorded in a folder, or None where nothing readable is in it."""
    try:
        plan = Plan.from_json((home / PLAN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = (read_process(path) for path in sorted(home.glob("[0-9]*.json")))
    processes = tuple(sorted((view for view in found if view is not None), key=lambda view: view.record.since))
    return RunView(home.name, plan, processes) if processes else None


def read_process(path: Path) -> ProcessView | None:
    """One process's record and counters, or None where the file cannot be understood."""
    try:
        record = Record.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if record.schema != SCHEMA:
        return None
    counted = cells.read(path.with_suffix(".cells"))
    ended = counted[cells.ENDED] if counted is not None else 0
    figures = read_board(path.with_suffix(SUFFIX))
    return ProcessView(record, _life(record, ended), readings(record.items, counted), figures)


def queues_apart(rows: Iterable[Mapping[str, object]]) -> tuple[list[dict[str, object]], list[object]]:
    """Processes without their queues' figures, and the figures of all of them: how a server shows them."""
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
        view = read_run(home)
        if view is None:
            if folder.too_old(home):
                folder.remove(home)
        elif not view.running and all(process.life != "unknown" for process in view.processes):
            folder.remove(home)
        elif not view.running and folder.too_old(home):
            folder.remove(home)


def missing(rows: Iterable[Mapping[str, object]], plan: Plan) -> list[Finding]:
    """What processes lack of their plan, as findings. ``rows`` are processes as ``ProcessView.as_dict`` gives them."""
    return [finding for row in rows if row["life"] != "ended" for finding in _missing_in(row, plan)]


def findings_of(rows: Sequence[Mapping[str, object]], plan: Plan) -> list[Finding]:
    """Everything worth saying of a server: processes that died, and what the others lack."""
    died = [
        Finding("S006", "error", _who(row), "is gone without having ended in order", "", _NEXT["died"])
        for row in rows
        if row["life"] == "died"
    ]
    others = [row for row in rows if row["life"] != "died"]
    return died + missing(others, plan) + unproven(others, plan)


def unproven(rows: Iterable[Mapping[str, object]], plan: Plan) -> list[Finding]:
    """Roles that the plan has something for and of which no living process says anything."""
    seen = {str(role) for row in rows if row["life"] != "ended" for role in _roles(row)}
    if "frontend" not in seen:
        return []
    return [
        Finding(
            "S007",
            "error",
            f"plan {plan.hash}",
            f"no {role} process has reported, so nothing is proven active there",
            role,
            _NEXT["unproven"],
        )
        for role in _PROVEN
        if role not in seen and plan.needed_by({role})
    ]


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
        "last_error": last_error,
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
    "apart": "start every node with the same vllm-graft and the same graft.toml, variables and --additional-config",
    "unanswered": "look for an error of this process in the log of its node",
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
    if record.namespace != pid_namespace() or record.host != os.uname().nodename:
        return "ended" if ended else "unknown"
    if lives(record.pid, record.started) and ended != cells.CLOSED:
        return "running"
    return "ended" if ended else "died"
