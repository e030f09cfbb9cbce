"""The patches of the model point, on methods that kept their shape from 0.26 to 0.32. Each calls the original.

Registering an architecture needs none of them: they see to it that a class that cannot work is named with its reason,
and that the class which a worker builds is the planned one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm_graft.bindings.models.planned_models import planned_models
from vllm_graft.patching import Engine, Patch, VLLMPatch, wrap

_WHY: Final = "vLLM only logs why a model class cannot be used, and weights without their names"

Call = Callable[..., Any]


class InspectedModels(
    VLLMPatch["vllm.model_executor.models.registry:_LazyRegisteredModel"], name="graft.model-inspection", why=_WHY
):
    """Remember why a class could not be inspected."""

    @wrap
    def inspect_model_cls(self, call: Call) -> Any:
        return planned_models.inspect(self, call)


class CheckedModels(VLLMPatch["vllm.model_executor.models.registry:_ModelInfo"], name="graft.model-check", why=_WHY):
    """Check a planned class in the subprocess in which vLLM inspects it."""

    @wrap
    @staticmethod
    def from_model_cls(call: Call, model: Any) -> Any:
        planned_models.check_inspected(model)
        return call(model)


class LoadedModels(VLLMPatch["vllm.v1.worker.gpu_worker:Worker"], name="graft.model-load", why=_WHY):
    """Load a planned model, with its weights' names mapped, and record the class that was built."""

    @wrap
    def load_model(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        return planned_models.load_model(self, lambda: call(*args, **kwargs))


MODEL_PATCHES: Final[tuple[Patch, ...]] = (InspectedModels, CheckedModels, LoadedModels)


def install(engine: Engine) -> None:
    """Apply the patches, each when its module is imported. A target that this vLLM lacks refuses the plan."""
    for patch in MODEL_PATCHES:
        engine.apply([patch])
