"""Kernels are compiled when the worker starts: the first request that needs one should not wait seconds for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from vllm_graft.contracts import Rows, ServedModel
from vllm_graft.contracts.rows import Step

if TYPE_CHECKING:
    import torch


def warm_up(model: ServedModel, change: Callable[[torch.Tensor, Rows], None]) -> None:
    """Call ``change`` on a row of nobody, where kernels will do the work; elsewhere there is nothing to compile."""
    import torch

    from vllm_graft.bindings.sampling.truncation import has_triton

    logits = torch.zeros((1, model.vocabulary), device=model.device)
    if has_triton(logits):
        row = torch.zeros(1, dtype=torch.int64, device=model.device)
        change(logits, Rows(row, row + model.slots, cast(Step, None)))
