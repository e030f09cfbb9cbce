"""What running requests were given, counted once for all of them rather than once for each in every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

TURNS: Final = 16
"""In so many steps everybody's turn comes once."""


class Given:
    """The tokens of each running request since it began to run.

    What most requests of a step are given, one token as a rule, is added once for all; the others differ by so much.
    """

    def __init__(self) -> None:
        self._each = 0
        self._offsets: dict[str, int] = {}
        self._turn: Iterator[str] = iter(())

    def begin(self, name: str) -> None:
        """A request runs, and was given nothing so far."""
        self._offsets[name] = -self._each

    def step(self, tokens: Mapping[str, int]) -> None:
        """So many tokens for each request of a step."""
        if not tokens:
            return
        offsets = self._offsets
        common = next(iter(tokens.values()))
        self._each += common
        for name, number in tokens.items():
            if number != common and name in offsets:
                offsets[name] += number - common
        if tokens.keys() != offsets.keys():
            for name in offsets.keys() - tokens.keys():
                offsets[name] -= common

    def total(self, name: str) -> int:
        """What a request was given; 0 for one that does not run."""
        offset = self._offsets.get(name)
        return 0 if offset is None else self._each + offset

    def end(self, name: str) -> None:
        """A request does not run any more, if it did."""
        self._offsets.pop(name, None)

    def next_ones(self) -> list[str]:
        """Some of the running requests, so that in ``TURNS`` steps all have had their turn."""
        number = len(self._offsets) // TURNS + 1
        found = list(islice((name for name in self._turn if name in self._offsets), number))
        if len(found) < number:
            self._turn = iter(list(self._offsets))
        return found
