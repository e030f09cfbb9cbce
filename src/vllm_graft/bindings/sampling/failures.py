"""Requests that end with an error because their sampler raised: reported by the worker, ended by the engine.

vLLM has no way to end a request from where its logits are. The worker therefore puts the ids of such requests beside
its output of the step, and the engine finishes them, with vLLM's own status for errors, when it takes that output in.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.step_output import attach

if TYPE_CHECKING:
    from vllm_graft.bindings.sampling.processor import Processor

NAME: Final = "graft_failed"
"""The attribute of a step's output that holds the ids of requests which are to end, each with the reason."""

PROCESSORS: Final[weakref.WeakSet[Processor]] = weakref.WeakSet()
"""The processors of this worker, whose failed requests are reported after each step."""


def report(runner: Any, output: Any) -> Any:
    """Return the worker's output of a step, with the ids of requests that are to end beside it."""
    failed: dict[str, str] = {}
    for processor in PROCESSORS:
        for slot, reason in processor.failed.items():
            name = processor.request_id(slot, runner)
            if name is not None:
                failed[name] = reason
        processor.failed.clear()
    if failed:
        attach(output, NAME, failed)
    return output


def finish(scheduler: Any, output: Any, answers: Any) -> Any:
    """End the requests that a worker's output reports, each when its next output is produced.

    A request whose prompt is still being read has no answer yet; it is remembered until it has.
    """
    failed: dict[str, str] = {**getattr(scheduler, NAME, {}), **(getattr(output, NAME, None) or {})}
    if not failed:
        return answers
    from vllm.v1.engine import FinishReason
    from vllm.v1.request import RequestStatus

    for answer in answers.values():
        for one in answer.outputs:
            if one.request_id in failed and one.finish_reason is None:
                one.finish_reason = FinishReason.ERROR
                one.stop_reason = failed[one.request_id]
                # Frees its blocks as well; without this the request would go on although its client has the answer.
                scheduler.finish_requests(one.request_id, RequestStatus.FINISHED_ERROR)
    setattr(scheduler, NAME, {name: reason for name, reason in failed.items() if name in scheduler.requests})
    return answers
