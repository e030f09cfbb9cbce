"""The Triton kernels of the binding: last tokens out of a ring, and a strategy's result written into the logits.

A module of its own, because ``triton.jit`` decorates at import and most CPU builds of vLLM have no Triton.
"""

# Kernels take pointers and numbers, whose types Triton infers from each call.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_PIECE: Final = 4096
_COLUMNS: Final = 1024

# Verdicts on a row: a token is left; its result, or what was there before, holds NaN or +inf; another request's.
_LEFT: tl.constexpr = tl.constexpr(1)
_BROKEN: tl.constexpr = tl.constexpr(2)
_WAS_BROKEN: tl.constexpr = tl.constexpr(4)
_OTHERS: tl.constexpr = tl.constexpr(8)


@triton.jit(do_not_specialize=["window"])
def _last_kernel(ring, size, slots, positions, result, window, COLUMNS: tl.constexpr):
    """One piece of a row's last tokens, out of the ring."""
    number = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    line = ring + tl.load(slots + number).to(tl.int64) * size
    at = tl.load(positions + number).to(tl.int64) - window + column
    there = column < window
    tokens = tl.load(line + tl.maximum(at, 0) % size, mask=there, other=-1)
    tl.store(result + number.to(tl.int64) * window + column, tl.where(at >= 0, tokens, -1), mask=there)


def last_by_triton(ring: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    """Return the tokens before each position, [slots, window], newest in the last column, -1 where there is none."""
    count = slots.shape[0]
    result = torch.empty((count, window), dtype=ring.dtype, device=ring.device)
    grid = (count, triton.cdiv(window, _COLUMNS))
    _last_kernel[grid](ring, ring.shape[1], slots, positions, result, window, _COLUMNS)
    return result


@triton.jit
def _judge_kernel(
    logits, row_step, rows, result, result_step, vocabulary, verdicts, FORBIDDEN: tl.constexpr, PIECE: tl.constexpr
):
    """Gather what one piece of a row tells of it."""
    number = tl.program_id(0)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    there = at < vocabulary
    row = logits + tl.load(rows + number).to(tl.int64) * row_step
    before = tl.load(row + at, mask=there, other=float("-inf"))
    after = tl.load(result + number.to(tl.int64) * result_step + at, mask=there, other=float("-inf"))
    if FORBIDDEN:
        after = tl.where(before == float("-inf"), before, after)
    left = tl.max((after > float("-inf")).to(tl.int32), 0)
    broken = tl.max(((after != after) | (after == float("inf"))).to(tl.int32), 0)
    was_broken = tl.max(((before != before) | (before == float("inf"))).to(tl.int32), 0)
    tl.atomic_or(verdicts + number, left * _LEFT + broken * _BROKEN + was_broken * _WAS_BROKEN)


@triton.jit
def _write_kernel(
    logits,
    row_step,
    rows,
    result,
    result_step,
    vocabulary,
    verdicts,
    seen,
    FORBIDDEN: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Write one piece of a row that may count, and note one that its strategy has broken."""
    number = tl.program_id(0)
    verdict = tl.load(verdicts + number)
    if (verdict & (_BROKEN | _WAS_BROKEN | _OTHERS)) == _BROKEN:
        tl.store(seen, 1)
    if (verdict & (_LEFT | _BROKEN | _OTHERS)) != _LEFT:
        return
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    there = at < vocabulary
    row = logits + tl.load(rows + number).to(tl.int64) * row_step
    after = tl.load(result + number.to(tl.int64) * result_step + at, mask=there, other=0.0)
    if FORBIDDEN:
        before = tl.load(row + at, mask=there, other=0.0)
        there = there & (before != float("-inf"))
    tl.store(row + at, after, mask=there)


def write_back_by_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    result: torch.Tensor,
    *,
    mine: torch.Tensor | None,
    keep_forbidden: bool,
    seen: torch.Tensor,
) -> None:
    """Write a strategy's result back as ``isolation.write_back`` does: one pass judges each row, one writes."""
    count, vocabulary = result.shape
    result = result if result.stride(1) == 1 else result.contiguous()
    verdicts = torch.zeros(count, dtype=torch.int32, device=logits.device)
    if mine is not None:
        verdicts = torch.where(mine, verdicts, _OTHERS.value)
    grid = (count, triton.cdiv(vocabulary, _PIECE))
    given = (logits, logits.stride(0), rows, result, result.stride(0), vocabulary, verdicts)
    _judge_kernel[grid](*given, keep_forbidden, _PIECE)
    _write_kernel[grid](*given, seen, keep_forbidden, _PIECE)
