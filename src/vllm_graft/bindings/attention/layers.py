"""The attention layers of this process: each asks the planned policy, and is changed, left as it is, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vllm_graft.bindings.attention.backends import SERVED, compacting_backend
from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.bindings.attention.kernel import kernel_class
from vllm_graft.bindings.instantiate import failure_reason, instantiate
from vllm_graft.contracts import KVPolicy, LayerView, Window
from vllm_graft.errors import StartError
from vllm_graft.ledger import current
from vllm_graft.plan import Plan, PlanItem, carried_plan


class PlannedLayers:
    """The planned policy of this process, and the layers that have a window from it."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._policy: KVPolicy | None = None
        self.windows: dict[str, Window | None] = {}
        """The policy's answer for each layer, by the layer's name."""

    def adapt(self, layer: Any, spec: Any, config: Any) -> Any:
        """Return the KV-cache spec of a layer, after giving the layer the backend that goes with it."""
        item, policy = self._planned()
        if item is None or policy is None:
            return spec
        view = layer_view(layer, spec, config)
        try:
            window = policy.window(view)
            planned = _planned_spec(layer, spec, view, window) if window is not None else spec
        # SystemExit too, as for every other method of an item.
        except BaseException as error:
            self._refuse(item, view.name, failure_reason(error))
            return spec
        self.windows[view.name] = window
        # vLLM asks for the spec more than once: when it sizes the KV cache, and when it makes it.
        if window is not None and not getattr(layer.attn_backend, "compacts", False):
            layer.attn_backend = compacting_backend(layer.attn_backend, self.prove_builder)
        return planned

    def prove_builder(self, names: Sequence[str]) -> None:
        """Record that a group of layers runs with compacted rows; called once its metadata builder is made."""
        item, _ = self._planned()
        if item is None:
            return
        missing = [name for name in names if self.windows.get(name) is None]
        if missing:
            self._refuse(item, missing[0], f"vLLM put it into one group with {names[0]}, which has another window")
            return
        current().set_item(item.point, item.name, "applied")
        current().hook(item.name, f"{len(names)} layers: {names[0]} to {names[-1]}")

    def prove_managers(self, manager: Any) -> None:
        """Record in engine core that blocks are freed, or that no group of layers has a window."""
        item, policy = self._planned()
        if item is None or policy is None:
            return
        groups = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
        windows = [getattr(spec, "sliding_window", None) for spec in groups]
        if not any(windows):
            self._refuse(item, "engine core", "no group of layers has a window, so no block is ever freed")
            return
        current().set_item(item.point, item.name, "applied")
        current().save()

    def _planned(self) -> tuple[PlanItem | None, KVPolicy | None]:
        """Return the planned item and its instance, which is made on first use."""
        plan = carried_plan()
        if plan is None or not plan.of("attention"):
            return None, None
        item = plan.of("attention")[0]
        if kernel_class(item) is not None:
            # Its layers are those of PlannedKernel.
            return None, None
        if self._plan != plan:
            self._plan, self.windows = plan, {}
            self._policy = instantiate(item, KVPolicy, plan, current())
            if self._policy is not None:
                # Made is not active: each layer has to show that first.
                current().set_item(item.point, item.name, "armed", "no layer has asked for its window yet")
        return item, self._policy

    def _refuse(self, item: PlanItem, subject: str, reason: str) -> None:
        """Record that a layer cannot have what is planned; stop the start unless the plan is lenient."""
        ledger = current()
        ledger.set_item(item.point, item.name, "refused", f"{subject}: {reason}")
        ledger.save()
        if self._plan is None or self._plan.strict:
            raise StartError(
                f"attention {item.name!r} (from {item.origin}) cannot be used: {reason}",
                where=subject,
                fix=f"change [options.{item.name}], or take it out of the plan for this model",
            )


planned_layers: Final = PlannedLayers()
"""The layers of this process."""


def layer_view(layer: Any, spec: Any, config: Any) -> LayerView:
    """Return what a policy sees of a layer."""
    digits = [part for part in layer.layer_name.split(".") if part.isdigit()]
    text = config.model_config.hf_text_config
    return LayerView(
        name=layer.layer_name,
        index=int(digits[0]) if digits else 0,
        layers=int(getattr(text, "num_hidden_layers", 0)),
        window=layer.sliding_window,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        block_size=spec.block_size,
        max_tokens=config.model_config.max_model_len,
    )


def _planned_spec(layer: Any, spec: Any, view: LayerView, window: Window) -> Any:
    """Return the spec of a layer with this window; raise ValueError or TypeError for what cannot be served."""
    if not isinstance(window, Window):
        raise TypeError(f"window() answered {window!r}, which is no Window")
    if unserved := _unserved(layer):
        raise ValueError(unserved)
    if view.window is not None:
        # The model was trained with it: narrower is another model, wider has no blocks to read.
        if window != Window(0, view.window):
            raise ValueError(
                f"the model gives this layer a window of {view.window} tokens, and the policy asks for {window}; only "
                f"Window(0, {view.window}) can be served"
            )
        return spec
    from vllm_graft.bindings.attention.retention import SinkWindowSpec

    return SinkWindowSpec.of(spec, WindowShape.fit(window.first, window.last, spec.block_size))


def _unserved(layer: Any) -> str:
    """Return why a layer cannot have a window; empty if it can."""
    name = layer.attn_backend.get_name()
    if type(layer).__name__ != "Attention":
        return f"it is a {type(layer).__name__}, and windows are for plain causal self-attention"
    if name not in SERVED:
        return f"vLLM chose the backend {name} for it, and windows are served on {', '.join(SERVED)}"
    if getattr(layer.impl, "alibi_slopes", None) is not None:
        return "it has ALiBi, whose biases count the tokens between, and those are left out"
    if str(layer.kv_cache_dtype).startswith(("fp8", "nvfp4", "int")):
        return f"its KV cache is quantized ({layer.kv_cache_dtype}), which is not served yet"
    return ""
