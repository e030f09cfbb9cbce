"""The loops of vLLM's engine cores and workers: watched while they run, and how they end is recorded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from vllm_graft import ledger
from vllm_graft.boot.process import LOG, process
from vllm_graft.boot.role import frames_above
from vllm_graft.ledger import Progress
from vllm_graft.ledger.guard import reason_of
from vllm_graft.ledger.ledger import is_orderly


def run_engine(core: Any, call: Callable[[], None]) -> None:
    """Run the loop of an engine core; with a plan, watch its steps and record how it ends."""
    if not process.plan:
        call()
        return
    if all(hasattr(core.scheduler, name) for name in ("finished_req_ids", "get_request_counts")):
        process.watch.progress = functools.partial(progress_of, core, threading.get_ident())
    else:
        LOG.warning("vllm-graft: %s is not vLLM's scheduler: whether it is stuck is not watched", type(core.scheduler))
    process.watch.start()
    ledger.current().set_ready()
    try:
        call()
    except BaseException as error:
        if not core.is_running():
            ledger.current().mark_asked_to_stop()
        elif not is_orderly(error):
            # Before vLLM tells the front end, which then shuts this process down.
            ledger.current().fail(reason_of(error))
        raise


def run_worker(call: Callable[[], None]) -> None:
    """Run the loop of a worker; with a plan, watch it and record the error that ends it."""
    if not process.plan:
        call()
        return
    ledger.current().unfinished = ""
    process.watch.start()
    ledger.current().set_ready()
    try:
        call()
    except Exception as error:
        if not _shutdown_requested():
            ledger.current().fail(reason_of(error))
        raise


def progress_of(core: Any, thread: int) -> Progress | None:
    """Return how far an engine core has come; None while no request waits for it.

    The scheduler replaces its set of finished requests in every step (0.26 to 0.32: ``_update_after_schedule``), so
    the set's identity tells one step from the next and costs neither anything.
    """
    queued = core.input_queue.qsize()
    if not queued and not core.has_work():
        return None
    running, waiting = core.scheduler.get_request_counts()
    requests = queued + running + waiting
    return Progress(core.scheduler.finished_req_ids, requests, thread) if requests else None


def _shutdown_requested() -> bool:
    """Return whether ``worker_main`` was told to end; it keeps that in a local variable (0.26 to 0.32)."""
    for frame in frames_above():
        requested = frame.f_locals.get("shutdown_requested") if frame.f_code.co_name == "worker_main" else None
        if requested is not None:
            return bool(requested.is_set())
    return True
