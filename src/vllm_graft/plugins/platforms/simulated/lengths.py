"""How long a request's answer is when nobody cuts it: a lognormal length with a given mean, by the request's hash.

A model ends its answers by itself, and a scheduler sees requests come and go because of it. The same prompt, seed and
adapter always give the same length.
"""

from __future__ import annotations

import math
from statistics import NormalDist

SIGMA = 0.7
"""The spread: half of the answers are shorter than 0.78 of the mean, one in twenty is longer than 2.5 of it."""

_WORDS = 1 << 64


class LengthModel:
    """Natural lengths in tokens, the token that ends the text included; never below 1."""

    def __init__(self, mean: float, sigma: float = SIGMA) -> None:
        if mean <= 0:
            raise ValueError(f"the mean of natural lengths must be above 0, not {mean}")
        self._logarithm = NormalDist(math.log(mean) - sigma * sigma / 2, sigma)

    def length(self, number: int) -> int:
        """The length that a well-spread 64-bit number stands for."""
        share = (number + 0.5) / _WORDS
        # The largest numbers round to 1.0, where the inverse is not defined.
        share = min(share, 1 - 2**-53)
        return max(1, round(math.exp(self._logarithm.inv_cdf(share))))
