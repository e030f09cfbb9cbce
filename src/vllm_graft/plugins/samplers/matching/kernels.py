"""Matches of many rows and the changes that follow from them, by Triton: about one read of the tokens.

A program compares one block of a row's tokens with the row's end, one token further back with each turn, until no
place of the block matches any more: in a text that does not repeat itself that is after one or two turns. What is to
be written is computed from untouched logits first and written by a second kernel, so that a token that occurs twice
is changed once.
"""

# Kernels take pointers and numbers, whose types Triton infers from each call.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.contracts import Rows
from vllm_graft.plugins.samplers.matching import MAX_MATCH

_BLOCK = 1024
_ROW_BLOCK = 4096


@triton.jit
def _in_set(sets, words, which, token, vocabulary):
    """1 for tokens that are in a set of the table, else 0."""
    known = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
    bit = (tl.load(sets + which * words + known // 32) >> (known % 32)) & 1
    return tl.where(token == known, bit, 0)


@triton.jit
def _match(
    line, at, start, columns, sets, words, which, vocabulary, alive, BREAKS: tl.constexpr, MAX_MATCH: tl.constexpr
):
    """Count the tokens right before each of the columns ``at`` that equal the end of the line, where ``alive``."""
    lengths = tl.zeros_like(at)
    back = 0
    going = tl.max(alive.to(tl.int32), 0)
    while going > 0:
        end = tl.load(line + columns - 1 - back)
        # What ends all matches is said by a start that no place reaches.
        first = tl.where(end >= 0, start, columns)
        if BREAKS:
            first = tl.where(_in_set(sets, words, which, end, vocabulary) == 0, first, columns)
        place = at - 1 - back
        inside = alive & (place >= first)
        alive = inside & (tl.load(line + place, mask=inside, other=-1) == end)
        lengths += alive.to(tl.int32)
        back += 1
        going = tl.where(back < MAX_MATCH, tl.max(alive.to(tl.int32), 0), 0)
    return lengths


@triton.jit
def _lowered_kernel(
    logits, row_step, rows, slots, tokens, columns, windows, sets, words, set_of_slot, multipliers, bases, allowed,
    vocabulary, lowered, GREATEST: tl.constexpr, MAX_MATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the most that the logit of each token of the window may be; inf where nothing follows from its place."""
    number = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + number)
    line = tokens + number.to(tl.int64) * columns
    multiplier = tl.load(multipliers + slot)
    least = tl.load(allowed + slot).to(tl.int32)
    start = tl.where(multiplier > 0, columns - tl.load(windows + slot).to(tl.int32), columns)
    token = tl.load(line + at, mask=at < columns, other=-1)
    wanted = (at > start) & (token >= 0) & (token < vocabulary)
    which = tl.load(set_of_slot + slot)
    lengths = _match(line, at, start, columns, sets, words, which, vocabulary, wanted, True, MAX_MATCH)
    meant = wanted & (lengths >= least)
    growth = tl.exp2(tl.log2(tl.load(bases + slot)) * (lengths - least).to(tl.float32))
    penalty = tl.minimum(multiplier * growth, GREATEST)
    row = tl.load(rows + number).to(tl.int64)
    logit = tl.load(logits + row * row_step + token, mask=meant, other=0.0)
    tl.store(lowered + number.to(tl.int64) * columns + at, tl.where(meant, logit - penalty, float("inf")), at < columns)


@triton.jit
def _write_lowered_kernel(logits, row_step, rows, tokens, columns, lowered, BLOCK: tl.constexpr):
    """The least of what was computed for a token becomes its logit."""
    number = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = number.to(tl.int64) * columns + at
    value = tl.load(lowered + place, mask=at < columns, other=float("inf"))
    # If it is -inf already, there is nothing to write.
    meant = (value < float("inf")) & (value > float("-inf"))
    token = tl.load(tokens + place, mask=meant, other=0)
    row = tl.load(rows + number).to(tl.int64)
    tl.atomic_min(logits + row * row_step + token, value, mask=meant, sem="relaxed")


@triton.jit
def _banned_kernel(
    slots, tokens, columns, windows, sets, words, set_of_slot, needed, vocabulary, banned,
    MAX_MATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the tokens of the window that would complete a sequence; -1 at the other places."""
    number = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + number)
    line = tokens + number.to(tl.int64) * columns
    least = tl.load(needed + slot).to(tl.int32)
    start = tl.where(least <= MAX_MATCH, columns - tl.load(windows + slot).to(tl.int32), columns)
    token = tl.load(line + at, mask=at < columns, other=-1)
    free = _in_set(sets, words, tl.load(set_of_slot + slot), token, vocabulary)
    wanted = (at >= start) & (token >= 0) & (token < vocabulary) & (free == 0)
    lengths = _match(line, at, start, columns, sets, words, 0, vocabulary, wanted, False, MAX_MATCH)
    meant = wanted & (lengths >= least)
    tl.store(banned + number.to(tl.int64) * columns + at, tl.where(meant, token, -1), at < columns)


@triton.jit
def _write_banned_kernel(
    logits, row_step, rows, banned, columns, before, vocabulary, BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr
):
    """One program bans all of a row's tokens, and takes that back if none stays possible."""
    number = tl.program_id(0)
    line = banned + number.to(tl.int64) * columns
    saved = before + number.to(tl.int64) * columns
    row = logits + tl.load(rows + number).to(tl.int64) * row_step
    some = 0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(line + at, mask=at < columns, other=-1)
        tl.store(saved + at, tl.load(row + token, mask=token >= 0, other=0.0), mask=token >= 0)
        some = tl.maximum(some, tl.max((token >= 0).to(tl.int32), 0))
    if some > 0:
        # All are read before any is written: a token may be there twice.
        tl.debug_barrier()
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)
            token = tl.load(line + at, mask=at < columns, other=-1)
            tl.store(row + token, float("-inf"), mask=token >= 0)
        tl.debug_barrier()
        begin = 0
        alive = 0
        while (begin < vocabulary) & (alive == 0):
            at = begin + tl.arange(0, ROW_BLOCK)
            greatest = tl.max(tl.load(row + at, mask=at < vocabulary, other=float("-inf")), 0)
            alive = (greatest > float("-inf")).to(tl.int32)
            begin += ROW_BLOCK
        if alive == 0:
            for first in range(0, columns, BLOCK):
                at = first + tl.arange(0, BLOCK)
                token = tl.load(line + at, mask=at < columns, other=-1)
                tl.store(row + token, tl.load(saved + at, mask=token >= 0, other=0.0), mask=token >= 0)


def lower_repetitions(
    logits: torch.Tensor,
    rows: Rows,
    tokens: torch.Tensor,
    *,
    windows: torch.Tensor,
    sets: torch.Tensor,
    set_of_slot: torch.Tensor,
    multipliers: torch.Tensor,
    bases: torch.Tensor,
    allowed: torch.Tensor,
    vocabulary: int,
    greatest: float,
) -> None:
    """Lower what would continue a repetition; ``windows`` to ``allowed`` have an entry for each slot."""
    tokens, slots = tokens.to(torch.int32).contiguous(), rows.slots.to(torch.int64)
    count, columns = tokens.shape
    lowered = torch.empty((count, columns), dtype=torch.float32, device=logits.device)
    grid = (count, triton.cdiv(columns, _BLOCK))
    _lowered_kernel[grid](
        logits, logits.stride(0), rows.rows, slots, tokens, columns, windows, sets, sets.shape[1], set_of_slot,
        multipliers, bases, allowed, vocabulary, lowered, greatest, MAX_MATCH, _BLOCK,
    )  # fmt: skip
    _write_lowered_kernel[grid](logits, logits.stride(0), rows.rows, tokens, columns, lowered, _BLOCK)


def ban_repetitions(
    logits: torch.Tensor,
    rows: Rows,
    tokens: torch.Tensor,
    *,
    windows: torch.Tensor,
    sets: torch.Tensor,
    set_of_slot: torch.Tensor,
    needed: torch.Tensor,
    vocabulary: int,
) -> None:
    """Ban what would complete a sequence; ``windows`` to ``needed`` have an entry for each slot."""
    tokens, slots = tokens.to(torch.int32).contiguous(), rows.slots.to(torch.int64)
    count, columns = tokens.shape
    banned = torch.empty_like(tokens)
    _banned_kernel[(count, triton.cdiv(columns, _BLOCK))](
        slots, tokens, columns, windows, sets, sets.shape[1], set_of_slot, needed, vocabulary, banned, MAX_MATCH,
        _BLOCK,
    )  # fmt: skip
    ban(logits, rows.rows, banned)


def ban(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Set logits to -inf; a row of ``tokens`` [rows, k] that would leave nothing possible changes nothing."""
    tokens = tokens.to(torch.int32)
    count, columns = tokens.shape
    before = torch.empty((count, columns), dtype=torch.float32, device=logits.device)
    _write_banned_kernel[(count,)](
        logits, logits.stride(0), rows, tokens, columns, before, logits.shape[1], _BLOCK, _ROW_BLOCK, num_warps=8
    )  # fmt: skip
