"""XTC by Triton: one pass over the rows that were drawn, and a second look at the few pieces with probable tokens."""

# Kernels take pointers and numbers, whose types Triton infers from each call.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PIECE = 4096


@triton.jit
def _pieces_kernel(
    logits, row_step, rows, slots, draws, chances, vocabulary, pieces, greatest, sums, PIECE: tl.constexpr
):
    """The greatest logit of each piece of a row, and the sum of exponentials relative to it."""
    number = tl.program_id(0)
    if tl.load(draws + number) >= tl.load(chances + tl.load(slots + number)):
        return
    piece = tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    row = logits + tl.load(rows + number).to(tl.int64) * row_step
    values = tl.load(row + at, mask=at < vocabulary, other=float("-inf"))
    top = tl.max(values, 0)
    pivot = tl.where(top > float("-inf"), top, 0.0)
    tl.store(greatest + number * pieces + piece, top)
    tl.store(sums + number * pieces + piece, tl.sum(tl.exp(values - pivot), 0))


@triton.jit
def _exclude_kernel(
    logits, row_step, rows, slots, draws, chances, logarithms, vocabulary, pieces, greatest, sums,
    PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One program for each row: find the least of the probable logits, then take away what is above it."""
    number = tl.program_id(0)
    slot = tl.load(slots + number)
    if tl.load(draws + number) >= tl.load(chances + slot):
        return
    each = tl.arange(0, PIECES)
    tops = tl.load(greatest + number * pieces + each, mask=each < pieces, other=float("-inf"))
    top = tl.max(tops, 0)
    if top == float("-inf"):
        return
    parts = tl.load(sums + number * pieces + each, mask=each < pieces, other=0.0)
    limit = top + tl.log(tl.sum(parts * tl.exp(tops - top), 0)) + tl.load(logarithms + slot)
    row = logits + tl.load(rows + number).to(tl.int64) * row_step
    least = top
    for piece in range(0, pieces):
        if tl.load(greatest + number * pieces + piece) >= limit:
            at = piece * PIECE + tl.arange(0, PIECE)
            values = tl.load(row + at, mask=at < vocabulary, other=float("-inf"))
            probable = (values >= limit) & (values > float("-inf"))
            least = tl.minimum(least, tl.min(tl.where(probable, values, float("inf")), 0))
    if least < top:
        for piece in range(0, pieces):
            if tl.load(greatest + number * pieces + piece) > least:
                at = piece * PIECE + tl.arange(0, PIECE)
                values = tl.load(row + at, mask=at < vocabulary, other=float("-inf"))
                tl.store(row + at, float("-inf"), mask=(at < vocabulary) & (values > least))


def exclude(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    draws: torch.Tensor,
    *,
    chances: torch.Tensor,
    logarithms: torch.Tensor,
) -> None:
    """Keep only the least probable of the tokens above the threshold, in rows whose draw is below their chance.

    ``chances`` and ``logarithms``, of the thresholds, have an entry for each slot.
    """
    vocabulary = logits.shape[1]
    count, pieces = rows.shape[0], triton.cdiv(vocabulary, _PIECE)
    # Two allocations: Triton compiles anew for pointers that are not aligned to 16 bytes, as halves of one may be.
    greatest, sums = (torch.empty((count, pieces), dtype=torch.float32, device=logits.device) for _ in range(2))
    _pieces_kernel[(count, pieces)](
        logits, logits.stride(0), rows, slots, draws, chances, vocabulary, pieces, greatest, sums, _PIECE
    )  # fmt: skip
    _exclude_kernel[(count,)](
        logits, logits.stride(0), rows, slots, draws, chances, logarithms, vocabulary, pieces, greatest, sums,
        _PIECE, triton.next_power_of_2(pieces), num_warps=8,
    )  # fmt: skip
