"""Scores of KV blocks: computed in the worker while requests decode, sent to engine core beside a step's output.

A layer that scores sums up the keys of each block when vLLM stores them, out of the tensor that is stored: how a cache
is laid out is the kernel's own affair. It also copies the last query of each request of a step into a buffer. Both are
plain work on the device without any choice on the host, so they are captured in CUDA graphs with the layer itself and
run at each replay. The scores are computed from these buffers every few steps, after the forward pass and outside of
all graphs, and copied to the host while the engine goes on: they leave with a later step than their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from vllm_graft.bindings.attention.layers import SCORES
from vllm_graft.bindings.step_output import attach

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

_GATHERED: Final = 1 << 24
"""The most numbers of keys that are gathered at once, 64 MiB: requests are scored in parts, because vLLM sets no memory
aside for it."""


def block_scores(
    queries: torch.Tensor,
    sums: torch.Tensor,
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """Return the share of attention of each block: ``[requests, blocks]``, NaN where a table has no block.

    queries: ``[requests, heads, head_size]``
    sums:    the sum of each block's keys, ``[blocks of the cache, kv_heads, head_size]``
    blocks:  the block tables, with the null block 0 where a block was evicted
    lengths: each request's tokens
    """
    requests, heads, size = queries.shape
    kv_heads = sums.shape[1]
    before = torch.arange(blocks.shape[1], device=blocks.device) * block_size
    tokens = (lengths[:, None] - before).clamp(max=block_size)
    held = (tokens > 0) & (blocks != 0)
    grouped = queries.to(sums.dtype).view(requests, kv_heads, heads // kv_heads, size)
    logits = torch.einsum("rkgd,rbkd->rkgb", grouped, sums[blocks.long()])
    # The mean of the keys, taken of what they make with the query: that is smaller.
    logits *= (scale / tokens.clamp(min=1))[:, None, None]
    shares = logits.masked_fill(~held[:, None, None], -torch.inf).softmax(-1).mean((1, 2))
    return shares.masked_fill(~held, torch.nan)


class ScoringLayer:
    """A layer whose keys are summed up by block, and whose queries are kept for the scoring after the step."""

    def __init__(self, layer: Any) -> None:
        self.heads, self.kv_heads, self.head_size = layer.num_heads, layer.num_kv_heads, layer.head_size
        self.scale = float(layer.impl.scale)
        self.sums: torch.Tensor | None = None
        """The sum of each block's keys; None until the number of blocks is known, and in workers that do not score."""
        self.queries: torch.Tensor | None = None
        """The last query of each request of the step."""
        self._block_size = 0
        self._wrap(layer.impl)

    def _wrap(self, impl: Any) -> None:
        """Have the layer's own implementation pass on its keys and queries."""
        store, attend = impl.do_kv_cache_update, impl.forward

        def do_kv_cache_update(
            layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self.add_keys(key, slot_mapping)
            return store(layer, key, value, kv_cache, slot_mapping, *args, **kwargs)

        def forward(
            layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if attn_metadata is not None:
                self.keep_queries(query, attn_metadata.query_start_loc)
            return attend(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

        impl.do_kv_cache_update, impl.forward = do_kv_cache_update, forward

    def allocate(self, blocks: int, block_size: int, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make the buffers, which stay where they are because CUDA graphs write into them."""
        self._block_size = block_size
        self.sums = torch.zeros((blocks, self.kv_heads, self.head_size), dtype=torch.float32, device=device)
        self.queries = torch.zeros((rows, self.heads, self.head_size), dtype=dtype, device=device)

    def add_keys(self, key: torch.Tensor, slots: torch.Tensor) -> None:
        """Add keys to the sums of their blocks; a block whose first slot is written begins anew."""
        if self.sums is None:
            return
        # One of the two may be padded. Block 0 is the null block, which is never scored: the place for padding.
        number = min(len(key), len(slots))
        slots = slots[:number].long().clamp(min=0)
        block = slots // self._block_size
        self.sums.index_fill_(0, torch.where(slots % self._block_size == 0, block, 0), 0.0)
        self.sums.index_add_(0, block, key[:number].view(number, self.kv_heads, self.head_size).to(self.sums.dtype))

    def keep_queries(self, query: torch.Tensor, starts: torch.Tensor) -> None:
        """Keep the last query of each request."""
        if self.queries is not None:
            last = (starts[1:] - 1).clamp(min=0).long()
            kept = query.view(-1, self.heads, self.head_size).index_select(0, last)
            self.queries[: len(last)] = kept.to(self.queries.dtype)


class BlockScorer:
    """The layers of this worker that score, and the scores that are on their way to the host."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.layers: dict[str, ScoringLayer] = {}
        """The layers that score, by name."""
        self._block_size = 0
        self._steps = 0
        self._step: CommonAttentionMetadata | None = None
        self._pending: deque[tuple[Any, torch.Tensor, Sequence[str]]] = deque()

    def watch(self, name: str, layer: Any) -> None:
        """Have a layer score; vLLM asks for a layer's spec more than once."""
        if name not in self.layers:
            self.layers[name] = ScoringLayer(layer)

    def allocate(self, blocks: int, block_size: int, config: Any, device: torch.device) -> None:
        """Make the buffers of all layers, for a KV cache of this many blocks."""
        from vllm.distributed import get_tensor_model_parallel_rank

        # The output of the first worker alone reaches engine core.
        if get_tensor_model_parallel_rank() != 0:
            return
        self._block_size = block_size
        captured = config.compilation_config.max_cudagraph_capture_size or 0
        rows = max(config.scheduler_config.max_num_seqs, captured)
        for layer in self.layers.values():
            layer.allocate(blocks, block_size, rows, device, config.model_config.dtype)

    def note_step(self, metadata: CommonAttentionMetadata) -> None:
        """Remember the rows of the step that is being prepared."""
        self._step = metadata

    def score_step(self, requests: Sequence[str]) -> None:
        """Score the blocks of the step's requests that decode, if it is time; the forward pass was queued."""
        step, self._step = self._step, None
        if step is None or not self._block_size:
            return
        starts = step.query_start_loc_cpu[: len(requests) + 1]
        decoding = (starts[1:] - starts[:-1] == 1).nonzero().flatten()
        if not len(decoding):
            return
        self._steps += 1
        if (self._steps - 1) % self.every:
            return
        with torch.inference_mode():
            scores = self._score(step, decoding)
        names = [requests[row] for row in decoding.tolist()]
        self._pending.append((*_copy_to_host(scores), names))

    def _score(self, step: CommonAttentionMetadata, rows: torch.Tensor) -> torch.Tensor:
        table = step.block_table_tensor
        width = min(table.shape[1], -(-step.max_seq_len // self._block_size))
        if table.is_cuda:
            rows = rows.pin_memory().to(table.device, non_blocking=True)
        largest = max(layer.kv_heads * layer.head_size for layer in self.layers.values())
        parts = [
            torch.stack([self._score_part(layer, step, part, width) for layer in self.layers.values()]).mean(0)
            for part in rows.split(max(1, _GATHERED // (width * largest)))
        ]
        return torch.cat(parts)

    def _score_part(
        self, layer: ScoringLayer, step: CommonAttentionMetadata, rows: torch.Tensor, width: int
    ) -> torch.Tensor:
        assert layer.sums is not None
        assert layer.queries is not None
        blocks, lengths = step.block_table_tensor[rows, :width], step.seq_lens[rows]
        return block_scores(layer.queries[rows], layer.sums, blocks, lengths, self._block_size, layer.scale)

    def take_scores(self) -> dict[str, np.ndarray]:
        """Return the scores that have arrived on the host, by request."""
        found: dict[str, np.ndarray] = {}
        while self._pending and (self._pending[0][0] is None or self._pending[0][0].query()):
            _, scores, names = self._pending.popleft()
            found |= {name: _without_end(row) for name, row in zip(names, scores.numpy(), strict=True)}
        return found

    def report(self, output: Any) -> Any:
        """Return the output of a step, with the scores that have arrived beside it."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        # The empty output is one object for all steps.
        if output is None or output is EMPTY_MODEL_RUNNER_OUTPUT:
            return output
        if found := self.take_scores():
            attach(output, SCORES, found)
        return output


def _copy_to_host(scores: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Begin to copy scores to the host; return the event after the copy, None if they are there."""
    if not scores.is_cuda:
        return None, scores
    copy = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
    copy.copy_(scores, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event, copy


def _without_end(row: np.ndarray) -> np.ndarray:
    """Return a row up to its last score: rows are as long as the longest request of their step."""
    known = np.flatnonzero(~np.isnan(row))
    # A copy, because a view would be sent with the whole.
    return row[: known[-1] + 1 if len(known) else 0].copy()


def step_requests(runner: Any) -> Sequence[str]:
    """Return the requests of the step that a model runner has computed, in the order of its rows."""
    # The V2 runner has a batch for each step, the V1 runner one for all.
    batch = getattr(runner, "input_batch", None)
    if batch is None:
        state = runner.execute_model_state
        batch = state.input_batch if state is not None else None
    return list(batch.req_ids) if batch is not None else []


def unscorable(config: Any) -> str:
    """Return why blocks cannot be scored in an engine; empty if they can."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "its policy wants scores, but with pipeline parallelism the last stage alone reports to engine core"
    if any(getattr(parallel, f"{kind}_context_parallel_size", 1) > 1 for kind in ("decode", "prefill")):
        return "its policy wants scores, but with context parallelism a worker has a part of each request's keys"
    if getattr(parallel, "use_ubatching", False):
        return "its policy wants scores, but with micro-batches a step has more than one set of rows"
    if config.speculative_config is not None:
        return "its policy wants scores, but the keys of drafts that were not accepted would count"
    if getattr(config.compilation_config.pass_config, "fuse_rope_kvcache", False):
        return "its policy wants scores, but with fuse_rope_kvcache vLLM stores keys that no layer is shown"
    return ""
