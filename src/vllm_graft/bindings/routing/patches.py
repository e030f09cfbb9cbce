"""The patches of the router point, on classes that kept their shape from 0.26 to 0.32. Each calls the original.

vLLM's own way in, an argument of the function that makes a layer, is in each model's code; and that function has had
three names. Every layer passes through the two constructors here, whatever made it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm_graft.bindings.routing.planned_router import planned_router
from vllm_graft.patching import Engine, Patch, VLLMPatch, wrap

_WHY: Final = "vLLM takes no router for the models that it has"

Call = Callable[..., Any]


class RoutedExpertsKernel(
    VLLMPatch["vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts"],
    name="graft.router-experts",
    why=_WHY,
):
    """Have vLLM choose a kernel for a layer's experts that leaves the routing to others."""

    @wrap
    def __init__(self, call: Call, *args: Any, **kwargs: Any) -> None:
        planned_router.make_experts(call, args, kwargs)


class RoutedRunner(
    VLLMPatch["vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner"], name="graft.router-layers", why=_WHY
):
    """Give a layer the planned router when it is made."""

    @wrap
    def __init__(self, call: Call, *args: Any, **kwargs: Any) -> None:
        planned_router.make_runner(self, call, args, kwargs)


class RoutedModel(VLLMPatch["vllm.v1.worker.gpu_worker:Worker"], name="graft.router-model", why=_WHY):
    """Try the routers of a model that is loaded, and follow them while it serves."""

    @wrap
    def load_model(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        planned_router.begin(self.vllm_config)
        result = call(*args, **kwargs)
        planned_router.settle(self.vllm_config)
        return result

    @wrap
    def execute_model(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        planned_router.end_step()
        return result


ROUTER_PATCHES: Final[tuple[Patch, ...]] = (RoutedExpertsKernel, RoutedRunner, RoutedModel)


def install(engine: Engine) -> None:
    """Apply the patches, each when its module is imported. A target that this vLLM lacks refuses the plan."""
    for patch in ROUTER_PATCHES:
        engine.apply([patch])
