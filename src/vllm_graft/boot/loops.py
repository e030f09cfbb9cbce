"""The loops of vLLM's engine cores and workers: watched while they run, and how they end is recorded."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from vllm_graft import ledger
from vllm_graft.boot.process import LOG, process
from vllm_graft.ledger import Progress
from vllm_graft.ledger.guard import reason_of
from vllm_graft.ledger.ledger import is_orderly


def run_engine(core: Any, call: Callable[[], None]) -> None:
    """Run the loop of an engine core; without a plan that is all."""
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
            ledger.current().end_in_order()
        elif not is_orderly(error):
            # Before vLLM tells the front end, which then takes this process down.
            ledger.current().fail(reason_of(error))
        raise


def run_worker(call: Callable[[], None]) -> None:
    """Run the loop of a worker; without a plan that is all."""
    if not process.plan:
        call()
        return
    ledger.current().unfinished = ""
    process.watch.start()
    ledger.current().set_ready()
    try:
        call()
    except Exception as error:
        if not _asked_to_end():
            ledger.current().fail(reason_of(error))
        raise


def progress_of(core: Any, thread: int) -> Progress | None:
    """How far an engine core is; None where nobody waits for it.

    The scheduler replaces its set of finished requests in every step (0.26 to 0.32: ``_update_after_schedule``), so
    that the set tells one step from the next at no cost to either.
    """
    queued = core.input_queue.qsize()
    if not queued and not core.has_work():
        return None
    running, waiting = core.scheduler.get_request_counts()
    requests = queued + running + waiting
    return Progress(core.scheduler.finished_req_ids, requests, thread) if requests else None


def _asked_to_end() -> bool:
    """Whether ``worker_main`` was told to end; it keeps that in a variable of its own (0.26 to 0.32)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        asked = frame.f_locals.get("shutdown_requested") if frame.f_code.co_name == "worker_main" else None
        if asked is not None:
            return bool(asked.is_set())
        frame = frame.f_back
    return True
