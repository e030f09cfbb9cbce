"""Randomness by Triton: the hash of ``steps.uniform`` in one launch, where torch takes thirty."""

# What a kernel is given are pointers and numbers, whose types Triton takes from each call.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


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
