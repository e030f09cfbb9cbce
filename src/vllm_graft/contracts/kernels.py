"""Building blocks for samplers: row statistics and truncation, random numbers, copies to the device, warm-up.

The samplers that ship use these and nothing else from inside the package. On a GPU the work is done by Triton; on the
host long rows are worked on one after another, while each is in the cache; all else is plain torch. Nothing here waits
for a device. torch is imported in the functions: the front end imports samplers for their keys and needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, cast

from vllm_graft.contracts.rows import Rows, ServedModel, Statistics, Step
from vllm_graft.splitmix import GAMMA, finalize_tensor, signed

if TYPE_CHECKING:
    import torch

_NEGLIGIBLE: Final = -80.0
"""The logarithm of a share that is lost in a float32 sum beside 1, even a million times."""
_LEAST: Final = -3.4e38
"""About the least number of float32."""
_LONG_ROW: Final = 8192
"""Rows longer than this are worked on one by one on the host: each then stays in the cache. For shorter ones the calls
into torch cost more than the memory does, and one call for all rows is several times as fast."""


def has_triton(tensor: torch.Tensor) -> bool:
    """Return whether Triton kernels can work on this tensor."""
    return tensor.device.type == "cuda" and _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    from importlib.util import find_spec

    # Looked for, not imported: the front end asks too, and most CPU builds have no Triton.
    return find_spec("triton") is not None


def works_by_row(logits: torch.Tensor) -> bool:
    """Return whether to work on these logits row by row: long rows on the host."""
    return logits.device.type == "cpu" and logits.shape[1] > _LONG_ROW


def to_device(
    numbers: torch.Tensor | Sequence[float] | Sequence[Sequence[float]],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Copy numbers of the host to the device without waiting for it; a tensor on a CPU is returned as it is.

    The copy goes through pinned memory, which torch keeps until the copy is done: from pageable memory CUDA would stage
    it and hold the host up.
    """
    import torch

    on_cpu = device.type == "cpu"
    if isinstance(numbers, torch.Tensor):
        return numbers if on_cpu else numbers.pin_memory().to(device, non_blocking=True)
    found = torch.tensor(numbers, dtype=dtype, pin_memory=not on_cpu)
    return found if on_cpu else found.to(device, non_blocking=True)


def indices(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Copy whole numbers, such as rows, slots or tokens, to the device as int64, without waiting for it."""
    import torch

    return to_device(numbers, device, torch.int64)


def copy_into(target: torch.Tensor, numbers: torch.Tensor) -> None:
    """Overwrite a tensor with numbers of the host, without waiting for its device: the host may change them at once."""
    target.copy_(numbers if target.device.type == "cpu" else numbers.pin_memory(), non_blocking=True)


def warm_up(model: ServedModel, change: Callable[[torch.Tensor, Rows], None]) -> None:
    """Compile kernels when the worker starts, so that no request waits seconds for them.

    Calls ``change`` on one row that belongs to no request; if Triton does not run there is nothing to compile.
    """
    import torch

    # One row is enough: no kernel is specialized on the number of rows.
    logits = torch.zeros((1, model.vocabulary), device=model.device)
    if has_triton(logits):
        row = torch.zeros(1, dtype=torch.int64, device=model.device)
        change(logits, Rows(row, row + model.slots, cast(Step, None)))


def uniform(seeds: torch.Tensor, positions: torch.Tensor, salt: int) -> torch.Tensor:
    """Return numbers in [0, 1), each a hash of seed, position and salt; the same on every device."""
    import torch

    if has_triton(seeds):
        from vllm_graft.contracts.triton_kernels import uniform_by_triton

        return uniform_by_triton(seeds, positions, salt)
    mixed = _mix(seeds + _mix(positions + (salt << 32)))
    # float32 distinguishes 24 bits.
    return ((mixed >> 40) & 0xFFFFFF).to(torch.float32) / 16777216.0


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    return finalize_tensor(numbers * signed(GAMMA) + 1)


def statistics(logits: torch.Tensor, rows: torch.Tensor) -> Statistics:
    """Compute the statistics of these rows; without a finite logit max and logsumexp are -inf, mean and std 0."""
    if has_triton(logits):
        from vllm_graft.contracts.triton_kernels import statistics_by_triton

        return statistics_by_triton(logits, rows)
    if not works_by_row(logits):
        return _statistics_by_torch(logits, rows)
    import torch

    scratch = torch.empty(logits.shape[1], dtype=logits.dtype)
    found = [_statistics_of_row(logits[row], scratch) for row in rows.tolist()]
    table = torch.tensor(found, dtype=torch.float32).view(len(found), 4)
    return Statistics(*table.T.contiguous().unbind())


def mask_below(
    logits: torch.Tensor, rows: torch.Tensor, thresholds: torch.Tensor, greatest: torch.Tensor | None = None
) -> None:
    """Set what is below its row's threshold to -inf, in place; the greatest logit of a row always stays.

    ``greatest`` is the greatest logit of each row, if that is known already: it saves a pass.
    """
    import torch

    if greatest is None:
        if has_triton(logits):
            greatest = statistics(logits, rows).max
        elif works_by_row(logits):
            greatest = torch.stack([logits[row].amax() for row in rows.tolist()])
        else:
            greatest = logits[rows].amax(1)
    # A threshold that is NaN lets all stay.
    limits = torch.minimum(thresholds, greatest).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if has_triton(logits):
        from vllm_graft.contracts.triton_kernels import mask_by_triton

        mask_by_triton(logits, rows, limits)
    elif works_by_row(logits):
        _mask_by_row(logits, rows, limits)
    else:
        own = logits[rows]
        logits[rows] = own.masked_fill(own < limits[:, None], -torch.inf)


def log_of_sum(row: torch.Tensor, greatest: float, scratch: torch.Tensor) -> float:
    """Return the logarithm of the sum of exponentials of a row on the host, relative to its greatest logit."""
    import torch

    # exp(-inf) is many times as slow as that of a number, and what is clamped here is lost in the sum.
    return math.log(torch.sub(row, greatest, out=scratch).clamp_(min=_NEGLIGIBLE).exp_().sum().item())


def _statistics_by_torch(logits: torch.Tensor, rows: torch.Tensor) -> Statistics:
    import torch

    own = logits[rows]
    finite = own > -torch.inf
    count = finite.sum(1).clamp(min=1)
    mean = torch.where(finite, own, 0.0).sum(1) / count
    around = torch.where(finite, own - mean[:, None], 0.0)
    std = (around.square().sum(1) / count).sqrt()
    return Statistics(own.amax(1), own.logsumexp(1), mean, std)


def _statistics_of_row(row: torch.Tensor, scratch: torch.Tensor) -> tuple[float, float, float, float]:
    """Return greatest, logsumexp, mean and spread of one row on the host."""
    import torch

    greatest = row.amax().item()
    if greatest == -math.inf:
        return -math.inf, -math.inf, 0.0, 0.0
    total, count = row.sum().item(), row.numel()
    if total > -math.inf:
        mean = total / count
        around = torch.sub(row, mean, out=scratch)
    else:
        # Some are -inf and must not count: relative to a number above all logits, exactly those become 0.
        above = greatest + max(1.0, abs(greatest))
        below = torch.threshold(row, _LEAST, above, out=scratch).sub_(above)
        count = int(below.count_nonzero())
        mean = above + below.sum().item() / count
        around = torch.threshold(row, _LEAST, mean, out=scratch).sub_(mean)
    std = math.sqrt(torch.dot(around, around).item() / count)
    return greatest, greatest + log_of_sum(row, greatest, scratch), mean, std


def _mask_by_row(logits: torch.Tensor, rows: torch.Tensor, limits: torch.Tensor) -> None:
    import torch

    # torch.threshold keeps what is above a limit, without the limit itself, several times as fast as a mask does.
    below = torch.nextafter(limits, torch.full_like(limits, -torch.inf))
    for row, limit in zip(rows.tolist(), below.tolist(), strict=True):
        if limit > -math.inf:
            torch.threshold_(logits[row], limit, -math.inf)
