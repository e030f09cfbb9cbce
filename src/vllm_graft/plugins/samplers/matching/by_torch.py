"""Matches of many rows at once, and the few changes in logits that follow, by torch: nothing waits for a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from vllm_graft.contracts.kernels import has_triton, indices, to_device
from vllm_graft.plugins.samplers.matching import MAX_MATCH

_FIRST: Final = 4096
"""The number of a row's logits that are looked at first for one that is not -inf."""


def match_lengths(tokens: torch.Tensor, windows: torch.Tensor, broken: torch.Tensor | None = None) -> torch.Tensor:
    """Count the tokens right before each column that equal the end of its row.

    tokens:  [rows, columns], the newest in the last column, negative where there is none
    windows: how many of a row's last columns count, for each row
    broken:  [rows, up to MAX_MATCH], whether the last, the last but one, ... token of a row ends matches
    """
    columns = tokens.shape[1]
    most = min(MAX_MATCH, columns - 1)
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
        # Only if the host has the answer anyway.
        if tokens.device.type == "cpu" and not (alive & (longest > length)).any():
            break
        lengths += alive
    return torch.minimum(lengths, longest)


def newest_first(tokens: torch.Tensor) -> torch.Tensor:
    """Return the last tokens of each row, as many as a match can be long, the newest in the first column."""
    return tokens[:, -MAX_MATCH:].flip(1)


def lower(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, penalties: torch.Tensor) -> None:
    """Lower logits by penalties, [rows, k] like ``tokens``; of several for one token the greatest counts.

    A negative token stands for none. What is -inf stays so.
    """
    flat, at = _flat(logits), _places(logits, rows, tokens)
    lowered = torch.where(tokens >= 0, flat[at] - penalties, torch.inf)
    flat.scatter_reduce_(0, at.flatten(), lowered.flatten(), "amin")


def ban(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Set logits to -inf; a row of ``tokens`` [rows, k] that would leave nothing possible changes nothing.

    A negative token stands for none.
    """
    flat, at = _flat(logits), _places(logits, rows, tokens)
    before = flat[at]
    # Those that stand for none share a place with a real one, and must not undo what that one does.
    flat.scatter_reduce_(0, at.flatten(), torch.where(tokens >= 0, -torch.inf, torch.inf).flatten(), "amin")
    # Rows of which all logits are -inf now.
    if logits.device.type != "cpu":
        dead = torch.isneginf(logits[rows].amax(1))
    else:
        own = (logits[row] for row in rows.tolist())
        # The first tokens tell nearly always that something is left.
        dead = torch.tensor([all(part.amax() == -math.inf for part in (row[:_FIRST], row)) for row in own])
    restored = torch.where(dead[:, None], before, -torch.inf)
    flat.scatter_reduce_(0, at.flatten(), restored.flatten(), "amax")


def lower_each(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], penalties: Sequence[float]) -> None:
    """Lower single logits, each named once, by penalties that the host knows."""
    step, apart = logits.stride()
    places = [row * step + token * apart for row, token in zip(rows, tokens, strict=True)]
    by = to_device(penalties, logits.device, torch.float32)
    _flat(logits).index_add_(0, indices(places, logits.device), by, alpha=-1)


def ban_each(logits: torch.Tensor, bans: Mapping[int, Sequence[int]]) -> None:
    """Ban tokens that the host knows, row to tokens; as with ``ban`` no row is left with nothing."""
    most = max(map(len, bans.values()))
    padded = [token for tokens in bans.values() for token in (*tokens, *[-1] * (most - len(tokens)))]
    rows = indices(list(bans), logits.device)
    table = indices(padded, logits.device).view(len(bans), most)
    if has_triton(logits):
        from vllm_graft.plugins.samplers.matching import kernels

        kernels.ban(logits, rows, table)
    else:
        ban(logits, rows, table)


def _flat(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits as one line that shares their memory, also if rows lie apart."""
    rows, columns = logits.shape
    size = (rows - 1) * logits.stride(0) + (columns - 1) * logits.stride(1) + 1
    return logits.as_strided((size,), (1,), logits.storage_offset())


def _places(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return rows[:, None] * logits.stride(0) + tokens.clamp(min=0).to(rows.dtype) * logits.stride(1)
