"""Many matches at a time: a length for every place of the window, moved on by one token in a few passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from vllm_graft.plugins.samplers.matching import LONGEST

_PEELS: Final = 8
_ONE: Final = np.int16(1)
_LONGEST: Final = np.int16(LONGEST)


class DenseMatches:
    """How many tokens up to each place of the window equal the end of the text."""

    def __init__(self, tokens: Sequence[int], window: int) -> None:
        self._window = window
        self._count = len(tokens)
        self._text = np.empty(2 * window, dtype=np.int64)
        self._text[: self._count] = tokens
        self._lengths = np.zeros(2 * window, dtype=np.int16)
        self._reach = np.minimum(np.arange(1, window + 1), LONGEST).astype(np.int16)

    def append(self, token: int) -> None:
        """The text goes on, and lengths are not asked for."""
        if self._count == len(self._text):
            self._make_room()
        self._text[self._count] = token
        self._count += 1

    def push(self, token: int, *, broken: bool) -> None:
        """The text goes on, and the lengths with it; ``broken``: all matches end here."""
        if self._count == len(self._text):
            self._make_room()
        low, count, lengths = max(0, self._count - self._window), self._count, self._lengths
        if broken:
            lengths[low:count] = 0
        else:
            before = lengths[low : count - 1] + _ONE
            lengths[low] = 1
            np.minimum(before, _LONGEST, out=lengths[low + 1 : count])
            lengths[low:count] *= self._text[low:count] == token
        self._text[count] = token
        lengths[count] = 0
        self._count += 1

    def measure(self, run: int) -> None:
        """Find the lengths without knowledge of those before; ``run``: tokens at the end that are no breakers."""
        low, last, text, lengths = max(0, self._count - self._window), self._count - 1, self._text, self._lengths
        lengths[low : last + 1] = 0
        at = low + np.flatnonzero(text[low:last] == text[last])
        length = 0
        while len(at) and length < min(run, LONGEST):
            length += 1
            lengths[at] = length
            at = at[at.searchsorted(low + length) :]
            at = at[text[at - length] == text[last - length]]

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
        return np.minimum(self._lengths[low:count], self._reach[: count - low])

    def _make_room(self) -> None:
        keep = self._window
        for array in (self._text, self._lengths):
            array[:keep] = array[len(array) - keep :].copy()
        self._count = keep
