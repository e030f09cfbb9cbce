"""The Triton kernel of the binding: the block tables of a step of single tokens, compacted in one launch.

A module of its own, because ``triton.jit`` decorates at import and most CPU builds of vLLM have no Triton.
"""

# Kernels take pointers and numbers, whose types Triton infers from each call.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from vllm_graft.bindings.attention.compaction import WindowShape

_COLUMNS: Final = 512


@triton.jit
def _compact_kernel(
    lengths,
    blocks,
    row_step,
    compacted_lengths,
    compacted,
    compacted_step,
    width,
    befores,
    OWN: tl.constexpr,
    FIRST: tl.constexpr,
    BEFORE: tl.constexpr,
    STEP: tl.constexpr,
    SLIDING: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One piece of a row's block table without the blocks between its first tokens and its window."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.load(lengths + row)
    position = tl.maximum(length - 1, 0)
    if SLIDING:
        gap = tl.maximum(position - SLIDING + 1, 0) // BLOCK * BLOCK
    elif OWN:
        gap = tl.maximum(position // STEP * STEP - tl.load(befores + row) - FIRST, 0)
    else:
        gap = tl.maximum(position // STEP * STEP - BEFORE - FIRST, 0)
    left = length - gap
    # Padding of a captured batch has length 0, and rows shorter than the table end early: nothing is read there.
    there = (column < width) & (column * BLOCK < left)
    source = tl.where(column * BLOCK < FIRST, column, column + gap // BLOCK)
    number = tl.load(blocks + row * row_step + source, mask=there, other=0)
    tl.store(compacted + row * compacted_step + column, number, mask=column < width)
    if tl.program_id(1) == 0:
        tl.store(compacted_lengths + row, left)


@triton.jit
def _evicted_kernel(
    lengths, blocks, row_step, compacted_lengths, compacted, compacted_step, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """A row's block table without its null blocks, piece by piece."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    used = (length + BLOCK - 1) // BLOCK
    kept = 0
    for begin in range(0, used, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        number = tl.load(blocks + row * row_step + column, mask=column < used, other=0)
        there = (number != 0).to(tl.int32)
        at = kept + tl.cumsum(there, 0) - there
        tl.store(compacted + row * compacted_step + at, number, mask=there != 0)
        kept += tl.sum(there, 0)
    tl.store(compacted_lengths + row, length - (used - kept) * BLOCK)


def compact_evicted(
    lengths: torch.Tensor,
    blocks: torch.Tensor,
    compacted_lengths: torch.Tensor,
    compacted: torch.Tensor,
    block_size: int,
) -> None:
    """Write the lengths and block tables of rows without the null blocks that stand for evicted ones."""
    _evicted_kernel[(len(lengths),)](
        lengths,
        blocks,
        blocks.stride(0),
        compacted_lengths,
        compacted,
        compacted.stride(0),
        BLOCK=block_size,
        COLUMNS=_COLUMNS,
    )


def compact_single_tokens(
    lengths: torch.Tensor,
    blocks: torch.Tensor,
    compacted_lengths: torch.Tensor,
    compacted: torch.Tensor,
    block_size: int,
    shape: WindowShape | None,
    sliding: int,
    before: torch.Tensor | None = None,
) -> None:
    """Write the compacted lengths and block tables of rows of one token each.

    ``shape`` is a planned window, or None for a window of the model's own, of ``sliding`` tokens. ``before`` is that of
    each row, if requests have narrower windows of their own.
    """
    width = compacted.shape[1]
    _compact_kernel[(len(lengths), triton.cdiv(width, _COLUMNS))](
        lengths,
        blocks,
        blocks.stride(0),
        compacted_lengths,
        compacted,
        compacted.stride(0),
        width,
        lengths if before is None else before,
        OWN=before is not None,
        FIRST=shape.first if shape else 0,
        BEFORE=shape.before if shape else 0,
        STEP=shape.step if shape else 1,
        SLIDING=0 if shape else sliding,
        BLOCK=block_size,
        COLUMNS=_COLUMNS,
    )


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
