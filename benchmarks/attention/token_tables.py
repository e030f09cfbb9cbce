"""Tables with a page for each token of a window, tried beside compacted block tables; nothing that ships uses them.

A block table cannot say that a window begins inside a block; a table of tokens can, and FlashAttention 3 then needs no
window of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 128
"""Entries of a table that one program writes."""


@triton.jit
def _tokens_kernel(
    lengths,
    blocks,
    row_step,
    tokens_lengths,
    tokens,
    tokens_step,
    STRIDE: tl.constexpr,
    SLIDING: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One piece of a row's table of the tokens in its window."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.load(lengths + row)
    begin = tl.maximum(length - SLIDING, 0)
    left = length - begin
    token = begin + column
    number = tl.load(blocks + row * row_step + token // BLOCK, mask=column < left, other=0)
    tl.store(tokens + row * tokens_step + column, number * STRIDE + token % BLOCK, mask=column < left)
    if tl.program_id(1) == 0:
        tl.store(tokens_lengths + row, left)


def list_tokens(
    lengths: torch.Tensor,
    blocks: torch.Tensor,
    tokens_lengths: torch.Tensor,
    tokens: torch.Tensor,
    block_size: int,
    sliding: int,
    stride: int,
) -> None:
    """Write the lengths and tables of rows of one token each, a page for each token of a window.

    ``stride`` is how many tokens lie between the beginnings of two blocks of the cache.
    """
    _tokens_kernel[(len(lengths), triton.cdiv(tokens.shape[1], _COLUMNS))](
        lengths,
        blocks,
        blocks.stride(0),
        tokens_lengths,
        tokens,
        tokens.stride(0),
        STRIDE=stride,
        SLIDING=sliding,
        BLOCK=block_size,
        COLUMNS=_COLUMNS,
    )
