"""Refusals of engines that cannot have a planned item of the attention point."""

from __future__ import annotations

from typing import Final

from vllm_graft.contracts import AttentionKernel
from vllm_graft.errors import GraftError
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.plan.catalogue import load

_SIMULATED: Final = "the simulated accelerator computes no attention"


def unusable_kernels(plan: Plan) -> dict[str, str]:
    """Return the planned kernels that this engine cannot have, each with the reason."""
    from vllm.platforms import current_platform

    # Asked of the class: an instance answers for attributes that it lacks, with a warning.
    if getattr(type(current_platform), "computes_attention", True):
        return {}
    return {item.name: _SIMULATED for item in plan.of("attention") if _is_kernel(item)}


def _is_kernel(item: PlanItem) -> bool:
    try:
        return issubclass(load(item.target, item.name, item.package), AttentionKernel)
    except GraftError:
        # The process that makes the item says what is wrong with it.
        return False
