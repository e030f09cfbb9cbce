"""The layers that get the planned router: each is given it when made, tried once loaded, and refused or proven."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from vllm_graft.bindings.instantiate import failure_reason, instantiate, warn_if_slow
from vllm_graft.bindings.routing.routed_layer import RoutedLayer, RouterState
from vllm_graft.bindings.routing.vllm_router import (
    LAYERS,
    inline_routing,
    router_object,
    routing_function,
    stock_routing,
)
from vllm_graft.contracts import MoeLayerView, MoeRouter
from vllm_graft.contracts.layer_choice import parse_layers
from vllm_graft.errors import StartError
from vllm_graft.ledger import current
from vllm_graft.plan import Plan, PlanItem, inherited_plan

_UNUSED: Final = "no mixture-of-experts layer has it yet"
_DRAFTERS: Final = frozenset({"mtp", "mtp_block", "draft_model", "drafter"})
"""Parts of the names of layers that draft for a model, and are counted from 0 beside its own."""
_LEAVE_OUT: Final = "leave the layer out with the option `layers`"


class PlannedRouter:
    """The planned router of this process, its layers by name, and the runners that vLLM made for them."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._item: PlanItem | None = None
        self._state: RouterState | None = None
        self._runners: dict[str, Any] = {}
        self._refused: dict[str, str] = {}
        self._seen: list[str] = []
        self._model = ""

    def begin(self, config: Any) -> None:
        """Note the model that a worker is about to load; a drafter comes with one of its own."""
        self._model = config.model_config.model

    def make_experts(self, call: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the constructor of a layer's experts, which chooses their kernel: one that leaves routing to others."""
        given = inspect.signature(call).bind(*args, **kwargs)
        name = given.arguments["layer_name"]
        meant, item = self._is_meant(name), self._item
        if not meant or item is None or not _on_cpu():
            call(*given.args, **given.kwargs)
            return
        from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

        config = given.arguments["moe_config"]
        stock, config.routing_method = config.routing_method, RoutingMethodType.Custom
        try:
            call(*given.args, **given.kwargs)
        except (NotImplementedError, ValueError) as error:
            # Quantized experts on CPUs have kernels for vLLM's own routing alone.
            self._refuse(item, name, f"vLLM has no kernel for its experts that leaves routing to others: {error}")
            config.routing_method = stock
            call(*given.args, **given.kwargs)

    def make_runner(
        self, runner: Any, call: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Call the constructor of a layer's runner, with the planned router among its arguments."""
        given = inspect.signature(call).bind(*args, **kwargs)
        name = given.arguments["layer_name"]
        meant, item, plan = self._is_meant(name), self._item, self._plan
        if not meant or item is None or plan is None:
            call(*given.args, **given.kwargs)
            return
        stock, experts, config = (given.arguments[each] for each in ("router", "routed_experts", "moe_config"))
        if reason := unserved(stock, experts):
            self._refuse(item, name, reason)
            call(*given.args, **given.kwargs)
            return
        router = instantiate(item, MoeRouter, plan, current())
        if router is None:
            self._refused[name] = "it cannot be made"
            call(*given.args, **given.kwargs)
            return
        # Made is not active: the layers have to show that first.
        current().set_item(item.point, item.name, "armed", _UNUSED)
        number = _layer_number(name)
        experts_count = getattr(config, "num_logical_experts", config.num_experts)
        router.layer = MoeLayerView(name, number or 0, experts_count, config.experts_per_token, config.hidden_dim)
        self._state = self._state or RouterState(item, current())
        inline = inline_routing(experts) if _on_cpu() else None
        layer = RoutedLayer(router, inline or stock_routing(stock), self._state)
        given.arguments["router"] = router_object(layer, stock)
        call(*given.args, **given.kwargs)
        if inline is not None:
            experts.custom_routing_function = routing_function(layer)
        LAYERS[name] = layer
        self._runners[name] = runner

    def settle(self, config: Any) -> None:
        """Try each layer's router once the model is loaded, and record which layers have it."""
        self._is_meant("")
        item = self._item
        if item is None:
            return
        for name, runner in self._runners.items():
            if reason := self._unproven(name, runner):
                self._refuse(item, name, reason)
                continue
            try:
                with warn_if_slow(f"router {item.name!r} is tried in {name}"):
                    _try_layer(LAYERS[name], runner.moe_config)
            # SystemExit too, as for every other method of an item.
            except BaseException as error:
                reason = f"it failed when it was tried on a few tokens: {failure_reason(error)}"
                self._refuse(item, name, reason, "fix the router")
        active = [name for name in self._runners if name not in self._refused]
        if not active and not self._refused:
            self._refuse_model(item, config)
        ledger = current()
        if self._refused:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._refused.items())
            ledger.set_item(item.point, item.name, "refused", reasons)
        else:
            ledger.set_item(item.point, item.name, "applied")
        if active:
            ledger.hook(item.name, f"{len(active)} of {len(self._seen)} layers: {_ranges(active)}")
            ledger.figure(item.name, "routed layers").set(len(active))
        ledger.save()

    def end_step(self) -> None:
        """Notice what a device has found in the last steps."""
        if self._state is not None:
            self._state.end_step()

    def _is_meant(self, name: str) -> bool:
        """Return whether the plan routes the layer of that name; follow the plan of this process."""
        plan = inherited_plan()
        if plan != self._plan:
            self._plan, self._item, self._state = plan, None, None
            self._runners, self._refused, self._seen = {}, {}, []
            LAYERS.clear()
            if plan is not None and plan.of("router"):
                self._item = plan.of("router")[0]
                current().set_item("router", self._item.name, "armed", _UNUSED)
        if self._item is None or not name:
            return False
        number = _layer_number(name)
        if number is None or _DRAFTERS & set(name.split(".")) or not self._in_model(number):
            return False
        if name not in self._seen:
            self._seen.append(name)
        return number in parse_layers(str(self._item.options["layers"])) and name not in self._refused

    def _in_model(self, number: int) -> bool:
        """Return whether a decoder layer that is being made is the model's own, and not a drafter's."""
        from vllm.config import get_current_vllm_config

        model = get_current_vllm_config().model_config
        # The layers of a drafter in the model's own checkpoint are counted on from those of the model.
        return model is not None and model.model == self._model and number < model.hf_text_config.num_hidden_layers

    def _unproven(self, name: str, runner: Any) -> str:
        """Return why a layer that was made with the router would not be routed by it; empty if it would."""
        router = runner.router
        if getattr(router, "layer", None) is not LAYERS[name]:
            return f"something has replaced its router by a {type(router).__name__}"
        if runner.routed_experts.quant_method.is_monolithic:
            method = runner.routed_experts.quant_method
            if not _on_cpu():
                return f"its kernel ({type(method).__name__}) does the routing itself"
            if inline_routing(runner.routed_experts) is None:
                return f"its kernel for CPUs ({type(method).__name__}) does the routing itself"
        return ""

    def _refuse(self, item: PlanItem, name: str, reason: str, fix: str = "") -> None:
        """Record that a layer cannot have the router; stop the start unless the plan is lenient."""
        self._refused[name] = reason
        if (layer := LAYERS.get(name)) is not None:
            layer.leave()
        error = StartError(
            f"router {item.name!r} (from {item.origin}) cannot be used: {reason}",
            where=name,
            fix=f"{fix or _LEAVE_OUT}, or remove it from the plan for this model",
        )
        ledger = current()
        strict = self._plan is not None and self._plan.strict
        # The front end shows this as the reason why a worker ended.
        ledger.set_item(item.point, item.name, "refused", str(error) if strict else f"{name}: {reason}")
        ledger.save()
        if strict:
            raise error

    def _refuse_model(self, item: PlanItem, config: Any) -> None:
        """Refuse a model of which no layer is routed; a stage of a pipeline may have none."""
        if config.parallel_config.pipeline_parallel_size > 1:
            return
        layers = item.options["layers"]
        if self._seen:
            chosen = f"its option `layers` is {layers!r}, but those with experts are {_ranges(self._seen)}"
        else:
            chosen = "the model has no mixture-of-experts layer of vLLM's"
        self._refuse(item, config.model_config.model, chosen, "correct the option")


planned_router: Final = PlannedRouter()
"""The router of this process."""


def unserved(stock: Any, experts: Any) -> str:
    """Return why a layer with this router of vLLM's cannot have another; empty if it can."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    name = type(stock).__name__
    if not _on_cpu():
        return "routers are served on CPUs only: none has been run on a GPU yet"
    if not isinstance(stock, BaseRouter):
        return f"its model brings a router of its own ({name})"
    if name == "ZeroExpertRouter":
        return "its model has experts that compute nothing, whose part a router does not return"
    if getattr(stock, "num_fused_shared_experts", 0):
        return "its shared experts are routed with the others"
    if inline_routing(experts) is not None and experts.use_grouped_topk:
        return "its experts are in groups, and this release's kernels for CPUs route those themselves"
    return ""


def _try_layer(layer: RoutedLayer, config: Any) -> None:
    """Route tokens that are made up: several, and a single one."""
    import torch

    view = layer.router.layer
    # A generator of its own: requests that use the server's seed must not depend on the trial.
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for tokens in (5, 1):
            hidden = torch.randn(tokens, view.hidden_size, generator=generator, device="cpu")
            logits = torch.randn(tokens, view.experts, generator=generator, device="cpu")
            dtype = config.router_logits_dtype or config.in_dtype
            layer.trial(hidden.to(config.device, config.in_dtype), logits.to(config.device, dtype))


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _layer_number(name: str) -> int | None:
    """Return the number in ``model.layers.3.mlp.experts``; None if there is none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _ranges(names: list[str]) -> str:
    """Return the numbers of layers in the form of the option ``layers``."""
    numbers = sorted(number for number in map(_layer_number, names) if number is not None)
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}-{high}" if high > low else f"{low}" for low, high in parts)
