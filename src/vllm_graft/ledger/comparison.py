"""The processes of a server compared with its plan: what one lacks, which died or is held up, as findings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from vllm_graft.findings import Finding, Level
from vllm_graft.ledger import folder
from vllm_graft.ledger.record import GOOD
from vllm_graft.ledger.status import ProcessRow, UnrecordedProcess
from vllm_graft.plan.plan import Plan
from vllm_graft.points import ROLES, Role

SAME_PLAN: Final = (
    "start every node with the same vllm-graft and the same graft.toml, variables and --additional-config"
)
"""The next step if nodes differ."""

SILENT_S: Final = 30.0
"""A process that gave no sign of life for longer is worth a finding: it gives one every two seconds."""

STALLED_S: Final = 60.0
"""A process that is held up for longer is an error, before that a warning."""

REPORT_S: Final = 600.0
"""The seconds in which the first process of a headless node reports: each does so before it loads anything."""

_MAY_WAIT = ("patch", "stats")
"""Points whose items may stay armed in a process: a module may never be imported there, a launcher makes no client."""

_GOES_ON = ("quarantined", "drifted", "skipped")  # states that are worth a warning, with which a server goes on

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
    "item stalled": "fix the plugin: a call of it does not return",
    "silent": "see what the process does with `py-spy dump` or a debugger; restart the server if this persists",
    "stalled": "see what holds up the code named here; restart the server if this persists",
    "starting": "wait until the server has started",
    "unsaved": f"free space there, or point {folder.VARIABLE} at a disk that has some",
    "absent": "look for an earlier error of this process in the server's log",
    "died": "look for its last lines in the server's log; restarting the server clears this",
    "unproven": "check that vllm-graft is installed there, and that VLLM_PLUGINS, if set, lists graft",
    "unused": "wait until the server has started; if this persists, see what else chose that part of the engine",
    "refused": "do what the reason says, or remove the item from the plan",
    "late": "patch something that is called later, or let the engine be forked",
    "dead": "patch what this model runner calls, or choose the other runner with VLLM_USE_V2_MODEL_RUNNER",
    "drifted": "see `vllm-graft diff` with the patch's name; accept what upstream changed with `vllm-graft lock`",
    "skipped": "start the engine without what prevents it, or remove the item from the plan",
    "overwritten": "leave out the other package's change, or the patch",
    "quarantined": "fix the plugin and restart the server",
}


def missing(rows: Iterable[ProcessRow], plan: Plan) -> list[Finding]:
    """Return a finding for each planned item that a process lacks, and for each process with another plan."""
    found = []
    for row in rows:
        if row["life"] == "ended":
            continue
        if row["plan"] != plan.hash:
            found.append(_other_plan(row, plan))
            continue
        states = {item["name"]: item for item in row["items"]}
        needed = plan.needed_by({role for role in ROLES if role in row["roles"]})
        for planned in plan:
            item = states.get(planned.name)
            if planned not in needed and (item is None or item["state"] in GOOD):
                continue  # a queue's `admit` is called in API servers too, which do not need the queue
            state = item["state"] if item is not None else "absent"
            level: Level = "warning" if state in _GOES_ON else "error"
            if item is None:
                code, what, fix = "S001", "is planned but not active: this process never loaded it", _NEXT["absent"]
            elif state == "armed" and planned.point not in _MAY_WAIT:
                code, what, fix = "S008", f"is planned but not in use: {item['reason']}", _NEXT["unused"]
            elif state in GOOD:
                continue
            else:
                code, what = _CODES[state], f"is {state}: {item['reason']}"
                # The reason of a refusal is our own error, which names its own next step.
                fix = "" if "Next: " in what else _NEXT[state]
            found.append(Finding(code, level, f"{planned.point} {planned.name}", what, _subject(row), fix))
    return found


def findings_of(rows: Sequence[ProcessRow], plan: Plan, shortage: str = "") -> list[Finding]:
    """Return all findings about a server: processes that died, stalls, records out of date, items that are missing.

    ``shortage`` is the sentence that the disk of the records is full; empty if it has room.
    """
    died = []
    for row in rows:
        if row["life"] == "died":
            failure = row.get("failure")
            what = f"crashed: {failure}" if failure else "exited without a clean shutdown"
            died.append(Finding("S006", "error", _subject(row), what, "", _NEXT["died"]))
    others = [row for row in rows if row["life"] != "died"]
    # A run whose plan cannot be read has an empty one, with which nothing can be compared.
    lacking = missing(others, plan) + unproven(rows, plan, shortage) if plan else []
    fronts = [row for row in rows if "frontend" in row["roles"] and row["life"] == "running"]
    if fronts and not any(_has_engine(row, rows) for row in fronts):
        lacking = [_while_starting(finding) for finding in lacking]
    # A second engine would hide that one of its role is gone.
    for row in rows if fronts else ():
        if row["life"] == "ended" and {*_PROVEN} & {*row["roles"]}:
            died.append(Finding("S006", "error", _subject(row), "ended, but its server goes on", "", _NEXT["died"]))
    held_up = [finding for row in others if row["life"] == "running" for finding in _held_up(row)]
    unsaved = []
    for row in others:
        if row["life"] != "ended" and row.get("unsaved"):
            level: Level = "warning" if row.get("live") else "error"
            why = row["unsaved"]
            what = f"could not write its record, so what is shown may be out of date: {why}"
            if row.get("live"):
                what = f"cannot write its record, so this view is current but the record on disk is stale: {why}"
            unsaved.append(Finding("S019", level, _subject(row), what, shortage, _NEXT["unsaved"]))
    return died + held_up + unsaved + lacking


def _has_engine(front: ProcessRow, rows: Sequence[ProcessRow]) -> bool:
    """Return whether a front end has its engine; on a headless node, without a client, whether a process is ready."""
    if not front.get("headless"):
        return bool(front.get("ready", True))
    others = [row for row in rows if row is not front and row["life"] == "running"]
    return any(row.get("ready") for row in others) or (not others and time.time() - front["since"] > REPORT_S)


def _while_starting(finding: Finding) -> Finding:
    """Soften a finding about a server that is still starting: what is missing may yet come."""
    if finding.code == "S007" and finding.fix == _NEXT["unproven"]:
        what = f"no {finding.where} process has reported yet: the server is still starting"
        return replace(finding, level="warning", what=what, fix=_NEXT["starting"])
    if finding.code == "S008":
        return replace(finding, level="warning", what=f"{finding.what}; the server is still starting")
    return finding


def _held_up(row: ProcessRow) -> list[Finding]:
    """Return findings for a running process that is stalled or gives no sign of life."""
    silent = row.get("silent_s")
    if isinstance(silent, float) and silent > SILENT_S:
        what = f"has given no sign of life for {silent:.0f} s: it is stopped, or held up in compiled code"
        return [Finding("S016", "error", _subject(row), what, "", _NEXT["silent"])]
    found = []
    for stall in row.get("stalls", []):
        level: Level = "error" if stall["seconds"] > STALLED_S else "warning"
        what = f"{stall['what']} ({stall['seconds']:.0f} s so far)"
        fix = _NEXT["item stalled" if stall["item"] else "stalled"]
        where = ", ".join(filter(None, [stall["where"], f"called for {stall['item']}" if stall["item"] else ""]))
        found.append(Finding("S016", level, _subject(row), what, where, fix))
    return found


def unproven(rows: Sequence[ProcessRow], plan: Plan, shortage: str = "") -> list[Finding]:
    """Return a finding for each role that the plan has items for and no living process plays."""
    living = [row for row in rows if row["life"] in ("running", "unknown")]
    seen = {role for row in living for role in row["roles"]}
    if "frontend" not in seen:
        return []
    # The engine core of a node that has workers alone is on another node.
    workers_only = all(row.get("headless") == "workers" for row in living if "frontend" in row["roles"])
    found = []
    for role in _PROVEN:
        if role in seen or not plan.needed_by({role}) or (role == "engine" and workers_only):
            continue
        if gone := [row for row in rows if role in row["roles"]]:
            fates = ", ".join(f"{row['name']} (pid {row['pid']}) {row['life']}" for row in gone)
            what, fix = f"lost every {role} process: {fates}", _NEXT["gone"]
        elif shortage:
            what, fix = f"has no record of any {role} process: {shortage}", _NEXT["unsaved"]
        else:
            what, fix = f"is not proven active in any {role} process: none has reported", _NEXT["unproven"]
        found.append(Finding("S007", "error", f"plan {plan.hash}", what, role, fix))
    return found


def row_without_record(process: UnrecordedProcess) -> ProcessRow:
    """Return the row of a process without a record."""
    return {
        "pid": process.get("pid", 0),
        "host": process.get("host", ""),
        "name": process["name"],
        "roles": process["roles"],
        "life": "unknown",
        "start_method": "-",
        "vllm": "",
        "runner": "",
        "plan": "",
        "since": 0.0,
        "live": False,
        "ready": True,
        "headless": "",
        "last_error": process.get("last_error", ""),
        "failure": "",
        "silent_s": None,
        "stalls": [],
        "unsaved": "",
        "items": [],
        "queue": [],
    }


def _other_plan(row: ProcessRow, plan: Plan) -> Finding:
    """Return the finding about a process, usually on another node, whose plan is not this server's."""
    needed = [item.name for item in plan.needed_by({role for role in ROLES if role in row["roles"]})]
    where = f"node {row['host']}" if row["host"] else ""
    if not row["plan"] and row["last_error"]:
        what = f"did not report its state: {row['last_error']}"
        return Finding("S023", "error" if needed else "warning", _subject(row), what, where, _NEXT["unanswered"])
    if not row["plan"]:
        without = f", and lacks {', '.join(needed)}" if needed else ""
        what = f"runs without a plan, but this server's is {plan.hash}{without}"
        return Finding("S022", "error" if needed else "warning", _subject(row), what, where, _NEXT["apart"])
    own, planned = [item["name"] for item in row["items"]], [item.name for item in plan]
    lacks = [name for name in needed if name not in own]
    besides = [name for name in own if name not in planned]
    pairs = (("lacks", lacks), ("has besides", besides))
    differences = [f"{verb} {', '.join(names)}" for verb, names in pairs if names]
    differs = f"; it {' and '.join(differences)}" if differences else ""
    what = f"has another plan: {row['plan']}, but this server's is {plan.hash}{differs}"
    return Finding("S021", "error", _subject(row), what, where, _NEXT["apart"])


def _subject(row: ProcessRow) -> str:
    place = f", pid {row['pid']} on {row['host']}" if row["pid"] else ""
    return f"{row['name']} ({'+'.join(row['roles'])}{place})"


def lost_folder(home: Path) -> Finding:
    """Return the finding that a run's records are gone, and with them those of processes that died before."""
    what = "is gone: running processes write theirs again within seconds; nothing is known about others"
    return Finding("S018", "warning", f"record {home.name}", what, str(home), _NEXT["lost"])


def damaged_file(path: Path, error: Exception, level: Level) -> Finding:
    """Return the finding about a file that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    what = f"cannot be read: {reason}"
    return Finding("S018", level, f"record {path.parent.name}/{path.name}", what, str(path), _NEXT["damaged"])
