"""The proof that engines and workers give a front end of what is active in them, and its comparison with the plan.

Each process answers for itself. vLLM resolves ``WorkerExtension`` by name before it makes a worker, and mixes it into
the worker class; ``EngineCore.graft_report`` calls the method that it adds on every worker. The resolution is used for
two more things: the user's own extension class, known from the run that was carried here, is mixed in with ours; and a
worker in engine core's own process, for which vLLM calls no plugin, gets its part of the plan before its model loads.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_graft import ledger
from vllm_graft.boot import startup_error
from vllm_graft.boot.process import LOG, process
from vllm_graft.errors import StartError
from vllm_graft.findings import Finding
from vllm_graft.ledger import ProcessRow, UnrecordedProcess, comparison, folder
from vllm_graft.ledger.record import process_name
from vllm_graft.plan import Plan, inherited_run

EXTENSION: Final = "vllm_graft.boot.proof.WorkerExtension"
"""The worker extension of a planned server, composed with the user's own."""

REPORT: Final = "graft_report"
"""The method of every engine core that the front end calls, and of every worker that the engine core calls."""

START_TIMEOUT_S: Final = 60.0
"""The seconds for which a front end waits for its engines before it serves."""


class WorkerReport:
    """Mixed into vLLM's worker class."""

    def graft_report(self) -> str:
        """Return the processes of this worker's machine and run, as a JSON list of ``ProcessRow``."""
        # A worker that answers is ready, even if its executor has a loop that we do not patch.
        ledger.current().unfinished = ""
        return json.dumps(rows_here())


def report_worker(worker: Any) -> str:
    """Return a worker's report, or an ``UnrecordedProcess`` for a worker that has none or failed to make one.

    It never raises: after one worker's error vLLM's multi-process executor leaves the other workers' answers unread,
    and takes them for answers of the next call (0.26 to 0.32). It is pickled by value, so that it also runs on a node
    without vllm-graft, and must use nothing of this package.
    """
    name = multiprocessing.current_process().name
    unrecorded = {"name": name, "roles": ["worker"], "host": socket.gethostname(), "pid": os.getpid()}
    try:
        report = getattr(worker, "graft_report", None)
        return str(report()) if report is not None else json.dumps(unrecorded)
    except Exception as error:
        return json.dumps({**unrecorded, "last_error": f"{type(error).__name__}: {error}"})


def report_engine(executor: Any) -> list[str]:
    """Return the processes of an engine core's machine, and the report of each of its workers."""
    import cloudpickle

    process.front_end_check_done = True
    own: object = rows_here()
    if not own:
        # An engine forked from a front end without a plan has the method too, and no record.
        own = {"name": process_name(), "roles": ["engine"], "host": socket.gethostname(), "pid": os.getpid()}
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        # Without a timeout: vLLM's multi-process executor would take a late answer for that of its next call. The
        # front end sets a limit of its own.
        return [json.dumps(own), *executor.collective_rpc(report_worker)]
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def rows_here() -> list[ProcessRow]:
    """Return every process of this run that recorded on this machine, after a check of this one's patches.

    A process that is asked is watched from then on, even if its loop is not one that we patch.
    """
    process.check_patches()
    rows = ledger.current().rows()
    if rows:
        process.watch.start()
    return rows


# Cached, because vLLM refuses an extension whose attributes the worker class has already, unless this very class is
# among its bases: a process that makes a second engine must get the same class again.
@functools.cache
def _extension(users: str) -> type:
    """Compose our extension with the user's own, given as ``pkg.module.Class``; an empty name means there is none."""
    if not users:
        return WorkerReport
    module, _, name = users.rpartition(".")
    try:
        own = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        what, fix = (
            f"the worker extension {users!r} cannot be imported: {error}",
            "correct the name, as pkg.module.Class",
        )
        raise StartError(what, where="--worker-extension-cls", fix=fix) from error
    if hasattr(own, REPORT):
        what = f"the worker extension {users!r} has a method {REPORT!r} of its own"
        fix = "rename that method; vllm-graft needs the name to prove what is active"
        raise StartError(what, where="--worker-extension-cls", fix=fix)
    return type("WorkerExtension", (WorkerReport, own), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name != "WorkerExtension":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    process.raise_deferred_error()
    run = inherited_run()
    if process.plan and run is not None and "worker" not in process.roles:
        process.adopt_plan(process.plan, run, "worker")
    return _extension(run.extension if run is not None else "")


def ask_engine(core: Any) -> list[str]:
    """Ask the one engine behind ``LLM``, in a process of its own or in this one."""
    call = getattr(core, "call_utility", None)
    answers: list[str] = call(REPORT) if call is not None else core.engine_core.graft_report()
    return answers


async def ask_engines(core: Any, seconds: float = START_TIMEOUT_S) -> list[str]:
    """Ask every engine that a server's client manages; one that does not answer is an ``UnrecordedProcess``.

    vLLM's own ``collective_rpc`` of a data-parallel client returns the first engine's answer only (0.26 to 0.32).
    """
    calls = [asyncio.wait_for(core._call_utility_async(REPORT, engine=each), seconds) for each in core.core_engines]
    results = await asyncio.gather(*calls, return_exceptions=True)
    answers: list[str] = []
    for identity, result in zip(core.core_engines, results, strict=True):
        if not isinstance(result, BaseException):
            answers += result
            continue
        if not isinstance(result, Exception):
            raise result
        silent: UnrecordedProcess = {"name": f"data-parallel rank {_rank(identity)}", "roles": ["engine", "worker"]}
        if isinstance(result, TimeoutError):
            silent["last_error"] = f"it did not answer within {seconds:g} s"
        elif REPORT not in str(result) or "attribute" not in str(result):
            # An engine core without our method answers with an AttributeError, whose text vLLM passes on.
            silent["last_error"] = f"{type(result).__name__}: {result}"
        answers.append(json.dumps(silent))
    return answers


def _rank(identity: bytes) -> int:
    # vLLM addresses an engine by its data-parallel rank as two little-endian bytes (0.26 to 0.32).
    return int.from_bytes(identity, "little")


def unmanaged_ranks(size: int, engines: Sequence[bytes]) -> Finding | None:
    """Return a finding that names the data-parallel ranks this front end cannot ask; None if it manages all."""
    managed = {_rank(identity) for identity in engines}
    others = [str(rank) for rank in range(size) if rank not in managed]
    if not others:
        return None
    noun, verb = ("rank", "reports") if len(others) == 1 else ("ranks", "report")
    what = f"{verb} to another front end, so this one cannot tell what is active there"
    where, fix = "external or hybrid load balancing", "check that /graft/status of every front end shows the same plan"
    return Finding("S025", "warning", f"data-parallel {noun} {', '.join(others)}", what, where, fix)


@dataclass(frozen=True, slots=True)
class RunReport:
    """The reports of a run's processes.

    rows:       every process, by its own answer if it gave one, else by its record
    damaged:    what could not be read on this machine
    unrecorded: the number of workers that answered without a record
    """

    rows: list[ProcessRow]
    damaged: list[Finding]
    unrecorded: int


def gather(answers: Iterable[str]) -> RunReport:
    """Join the records on this machine with the engines' answers.

    What a process says of itself takes precedence over its record, which on a full disk may be hours old.
    """
    process.check_patches()
    found, damaged = ledger.current().read_all_processes()
    unrecorded = 0
    for answer in answers:
        content: list[ProcessRow] | UnrecordedProcess = json.loads(answer)
        unrecorded += not content
        found += content if isinstance(content, list) else [comparison.row_without_record(content)]
    rows: dict[object, ProcessRow] = {}
    for row in found:
        # Nodes may share a host name, and processes on them an id.
        key = (row["host"], row["pid"], row["since"], row["name"])
        if key not in rows or row.get("live"):
            rows[key] = row
    return RunReport(list(rows.values()), damaged, unrecorded)


def compare(plan: Plan, answers: Iterable[str] = ()) -> None:
    """Stop the start if a process lacks what the plan names; with ``on_failure = "warn"`` only log it."""
    report = gather(answers)
    living = [row for row in report.rows if row["life"] in ("running", "unknown")]
    found = [finding for finding in comparison.missing(living, plan) if finding.level == "error"]
    found += comparison.unproven(report.rows, plan, disk_full_reason())
    if report.unrecorded and plan.needed_by({"worker"}):
        what = f"is not proven active in {report.unrecorded} workers, which answered without a record"
        fix = "look for an earlier error of these processes in the server's log"
        found.append(Finding("S007", "error", f"plan {plan.hash}", what, "worker", fix))
    for finding in found:
        LOG.error("vllm-graft: %s", finding.explain())
    if found and plan.strict:
        raise startup_error.as_error(found)


def disk_full_reason() -> str:
    """Return a sentence that the disk of the records is full; empty if it has room."""
    place = ledger.current().home or folder.state_folder()
    return folder.disk_full_reason(place) if place is not None else ""
