"""The layers that get the planned kernel: each is given it when it is made, tried at the start, refused or proven."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from vllm_graft.bindings.attention.kernel import LayerKernel, kernel_backend, kernel_class
from vllm_graft.bindings.attention.kernel_trial import try_kernel
from vllm_graft.bindings.attention.layer_budget import LayerBudget, measure_bandwidth
from vllm_graft.bindings.attention.layers import layer_view
from vllm_graft.bindings.instantiate import failure_reason, instantiate, warn_if_slow
from vllm_graft.contracts import AttentionKernel
from vllm_graft.errors import StartError
from vllm_graft.ledger import current
from vllm_graft.plan import Plan, PlanItem, inherited_plan

_UNUSED: Final = "none of its layers is ready to run"
_OTHER: Final = "plan a kernel that serves this"


class PlannedKernel:
    """The planned kernel of this process, and its instances by the names of their layers."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._item: PlanItem | None = None
        self._kind: type[AttentionKernel] = AttentionKernel
        self._backend: type | None = None
        self._kernels: dict[str, AttentionKernel] = {}
        self._refused = False
        self._budget: LayerBudget | None = None
        self._config: Any = None
        """The configuration of the engine that the budget is for."""

    def make_layer(self, layer: Any, call: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the constructor of a layer, with the planned kernel among its arguments if there is one."""
        item = self._planned()
        if item is None or self._refused:
            call(*args, **kwargs)
            return
        given = inspect.signature(call).bind(*args, **kwargs)
        given.apply_defaults()
        name = given.arguments["prefix"]
        if reason := unserved(self._kind, type(layer).__name__, given.arguments, _engine_facts()):
            self._refuse(item, name, reason)
            call(*args, **kwargs)
            return
        kernel = instantiate(item, AttentionKernel, self._plan_in_force(), current())
        if kernel is None:
            self._refused = True
            call(*args, **kwargs)
            return
        # Made is not active: the layers have to show that first.
        current().set_item(item.point, item.name, "armed", _UNUSED)
        self._kernels[name] = kernel
        # What a layer does not know it passes on to the implementation that its backend names.
        self._backend = self._backend or kernel_backend(self._kind, self.prove)
        given.arguments["attn_backend"] = self._backend
        given.arguments["extra_impl_args"] = {"kernel": LayerKernel(kernel, item, name, current())}
        call(*given.args, **given.kwargs)

    def settle_layer(self, layer: Any, spec: Any, config: Any) -> None:
        """Tell a kernel its layer, and try it, as soon as vLLM asks the layer for its KV-cache spec."""
        item, kernel = self._planned(), self._kernels.get(layer.layer_name)
        # vLLM asks more than once: when it sizes the KV cache, and when it makes it.
        if item is None or kernel is None or hasattr(kernel, "layer"):
            return
        kernel.layer = layer_view(layer, spec, config)
        if spec.block_size % self._kind.block_multiple:
            multiple = self._kind.block_multiple
            what = f"blocks have {spec.block_size} tokens, but it serves multiples of {multiple}"
            self._refuse(item, layer.layer_name, what, f"start with --block-size {multiple}", may_go_on=False)
        try:
            with warn_if_slow(f"attention {item.name!r} is tried in {layer.layer_name}"):
                try_kernel(kernel, layer.dtype, config.device_config.device)
        # SystemExit too, as for every other method of an item.
        except BaseException as error:
            reason = f"it failed when it was tried on a small batch: {failure_reason(error)}"
            self._refuse(item, layer.layer_name, reason, "fix the kernel", may_go_on=False)
        if isinstance(made := getattr(layer.impl, "kernel", None), LayerKernel):
            made.budget = self._layer_budget(item, config)

    def _layer_budget(self, item: PlanItem, config: Any) -> LayerBudget:
        """Return the budget that all layers of an engine share; the device is measured once."""
        if self._budget is None or config is not self._config:
            import torch

            # The next engine of this process may have another record, in which its figures must be.
            known = self._budget.bandwidth if self._budget is not None else None
            bandwidth = known or measure_bandwidth(torch.device(config.device_config.device))
            self._budget, self._config = LayerBudget(item.name, current(), bandwidth), config
        return self._budget

    def prove(self, spec: Any, names: list[str]) -> None:
        """Record that a group of layers runs with the kernel; called once its metadata builder is made."""
        item = self._planned()
        if item is None:
            return
        for name in names:
            # vLLM may have settled on other blocks, to give layers that differ pages of one size.
            self._kernels[name].layer = replace(self._kernels[name].layer, block_size=spec.block_size)
        if self._refused:
            return
        current().set_item(item.point, item.name, "applied")
        current().hook(item.name, f"{len(names)} layers: {names[0]} to {names[-1]}")

    def _planned(self) -> PlanItem | None:
        """Return the planned item if it is a kernel; a policy has ``PlannedLayers``."""
        plan = inherited_plan()
        if plan != self._plan:
            self._plan, self._item, self._backend = plan, None, None
            self._kernels, self._refused, self._budget = {}, False, None
            item = plan.of("attention")[0] if plan is not None and plan.of("attention") else None
            kind = kernel_class(item) if item is not None else None
            if item is not None and kind is not None:
                self._item, self._kind = item, kind
                current().set_item(item.point, item.name, "armed", _UNUSED)
        return self._item

    def _plan_in_force(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def _refuse(self, item: PlanItem, subject: str, reason: str, fix: str = _OTHER, *, may_go_on: bool = True) -> None:
        """Record that a layer cannot have the kernel; stop the start unless the plan is lenient and there is a way."""
        self._refused = True
        ledger = current()
        ledger.set_item(item.point, item.name, "refused", f"{subject}: {reason}")
        ledger.save()
        if self._plan_in_force().strict or not may_go_on:
            raise StartError(
                f"attention {item.name!r} (from {item.origin}) cannot be used: {reason}",
                where=subject,
                fix=f"{fix}, or remove it from the plan for this model",
            )


planned_kernel: Final = PlannedKernel()
"""The kernel of this process."""


def _engine_facts() -> dict[str, Any]:
    """Return what a layer's arguments do not say of its engine."""
    import torch
    from vllm import envs
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    parallel, model = config.parallel_config, config.model_config
    return {
        # While a model is made, this is the type of its weights.
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "mm_prefix": model is not None and model.is_mm_prefix_lm,
        "context_parallel": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
        "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
    }


def unserved(kind: type[AttentionKernel], layer: str, arguments: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Return why a layer of this class and with these arguments cannot have the kernel; empty if it can."""
    return _unserved_by_all(layer, arguments, engine) or _unserved_by(kind, arguments, engine)


def _unserved_by_all(layer: str, arguments: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Return what is not passed to kernels, so that none could serve it."""
    if layer != "Attention" or str(getattr(arguments["attn_type"], "value", arguments["attn_type"])) != "decoder":
        return f"it is a layer of the kind {layer}, but kernels are for plain causal self-attention"
    if arguments["attn_backend"] is not None:
        return f"the model chooses {arguments['attn_backend'].__name__} for it"
    if arguments["alibi_slopes"] is not None or arguments["use_alibi_sqrt"]:
        return "it has ALiBi, whose biases are not passed to kernels"
    if arguments["logits_soft_cap"]:
        return f"its scores are capped at {arguments['logits_soft_cap']:g}, which is not passed to kernels"
    extra = {name: value for name, value in arguments["extra_impl_args"].items() if value is not None}
    if "sinks" in extra:
        return "it has learned sinks, which are not passed to kernels"
    if extra:
        return f"the model gives it {', '.join(extra)}, which is not passed to kernels"
    if arguments["head_size_v"] not in (None, arguments["head_size"]):
        return f"its keys have {arguments['head_size']} numbers but its values {arguments['head_size_v']}"
    if arguments["kv_sharing_target_layer_name"] is not None:
        return f"it shares the KV cache of {arguments['kv_sharing_target_layer_name']}"
    if engine["mm_prefix"]:
        return "its model attends to images in both directions"
    if engine["context_parallel"] > 1:
        return "context parallelism gives each worker a part of every request"
    if engine["batch_invariant"]:
        return "VLLM_BATCH_INVARIANT is set, but kernels do not promise batch invariance"
    return _quantized(arguments, engine["dtype"])


def _quantized(arguments: Mapping[str, Any], dtype: str) -> str:
    """Return that a layer's KV cache has another type than its queries; empty if it has the same."""
    cache = arguments["cache_config"]
    name = cache.cache_dtype if cache is not None else "auto"
    if name == "auto" and getattr(arguments["quant_config"], "kv_cache_scheme", None) is not None:
        name = "fp8"
    if name in ("auto", dtype):
        return ""
    return f"its KV cache is {name} and its queries {dtype}, but quantization is not served"


def _unserved_by(kind: type[AttentionKernel], arguments: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Return what this kernel says it does not serve."""
    window, cache = arguments["per_layer_sliding_window"], arguments["cache_config"]
    if window is None and cache is not None:
        window = cache.sliding_window
    if window is not None and not kind.windows:
        return f"it has a sliding window of {window} tokens, but {kind.__name__} serves none"
    if engine["dtype"] not in kind.dtypes:
        return f"it computes in {engine['dtype']}, but {kind.__name__} serves {', '.join(kind.dtypes)}"
    if kind.head_sizes and arguments["head_size"] not in kind.head_sizes:
        sizes = ", ".join(map(str, kind.head_sizes))
        return f"its heads have {arguments['head_size']} numbers, but {kind.__name__} serves {sizes}"
    return ""
