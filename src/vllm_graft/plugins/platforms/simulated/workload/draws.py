"""The random numbers of a description: the same for the same seed, in every process and on every Python.

Each purpose has a sequence of its own, so that a change to the lengths leaves the arrivals as they were. Only
``random()`` of Python's generator is used, whose sequence Python promises to keep.
"""

from __future__ import annotations

import hashlib
import math
import random
from statistics import NormalDist

_NORMAL = NormalDist()


class Draws:
    """A sequence of random numbers."""

    def __init__(self, seed: int, purpose: str) -> None:
        digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
        self._source = random.Random(int.from_bytes(digest, "little"))

    def share(self) -> float:
        """A number above 0 and below 1."""
        return max(self._source.random(), 2.0**-53)

    def gap(self) -> float:
        """The time to the next event, where one happens every second on average."""
        return -math.log(self.share())

    def normal(self) -> float:
        """A number around 0, with a spread of 1."""
        return _NORMAL.inv_cdf(self.share())
