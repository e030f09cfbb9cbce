"""Few changes in many logits: by torch, on any device, without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from vllm_graft.contracts.kernels import has_triton, indices, to_device

if TYPE_CHECKING:
    import torch

_FIRST: Final = 4096


def lower(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, penalties: torch.Tensor) -> None:
    """Lower logits by penalties, [rows, k] like ``tokens``; of several for one token the greatest counts.

    A negative token stands for none. What is -inf stays so.
    """
    import torch

    flat, at = _flat(logits), _places(logits, rows, tokens)
    lowered = torch.where(tokens >= 0, flat[at] - penalties, torch.inf)
    flat.scatter_reduce_(0, at.flatten(), lowered.flatten(), "amin")


def ban(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Set logits to -inf; a row of ``tokens`` [rows, k] that would leave nothing possible changes nothing.

    A negative token stands for none.
    """
    import torch

    flat, at = _flat(logits), _places(logits, rows, tokens)
    before = flat[at]
    # Those that stand for none share a place with a real one, and must not undo what that one does.
    flat.scatter_reduce_(0, at.flatten(), torch.where(tokens >= 0, -torch.inf, torch.inf).flatten(), "amin")
    dead = _dead(logits, rows)
    restored = torch.where(dead[:, None], before, -torch.inf)
    flat.scatter_reduce_(0, at.flatten(), restored.flatten(), "amax")


def lower_each(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], penalties: Sequence[float]) -> None:
    """Lower single logits, each named once, by penalties that the host knows."""
    import torch

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


def _dead(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Whether nothing is possible in a row."""
    import torch

    if logits.device.type != "cpu":
        return torch.isneginf(logits[rows].amax(1))
    # The first tokens tell nearly always that something is.
    return torch.tensor([_is_dead(logits[row][:_FIRST]) and _is_dead(logits[row]) for row in rows.tolist()])


def _is_dead(row: torch.Tensor) -> bool:
    return bool(row.amax() == -math.inf)


def _flat(logits: torch.Tensor) -> torch.Tensor:
    """The logits as one line that shares their memory, also where rows lie apart."""
    rows, columns = logits.shape
    size = (rows - 1) * logits.stride(0) + (columns - 1) * logits.stride(1) + 1
    return logits.as_strided((size,), (1,), logits.storage_offset())


def _places(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return rows[:, None] * logits.stride(0) + tokens.clamp(min=0).to(rows.dtype) * logits.stride(1)
