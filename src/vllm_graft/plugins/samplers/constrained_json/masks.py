"""The tokens that a state of the automaton allows: worked out once on the vocabulary as a tree, then looked up."""

from __future__ import annotations

import functools
import math
import os.path
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vllm_graft.contracts.kernels import to_device
from vllm_graft.plugins.samplers.constrained_json import in_string
from vllm_graft.plugins.samplers.constrained_json.automaton import STRINGS, JsonState, complete, cost, end_string, step

if TYPE_CHECKING:
    import torch

ROOT: Final = 0
_NO_TOKENS: Final = array("q")

STATES: Final = 128
"""The number of states that are kept, each with at most two masks of two bytes per token, on the host four."""


@dataclass(slots=True)
class Inside:
    """The effect of the tokens below a node when they begin inside of a string.

    stay:  those that do not close it, by the mode they end in
    tails: those that do, as a tree of what follows the closing quote; None if there are none
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
        return self._tokens.get(node, _NO_TOKENS)

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
            if to == in_string.CLOSED:
                # The texts below the node, without what leads to it.
                below = [(node, b"")]
                while below:
                    at, text = below.pop()
                    if at in self._tokens:
                        tails.setdefault(text, array("q")).extend(self._tokens[at])
                    below += [(child, text + bytes([byte])) for byte, child in self.children(at)]
            if to in (in_string.NOWHERE, in_string.CLOSED):
                node = self._ends[node]
                continue
            if node in self._tokens:
                found.stay.setdefault(to, array("q")).extend(self._tokens[node])
            above.append((self._ends[node], to))
            node += 1
        found.tails = Trie(tails) if tails else None
        return found


def mask_type(device: torch.device) -> torch.dtype:
    """Return the type of masks: small on a device; on the host float32, which numpy adds thirty times as fast."""
    import torch

    return torch.float32 if device.type == "cpu" else torch.float16


class AllowedTokens:
    """The tokens that one state allows, in groups by how many bytes it takes to end the document after them."""

    def __init__(self, groups: Mapping[int, Sequence[array[int]]], vocabulary: int, device: torch.device) -> None:
        self._groups = sorted(groups.items())
        self._vocabulary = vocabulary
        self._device = device
        self._masks: dict[int, torch.Tensor] = {}
        self.way_out = min(token for tokens in self._groups[0][1] for token in tokens)
        """A token on the shortest way to the end."""

    def mask(self, budget: int | None) -> torch.Tensor:
        """Return what to add to the logits, [vocabulary]: 0 for the tokens that may come, -inf for all others.

        ``budget`` is how many tokens may follow this one. Tokens after which that is too few to end the document are
        left out; if that would leave none, those nearest to the end stay.
        """
        allowed = len(self._groups)
        while budget is not None and allowed > 1 and self._groups[allowed - 1][0] > budget:
            allowed -= 1
        if allowed not in self._masks:
            # Near the limit a mask serves for a step or two; only the one without a limit is worth keeping besides.
            self._masks = {number: mask for number, mask in self._masks.items() if number == len(self._groups)}
            import torch

            # To add is ten times faster than to fill by a mask of truths.
            mask = torch.full((self._vocabulary,), -math.inf, dtype=mask_type(self._device))
            for _, parts in self._groups[:allowed]:
                for tokens in parts:
                    mask.index_fill_(0, torch.frombuffer(tokens, dtype=torch.int64), 0.0)
            self._masks[allowed] = to_device(mask, self._device)
        return self._masks[allowed]


class Masks:
    """The tokens that each state allows, for one vocabulary; the states used least recently are forgotten."""

    def __init__(
        self, texts: Mapping[int, bytes], eos: Sequence[int], vocabulary: int, device: torch.device, size: int = STATES
    ) -> None:
        import torch

        self._trie = Trie.of({token: text for token, text in texts.items() if token < vocabulary})
        self._eos = array("q", eos)
        self._vocabulary = vocabulary
        self._device = device
        self.allowed = functools.lru_cache(maxsize=size)(self._allowed)
        """Returns what a state allows, given how many containers may be open."""
        self.unconstrained = torch.zeros(vocabulary, dtype=mask_type(device), device=device)
        """The mask that lets every token come."""
        # Worked out before the first request: inside of a string nearly every token is possible, which takes longest.
        for mode in range(STRINGS):
            self._trie.inside(ROOT, mode)

    def _allowed(self, state: JsonState, depth: int) -> AllowedTokens:
        groups: dict[int, list[array[int]]] = {}
        if complete(state):
            groups[0] = [self._eos]
        work = [(self._trie, ROOT, state)]
        while work:
            trie, node, state = work.pop()
            if state.mode < STRINGS:
                inside = trie.inside(node, state.mode)
                for mode, tokens in inside.stay.items():
                    groups.setdefault(cost(JsonState(mode, 0, state.stack)), []).append(tokens)
                if inside.tails is None:
                    continue
                trie, node, state = inside.tails, ROOT, end_string(state.stack)
                if tokens := trie.tokens(ROOT):
                    groups.setdefault(cost(state), []).append(tokens)
            for byte, child in trie.children(node):
                after = step(state, byte, depth)
                if after is None:
                    continue
                if tokens := trie.tokens(child):
                    groups.setdefault(cost(after), []).append(tokens)
                work.append((trie, child, after))
        return AllowedTokens(groups, self._vocabulary, self._device)
