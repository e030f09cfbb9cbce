"""KV-cache specs and managers for layers with a window: what is freed, and what the prefix cache may answer.

A spec is made in the worker, pickled to engine core and back, and names its manager there, so both classes stand at
the top of this module; importing it registers them. The managers of vLLM's sliding window kept their shape from 0.26
to 0.32. They know one window that ends at the last token; what is added here is the first tokens, which stay too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.bindings.attention.request_windows import stamped_window

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(SlidingWindowSpec):
    """The KV cache of a layer that keeps its first tokens and a window.

    ``sliding_window`` is what the base class works with. It is so much larger than the window that the base frees a
    block only after the window has left it, wherever inside a step the last token is. ``whole`` tells a window that
    leaves out nothing, and that single requests narrow.
    """

    first: int
    before: int
    step: int
    whole: bool = False

    def __post_init__(self) -> None:
        """Fit the window anew to blocks that it does not consist of.

        vLLM gives larger blocks to layers whose pages are smaller than those of others, after it was given the spec.
        """
        super().__post_init__()
        if not (self.first % self.block_size or self.step % self.block_size):
            return
        if self.whole:
            shape = WindowShape.whole(self.first, self.before, self.block_size)
        else:
            shape = WindowShape.fit(self.first, self.before + self.step, self.block_size)
        for name, value in {**asdict(shape), "sliding_window": _reach(shape, self.block_size)}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, spec: FullAttentionSpec, shape: WindowShape, *, whole: bool = False) -> SinkWindowSpec:
        """Return the spec of a layer with full attention, with a window instead."""
        # Each release has other fields in common to the two specs: a padded page, the size of a value, quantization.
        own = {field.name for field in fields(SlidingWindowSpec) if field.init} - {"sliding_window"}
        shared = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name in own}
        return cls(**shared, sliding_window=_reach(shape, spec.block_size), **asdict(shape), whole=whole)

    def without_window(self) -> FullAttentionSpec:
        """Return the spec of full attention, which is what a stock kernel computes over a compacted table."""
        own = {field.name for field in fields(FullAttentionSpec) if field.init} - {"sliding_window"}
        return FullAttentionSpec(
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name in own}
        )

    @property
    def shape(self) -> WindowShape:
        """The window in whole blocks."""
        return WindowShape(self.first, self.before, self.step)

    @property
    def first_blocks(self) -> int:
        """The blocks at the start of a sequence that stay."""
        return self.first // self.block_size

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the most blocks that a request holds at a time: those of the window, and the first ones."""
        sliding: int = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return min(sliding + self.first_blocks, -(-max_model_len // self.block_size))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Return whether all layers have this window, and can share one group of blocks."""
        return all(isinstance(spec, SinkWindowSpec) and spec.shape == self.shape for spec in kv_cache_specs.values())


def _reach(shape: WindowShape, block_size: int) -> int:
    """Return the sliding window by which vLLM frees the blocks before a window."""
    return shape.before + shape.step - block_size + 1


class SinkWindowManager(SlidingWindowManager):
    """Frees the blocks between a request's first tokens and its window."""

    def __init__(self, kv_cache_spec: SinkWindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.first_blocks = kv_cache_spec.first_blocks
        self.freed = 0
        """The blocks that were freed while their requests ran."""
        self.report: Callable[[], None] | None = None
        """Called before each step of the engine."""
        self.request: Request | None = None
        """The request that slots are being allocated for."""
        self._shape = kv_cache_spec.shape

    def new_step_starts(self) -> None:
        """Report what is held, once for each step."""
        super().new_step_starts()
        if self.report is not None:
            self.report()

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Free what has left the window; called before each step of a request takes blocks."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        skipped = self.get_num_skipped_tokens(processed_computed_tokens + self._narrower_by(request_id))
        end = min(skipped // self.block_size, len(blocks))
        # Backwards: those of earlier steps are null already. By index, because a slice of a long request is long.
        leaving = itertools.takewhile(
            lambda index: blocks[index] is not self._null_block, range(end - 1, self.first_blocks - 1, -1)
        )
        self.freed += sum(1 for _ in leaving)
        self._remove_blocks_in_range(request_id, self.first_blocks, end)

    def _narrower_by(self, request_id: str) -> int:
        """Return how many tokens the window of a request is narrower than the planned one."""
        request = self.request
        window = stamped_window(request.sampling_params) if request and request.request_id == request_id else None
        return self._shape.before - self._shape.narrowed(window).before if window is not None else 0

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Return how many free blocks a request takes; a cached first block that is not in use is one of them."""
        number: int = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
        )
        if request_id in self.num_cached_block:
            return number
        return number + self._get_num_evictable_blocks(self._first_hits(new_computed_blocks, total_computed_tokens))

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Give a request the blocks of a cache hit; the base class drops all before the window, the first ones too."""
        computed = num_local_computed_tokens + num_external_computed_tokens
        first = list(self._first_hits(new_computed_blocks, computed))
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens, *args, **kwargs
        )
        if first:
            self.block_pool.touch(first)
            self.req_to_blocks[request_id][: len(first)] = first

    def _first_hits(self, hits: Sequence[KVCacheBlock], computed: int) -> Sequence[KVCacheBlock]:
        """Return the blocks of a cache hit that stay though the window has left them."""
        return hits[: min(self.first_blocks, self.get_num_skipped_tokens(computed) // self.block_size)]

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: SinkWindowSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Find the longest prefix in the cache of which the window and the first blocks are all there."""
        blocks, length = super().find_longest_cache_hit(
            block_hashes,
            max_length,
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            drop_eagle_block,
            alignment_tokens,
            *args,
            **kwargs,
        )
        # Hashes of blocks of this group's size, which may be a multiple of the size that is hashed.
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            kv_cache_spec.block_size,
            supports_fine_grained_hash_lookup=False,
            alignment_tokens=alignment_tokens,
        )
        for index in range(min(kv_cache_spec.first_blocks, len(blocks[0]))):
            if blocks[0][index] is not block_pool.null_block:
                continue
            cached = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            if not cached:
                # What comes before it is a hit of its own: all of its blocks are first blocks. Of every hit the last
                # block is dropped if a drafter has to compute it again.
                found_blocks = max(index - 1, 0) if drop_eagle_block else index
                length = found_blocks * kv_cache_spec.block_size // alignment_tokens * alignment_tokens
                for found in blocks:
                    del found[length // kv_cache_spec.block_size :]
                return blocks, length
            for found, block in zip(blocks, cached, strict=True):
                found[index] = block
        return blocks, length

    @classmethod
    def reachable_block_mask(cls, *args: Any, **kwargs: Any) -> list[bool] | None:
        """Let every whole block into the prefix cache, as full attention does.

        From 0.29 on the base class caches the ends of prompts alone, so that requests with a common beginning and
        different questions would share nothing.
        """
        return None


# The registry fills itself with vLLM's own specs on first use, but only while it is empty (0.26 to 0.32).
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(SinkWindowSpec, SinkWindowManager, SinkWindowSpec)
