"""A token for each row, by the temperature, top_k and top_p of its request and one random number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_graft.contracts import Params

if TYPE_CHECKING:
    import torch


def pick(scores: torch.Tensor, params: Sequence[Params], numbers: Sequence[float]) -> torch.Tensor:
    """The token of each row: ``scores`` is [rows, vocabulary], -inf for what may not come, and is used up.

    ``numbers`` are in [0, 1), one for each row. A row gets the same token whatever other rows there are. A token that
    may not come is returned only for a row of which nothing may.
    """
    import torch

    chance = [row for row, one in enumerate(params) if not one.greedy]
    if not chance:
        return _highest(scores)
    if len(chance) == len(params):
        return _drawn(scores, params, numbers)
    picked = _highest(scores)
    drawn = _drawn(scores[chance], [params[row] for row in chance], [numbers[row] for row in chance])
    return picked.index_copy_(0, torch.tensor(chance, device=scores.device), drawn)


def _drawn(scores: torch.Tensor, params: Sequence[Params], numbers: Sequence[float]) -> torch.Tensor:
    import torch

    heat = torch.tensor([[one.temperature] for one in params], device=scores.device)
    lots = torch.tensor([[number] for number in numbers], device=scores.device)
    weights = scores.div_(heat).softmax(dim=-1)
    narrow = [row for row, one in enumerate(params) if one.top_p < 1 or 0 < one.top_k < weights.shape[1]]
    drawn = _passed(weights, lots) if len(narrow) < len(params) else torch.zeros_like(lots[:, 0], dtype=torch.int64)
    for row in narrow:
        drawn[row] = _passed_among_heaviest(weights[row], lots[row], params[row])
    # Sums are rounded: a number at the edge of one may fall on a token of no weight.
    drawn_weights = weights.gather(1, drawn[:, None])[:, 0]
    return drawn if drawn_weights.min() > 0 else torch.where(drawn_weights > 0, drawn, _highest(weights))


# Both of these look for a block first and then in it: on a CPU a search through the whole row takes five times as long.


def _highest(scores: torch.Tensor) -> torch.Tensor:
    """The index of the greatest of each row."""
    blocks = scores.view(len(scores), -1, math.gcd(256, scores.shape[1]))
    block = blocks.amax(dim=-1).argmax(dim=-1)
    return block * blocks.shape[2] + _of(blocks, block).argmax(dim=-1)


def _passed(weights: torch.Tensor, lots: torch.Tensor) -> torch.Tensor:
    """The index at which the running sum of each row passes its lot, a share of the whole."""
    import torch

    blocks = weights.view(len(weights), -1, math.gcd(256, weights.shape[1]))
    sums = blocks.sum(dim=-1)
    edges = sums.cumsum(dim=-1)
    target = lots * edges[:, -1:]
    block = torch.searchsorted(edges, target, right=True).clamp_(max=edges.shape[1] - 1)
    left = target - (edges.gather(1, block) - sums.gather(1, block))
    within = _of(blocks, block[:, 0]).cumsum(dim=-1)
    place = torch.searchsorted(within, left, right=True).clamp_(max=blocks.shape[2] - 1)
    return (block * blocks.shape[2] + place)[:, 0]


def _of(blocks: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One block of each row."""
    return blocks.gather(1, block[:, None, None].expand(-1, 1, blocks.shape[2]))[:, 0]


def _passed_among_heaviest(weights: torch.Tensor, lot: torch.Tensor, params: Params) -> torch.Tensor:
    """The same for one row, among the tokens that top_k and top_p leave."""
    import torch

    vocabulary = weights.shape[0]
    if 0 < params.top_k < vocabulary:
        heavy, tokens = weights.topk(params.top_k)
        total = heavy.sum()
    else:
        # What is lighter than this weighs less, all together, than top_p leaves out: it need not be sorted.
        total = weights.sum()
        tokens = _places(weights >= total * ((1 - params.top_p) / vocabulary))
        if not len(tokens):
            return tokens.new_zeros(())
        heavy, order = weights[tokens].sort(descending=True)
        tokens = tokens[order]
    edges = heavy.cumsum(dim=0)
    # The first stays, and each whose forerunners do not make up top_p.
    last = torch.searchsorted(edges, total * params.top_p).clamp_(max=len(tokens) - 1)
    place = torch.searchsorted(edges, lot * edges[last], right=True)[0]
    return tokens[torch.minimum(place, last)]


def _places(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask is true."""
    if mask.device.type != "cpu":
        return mask.nonzero()[:, 0]
    # The same in a fifth of the time.
    import numpy as np
    import torch

    return torch.from_numpy(np.flatnonzero(mask.numpy()))
