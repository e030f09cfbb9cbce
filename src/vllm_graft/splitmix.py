"""splitmix64: well-spread 64-bit numbers from neighbouring ones, for Python's integers, numpy and torch.

Random numbers that every rank and every repetition of a step must agree on are hashes, not draws from a generator.
The constants are those of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

GAMMA: Final = 0x9E3779B97F4A7C15
"""The distance between two states of the sequence."""
FIRST: Final = 0xBF58476D1CE4E5B9
SECOND: Final = 0x94D049BB133111EB
_WORD: Final = (1 << 64) - 1


def splitmix64(key: int, index: int) -> int:
    """Return the ``index``-th number of the sequence that starts at ``key``."""
    word = (key + (index + 1) * GAMMA) & _WORD
    word = ((word ^ (word >> 30)) * FIRST) & _WORD
    word = ((word ^ (word >> 27)) * SECOND) & _WORD
    return word ^ (word >> 31)


def finalize_array(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each word of an array: the last steps of splitmix64."""
    import numpy as np

    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    return words ^ (words >> np.uint64(31))


def finalize_tensor(words: torch.Tensor) -> torch.Tensor:
    """Mix each int64 of a tensor, whose products wrap: the last steps of splitmix64."""
    words = (words ^ _shift(words, 30)) * signed(FIRST)
    words = (words ^ _shift(words, 27)) * signed(SECOND)
    return words ^ _shift(words, 31)


def signed(number: int) -> int:
    """Return the int64 that has the lowest 64 bits of a number."""
    return ((number + (1 << 63)) & _WORD) - (1 << 63)


def _shift(words: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask takes the copies of the sign away.
    return (words >> bits) & ((1 << (64 - bits)) - 1)
