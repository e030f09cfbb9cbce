"""The status document of a server: processes, queues and findings, as ``--json`` and ``GET /graft/status`` show them.

Its rows are plain JSON objects with stable lower-case keys. Processes also send them to each other, so they are typed
here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, NotRequired, TypedDict

from vllm_graft.findings import Finding
from vllm_graft.ledger.queue_statistics import QueueRow
from vllm_graft.plan.plan import Plan

Life = Literal["running", "ended", "died", "unknown"]
"""running; ended cleanly; died: gone without having ended cleanly; unknown: of another machine or container."""


class HookRow(TypedDict):
    """A counted hook: the fields of ``MeterReading``."""

    calls: int
    errors: int
    overruns: int
    mean_us: float
    p50_us: float
    p99_us: float
    max_us: float
    budget_us: float | None


class ItemRow(TypedDict):
    """A planned item in one process.

    calls:   those of all its hooks
    figures: what it reports of itself, as blocks that it holds
    """

    point: str
    name: str
    state: str
    reason: str
    calls: int
    hooks: dict[str, HookRow]
    figures: NotRequired[dict[str, int]]


class StallRow(TypedDict):
    """Something that has held a process up for these seconds."""

    what: str
    where: str
    item: str
    seconds: float


class ProcessRow(TypedDict):
    """One process of a server.

    live:     whether the process itself made the row from memory, which is never stale
    silent_s: the seconds since its last sign of life; None if it is not watched
    unsaved:  why its record on disk is out of date; empty if it is not
    """

    pid: int
    host: str
    name: str
    roles: list[str]
    life: Life
    start_method: str
    vllm: str
    runner: str
    plan: str
    since: float
    live: bool
    ready: bool
    headless: str
    last_error: str
    failure: str
    silent_s: float | None
    stalls: list[StallRow]
    unsaved: str
    items: list[ItemRow]
    queue: NotRequired[list[QueueRow]]


class UnrecordedProcess(TypedDict):
    """A process without a record: it runs without a plan, or did not answer (``last_error``)."""

    name: str
    roles: list[str]
    host: NotRequired[str]
    pid: NotRequired[int]
    last_error: NotRequired[str]


class StatusDocument(TypedDict):
    """One server."""

    run: str
    model: str
    running: bool
    plan: dict[str, object]
    processes: list[ProcessRow]
    queues: list[QueueRow]
    findings: list[dict[str, str]]


def status_document(
    run: str,
    plan: Plan,
    rows: Sequence[ProcessRow],
    findings: Iterable[Finding],
    *,
    model: str = "",
    running: bool = True,
    with_options: bool = True,
) -> StatusDocument:
    """Return the status document of a run; ``model`` is that of the plan by default.

    ``with_options`` shows the values of options, which may be secrets. Their names are shown in any case.
    """
    planned = plan.as_dict()
    if not with_options:
        items = [dataclasses.replace(item, options=dict.fromkeys(item.options, "")) for item in plan]
        planned |= {"items": dataclasses.replace(plan, items=tuple(items)).as_dict()["items"]}
    processes = [row.copy() for row in rows]
    queues = [queue for row in processes for queue in row.pop("queue", [])]
    return {
        "run": run,
        "model": model or plan.model,
        "running": running,
        "plan": planned,
        "processes": processes,
        "queues": queues,
        "findings": [finding.as_dict() for finding in findings],
    }
