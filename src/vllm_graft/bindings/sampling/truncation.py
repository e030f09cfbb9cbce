"""Statistics of rows of logits, and the one pass that takes away what is below a limit.

On a GPU by Triton; on the host long rows one after another, while each is in the cache; all else by plain torch.
Nothing here waits for a device.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Final

from vllm_graft.contracts import Statistics

if TYPE_CHECKING:
    import torch

_NOTHING: Final = -80.0
"""An exponential that is lost beside that of 0, even a million times."""
_LEAST: Final = -3.4e38
"""About the least number of float32."""
_LONG_ROW: Final = 8192
"""Rows longer than this are worked on one by one on the host: each then stays in the cache. For shorter ones the calls
into torch cost more than the memory does, and one call for all rows is several times as fast."""


def has_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels can work on this tensor."""
    return tensor.device.type == "cuda" and _triton_is_installed()


def works_by_row(logits: torch.Tensor) -> bool:
    """Whether to work on these logits row by row: long rows on the host."""
    return logits.device.type == "cpu" and logits.shape[1] > _LONG_ROW


def statistics(logits: torch.Tensor, rows: torch.Tensor) -> Statistics:
    """What is to be known of these rows of the logits; of a row without any finite logit max and logsumexp are -inf,
    mean and std 0."""
    if has_triton(logits):
        from vllm_graft.bindings.sampling.truncation_kernels import statistics_by_triton

        return statistics_by_triton(logits, rows)
    return _by_row(logits, rows) if works_by_row(logits) else _by_torch(logits, rows)


def mask_below(
    logits: torch.Tensor, rows: torch.Tensor, thresholds: torch.Tensor, greatest: torch.Tensor | None = None
) -> None:
    """Set what is below its row's threshold to -inf, in place; the greatest logit of a row always stays.

    ``greatest`` is the greatest logit of each row, where that is known already: it saves a pass.
    """
    import torch

    if greatest is None:
        greatest = _greatest(logits, rows)
    # A threshold that is no number lets all stay.
    limits = torch.minimum(thresholds, greatest).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if has_triton(logits):
        from vllm_graft.bindings.sampling.truncation_kernels import mask_by_triton

        mask_by_triton(logits, rows, limits)
    elif works_by_row(logits):
        _mask_by_row(logits, rows, limits)
    else:
        own = logits[rows]
        logits[rows] = own.masked_fill(own < limits[:, None], -torch.inf)


@cache
def _triton_is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def _greatest(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    import torch

    if has_triton(logits):
        return statistics(logits, rows).max
    if not works_by_row(logits):
        return logits[rows].amax(1)
    return torch.stack([logits[row].amax() for row in rows.tolist()])


def _by_row(logits: torch.Tensor, rows: torch.Tensor) -> Statistics:
    import torch

    scratch = torch.empty(logits.shape[1], dtype=logits.dtype)
    found = [_of_row(logits[row], scratch) for row in rows.tolist()]
    table = torch.tensor(found, dtype=torch.float32).view(len(found), 4)
    return Statistics(*table.T.contiguous().unbind())


def _of_row(row: torch.Tensor, scratch: torch.Tensor) -> tuple[float, float, float, float]:
    """Greatest, logsumexp, mean and spread of one row on the host."""
    import torch

    greatest = row.amax().item()
    if greatest == -math.inf:
        return -math.inf, -math.inf, 0.0, 0.0
    total, count = row.sum().item(), row.numel()
    if total > -math.inf:
        mean = total / count
        around = torch.sub(row, mean, out=scratch)
    else:
        # Relative to what is above all, only those that do not count are 0.
        above = greatest + max(1.0, abs(greatest))
        below = torch.threshold(row, _LEAST, above, out=scratch).sub_(above)
        count = int(below.count_nonzero())
        mean = above + below.sum().item() / count
        around = torch.threshold(row, _LEAST, mean, out=scratch).sub_(mean)
    std = math.sqrt(torch.dot(around, around).item() / count)
    return greatest, greatest + log_of_sum(row, greatest, scratch), mean, std


def log_of_sum(row: torch.Tensor, greatest: float, scratch: torch.Tensor) -> float:
    """The logarithm of the sum of exponentials of a row on the host, all relative to its greatest."""
    import torch

    # Exponentials of -inf are many times as slow as those of numbers, and what is clamped here is lost in the sum.
    return math.log(torch.sub(row, greatest, out=scratch).clamp_(min=_NOTHING).exp_().sum().item())


def _mask_by_row(logits: torch.Tensor, rows: torch.Tensor, limits: torch.Tensor) -> None:
    import torch

    # torch keeps what is above a limit, without the limit itself; and does so several times as fast as a mask.
    below = torch.nextafter(limits, torch.full_like(limits, -torch.inf))
    for row, limit in zip(rows.tolist(), below.tolist(), strict=True):
        if limit > -math.inf:
            torch.threshold_(logits[row], limit, -math.inf)


def _by_torch(logits: torch.Tensor, rows: torch.Tensor) -> Statistics:
    import torch

    own = logits[rows]
    finite = own > -torch.inf
    count = finite.sum(1).clamp(min=1)
    mean = torch.where(finite, own, 0.0).sum(1) / count
    around = torch.where(finite, own - mean[:, None], 0.0)
    std = (around.square().sum(1) / count).sqrt()
    return Statistics(own.amax(1), own.logsumexp(1), mean, std)
