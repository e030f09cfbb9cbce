"""What is said of a use, and how the code that decides says it."""

from __future__ import annotations

BROKEN, FINE, UNDECIDED, NO_USE = "broken", "fine", "undecided", "no use"


class Undecided(Exception):
    """Running vLLM here does not tell."""


class NoUse(Exception):
    """It turns out not to be a use of vLLM, or is counted elsewhere."""


class Broken(Exception):
    """The use fails on this release."""

    def __init__(self, error: str, why: str) -> None:
        super().__init__(why)
        self.error = error
