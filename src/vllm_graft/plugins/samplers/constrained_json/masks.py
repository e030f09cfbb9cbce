"""Which tokens a state of the automaton allows: worked out once, then looked up."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from vllm_graft.contracts.kernels import to_device
from vllm_graft.plugins.samplers.constrained_json.automaton import STRINGS, JsonState, complete, cost, end_string, step
from vllm_graft.plugins.samplers.constrained_json.trie import ROOT, Trie

if TYPE_CHECKING:
    import torch

STATES: Final = 128
"""How many states are kept, each with at most two masks of two bytes per token, on the host four."""


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
        left out; where that would leave none, those nearest to the end stay.
        """
        allowed = len(self._groups)
        while budget is not None and allowed > 1 and self._groups[allowed - 1][0] > budget:
            allowed -= 1
        if allowed not in self._masks:
            # Near the limit a mask serves for a step or two; only the one without a limit is worth keeping besides.
            self._masks = {number: mask for number, mask in self._masks.items() if number == len(self._groups)}
            self._masks[allowed] = self._build_mask(allowed)
        return self._masks[allowed]

    def _build_mask(self, allowed: int) -> torch.Tensor:
        import torch

        # To add is ten times faster than to fill by a mask of truths.
        mask = torch.full((self._vocabulary,), -math.inf, dtype=mask_type(self._device))
        for _, parts in self._groups[:allowed]:
            for tokens in parts:
                mask.index_fill_(0, torch.frombuffer(tokens, dtype=torch.int64), 0.0)
        return to_device(mask, self._device)


class Masks:
    """What each state allows, for one vocabulary; the states used least recently are forgotten."""

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
