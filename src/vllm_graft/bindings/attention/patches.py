"""The patches of the attention point, on functions that kept their shape from 0.26 to 0.32. Each calls the original.

A layer asks the plan when vLLM wants its KV-cache spec: the block size is settled then, and the metadata builders are
not made yet. Every platform and runner passes there. A backend that is named in the arguments is ignored on CPU, and
one that is registered under a name of vLLM's own is shared by all plugins of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm_graft.bindings.attention.kernel_layers import planned_kernel
from vllm_graft.bindings.attention.layers import planned_layers
from vllm_graft.patching import Engine, Patch, VLLMPatch, wrap

_WHY: Final = "vLLM takes no attention backend and no KV-cache spec per layer"

Call = Callable[..., Any]


class PlannedWindows(
    VLLMPatch["vllm.model_executor.layers.attention.attention:Attention"], name="graft.attention-windows", why=_WHY
):
    """Give a layer the backend and the KV-cache spec of its window."""

    @wrap
    def get_kv_cache_spec(self, call: Call, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        spec = call(vllm_config, *args, **kwargs)
        if spec is not None:
            planned_kernel.settle_layer(self, spec, vllm_config)
        return planned_layers.adapt(self, spec, vllm_config) if spec is not None else None


class PlannedKernels(
    VLLMPatch["vllm.model_executor.layers.attention.attention:Attention"], name="graft.attention-kernel", why=_WHY
):
    """Give a layer the planned kernel when it is made."""

    @wrap
    def __init__(self, call: Call, *args: Any, **kwargs: Any) -> None:
        planned_kernel.make_layer(self, call, args, kwargs)


class RefusedKernels(
    VLLMPatch["vllm.model_executor.layers.attention.mla_attention:MLAAttention"], name="graft.attention-mla", why=_WHY
):
    """Refuse the planned kernel to a layer with multi-head latent attention, which has a class of its own."""

    @wrap
    def __init__(self, call: Call, *args: Any, **kwargs: Any) -> None:
        planned_kernel.make_layer(self, call, args, kwargs)


class PlannedManagers(
    VLLMPatch["vllm.v1.core.kv_cache_manager:KVCacheManager"], name="graft.attention-managers", why=_WHY
):
    """Record in engine core which groups of layers free what has left their window."""

    @wrap
    def __init__(self, call: Call, *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        planned_layers.prove_managers(self)

    @wrap
    def free(self, call: Call, *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        # The last request to end is followed by no step that would report it.
        planned_layers.report_blocks()


ATTENTION_PATCHES: Final[tuple[Patch, ...]] = (PlannedWindows, PlannedKernels, RefusedKernels, PlannedManagers)


def install(engine: Engine) -> None:
    """Apply the patches, each when its module is imported. A target that this vLLM lacks refuses the plan."""
    for patch in ATTENTION_PATCHES:
        engine.apply([patch])
