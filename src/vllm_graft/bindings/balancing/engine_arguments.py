"""Refusals of engines that cannot have a planned balancer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graft.errors import ConfigError
from vllm_graft.plan import Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def unusable_balancers(config: VllmConfig, plan: Plan) -> dict[str, str]:
    """Return the planned balancer if this engine cannot have it, with the reason; a strict plan is refused."""
    parallel = config.parallel_config
    if not parallel.enable_eplb:
        reason, fix = "vLLM rearranges no experts without --enable-eplb", "start the engine with --enable-eplb"
    elif getattr(parallel, "enable_elastic_ep", False):
        # The ranks change while it runs, and with them who asks and who follows.
        reason, fix = "it is not bound with elastic expert parallelism", "start the engine without --enable-elastic-ep"
    else:
        return {}
    for item in plan.of("expert-balancer"):
        if plan.strict:
            what = f"the expert balancer {item.name!r} would never be called: {reason}"
            raise ConfigError(what, where=item.origin, fix=f"{fix}, or remove it from the plan")
    return {item.name: reason for item in plan.of("expert-balancer")}
