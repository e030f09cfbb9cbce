"""The Triton kernels behind ``kernels``: random numbers, statistics of rows, and the mask below a limit.

A module of its own, because ``triton.jit`` decorates at import and most CPU builds of vLLM have no Triton.
"""

# Kernels take pointers and numbers, whose types Triton infers from each call.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft import splitmix
from vllm_graft.contracts.rows import Statistics

_BLOCK = 256
_PIECE = 4096

# A kernel reads no global but those that are constants of the compiler.
_GAMMA: tl.constexpr = tl.constexpr(splitmix.GAMMA)
_FIRST: tl.constexpr = tl.constexpr(splitmix.FIRST)
_SECOND: tl.constexpr = tl.constexpr(splitmix.SECOND)


@triton.jit
def _mix(number):
    """Hash unsigned 64-bit numbers as ``kernels.uniform`` does: the last steps of splitmix64."""
    number = number * _GAMMA + 1
    number = (number ^ (number >> 30)) * _FIRST
    number = (number ^ (number >> 27)) * _SECOND
    return number ^ (number >> 31)


@triton.jit(do_not_specialize=["count"])
def _uniform_kernel(seeds, positions, result, count, SALT: tl.constexpr, BLOCK: tl.constexpr):
    """A number in [0, 1) for each seed and position."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    seed = tl.load(seeds + at, mask=there, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions + at, mask=there, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
    mixed = _mix(seed + _mix(position + SALT))
    tl.store(result + at, (mixed >> 40).to(tl.float32) / 16777216.0, mask=there)


# Triton compiles anew for a number that becomes 1 or a multiple of 16; what depends on the batch must not do that.
@triton.jit(do_not_specialize=["plane"])
def _pieces_kernel(logits, row_step, rows, vocabulary, pieces, parts, plane, PIECE: tl.constexpr):
    """Of one piece of a row: greatest, sum of exponentials, count, mean, and sum of squares around the mean."""
    number = tl.program_id(0)
    piece = tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    row = logits + tl.load(rows + number).to(tl.int64) * row_step
    values = tl.load(row + at, mask=at < vocabulary, other=float("-inf"))
    finite = values > float("-inf")
    greatest = tl.max(values, 0)
    pivot = tl.where(greatest > float("-inf"), greatest, 0.0)
    count = tl.sum(finite.to(tl.float32), 0)
    mean = tl.sum(tl.where(finite, values, 0.0), 0) / tl.maximum(count, 1.0)
    around = tl.where(finite, values - mean, 0.0)
    out = parts + number * pieces + piece
    # A plane for each figure, so that the second kernel reads neighbouring addresses.
    tl.store(out, greatest)
    tl.store(out + plane, tl.sum(tl.exp(values - pivot), 0))
    tl.store(out + 2 * plane, count)
    tl.store(out + 3 * plane, mean)
    tl.store(out + 4 * plane, tl.sum(around * around, 0))


@triton.jit(do_not_specialize=["plane", "rows"])
def _row_kernel(parts, plane, pieces, result, rows, PIECES: tl.constexpr):
    """The pieces of a row taken together."""
    number = tl.program_id(0)
    each = tl.arange(0, PIECES)
    own = parts + number * pieces + each
    there = each < pieces
    tops = tl.load(own, mask=there, other=float("-inf"))
    sums = tl.load(own + plane, mask=there, other=0.0)
    counts = tl.load(own + 2 * plane, mask=there, other=0.0)
    means = tl.load(own + 3 * plane, mask=there, other=0.0)
    squares = tl.load(own + 4 * plane, mask=there, other=0.0)
    greatest = tl.max(tops, 0)
    pivot = tl.where(greatest > float("-inf"), greatest, 0.0)
    total = tl.sum(sums * tl.exp(tops - pivot), 0)
    count = tl.maximum(tl.sum(counts, 0), 1.0)
    mean = tl.sum(means * counts, 0) / count
    apart = means - mean
    std = tl.sqrt(tl.sum(squares + counts * apart * apart, 0) / count)
    tl.store(result + number, greatest)
    tl.store(result + rows + number, pivot + tl.log(total))
    tl.store(result + 2 * rows + number, mean)
    tl.store(result + 3 * rows + number, std)


@triton.jit
def _mask_kernel(logits, row_step, rows, limits, vocabulary, PIECE: tl.constexpr):
    """Set what is below its row's limit to -inf; nothing else is written."""
    number = tl.program_id(0)
    limit = tl.load(limits + number)
    if limit == float("-inf"):
        return
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    row = logits + tl.load(rows + number).to(tl.int64) * row_step
    values = tl.load(row + at, mask=at < vocabulary, other=float("inf"))
    tl.store(row + at, float("-inf"), mask=(at < vocabulary) & (values < limit))


def uniform_by_triton(seeds: torch.Tensor, positions: torch.Tensor, salt: int) -> torch.Tensor:
    """Return numbers in [0, 1), each a hash of seed, position and salt."""
    count = seeds.shape[0]
    result = torch.empty(count, dtype=torch.float32, device=seeds.device)
    _uniform_kernel[(triton.cdiv(count, _BLOCK),)](seeds, positions, result, count, salt << 32, _BLOCK)
    return result


def statistics_by_triton(logits: torch.Tensor, rows: torch.Tensor) -> Statistics:
    """Compute the statistics of these rows, each row in pieces that are merged by a second kernel."""
    vocabulary, count = logits.shape[1], rows.shape[0]
    pieces = triton.cdiv(vocabulary, _PIECE)
    parts = torch.empty((5, count, pieces), dtype=torch.float32, device=logits.device)
    result = torch.empty((4, count), dtype=torch.float32, device=logits.device)
    plane = count * pieces
    _pieces_kernel[(count, pieces)](logits, logits.stride(0), rows, vocabulary, pieces, parts, plane, _PIECE)
    _row_kernel[(count,)](parts, plane, pieces, result, count, triton.next_power_of_2(pieces), num_warps=1)
    return Statistics(*result.unbind())


def mask_by_triton(logits: torch.Tensor, rows: torch.Tensor, limits: torch.Tensor) -> None:
    """Set what is below its row's limit to -inf."""
    vocabulary = logits.shape[1]
    grid = (rows.shape[0], triton.cdiv(vocabulary, _PIECE))
    _mask_kernel[grid](logits, logits.stride(0), rows, limits, vocabulary, _PIECE)
