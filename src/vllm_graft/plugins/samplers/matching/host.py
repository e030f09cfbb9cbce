"""One request's matches on the host: kept up token by token, in constant time for a text that does not repeat itself.

An index knows where each short sequence of tokens ended last, and each such place the one before. A place that matched
one token ago, one further to the left, matches one token longer now; any other place where the sequence occurs matches
just as long as the sequence is. Many matches at a time, as in a text that runs in a circle, are left to
``DenseMatches``, which moves a length for every place of the window on by one token in a few passes of numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from vllm_graft.contracts import History
from vllm_graft.plugins.samplers.matching import MAX_MATCH

_SEQUENCE: Final = 3
"""The longest sequence that is indexed: longer ones make large keys and few places fewer."""
_MANY: Final = 64
_FEW: Final = 32
"""More places than ``_MANY`` are followed densely; no more than ``_FEW`` one by one again."""
_PEELS: Final = 8
_ONE: Final = np.int16(1)
_MAX_MATCH: Final = np.int16(MAX_MATCH)


class Matcher:
    """The matches of one text's end that are at least ``shortest`` long, within its last ``window`` tokens.

    ``breakers`` has a byte for each token, 1 for those at which a match ends. If ``shortest`` is 0, every token of
    the window follows a match, and no lengths are returned.
    """

    def __init__(self, shortest: int, window: int, breakers: bytes = b"") -> None:
        self._shortest = shortest
        self._window = window
        self._breakers = breakers
        self._size = max(1, min(shortest, _SEQUENCE))
        self._mask = (1 << 32 * self._size) - 1
        self._tokens: list[int] = []
        self._before: list[int] = []
        self._index: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._dense: DenseMatches | None = None
        self._clear(0)

    def catch_up(self, history: History, slot: int) -> None:
        """Take in the slot's tokens since the last call; a text that is not a continuation is read anew."""
        fresh = history.since(slot, self._seen - 1) if self._seen else ()
        if len(fresh) == 0 or fresh[0] != self._tokens[-1] or len(fresh) > self._window:
            start = max(0, history.length(slot) - self._window)
            self._clear(start)
            self.extend(history.since(slot, start))
        elif len(fresh) > 1:
            self.extend(fresh[1:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        if len(tokens) == 1:
            self._follow(tokens[0])
        elif len(tokens) > 1:
            self._push(tokens)
            self._dense, self._many = None, False
            self._live = self._find_all()

    def followers(self) -> Mapping[int, int]:
        """Return the tokens that came after a match, each with the length of its longest match."""
        if self._shortest == 0:
            return dict.fromkeys(self._tokens[-self._window :], 0)
        if self._dense is not None and self._many:
            return self._dense.followers(self._shortest)
        found: dict[int, int] = {}
        shortest, tokens = self._shortest, self._tokens
        after, before_window = 1 - self._base, self._start - 1
        for end, length in self._live.items():
            length = min(length, end - before_window, MAX_MATCH)
            if length >= shortest:
                token = tokens[end + after]
                if length > found.get(token, 0):
                    found[token] = length
        return found

    @property
    def _start(self) -> int:
        return self._seen - self._window

    def _clear(self, start: int) -> None:
        self._base = self._seen = start
        self._turn = start + self._window
        self._tokens, self._before = [], []
        self._index, self._older = {}, {}
        self._key = self._run = 0
        self._live, self._dense, self._many = {}, None, False

    def _follow(self, token: int) -> None:
        """Append one token and move all matches on."""
        self._push((token,))
        if self._dense is not None and self._many:
            self._dense.push(token, broken=self._run == 0)
            if self._dense.count(self._size) <= _FEW:
                self._live, self._many = self._dense.ends(self._size, self._seen), False
            return
        if self._dense is not None:
            self._dense.append(token)
        if self._before[-1] < 0:
            self._live = {}
            return
        ends = self._ends()
        if ends is None:
            self._live = self._find_all()
            return
        before, shorter = self._live, self._size - 1
        self._live = {end: before.get(end - 1, shorter) + 1 for end in ends}

    def _push(self, tokens: Sequence[int]) -> None:
        """Append tokens to the index."""
        breakers, known, size, mask = self._breakers, len(self._breakers), self._size, self._mask
        index, older, before = self._index, self._older, self._before
        at, run, key = self._seen, self._run, self._key
        for token in tokens:
            last = -1
            if token < 0 or (token < known and breakers[token]):
                run = 0
            else:
                run += 1
                key = (key << 32 | token) & mask
                if run >= size:
                    last = index.get(key, -1)
                    if last < 0:
                        last = older.get(key, -1)
                    index[key] = at
            before.append(last)
            at += 1
        self._tokens.extend(tokens)
        self._seen, self._run, self._key = at, run, key
        if at >= self._turn:
            # Drop what no window reaches any more: nothing in the older index is younger than a window.
            self._older, self._index = index, {}
            self._turn = at + self._window
            drop = max(0, len(self._tokens) - 2 * self._window)
            del self._tokens[:drop], self._before[:drop]
            self._base += drop

    def _ends(self) -> list[int] | None:
        """Return where in the window the sequence at the text's end ended before; None if there are many places."""
        found: list[int] = []
        least = self._start + self._size - 1
        end = self._before[-1]
        while end >= least and end >= self._base:
            found.append(end)
            if len(found) > _MANY:
                return None
            end = self._before[end - self._base]
        return found

    def _find_all(self) -> dict[int, int]:
        """Find the matches from scratch; many of them become dense."""
        if not self._tokens or self._run < self._size or self._shortest == 0:
            return {}
        ends = self._ends()
        if ends is None:
            if self._dense is None:
                self._dense = DenseMatches(self._tokens[-self._window :], self._window)
            self._dense.measure(self._run)
            self._many = True
            return {}
        found, tokens = {}, self._tokens
        for end in ends:
            at = end - self._base
            most = min(self._run, MAX_MATCH, at + 1)
            length = 0
            while length < most and tokens[at - length] == tokens[-1 - length]:
                length += 1
            found[end] = length
        return found


class DenseMatches:
    """The lengths of matches at every place of the window: tokens up to there that equal the end of the text."""

    def __init__(self, tokens: Sequence[int], window: int) -> None:
        self._window = window
        self._count = len(tokens)
        self._text = np.empty(2 * window, dtype=np.int64)
        self._text[: self._count] = tokens
        self._lengths = np.zeros(2 * window, dtype=np.int16)
        self._reach = np.minimum(np.arange(1, window + 1), MAX_MATCH).astype(np.int16)

    def append(self, token: int) -> None:
        """Append a token without moving the lengths on."""
        if self._count == len(self._text):
            self._make_room()
        self._text[self._count] = token
        self._count += 1

    def push(self, token: int, *, broken: bool) -> None:
        """Append a token and move the lengths on; at a ``broken`` one all matches end."""
        if self._count == len(self._text):
            self._make_room()
        low, count, lengths = max(0, self._count - self._window), self._count, self._lengths
        if broken:
            lengths[low:count] = 0
        else:
            before = lengths[low : count - 1] + _ONE
            lengths[low] = 1
            np.minimum(before, _MAX_MATCH, out=lengths[low + 1 : count])
            lengths[low:count] *= self._text[low:count] == token
        self._text[count] = token
        lengths[count] = 0
        self._count += 1

    def measure(self, run: int) -> None:
        """Find the lengths from scratch; ``run`` counts the tokens at the end that are not breakers."""
        low, last, text, lengths = max(0, self._count - self._window), self._count - 1, self._text, self._lengths
        lengths[low : last + 1] = 0
        at = low + np.flatnonzero(text[low:last] == text[last])
        length = 0
        while len(at) and length < min(run, MAX_MATCH):
            length += 1
            lengths[at] = length
            at = at[at.searchsorted(low + length) :]
            at = at[text[at - length] == text[last - length]]

    def count(self, shortest: int) -> int:
        """Count the matches that are at least this long."""
        return int(np.count_nonzero(self._within() >= shortest))

    def ends(self, shortest: int, seen: int) -> dict[int, int]:
        """Return where the matches end, in a text of ``seen`` tokens, and their lengths."""
        lengths = self._within()
        (at,) = np.nonzero(lengths >= shortest)
        first = seen - 1 - len(lengths)
        return dict(zip((at + first).tolist(), lengths[at].tolist(), strict=True))

    def followers(self, shortest: int) -> Mapping[int, int]:
        """Return the tokens that came after a match, each with the length of its longest match."""
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
        """Return the lengths at all places of the window but the last, none reaching out of the window."""
        low, count = max(0, self._count - self._window), self._count - 1
        return np.minimum(self._lengths[low:count], self._reach[: count - low])

    def _make_room(self) -> None:
        keep = self._window
        for array in (self._text, self._lengths):
            array[:keep] = array[len(array) - keep :].copy()
        self._count = keep
