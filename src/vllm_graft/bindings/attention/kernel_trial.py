"""A trial of a kernel at the start: two small batches with numbers made up, through ``store`` and ``forward``.

vLLM's own warm-up does not reach a kernel everywhere: on CPUs it runs without a KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_graft.bindings.attention.kernel import wrong_output
from vllm_graft.contracts import AttentionBatch, AttentionKernel
from vllm_graft.errors import StartError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """A request of a trial: the tokens of its step, and all that it has in the cache with them."""

    tokens: int
    length: int


def try_kernel(kernel: AttentionKernel, dtype: torch.dtype, device: torch.device) -> None:
    """Run the kernel on a batch of everything and on one that only decodes; raise what it raises, or StartError."""
    import torch

    block = kernel.layer.block_size
    # A prompt longer than a block, the second part of one, a single token at the end of a block.
    mixed = [TrialRequest(block + 1, block + 1), TrialRequest(3, block + 5), TrialRequest(1, block)]
    decodes = [TrialRequest(1, length) for length in (1, block, block + 1)]
    with torch.inference_mode():
        for requests in (mixed, decodes):
            _try_batch(kernel, requests, dtype, device)


def _try_batch(
    kernel: AttentionKernel, requests: Sequence[TrialRequest], dtype: torch.dtype, device: torch.device
) -> None:
    import torch

    layer = kernel.layer
    # A generator of its own: requests that use the server's seed must not depend on the trial.
    generator = torch.Generator().manual_seed(0)

    def numbers(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, layer.head_size, generator=generator).to(device, dtype)

    # Block 0 is vLLM's null block; two blocks hold each request.
    cache = torch.zeros(
        1 + 2 * len(requests), layer.kv_heads, layer.block_size, 2 * layer.head_size, dtype=dtype, device=device
    )
    ends = torch.tensor([0, *(request.tokens for request in requests)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    first = [1 + 2 * number for number in range(len(requests))]
    slots = [
        block * layer.block_size + position
        for block, request in zip(first, requests, strict=True)
        for position in range(request.length)
    ]
    key, value = numbers(len(slots) + 1, layer.kv_heads), numbers(len(slots) + 1, layer.kv_heads)
    kernel.store(key, value, cache, torch.tensor([*slots, -1], device=device))
    step = _rows_of_step(requests)
    query = numbers(len(step), layer.heads)
    batch = AttentionBatch(
        starts=ends.to(device),
        lengths=torch.tensor([request.length for request in requests], dtype=torch.int32, device=device),
        blocks=torch.tensor([[block, block + 1] for block in first], dtype=torch.int32, device=device),
        max_query=max(request.tokens for request in requests),
        max_length=max(request.length for request in requests),
    )
    made = kernel.forward(query, key[step], value[step], cache, batch)
    if problem := wrong_output(made, query):
        raise StartError(problem)
    if not bool(made.isfinite().all()):
        raise StartError("forward() returned NaN or infinity")


def _rows_of_step(requests: Sequence[TrialRequest]) -> list[int]:
    """Return which of all stored tokens are those of the step: each request's last."""
    rows: list[int] = []
    stored = 0
    for request in requests:
        stored += request.length
        rows += range(stored - request.tokens, stored)
    return rows
