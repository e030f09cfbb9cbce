"""The policies whose quality is measured: which of the tokens held does a request keep, before it reads on?

All are asked once for every block of tokens, and what is dropped never comes back. ``SinkWindow`` is the mask that the
plugin ``sink-window`` gives a server. ``BestBlocks`` and ``RandomBlocks`` drop whole blocks, as a ``KVPolicy`` with
``evict`` does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from vllm_graft.bindings.attention.compaction import WindowShape

BLOCK: Final = 32
"""Tokens in a block: how many are read, and dropped, at a time."""
WINDOW_BLOCK: Final = 16
"""The block size of the windows: vLLM's usual one, so that 4 sink tokens are rounded up to 16 only."""
LAST: Final = 4
"""The last blocks stay, whatever their score: nobody has had the time to attend to them."""


class Policy(Protocol):
    """A rule for what is kept.

    scored: True if it goes by ``mass``, which costs time to collect
    """

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def scored(self) -> bool: ...

    def keep(self, begin: int, at: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """Tell for each token held if it stays, before the tokens from ``begin`` on are read.

        ``at`` are the positions of the tokens; ``mass`` is the mean share of the attention that each has had, over the
        layers, the heads, and the tokens since.
        """
        ...


@dataclass(frozen=True)
class Full:
    """Keeps everything."""

    name: str = "full attention"
    family: str = "full attention"
    scored: bool = False

    def keep(self, begin: int, at: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(at, dtype=torch.bool)


@dataclass(frozen=True)
class SinkWindow:
    """Keeps the first tokens and a window of the last ones, as the plugin of this name does."""

    window: int
    sinks: int
    scored: bool = False

    @property
    def name(self) -> str:
        return f"window {self.window}, {f'{self.sinks} sink tokens' if self.sinks else 'no sinks'}"

    @property
    def family(self) -> str:
        return f"window, {f'{self.sinks} sink tokens' if self.sinks else 'no sinks'}"

    @property
    def shape(self) -> WindowShape:
        return WindowShape.fit(self.sinks, self.window, WINDOW_BLOCK)

    def keep(self, begin: int, at: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return (at < self.shape.first) | (at >= self.shape.start(begin))


@dataclass(frozen=True)
class BestBlocks:
    """Keeps the first block, the last four, and of the others a share: those with the most attention so far."""

    share: float
    scored: bool = True
    family: str = "blocks by score"

    @property
    def name(self) -> str:
        return f"{self.family}, {100 * self.share:.0f} %"

    def keep(self, begin: int, at: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        block = at // BLOCK
        scores = torch.zeros(begin // BLOCK, dtype=mass.dtype).index_add_(0, block, mass)
        return stay(begin, block, self.share, lambda index: float(scores[index]))


@dataclass(frozen=True)
class RandomBlocks:
    """Keeps the first block, the last four, and of the others a share by lot: what is a score worth beside it?"""

    share: float
    scored: bool = False
    family: str = "blocks by lot"

    @property
    def name(self) -> str:
        return f"{self.family}, {100 * self.share:.0f} %"

    def keep(self, begin: int, at: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        # One lot for each block. With new lots every time the old blocks would be gone before long.
        return stay(begin, at // BLOCK, self.share, lambda index: random.Random(index).random())


def stay(begin: int, block: torch.Tensor, share: float, score: Callable[[int], float]) -> torch.Tensor:
    """Tell for each token if its block stays."""
    held = block.unique().tolist()
    return torch.isin(block, torch.tensor(choose_blocks(held, begin // BLOCK, share, score), dtype=block.dtype))


def choose_blocks(held: Sequence[int], filled: int, share: float, score: Callable[[int], float]) -> list[int]:
    """Choose the blocks that stay, of those held, where ``filled`` blocks were read so far.

    The first and the last four stay always, and a share of all others that were read.
    """
    always = {0, *range(filled - LAST, filled)}
    others = sorted((index for index in held if index not in always), key=score, reverse=True)
    room = math.ceil(share * max(0, filled - len(always)))
    return sorted([*(index for index in held if index in always), *others[:room]])


def tokens_held(policy: Policy, begin: int) -> int:
    """Count the tokens that are held before those from ``begin`` on are read; for any scores they are as many."""
    at = torch.empty(0, dtype=torch.long)
    for block in range(0, begin + 1, BLOCK):
        at = at[policy.keep(block, at, torch.ones(len(at)))]
        at = torch.cat((at, torch.arange(block, min(block + BLOCK, begin))))
    return len(at)


def all_policies() -> list[Policy]:
    """List what is measured, full attention first."""
    windows = [SinkWindow(window, sinks) for sinks in (0, 4, 64) for window in (256, 512, 1024, 2048)]
    shares = (0.25, 0.5, 0.8)
    return [Full(), *windows, *(BestBlocks(share) for share in shares), *(RandomBlocks(share) for share in shares)]
