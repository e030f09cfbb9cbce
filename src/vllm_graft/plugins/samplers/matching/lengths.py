"""All matches of many rows at once, from their tokens alone: by torch, on any device, without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graft.plugins.samplers.matching import LONGEST

if TYPE_CHECKING:
    import torch

    from vllm_graft.contracts import ServedModel


def match_lengths(tokens: torch.Tensor, windows: torch.Tensor, broken: torch.Tensor | None = None) -> torch.Tensor:
    """How many tokens right before each column equal the end of its row.

    tokens:  [rows, columns], the newest in the last column, negative where there is none
    windows: how many of a row's last columns count, for each row
    broken:  [rows, up to LONGEST], whether the last, the last but one, ... token of a row ends matches
    """
    import torch

    columns = tokens.shape[1]
    most = min(LONGEST, columns - 1)
    ends = tokens.flip(1)[:, :most]
    whole = ends >= 0 if broken is None else (ends >= 0) & ~broken[:, :most]
    run = whole.to(torch.int32).cumprod(1).sum(1)
    reach = torch.arange(columns, device=tokens.device) - (columns - windows.to(torch.int64)[:, None])
    longest = torch.minimum(run[:, None], reach.clamp(min=0))
    alive = torch.ones_like(tokens, dtype=torch.bool)
    lengths = torch.zeros_like(longest)
    for length in range(most):
        alive[:, : length + 1] = False
        alive[:, length + 1 :] &= tokens[:, : columns - 1 - length] == ends[:, length : length + 1]
        # Only where the host has the answer anyway.
        if tokens.device.type == "cpu" and not (alive & (longest > length)).any():
            break
        lengths += alive
    return torch.minimum(lengths, longest)


def newest_first(tokens: torch.Tensor) -> torch.Tensor:
    """The last tokens of each row, as many as a match can be long, the newest in the first column."""
    return tokens[:, -LONGEST:].flip(1)


def no_tokens(model: ServedModel, window: int) -> torch.Tensor:
    """The history of one row that has none."""
    import torch

    return torch.full((1, window), -1, dtype=torch.int32, device=model.device)
