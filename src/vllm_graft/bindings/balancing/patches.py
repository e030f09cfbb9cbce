"""The patch of the expert-balancer point, on a method that kept its shape from 0.26 to 0.32. It calls the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm_graft.patching import Engine, Patch, VLLMPatch, wrap

_POLICY: Final = "policy"
"""The attribute of vLLM's ``EplbState`` with the policy that it has picked."""


class PlannedPolicy(
    VLLMPatch["vllm.distributed.eplb.eplb_state:EplbState"],
    name="graft.expert-balancer",
    why="vLLM takes no EPLB policy but its own",
):
    """Put the planned balancer in the place of the policy that vLLM picks with each model it is given."""

    @wrap
    def add_model(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Late, as this module is imported in every process and that one needs torch.
        from vllm_graft.bindings.balancing.policy import planned_policy

        result = call(*args, **kwargs)
        setattr(self, _POLICY, planned_policy(getattr(self, _POLICY)))
        return result


BALANCER_PATCHES: Final[tuple[Patch, ...]] = (PlannedPolicy,)


def install(engine: Engine) -> None:
    """Apply the patch when its module is imported. A target that this vLLM lacks refuses the plan."""
    for patch in BALANCER_PATCHES:
        engine.apply([patch])
