"""Sets of tokens: a bit for each token of the vocabulary, on the host, and on the device one for each slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from vllm_graft.contracts import PerSlot, ServedModel
from vllm_graft.contracts.kernels import copy_into

if TYPE_CHECKING:
    import torch

WORD: Final = 32
"""The number of tokens that share a word of the table."""


@dataclass(frozen=True)
class TokenSet:
    """Some tokens of a vocabulary, as bits; the same tokens make the same set."""

    bits: bytes

    @classmethod
    def of(cls, tokens: Iterable[int], vocabulary: int) -> TokenSet:
        """Make the set of these tokens; ids that the vocabulary does not have are left out."""
        mask = np.zeros(vocabulary, dtype=bool)
        mask[[token for token in tokens if 0 <= token < vocabulary]] = True
        return cls.where(mask)

    @classmethod
    def where(cls, mask: np.ndarray) -> TokenSet:
        """Make the set of tokens for which ``mask`` is true."""
        bits = np.packbits(mask, bitorder="little").tobytes()
        return cls(bits + bytes(-len(bits) % (WORD // 8)))

    @cached_property
    def flags(self) -> bytes:
        """A byte for each token, 1 for those in the set: the fastest to look up on the host."""
        return np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8), bitorder="little").tobytes()

    def __or__(self, other: TokenSet) -> TokenSet:
        both = np.frombuffer(self.bits, dtype=np.uint8) | np.frombuffer(other.bits, dtype=np.uint8)
        return TokenSet(both.tobytes())

    def __contains__(self, token: int) -> bool:
        return 0 <= token < len(self.flags) and self.flags[token] == 1

    def __bool__(self) -> bool:
        return any(self.bits)


class TokenSets:
    """A table of distinct sets on the device, and which of them is each slot's. The first, empty, is for other rows.

    There is a place for every slot, so a new set always finds one: a set that no slot has any more gives way, the
    one longest out of use first.
    """

    def __init__(self, model: ServedModel) -> None:
        import torch

        empty = TokenSet.of((), model.vocabulary)
        self._vocabulary = model.vocabulary
        words = len(empty.bits) * 8 // WORD
        self.table: torch.Tensor = torch.zeros((model.slots + 1, words), dtype=torch.int32, device=model.device)
        self.of_slot: PerSlot = model.per_slot(0, integer=True)
        self._at: OrderedDict[TokenSet, int] = OrderedDict({empty: 0})
        self._owners: dict[TokenSet, int] = {empty: 1}
        self._owned: dict[int, TokenSet] = {}
        self._free = list(range(model.slots, 0, -1))

    def assign(self, slot: int, tokens: TokenSet) -> None:
        """Make these tokens the slot's set."""
        import torch

        before = self._owned.pop(slot, None)
        if before is not None:
            self._owners[before] -= 1
        if tokens not in self._at:
            if self._free:
                place = self._free.pop()
            else:
                unused = next(each for each in self._at if not self._owners[each])
                del self._owners[unused]
                place = self._at.pop(unused)
            self._at[tokens] = place
            copy_into(self.table[self._at[tokens]], torch.frombuffer(bytearray(tokens.bits), dtype=torch.int32))
        self._at.move_to_end(tokens)
        self._owned[slot] = tokens
        self._owners[tokens] = self._owners.get(tokens, 0) + 1
        self.of_slot[slot] = self._at[tokens]

    def contains(self, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return whether each token is in the set of its row's slot: ``slots`` [rows], ``tokens`` [rows, k]."""
        known = (tokens >= 0) & (tokens < self._vocabulary)
        at = tokens.clamp(0, self._vocabulary - 1).long()
        words = self.table[self.of_slot.all()[slots][:, None], at // WORD]
        return ((words >> (at % WORD)) & 1).bool() & known
