"""A worker of vLLM's that notes what each step on a GPU is made of and how long it takes; for `serving.py --steps`."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

Shares = list[list[int]]
"""New tokens and context of each request in a step."""


class RecordingWorker(Worker):
    """vLLM's own worker, with a CUDA event at the end of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps: list[tuple[Shares, float, torch.cuda.Event]] = []
        self._begun: tuple[Shares, float] | None = None

    def execute_model(self, scheduler_output: Any) -> Any:
        """The forward pass."""
        began = time.perf_counter()
        output = super().execute_model(scheduler_output)
        self._begun = (_shares(scheduler_output), time.perf_counter() - began)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The step's end."""
        began = time.perf_counter()
        output = super().sample_tokens(grammar_output)
        if self._begun is not None and self._begun[0]:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            shares, spent = self._begun
            self._steps.append((shares, spent + time.perf_counter() - began, end))
        self._begun = None
        return output

    def forget_steps(self) -> None:
        """Begin anew."""
        self._steps.clear()

    def recorded_steps(self) -> list[list[Any]]:
        """Each step but the first, as `serving.py` keeps it.

        [requests that decode, their mean context, [new tokens, context] of each prompt, milliseconds from the end of
        the step before to its own on the device, milliseconds of this process to launch it]
        """
        torch.cuda.synchronize()
        made = []
        for (*_, before), (shares, spent, end) in zip(self._steps, self._steps[1:], strict=False):
            contexts = [context for new, context in shares if new == 1]
            prompts = [share for share in shares if share[0] > 1]
            mean = round(sum(contexts) / len(contexts)) if contexts else 0
            made.append([len(contexts), mean, prompts, round(before.elapsed_time(end), 2), round(1000 * spent, 2)])
        return made


def _shares(output: Any) -> Shares:
    computed = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [[count, computed[name] + count] for name, count in output.num_scheduled_tokens.items()]
