"""A worker of vLLM's that notes what each step on a GPU is made of and how long it takes; for `serving.py --steps`."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker


class RecordingWorker(Worker):
    """vLLM's own worker, with a pair of CUDA events around each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps: list[tuple[list[list[int]], float, torch.cuda.Event, torch.cuda.Event]] = []
        self._begun: tuple[list[list[int]], float, torch.cuda.Event] | None = None

    def execute_model(self, scheduler_output: Any) -> Any:
        """The forward pass, between its start on the device's own timeline and what ``sample_tokens`` notes."""
        start = torch.cuda.Event(enable_timing=True)
        began = time.perf_counter()
        start.record()
        output = super().execute_model(scheduler_output)
        self._begun = (_shares(scheduler_output), time.perf_counter() - began, start)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The step's end."""
        began = time.perf_counter()
        output = super().sample_tokens(grammar_output)
        if self._begun is not None and self._begun[0]:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            shares, spent, start = self._begun
            self._steps.append((shares, spent + time.perf_counter() - began, start, end))
        self._begun = None
        return output

    def forget_steps(self) -> None:
        """Begin anew."""
        self._steps.clear()

    def recorded_steps(self) -> list[dict[str, Any]]:
        """Each step but the first: [new tokens, context] of its requests, and milliseconds.

        ``ms``: from the end of the step before to its own; ``inside``: from its own start; ``host``: what launching it
        took of this process's time.
        """
        torch.cuda.synchronize()
        return [
            {
                "shares": shares,
                "ms": round(before.elapsed_time(end), 3),
                "inside": round(start.elapsed_time(end), 3),
                "host": round(1000 * spent, 3),
            }
            for (*_, before), (shares, spent, start, end) in zip(self._steps, self._steps[1:], strict=False)
        ]


def _shares(output: Any) -> list[list[int]]:
    computed = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [[count, computed[name] + count] for name, count in output.num_scheduled_tokens.items()]
