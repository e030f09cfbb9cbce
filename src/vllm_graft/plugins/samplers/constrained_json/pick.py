"""A token for each row, by the temperature, top_k and top_p of its request and one random number.

On an accelerator every call counts and a row is read in no time; on a CPU it is the other way round, so there the work
on whole rows is avoided. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from vllm_graft.contracts import Params

if TYPE_CHECKING:
    import torch


_SHARES: Final = (1e-3, 1e-4, 1e-5)
"""From which share of all on a token is looked at for top_p; the next one where those do not make it up."""
_ROUNDING: Final = 1.00001


def pick(scores: torch.Tensor, params: Sequence[Params], numbers: Sequence[float]) -> torch.Tensor:
    """The token of each row: ``scores`` is [rows, vocabulary], -inf for what may not come, and is used up.

    ``numbers`` are in [0, 1), one for each row. A row gets the same token whatever other rows there are. A token that
    may not come is returned only for a row of which nothing may.
    """
    chance = [row for row, one in enumerate(params) if not one.greedy]
    if not chance:
        return _highest(scores)
    if len(chance) == len(params):
        return _drawn(scores, params, numbers)
    picked, rows = _highest(scores), tensor(chance, scores.device)
    drawn = _drawn(scores[rows], [params[row] for row in chance], [numbers[row] for row in chance])
    return picked.index_copy_(0, rows, drawn)


def tensor(numbers: Sequence[int] | Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    """Numbers on a device, without waiting for it."""
    import torch

    if device.type == "cpu":
        return torch.tensor(numbers)
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


def _drawn(scores: torch.Tensor, params: Sequence[Params], numbers: Sequence[float]) -> torch.Tensor:
    import torch

    on_host = scores.device.type == "cpu"
    heats_and_lots = tensor([[float(one.temperature) for one in params], numbers], scores.device)
    weights = scores.div_(heats_and_lots[0, :, None]).softmax(dim=-1)
    lots = heats_and_lots[1, :, None]
    narrow = [row for row, one in enumerate(params) if one.top_p < 1 or 0 < one.top_k < weights.shape[1]]
    drawn = _passed(weights, lots) if len(narrow) < len(params) else torch.zeros_like(lots[:, 0], dtype=torch.int64)
    for row in narrow if on_host else ():
        one = slice(row, row + 1)
        drawn[one] = _passed_among_heaviest(weights[one], lots[one], params[one])
    if narrow and not on_host:
        rows = tensor(narrow, scores.device)
        drawn[rows] = _passed_among_heaviest(weights[rows], lots[rows], [params[row] for row in narrow])
    # Sums are rounded: a number at the edge of one may fall on a token of no weight.
    weighs = weights.gather(1, drawn[:, None])[:, 0] > 0
    return drawn if on_host and weighs.all() else torch.where(weighs, drawn, _highest(weights))


def _highest(scores: torch.Tensor) -> torch.Tensor:
    """The index of the greatest of each row."""
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    # The block first and then the place in it: a search for the place through the whole row takes five times as long.
    blocks = _blocks(scores)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    return block * blocks.shape[2] + _of(blocks, block).argmax(dim=-1)


def _passed(weights: torch.Tensor, lots: torch.Tensor) -> torch.Tensor:
    """The index at which the running sum of each row passes its lot, a share of the whole."""
    import torch

    if weights.device.type != "cpu":
        edges = weights.cumsum(dim=-1)
        return torch.searchsorted(edges, lots * edges[:, -1:], right=True).clamp_(max=weights.shape[1] - 1)[:, 0]
    blocks = _blocks(weights)
    sums = blocks.sum(dim=-1)
    edges = sums.cumsum(dim=-1)
    target = lots * edges[:, -1:]
    block = torch.searchsorted(edges, target, right=True).clamp_(max=edges.shape[1] - 1)
    left = target - (edges.gather(1, block) - sums.gather(1, block))
    within = _of(blocks, block[:, 0]).cumsum(dim=-1)
    place = torch.searchsorted(within, left, right=True).clamp_(max=blocks.shape[2] - 1)
    return (block * blocks.shape[2] + place)[:, 0]


def _blocks(scores: torch.Tensor) -> torch.Tensor:
    return scores.view(len(scores), -1, math.gcd(256, scores.shape[1]))


def _of(blocks: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One block of each row."""
    return blocks.gather(1, block[:, None, None].expand(-1, 1, blocks.shape[2]))[:, 0]


class _Heaviest(NamedTuple):
    """The heaviest tokens of each row in falling order, 0 behind its top_k; enough of them to hold its top_p."""

    weights: torch.Tensor
    tokens: torch.Tensor
    total: torch.Tensor
    """What top_p is a share of."""


def _passed_among_heaviest(weights: torch.Tensor, lots: torch.Tensor, params: Sequence[Params]) -> torch.Tensor:
    """As ``_passed``, among the tokens that top_k and top_p leave."""
    import torch

    heaviest = _heaviest_on_host(weights, params[0]) if weights.device.type == "cpu" else _heaviest(weights, params)
    shares = tensor([[one.top_p] for one in params], weights.device)
    edges = heaviest.weights.cumsum(dim=-1)
    # The first stays, and each whose forerunners do not make up top_p.
    last = torch.searchsorted(edges, heaviest.total * shares).clamp_(max=edges.shape[1] - 1)
    place = torch.searchsorted(edges, lots * edges.gather(1, last), right=True)
    return heaviest.tokens.gather(1, torch.minimum(place, last))[:, 0]


def _heaviest(weights: torch.Tensor, params: Sequence[Params]) -> _Heaviest:
    """Of all rows at once."""
    import torch

    vocabulary = weights.shape[1]
    counts = [one.top_k if 0 < one.top_k < vocabulary else vocabulary for one in params]
    most = max(counts)
    heavy, tokens = weights.topk(most) if most < vocabulary else weights.sort(descending=True)
    if min(counts) < most:
        behind = torch.arange(most, device=weights.device) >= tensor(counts, weights.device)[:, None]
        heavy = heavy.masked_fill(behind, 0.0)
    return _Heaviest(heavy, tokens, heavy.sum(dim=-1, keepdim=True))


def _heaviest_on_host(weights: torch.Tensor, params: Params) -> _Heaviest:
    """Of one row."""
    import numpy as np
    import torch

    vocabulary = weights.shape[1]
    if 0 < params.top_k < vocabulary:
        heavy, tokens = weights.topk(params.top_k)
        return _Heaviest(heavy, tokens, heavy.sum(dim=-1, keepdim=True))
    total = weights.sum(dim=-1, keepdim=True)
    row, whole = weights.numpy()[0], total.item()
    # Only what may be part of top_p is sorted: seldom more than a few. What is lighter than the last share weighs less,
    # all together, than top_p leaves out.
    for share in (*_SHARES, (1 - params.top_p) / vocabulary):
        places = np.flatnonzero(row >= whole * share)
        heavy = row[places]
        if heavy.sum(dtype=np.float64) >= whole * params.top_p * _ROUNDING:
            break
    if not len(places):
        return _Heaviest(weights, torch.arange(vocabulary)[None], total)
    order = np.argsort(-heavy, kind="stable")
    return _Heaviest(torch.from_numpy(heavy[order])[None], torch.from_numpy(places[order])[None], total)
