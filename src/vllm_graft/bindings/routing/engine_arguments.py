"""Refusals of engines that cannot have a planned router."""

from __future__ import annotations

from typing import Final

from vllm_graft.plan import Plan

_SIMULATED: Final = "the simulated accelerator computes no experts"


def unusable_routers(plan: Plan) -> dict[str, str]:
    """Return the planned routers that this engine cannot have, each with the reason."""
    from vllm.platforms import current_platform

    # Asked of the class: an instance answers for attributes that it lacks, with a warning.
    if getattr(type(current_platform), "computes_attention", True):
        return {}
    return {item.name: _SIMULATED for item in plan.of("router")}
