"""Many matches at a time: a length for every place of the window, moved on by one token in a few passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from vllm_graft.plugins.samplers.matching import LONGEST

_PEELS: Final = 8


class DenseMatches:
    """How many tokens up to each place equal the end of the text; ``run``: tokens at the end that are no breakers."""

    def __init__(self, tokens: Sequence[int], window: int, run: int) -> None:
        self._window = window
        self._count = len(tokens)
        self._text = np.empty(2 * window, dtype=np.int64)
        self._text[: self._count] = tokens
        self._lengths = np.zeros(2 * window, dtype=np.int16)
        self._measure(run)

    def push(self, token: int, *, broken: bool) -> None:
        """The text goes on with this token; ``broken``: matches end here."""
        if self._count == len(self._text):
            self._make_room()
        low, count = max(0, self._count - self._window), self._count
        before = self._lengths[low : count - 1] + np.int16(1)
        self._lengths[low] = 1
        self._lengths[low + 1 : count] = np.minimum(before, LONGEST)
        self._lengths[low:count] *= (self._text[low:count] == token) & (not broken)
        self._text[count] = token
        self._lengths[count] = 0
        self._count += 1

    def count(self, shortest: int) -> int:
        """How many matches are at least this long."""
        return int(np.count_nonzero(self._within() >= shortest))

    def ends(self, shortest: int, seen: int) -> dict[int, int]:
        """Where the matches end, in a text of ``seen`` tokens, and their lengths."""
        lengths = self._within()
        (at,) = np.nonzero(lengths >= shortest)
        first = seen - 1 - len(lengths)
        return dict(zip((at + first).tolist(), lengths[at].tolist(), strict=True))

    def followers(self, shortest: int) -> Mapping[int, int]:
        """The tokens that came after a match, each with the length of its longest match."""
        lengths = self._within()
        (at,) = np.nonzero(lengths >= shortest)
        tokens = self._text[at + (self._count - len(lengths))]
        lengths = lengths[at]
        found: dict[int, int] = {}
        # A circle is followed by few tokens, which are found faster one by one than by sorting.
        for _ in range(_PEELS):
            if not len(tokens):
                return found
            best = int(lengths.argmax())
            token = int(tokens[best])
            found[token] = int(lengths[best])
            others = tokens != token
            tokens, lengths = tokens[others], lengths[others]
        order = lengths.argsort(kind="stable")
        found.update(zip(tokens[order].tolist(), lengths[order].tolist(), strict=True))
        return found

    def _within(self) -> np.ndarray:
        """The lengths of all places in the window but the last, none reaching out of the window."""
        low, count = max(0, self._count - self._window), self._count - 1
        return np.minimum(self._lengths[low:count], np.arange(1, count - low + 1, dtype=np.int64)).astype(np.int16)

    def _measure(self, run: int) -> None:
        text, count = self._text, self._count
        alive = np.arange(count) < count - 1
        for length in range(min(run, LONGEST)):
            alive[:length] = False
            alive[length:] &= text[: count - length] == text[count - 1 - length]
            if not alive.any():
                return
            self._lengths[:count] += alive

    def _make_room(self) -> None:
        keep = self._window
        for array in (self._text, self._lengths):
            array[:keep] = array[len(array) - keep :].copy()
        self._count = keep
