"""Stock attention backends with a metadata builder that compacts the rows of each step.

vLLM chooses a backend for a layer; ``compacting_backend`` derives one from it that differs in its builder alone. The
stock builder is called with compacted rows and makes its own metadata from them, so that everything a release adds to
it is inherited. The kernel is the stock one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.attention import token_tables
from vllm_graft.bindings.attention.compaction import (
    StepRows,
    WindowShape,
    cut,
    rows_after_cut,
    shift,
    without_empty,
    without_null,
)
from vllm_graft.bindings.attention.layer_budget import MeteredCall
from vllm_graft.errors import ServingError

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata

    from vllm_graft.bindings.attention.request_windows import RowWindows
    from vllm_graft.ledger import Meter

SERVED: Final = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""The stock backends whose metadata is made of rows alone. Others plan their work on the host from lengths that a
compaction does not have there."""

_OF_ROWS: Final = (
    "seq_lens_cpu_upper_bound", "is_prefilling", "req_idx", "_seq_lens_cpu", "_num_computed_tokens_cpu",
    "_num_computed_tokens_cache", "_token_to_req_indices_cache",
)  # fmt: skip
"""Fields of vLLM's metadata that describe the rows before the compaction. Each release has some of them, none of the
served backends reads one, and all may be None."""


@functools.cache
def compacting_backend(
    stock: type[AttentionBackend],
    on_builder: Callable[[Sequence[str]], Callable[[CommonAttentionMetadata], None] | None],
    meter: Callable[[], Meter],
    row_windows: RowWindows,
) -> type[AttentionBackend]:
    """Derive a backend whose builder compacts rows; the same stock backend gives the same class.

    ``on_builder`` is called with the names of the layers that a builder is made for. What it returns is called with the
    rows of each step of the builder before they are compacted. ``meter`` returns what counts the time of compacting
    them, ``row_windows`` knows the requests that have windows of their own.
    """
    builder = _compacting_builder(stock.get_builder_cls(), on_builder, meter, row_windows)

    class CompactingBackend(stock):
        """A stock backend with another builder. It keeps the name, which vLLM looks up among its own."""

        compacts = True

        @staticmethod
        def get_builder_cls() -> type:
            return builder

    CompactingBackend.__name__ = CompactingBackend.__qualname__ = f"Compacting{stock.__name__}"
    return CompactingBackend


def _compacting_builder(
    stock: Any,
    on_builder: Callable[[Sequence[str]], Callable[[CommonAttentionMetadata], None] | None],
    meter: Callable[[], Meter],
    row_windows: RowWindows,
) -> type:
    from vllm.v1.attention.backend import AttentionCGSupport

    class CompactingBuilder(stock):
        """A stock builder that is given compacted rows."""

        # A step with drafts or prompts has another number of rows than of requests, so only steps of single tokens are
        # captured whole; the others run with piecewise graphs.
        _cudagraph_support = min(
            stock._cudagraph_support, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda each: each.value
        )
        # Metadata of one group of layers with the block table of another would miss the compaction.
        supports_update_block_table = False
        supports_draft_decode_metadata_update = False

        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **kw: Any
        ) -> None:
            # Up to 0.27 stock builders have the kernel apply the window of the spec, which is not meant for kernels.
            plain = kv_cache_spec.without_window() if hasattr(kv_cache_spec, "without_window") else kv_cache_spec
            super().__init__(plain, layer_names, vllm_config, device, **kw)
            self.supports_draft_decode_metadata_update = False
            self._compactor = Compactor(kv_cache_spec, layer_names, vllm_config, device, row_windows)
            self._metered = MeteredCall(meter())
            self._on_step = on_builder(layer_names)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            if common_attn_metadata.causal is not True:
                # A tensor with an answer for each request from 0.32 on.
                raise ServingError(
                    "vLLM asks for attention to later tokens, which KV policies do not serve",
                    where=self.layer_names[0],
                    fix="remove the policy from the plan for this model, or leave its drafter out",
                )
            if self._on_step is not None:
                self._on_step(common_attn_metadata)
            compacted = self._metered.run(
                lambda: self._compactor.compact(common_attn_metadata), common_attn_metadata.seq_lens.device
            )
            # FlashAttention 3 plans its work in a buffer for as many rows as there can be requests.
            more = compacted.num_reqs > common_attn_metadata.num_reqs
            metadata = super().build(0, compacted, fast_build or more)
            if self._compactor.lists_tokens(common_attn_metadata):
                setattr(metadata, token_tables.MARK, True)
            return metadata

        def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
            # Up to 0.31: a common prefix is attended to apart, with the stock tables.
            return False

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            return cls._cudagraph_support

        @classmethod
        def get_varlen_cudagraph_max_query_len(cls, *args: Any, **kwargs: Any) -> None:
            return None

    CompactingBuilder.__name__ = CompactingBuilder.__qualname__ = f"Compacting{stock.__name__}"
    return CompactingBuilder


class Compactor:
    """Compacts the rows of each step for one group of layers, all of which have one window.

    Steps of single tokens are written into buffers that stay where they are, because CUDA graphs read them there.
    """

    def __init__(
        self, spec: Any, layers: Sequence[str], config: Any, device: torch.device, row_windows: RowWindows
    ) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self.block_size: int = spec.block_size
        self.shape: WindowShape | None = getattr(spec, "shape", None)
        """The window that the plan gave these layers; None for a window of the model's own."""
        # Without its hybrid KV-cache manager, vLLM notes a window of the model in a spec of full attention.
        self.sliding = 0 if self.shape else int(getattr(spec, "sliding_window", None) or 0)
        self.evicts = isinstance(spec, FullAttentionSpec) and not self.sliding
        """Whether blocks are evicted one by one, and are null in the tables."""
        if self.evicts:
            most = config.model_config.max_model_len + config.scheduler_config.max_num_batched_tokens
        else:
            most = self.shape.most if self.shape else self.sliding + self.block_size - 1
        self.most = most
        """The most tokens of a row of one query."""
        self.on_cpu = torch.device(device).type == "cpu"
        self._layers, self._config, self._row_windows = layers, config, row_windows
        self._stride: int | None = None
        """The token stride of the layers' caches; 0 where the tables are of blocks, None before the first step."""
        self._compiled = False
        """Whether the kernel for requests with windows of their own is compiled."""
        if self.on_cpu:
            return
        captured = config.compilation_config.max_cudagraph_capture_size or 0
        rows = max(config.scheduler_config.max_num_seqs, captured)
        self._rows = rows
        width = -(-self.most // self.block_size)
        self._blocks = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    def compact(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the metadata of a step with compacted rows."""
        rows = StepRows(metadata.query_start_loc, metadata.seq_lens, metadata.block_table_tensor)
        starts_cpu, longest, most = metadata.query_start_loc_cpu, metadata.max_query_len, self.most
        if self.evicts:
            rows = self._compact_evicted(rows)
        elif self.lists_tokens(metadata):
            rows, most = self._list_tokens(rows), self.sliding
        elif longest == 1 and not self.on_cpu:
            rows = self._compact_single_tokens(rows)
        elif self.shape is None:
            rows, most = shift(rows, self.sliding, self.block_size), most + longest
        else:
            before = self._row_windows.before(self.shape, len(rows.lengths), rows.lengths.device)
            rows = cut(rows, self.shape, self.block_size, rows_after_cut(starts_cpu, self.shape.step), before)
            longest = min(longest, self.shape.step)
            if self.on_cpu:
                rows = without_empty(rows)
                starts_cpu = rows.starts
        return _replace_rows(metadata, rows, starts_cpu, longest, min(metadata.max_seq_len, most))

    def lists_tokens(self, metadata: CommonAttentionMetadata) -> bool:
        """Return whether the rows of a step get tables of tokens instead of blocks."""
        if self.on_cpu or not self.sliding or metadata.max_query_len != 1:
            return False
        if self._stride is None:
            self._stride = self._find_stride()
        return self._stride > 0

    def _find_stride(self) -> int:
        """Return the token stride of the layers' caches, which exist by the first step; 0 where blocks it must be."""
        import torch

        if not token_tables.fits(self._rows, self.sliding):
            return 0
        stride = token_tables.common_stride(self._layers, self._config)
        if stride:
            shape = (self._rows, self.sliding)
            self._tokens = torch.zeros(shape, dtype=torch.int32, device=self._blocks.device)
        return stride

    def _list_tokens(self, rows: StepRows) -> StepRows:
        from vllm_graft.bindings.attention.triton_kernels import list_tokens

        assert self._stride
        number = len(rows.lengths)
        tokens, lengths = self._tokens[:number], self._lengths[:number]
        list_tokens(rows.lengths, rows.blocks, lengths, tokens, self.block_size, self.sliding, self._stride)
        return StepRows(rows.starts, lengths, tokens)

    def _compact_evicted(self, rows: StepRows) -> StepRows:
        if self.on_cpu:
            return without_null(rows, self.block_size)
        from vllm_graft.bindings.attention.triton_kernels import compact_evicted

        number, width = rows.blocks.shape
        blocks, lengths = self._blocks[:number, :width], self._lengths[:number]
        compact_evicted(rows.lengths, rows.blocks, lengths, blocks, self.block_size)
        return StepRows(rows.starts, lengths, blocks)

    def _compact_single_tokens(self, rows: StepRows) -> StepRows:
        import torch

        from vllm_graft.bindings.attention.triton_kernels import compact_single_tokens

        number = len(rows.lengths)
        blocks, lengths = self._blocks[:number], self._lengths[:number]
        before = self._row_windows.before(self.shape, number, rows.lengths.device) if self.shape else None
        compact = functools.partial(
            compact_single_tokens, rows.lengths, rows.blocks, lengths, blocks, self.block_size, self.shape, self.sliding
        )
        if self.shape is not None and self._row_windows.possible and not self._compiled:
            # In the first step, which vLLM makes itself before it serves: the first request with a window of its own
            # would wait for the compiler, and with --jit-monitor-mode=error it would end the engine.
            compact(torch.full_like(lengths, self.shape.before))
            self._compiled = True
        compact(before)
        return StepRows(rows.starts, lengths, blocks)


def _replace_rows(
    metadata: CommonAttentionMetadata, rows: StepRows, starts_cpu: torch.Tensor, longest: int, most: int
) -> CommonAttentionMetadata:
    known = {field.name for field in dataclasses.fields(metadata)}
    return dataclasses.replace(
        metadata,
        query_start_loc=rows.starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=rows.lengths,
        block_table_tensor=rows.blocks,
        num_reqs=len(rows.lengths),
        max_query_len=longest,
        max_seq_len=most,
        **{name: None for name in _OF_ROWS if name in known},
    )
