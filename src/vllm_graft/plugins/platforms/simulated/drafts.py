"""Draft tokens: what a drafter would propose, right as often as it is told to be, and how drafts are checked.

A draft is right when it equals the token that the request's stream gives at its position; whether it does follows from
a hash. Checking keeps the right ones up to the first wrong one and adds one token, so a request's output is the same
with and without drafts, and only the number of steps differs. Drafts know nothing of a grammar, as an n-gram drafter's
do not: a grammar strikes most of them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_graft.hashing import splitmix64

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vllm_graft.plugins.platforms.simulated.tokens import TokenStream

_WORDS = 1 << 64
_RIGHT_SALT = 0x6472616674
_WRONG_SALT = 0x77726F6E67

PLACEHOLDER = -1
"""What the scheduler writes for a draft whose token only the worker knows."""


class Drafter:
    """Proposes up to ``count`` tokens ahead, of which the share ``acceptance`` is right."""

    def __init__(self, count: int, acceptance: float, vocab_size: int) -> None:
        self.count = count
        self._acceptance = acceptance
        self._vocab_size = vocab_size

    def propose(self, stream: TokenStream, index: int, count: int) -> list[int]:
        """Drafts for the ``count`` positions from ``index`` on."""
        return [self._draft(stream.token(position, None), position) for position in range(index, index + count)]

    def _draft(self, right: int, position: int) -> int:
        if splitmix64(right ^ _RIGHT_SALT, position) < self._acceptance * _WORDS:
            return right
        away = 1 + splitmix64(right ^ _WRONG_SALT, position) % max(self._vocab_size - 1, 1)
        return (right + away) % self._vocab_size


def verified(
    stream: TokenStream, index: int, drafts: Sequence[int], masks: Sequence[NDArray[np.int32]] | None
) -> list[int]:
    """The tokens of a step from ``index`` on: the right drafts up to the first wrong one, and one more.

    ``masks`` has a grammar's row for every draft and for the token after them, or is None without a grammar.
    """
    tokens: list[int] = []
    for place in range(len(drafts) + 1):
        mask = masks[place] if masks is not None else None
        tokens.append(stream.token(index + place, mask))
        if place == len(drafts) or drafts[place] != tokens[-1]:
            break
    return tokens
