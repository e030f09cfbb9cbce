"""``cpu-seeds``: a request with a ``seed`` no longer ends a CPU engine.

A prompt that is read in parts has a row in each step, and the V1 model runner samples a token for it that is thrown
away until the prompt is read. So that such a token does not count, the runner then turns the request's generator back
by four numbers. Only generators of a GPU can do that: one of a CPU raises ``CPU Generator does not use offset``, and
the engine is dead. It takes one client, a ``seed`` and a prompt that is longer than what a step has room for.

With this patch such generators get back the state they had before the token was sampled. A seeded answer is then the
same whether its prompt was read in parts or at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.patching import VLLMPatch, wrap

if TYPE_CHECKING:
    from collections.abc import Callable


class CpuSeeds(
    VLLMPatch["vllm.v1.worker.gpu_model_runner:GPUModelRunner"],
    name="cpu-seeds",
    vllm=">=0.26,<0.33",
    why="on a CPU, a seeded request whose prompt is read in parts ends the engine: its generator has no offset",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner._bookkeeping_sync: set_offset(get_offset() - 4)",
    remove_when="vLLM turns generators back in a way that those of a CPU have, or no longer does",
    processes={"worker"},
):
    """Turn back the generators of a CPU by their state instead of an offset."""

    @wrap
    def _sample(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # `_sample` is where the token is drawn, `_bookkeeping_sync` where the runner takes it back; both on 0.26 to
        # 0.32.
        before = [(generator, generator.get_state()) for generator in _thrown_away(self).values()]
        output = call(*args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return output

    @wrap
    def _bookkeeping_sync(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The loop that would turn them back looks for them in this very dictionary.
        generators, hidden = self.input_batch.generators, _thrown_away(self)
        for index in hidden:
            del generators[index]
        try:
            return call(*args, **kwargs)
        finally:
            generators.update(hidden)


def _thrown_away(runner: Any) -> dict[int, Any]:
    """Return the generators, by row, of the requests whose token of this step is thrown away; none with a GPU."""
    batch = runner.input_batch
    if runner.device.type != "cpu" or not batch.generators:
        return {}
    discarded = runner.discard_request_mask.np[: batch.num_reqs]
    return {index: generator for index, generator in batch.generators.items() if discarded[index]}
