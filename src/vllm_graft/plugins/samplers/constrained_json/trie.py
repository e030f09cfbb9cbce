"""A vocabulary as a tree, so that tokens which begin alike are tried together."""

from __future__ import annotations

import os.path
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from vllm_graft.plugins.samplers.constrained_json import in_string

ROOT: Final = 0


@dataclass(slots=True)
class Inside:
    """The effect of the tokens below a node when they begin inside of a string.

    stay:  those that do not close it, by the mode they end in
    tails: those that do, as a tree of what follows the closing quote; None where there are none
    """

    stay: dict[int, array[int]] = field(default_factory=dict)
    tails: Trie | None = None


class Trie:
    """Texts and the tokens that each stands for. A node is a number: nodes lie in the order of a walk, subtrees whole.

    What a subtree does inside of a string depends on nothing around the string, so it is worked out once and kept:
    for the whole vocabulary that is nearly all the work there is, and a new state of the automaton is left with the
    few texts outside of strings.
    """

    def __init__(self, texts: Mapping[bytes, array[int]]) -> None:
        self._bytes = bytearray(1)
        self._ends = array("q", [0])
        self._tokens: dict[int, array[int]] = {}
        self._cache: dict[tuple[int, int], Inside] = {}
        open_nodes, before = [ROOT], b""
        for text in sorted(texts):
            alike = len(os.path.commonprefix([before, text]))  # noqa: RUF071 - of bytes, not of paths
            self._close(open_nodes, alike + 1)
            for byte in text[alike:]:
                open_nodes.append(len(self._bytes))
                self._bytes.append(byte)
                self._ends.append(0)
            self._tokens[open_nodes[-1]] = texts[text]
            before = text
        self._close(open_nodes, 0)

    @classmethod
    def of(cls, vocabulary: Mapping[int, bytes]) -> Trie:
        """Make the tree of a vocabulary: token to text."""
        texts: dict[bytes, array[int]] = {}
        for token, text in vocabulary.items():
            texts.setdefault(text, array("q")).append(token)
        return cls(texts)

    def tokens(self, node: int) -> array[int]:
        """Return the tokens whose text ends here."""
        return self._tokens.get(node, _NONE)

    def children(self, node: int) -> Iterator[tuple[int, int]]:
        """List the children of a node: the byte of each and its number."""
        child, end = node + 1, self._ends[node]
        while child < end:
            yield self._bytes[child], child
            child = self._ends[child]

    def inside(self, node: int, mode: int) -> Inside:
        """Return what the tokens below this node do inside of a string, from a mode of ``in_string`` on."""
        if (node, mode) not in self._cache:
            self._cache[node, mode] = self._walk(node, mode)
        return self._cache[node, mode]

    def _close(self, open_nodes: list[int], keep: int) -> None:
        while len(open_nodes) > keep:
            self._ends[open_nodes.pop()] = len(self._bytes)

    def _walk(self, start: int, mode: int) -> Inside:
        found = Inside()
        tails: dict[bytes, array[int]] = {}
        above = [(self._ends[start], mode)]
        node = start + 1
        while node < self._ends[start]:
            while node >= above[-1][0]:
                above.pop()
            to = in_string.NEXT[above[-1][1]][self._bytes[node]]
            if to == in_string.NOWHERE:
                node = self._ends[node]
                continue
            if to == in_string.CLOSED:
                self._gather(node, tails)
                node = self._ends[node]
                continue
            if node in self._tokens:
                found.stay.setdefault(to, array("q")).extend(self._tokens[node])
            above.append((self._ends[node], to))
            node += 1
        found.tails = Trie(tails) if tails else None
        return found

    def _gather(self, node: int, tails: dict[bytes, array[int]]) -> None:
        """Add the texts below a node, without what leads to it."""
        below = [(node, b"")]
        while below:
            node, text = below.pop()
            if node in self._tokens:
                tails.setdefault(text, array("q")).extend(self._tokens[node])
            below += [(child, text + bytes([byte])) for byte, child in self.children(node)]


_NONE: Final = array("q")
