"""A request that ends with an error because its sampler raised: told by the worker, ended by the engine.

vLLM has no way to end a request from where its logits are. The worker therefore puts the names of such requests beside
its output of the step, and the engine, when it takes that output in, finishes them with the state it has for errors.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm_graft.bindings.sampling.processor import Processor

NAME: Final = "graft_failed"
"""The attribute of a step's output that names the requests which are to end, each with the reason."""

_processors: weakref.WeakSet[Processor] = weakref.WeakSet()


def remember(processor: Processor) -> None:
    """A processor of this worker, which is to be asked after each step."""
    _processors.add(processor)


def tell(runner: Any, output: Any) -> Any:
    """The worker's output of a step, with the requests that are to end named beside it."""
    failed: dict[str, str] = {}
    for processor in _processors:
        for slot, reason in processor.failed.items():
            name = processor.request_id(slot, runner)
            if name is not None:
                failed[name] = reason
        processor.failed.clear()
    if failed and output is not None:
        # With asynchronous scheduling the output is yet to come, and its frame is already there.
        frame = getattr(output, "_model_runner_output", None) or getattr(output, "model_runner_output", None)
        setattr(frame if frame is not None else output, NAME, failed)
    return output


def end(scheduler: Any, output: Any, answers: Any) -> Any:
    """The engine has taken an output in: requests that are to end do so with their first answer from now on.

    One whose prompt is still being read has none yet, and is kept in mind until it has.
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
                scheduler.finish_requests(one.request_id, RequestStatus.FINISHED_ERROR)
    setattr(scheduler, NAME, {name: reason for name, reason in failed.items() if name in scheduler.requests})
    return answers
