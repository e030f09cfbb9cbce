"""What a step offers, by Triton: random numbers and last tokens in one launch each, where torch takes many."""

# What a kernel is given are pointers and numbers, whose types Triton takes from each call.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256
_COLUMNS = 1024


@triton.jit
def _mix(number):
    """The finaliser of splitmix64."""
    number = number * 0x9E3779B97F4A7C15 + 1
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB
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


def uniform_by_triton(seeds: torch.Tensor, positions: torch.Tensor, salt: int) -> torch.Tensor:
    """Numbers in [0, 1), each a hash of seed, position and salt."""
    count = seeds.shape[0]
    result = torch.empty(count, dtype=torch.float32, device=seeds.device)
    _uniform_kernel[(triton.cdiv(count, _BLOCK),)](seeds, positions, result, count, salt << 32, _BLOCK)
    return result


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
    """The tokens before each position, [slots, window], the newest in the last column, -1 where there is none."""
    count = slots.shape[0]
    result = torch.empty((count, window), dtype=ring.dtype, device=ring.device)
    grid = (count, triton.cdiv(window, _COLUMNS))
    _last_kernel[grid](ring, ring.shape[1], slots, positions, result, window, _COLUMNS)
    return result
