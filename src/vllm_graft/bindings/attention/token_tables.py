"""Tables of tokens instead of blocks: exactly a model's own window, by FlashAttention 3's kernel for full attention.

A model's own window may begin inside a block, which a block table cannot say. So the stock kernel is told the window
too, and FlashAttention 3 then takes its kernel for windows, which is slower than the one for full attention. A table
with a page for each token can say it. It is as wide as the window, and FlashAttention drops a window that is as wide as
the table. Its kernels address single tokens in any case, unless pages fill a whole tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

MARK: Final = "graft_tokens"
"""The attribute of a step's metadata whose block table has a page for each token."""

_READS: Final = "graft_reads_tokens"
_LARGEST: Final = 64 << 20
"""The most bytes of a table: vLLM sets no memory aside for it."""


def read_tokens(impl: Any) -> None:
    """Have a layer's implementation follow tables of tokens, if it is FlashAttention 3; others need whole blocks."""
    if getattr(impl, "vllm_flash_attn_version", None) != 3 or getattr(impl, _READS, False):
        return
    attend = impl.forward

    def forward(
        layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        cache = by_token(kv_cache) if getattr(attn_metadata, MARK, False) else kv_cache
        return attend(layer, query, key, value, cache, attn_metadata, *args, **kwargs)

    impl.forward = forward
    setattr(impl, _READS, True)


def token_stride(cache: torch.Tensor) -> int:
    """Return how many tokens lie between the beginnings of two blocks of a cache; 0 if it is no whole number.

    cache: ``[blocks, kv_heads, block_size, 2 * head_size]`` in any layout
    """
    between_blocks, _, between_tokens, _ = cache.stride()
    return 0 if between_blocks % between_tokens else between_blocks // between_tokens


def by_token(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache as pages of one token. Token ``t`` of block ``b`` is the page ``b * token_stride(cache) + t``."""
    blocks, heads, block_size, size = cache.shape
    _, between_heads, between_tokens, _ = cache.stride()
    pages = (blocks - 1) * token_stride(cache) + block_size
    return cache.as_strided((pages, heads, 1, size), (between_tokens, between_heads, between_tokens, 1))


def fits(rows: int, window: int) -> bool:
    """Return whether the tables of this many rows may be held."""
    return rows * window * 4 <= _LARGEST


def common_stride(names: Sequence[str], config: Any) -> int:
    """Return the token stride of the caches of these layers; 0 unless all have the same and follow tables of tokens."""
    if getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1:
        return 0
    layers = [config.compilation_config.static_forward_context[name] for name in names]
    if not all(getattr(layer.impl, _READS, False) for layer in layers):
        return 0
    # A list with one cache for each virtual engine in older releases.
    caches = [layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache for layer in layers]
    strides = {token_stride(cache) if cache.dim() == 4 else 0 for cache in caches}
    return strides.pop() if len(strides) == 1 else 0
