"""A routed layer as vLLM's router object, and as the function that older CPU kernels call.

Where torch.compile traces into a layer's routing, which it does on CPUs, it meets an operation that it knows nothing
about: a router is never traced, and may do what it likes. On other devices vLLM's whole layer is such an operation.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.routing.routed_layer import RoutedLayer, Routing

if TYPE_CHECKING:
    import torch

LAYERS: Final[dict[str, RoutedLayer]] = {}
"""The routed layers of this process by name, for the operation that compiled code calls."""

_OPERATION: Final = "graft::moe_route"


def stock_routing(router: Any) -> Routing:
    """Return the routing of a layer as the installed vLLM would do it, without what comes after it."""

    def route(
        hidden: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = router._compute_routing(hidden, logits, None, input_ids=input_ids)
        return weights, ids

    return route


def inline_routing(experts: Any) -> Routing | None:
    """Return the routing that kernels for CPUs do themselves, up to 0.29; None where they are given experts."""
    module = next((found for name in _INLINE if (found := _select_experts(name)) is not None), None)
    if module is None or _has_cpu_router():
        return None
    own = experts.custom_routing_function

    def route(
        hidden: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = module(
            hidden_states=hidden,
            router_logits=logits,
            top_k=experts.top_k,
            use_grouped_topk=False,
            renormalize=experts.renormalize,
            custom_routing_function=own,
            scoring_func=experts.scoring_func,
        )
        return weights, ids

    return route


_INLINE: Final = (
    # 0.26 and 0.27.
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe",
    # 0.28 and 0.29.
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
)


def _select_experts(module: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(module), "select_experts", None)
    except ImportError:
        return None


def _has_cpu_router() -> bool:
    # From 0.30 on.
    return importlib.util.find_spec("vllm.model_executor.layers.fused_moe.router.cpu_router") is not None


def routing_function(layer: RoutedLayer) -> Callable[..., Any]:
    """Return a layer's router as a ``custom_routing_function``."""
    name, operation = layer.router.layer.name, _operation()

    def route(
        hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        if torch.compiler.is_compiling():
            return operation(hidden_states, gating_output, None, name, topk)
        return layer.route(hidden_states, gating_output)

    return route


def router_object(layer: RoutedLayer, stock: Any) -> Any:
    """Return a layer's router as an object of vLLM's, which counts, captures and maps as the stock one does."""
    return _router_class()(layer, stock)


@functools.cache
def _router_class() -> type:
    import torch
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    operation = _operation()

    class GraftRouter(BaseRouter):
        """Routes by the planned router."""

        def __init__(self, layer: RoutedLayer, stock: Any) -> None:
            super().__init__(stock.top_k, stock.global_num_experts, stock.eplb_state)
            self.layer = layer
            self.stock = stock
            self.layer_name = layer.router.layer.name

        @property
        def routing_method_type(self) -> Any:
            # Keeps kernels away that do the routing themselves.
            return RoutingMethodType.Custom

        def _compute_routing(
            self,
            hidden_states: torch.Tensor,
            router_logits: torch.Tensor,
            indices_type: torch.dtype | None,
            *,
            input_ids: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if torch.compiler.is_compiling():
                weights, ids = operation(hidden_states, router_logits, input_ids, self.layer_name, self.top_k)
            else:
                weights, ids = self.layer.route(hidden_states, router_logits, input_ids)
            return weights, ids if indices_type is None else ids.to(indices_type)

    return GraftRouter


@functools.cache
def _operation() -> Callable[..., Any]:
    import torch

    def route(
        hidden: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor | None, layer: str, top_k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = LAYERS[layer].route(hidden, logits, input_ids)
        # What an operation returns must not share memory with what it was given.
        return weights.to(torch.float32, copy=True), ids.to(torch.int32, copy=True)

    def shapes(
        hidden: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor | None, layer: str, top_k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = (logits.shape[0], top_k)
        return logits.new_empty(size, dtype=torch.float32), logits.new_empty(size, dtype=torch.int32)

    schema = "(Tensor hidden, Tensor logits, Tensor? input_ids, str layer, int top_k) -> (Tensor, Tensor)"
    made = torch.library.custom_op(_OPERATION, route, mutates_args=(), schema=schema)
    made.register_fake(shapes)
    return made
