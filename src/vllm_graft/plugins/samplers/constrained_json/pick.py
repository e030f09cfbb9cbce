"""A token for each row, by the temperature, top_k and top_p of its request and one random number.

On an accelerator calls cost more than rows do, so all rows are worked on at once, and nothing waits for the device.
On a CPU it is numpy, row by row: torch shares out every operation on a row among its threads and waits for all of them,
which on a busy machine takes a time slice of another process. vLLM's CPU worker fixes the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.contracts import Params
from vllm_graft.contracts.kernels import indices, to_device

if TYPE_CHECKING:
    import torch

_SHARES: Final = (1e-3, 1e-4, 1e-5)
"""Tokens with at least this share of the total are considered for top_p; the next share if they do not add up to it."""
_ROUNDING: Final = 1.00001


def pick(scores: torch.Tensor, params: Sequence[Params], numbers: Sequence[float]) -> torch.Tensor:
    """Pick the token of each row: ``scores`` is [rows, vocabulary], -inf for what may not come, and is overwritten.

    ``numbers`` are in [0, 1), one for each row. A row gets the same token whatever other rows there are. A token that
    may not come is returned only for a row of which nothing may.
    """
    if scores.device.type == "cpu":
        import torch

        rows = zip(scores.numpy(), params, numbers, strict=True)
        return torch.tensor([_pick_on_host(row, one, number) for row, one, number in rows], dtype=torch.int64)
    chance = [row for row, one in enumerate(params) if not one.greedy]
    if not chance:
        return scores.argmax(dim=-1)
    if len(chance) == len(params):
        return _draw(scores, params, numbers)
    picked, rows_of_chance = scores.argmax(dim=-1), indices(chance, scores.device)
    drawn = _draw(scores[rows_of_chance], [params[row] for row in chance], [numbers[row] for row in chance])
    return picked.index_copy_(0, rows_of_chance, drawn)


def _pick_on_host(row: Any, params: Params, number: float) -> int:
    """Pick the token of one row, a numpy array."""
    import numpy as np

    best = int(row.argmax())
    if params.greedy or row[best] == -math.inf:
        return best
    weights = row - row[best]
    weights /= np.float32(params.temperature)
    np.exp(weights, out=weights)
    narrow = params.top_p < 1 or 0 < params.top_k < len(row)
    token = _invert_top_cdf_on_host(weights, params, number) if narrow else _invert_cdf_on_host(weights, number)
    # Sums are rounded: a number at the edge of one may fall on a token of no weight.
    return token if weights[token] > 0 else best


def _invert_cdf_on_host(weights: Any, number: float) -> int:
    """Find the index at which the running sum passes a share of the whole; first the block, then the place in it."""
    import numpy as np

    blocks = weights.reshape(-1, math.gcd(256, len(weights)))
    sums = blocks.sum(axis=1)
    edges = sums.cumsum(dtype=np.float64)
    target = number * edges[-1]
    block = min(int(edges.searchsorted(target, side="right")), len(edges) - 1)
    within = blocks[block].cumsum(dtype=np.float64)
    place = min(int(within.searchsorted(target - (edges[block] - sums[block]), side="right")), len(within) - 1)
    return block * len(within) + place


def _invert_top_cdf_on_host(weights: Any, params: Params, number: float) -> int:
    """Find that index among the tokens that top_k and top_p leave."""
    import numpy as np
    import torch

    # The heaviest tokens in falling order, enough to hold top_p, and the total that top_p is a share of.
    vocabulary = len(weights)
    if 0 < params.top_k < vocabulary:
        heavy, tokens = (each.numpy() for each in torch.from_numpy(weights).topk(params.top_k))
        total = float(heavy.sum(dtype=np.float64))
    else:
        total = float(weights.sum(dtype=np.float64))
        # Only what may be part of top_p is sorted: seldom more than a few. What is lighter than the last share weighs
        # less, all together, than top_p leaves out.
        for share in (*_SHARES, (1 - params.top_p) / vocabulary):
            tokens = np.flatnonzero(weights >= total * share)
            heavy = weights[tokens]
            if heavy.sum(dtype=np.float64) >= total * params.top_p * _ROUNDING:
                break
        if not len(tokens):
            tokens, heavy = np.arange(vocabulary), weights
        order = np.argsort(-heavy, kind="stable")
        heavy, tokens = heavy[order], tokens[order]
    edges = heavy.cumsum(dtype="float64")
    # The first stays, and each whose forerunners do not make up top_p.
    last = min(int(edges.searchsorted(total * params.top_p)), len(edges) - 1)
    return int(tokens[min(int(edges.searchsorted(number * edges[last], side="right")), last)])


def _draw(scores: torch.Tensor, params: Sequence[Params], numbers: Sequence[float]) -> torch.Tensor:
    import torch

    # One copy to the device for both.
    temperatures, targets = to_device([[float(one.temperature) for one in params], numbers], scores.device)[..., None]
    weights = scores.div_(temperatures).softmax(dim=-1)
    narrow = [row for row, one in enumerate(params) if one.top_p < 1 or 0 < one.top_k < weights.shape[1]]
    if len(narrow) < len(params):
        # The index at which the running sum of each row passes its target, a share of the whole.
        edges = weights.cumsum(dim=-1)
        drawn = torch.searchsorted(edges, targets * edges[:, -1:], right=True).clamp_(max=weights.shape[1] - 1)[:, 0]
    else:
        drawn = torch.zeros_like(targets[:, 0], dtype=torch.int64)
    if narrow:
        rows = indices(narrow, scores.device)
        drawn[rows] = _invert_top_cdf(weights[rows], targets[rows], [params[row] for row in narrow])
    # Sums are rounded: a number at the edge of one may fall on a token of no weight.
    weighs = weights.gather(1, drawn[:, None])[:, 0] > 0
    return torch.where(weighs, drawn, weights.argmax(dim=-1))


def _invert_top_cdf(weights: torch.Tensor, targets: torch.Tensor, params: Sequence[Params]) -> torch.Tensor:
    """Find those indices among the tokens that top_k and top_p leave, of all rows at once."""
    import torch

    vocabulary = weights.shape[1]
    counts = [one.top_k if 0 < one.top_k < vocabulary else vocabulary for one in params]
    most = max(counts)
    # In falling order, 0 behind a row's own top_k: enough of them to hold its top_p.
    heavy, tokens = weights.topk(most) if most < vocabulary else weights.sort(descending=True)
    if min(counts) < most:
        behind = torch.arange(most, device=weights.device) >= indices(counts, weights.device)[:, None]
        heavy = heavy.masked_fill(behind, 0.0)
    shares = to_device([[one.top_p] for one in params], weights.device)
    edges = heavy.cumsum(dim=-1)
    # The first stays, and each whose forerunners do not make up top_p, which is a share of what top_k left.
    last = torch.searchsorted(edges, heavy.sum(dim=-1, keepdim=True) * shares).clamp_(max=edges.shape[1] - 1)
    place = torch.searchsorted(edges, targets * edges.gather(1, last), right=True)
    return tokens.gather(1, torch.minimum(place, last))[:, 0]
