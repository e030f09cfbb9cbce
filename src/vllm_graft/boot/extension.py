"""What our worker extension adds to vLLM's worker: a method that reports, beside the user's own extension.

vLLM resolves ``WorkerExtension`` by name before it makes a worker, and mixes it into the worker class. That moment is
used twice: the user's own extension class, known only from the run that was carried here, is mixed in with ours; and a
worker that lives in engine core's process, where vLLM calls no plugin for it, takes its part of the plan before its
model is loaded.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import socket
import sys
from typing import TYPE_CHECKING

from vllm_graft import ledger
from vllm_graft.errors import StartError
from vllm_graft.ledger.record import process_name

if TYPE_CHECKING:
    from typing import Any

REPORT = "graft_report"
"""The method of every engine core that the front end calls, and of every worker that the engine core calls."""

TIMEOUT_S = 60.0
"""How long a front end waits for its engines."""


class Reporter:
    """Mixed into vLLM's worker class."""

    def graft_report(self) -> str:
        """The records of this worker's machine and run, as a JSON list of processes."""
        # A worker that answers is ready, also where an executor has a loop of its own.
        ledger.current().unfinished = ""
        return json.dumps(rows_here())


def report_worker(worker: Any) -> str:
    """Return a worker's report, or an object that names a worker which has none or failed to make one.

    It never raises: after one worker's error vLLM's multi-process executor leaves the other workers' answers unread,
    and takes them for answers of the next call. It travels by value, so that it runs on a node without vllm-graft too.
    """
    name = multiprocessing.current_process().name
    stranger = {"name": name, "roles": ["worker"], "host": socket.gethostname(), "pid": os.getpid()}
    try:
        report = getattr(worker, "graft_report", None)
        return str(report()) if report is not None else json.dumps(stranger)
    except Exception as error:
        return json.dumps({**stranger, "last_error": f"{type(error).__name__}: {error}"})


def report_engine(executor: Any) -> list[str]:
    """Return the records of an engine core's machine, and the report of each of its workers."""
    import cloudpickle

    from vllm_graft.boot.process import process

    process.asked = True
    # An engine forked from a front end without a plan has the method too, and no record.
    stranger = {"name": process_name(), "roles": ["engine"], "host": socket.gethostname(), "pid": os.getpid()}
    own = json.dumps(rows_here() or stranger)
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        # Without a timeout: vLLM's multi-process executor would take a late answer for that of its next call. Whoever
        # asks sets a limit of their own.
        return [own, *executor.collective_rpc(report_worker)]
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def rows_here() -> list[dict[str, object]]:
    """Every process of this run that recorded on this machine, after a look at this one's patches.

    Whoever is asked is watched from then on, also where a loop of vLLM's is not the one that we know.
    """
    from vllm_graft.boot.process import process

    process.look()
    rows = ledger.current().rows()
    if rows:
        process.watch.start()
    return rows


def _compose(users: str) -> type:
    module, _, name = users.rpartition(".")
    try:
        own = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StartError(
            f"the worker extension {users!r} cannot be imported: {error}",
            where="--worker-extension-cls",
            fix="correct the name, as pkg.module.Class",
        ) from error
    if hasattr(own, REPORT):
        raise StartError(
            f"the worker extension {users!r} has a method {REPORT!r} of its own",
            where="--worker-extension-cls",
            fix="rename that method; vllm-graft needs the name to prove what is active",
        )
    return type("WorkerExtension", (Reporter, own), {"__module__": __name__})


@functools.cache
def _extension(users: str) -> type:
    return _compose(users) if users else Reporter


def __getattr__(name: str) -> Any:
    if name != "WorkerExtension":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_graft.boot.process import process
    from vllm_graft.plan import carried_run

    if process.failed is not None:
        raise process.failed
    run = carried_run()
    if process.plan and run is not None and "worker" not in process.roles:
        process.take(process.plan, run, "worker")
    return _extension(run.extension if run is not None else "")
