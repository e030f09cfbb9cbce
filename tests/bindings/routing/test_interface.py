"""The router's side of vLLM: in the matrix, of each release."""

import importlib
import inspect
from types import SimpleNamespace

import pytest

from vllm_graft.bindings.routing import planned_router, vllm_router
from vllm_graft.bindings.routing.patches import ROUTER_PATCHES
from vllm_graft.bindings.routing.planned_router import unserved
from vllm_graft.bindings.routing.routed_layer import RoutedLayer, RouterState
from vllm_graft.contracts import MoeLayerView, MoeRouter
from vllm_graft.errors import StartError
from vllm_graft.ledger import Ledger
from vllm_graft.patching import Engine
from vllm_graft.plan import PlanItem

torch = pytest.importorskip("torch")

ITEM = PlanItem("router", "mine", "acme:Mine", "acme", ("worker",), {"layers": "all"}, "graft.toml:2")
HIDDEN = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
LOGITS = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


class Second(MoeRouter):
    """Exchanges a token's two experts."""

    def route(self, hidden, logits, top_k):
        ids, weights = self.stock(hidden, logits)
        return ids.flip(-1), weights


def best_two(hidden_states, gating_output, topk, renormalize):
    weights, ids = gating_output.softmax(-1).topk(topk)
    return weights, ids


def stock_router():
    from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter

    return CustomRoutingRouter(2, 6, best_two)


def routed(name: str = "model.layers.0.mlp.experts") -> RoutedLayer:
    router = Second()
    router.layer = MoeLayerView(name, 0, 6, 2, 8)
    layer = RoutedLayer(router, vllm_router.stock_routing(stock_router()), RouterState(ITEM, Ledger()))
    vllm_router.LAYERS[name] = layer
    return layer


@pytest.mark.parametrize("patch", ROUTER_PATCHES, ids=lambda patch: patch.declaration.name)
def test_every_patch_has_its_place(patch):
    engine = Engine()
    importlib.import_module(str(patch.declaration.target).partition(":")[0])
    engine.apply([patch])
    try:
        assert {hook.state for hook in engine.report()} == {"applied"}
    finally:
        engine.revert(patch)


def test_the_constructors_have_the_arguments_that_are_read_by_name():
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    assert {"layer_name", "moe_config"} <= inspect.signature(RoutedExperts.__init__).parameters.keys()
    wanted = {"layer_name", "moe_config", "router", "routed_experts"}
    assert wanted <= inspect.signature(MoERunner.__init__).parameters.keys()
    read = {"num_logical_experts", "experts_per_token", "hidden_dim", "in_dtype", "router_logits_dtype", "device"}
    assert read | {"routing_method"} <= FusedMoEConfig.__dataclass_fields__.keys()
    assert not FusedMoEConfig.__dataclass_params__.frozen
    assert RoutingMethodType.Custom


def test_vllms_own_way_through_a_router_ends_in_ours():
    stock = stock_router()
    ours = vllm_router.router_object(routed(), stock)
    assert not inspect.isabstract(type(ours))
    weights, ids = ours.select_experts(HIDDEN, LOGITS, torch.int64)
    expected_weights, expected_ids = stock.select_experts(HIDDEN, LOGITS, torch.int64)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, expected_ids.flip(-1))
    assert torch.equal(weights, expected_weights)
    seen = []
    ours.set_capture_fn(seen.append)
    ours.select_experts(HIDDEN, LOGITS, torch.int32)
    assert torch.equal(seen[0], ids.to(torch.int32)), "experts are captured as they were routed"
    assert type(ours.routing_method_type).__name__ == "RoutingMethodType"
    assert ours.routing_method_type.name == "Custom"


def test_the_function_of_older_kernels_for_cpus_ends_in_ours():
    function = vllm_router.routing_function(routed())
    weights, ids = function(hidden_states=HIDDEN, gating_output=LOGITS, topk=2, renormalize=True)
    expected_weights, expected_ids = best_two(HIDDEN, LOGITS, 2, True)
    assert torch.equal(ids, expected_ids.flip(-1).to(torch.int32))
    assert torch.equal(weights, expected_weights)


def test_the_tracer_meets_an_operation_that_it_knows_nothing_about():
    """So one that was compiled follows a router that changes its mind."""
    layer = routed("model.layers.1.mlp.experts")
    function = vllm_router.routing_function(layer)

    def forward(hidden, logits):
        weights, ids = function(hidden_states=hidden, gating_output=logits, topk=2, renormalize=True)
        return weights * 2, ids

    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    assert torch.equal(compiled(HIDDEN, LOGITS)[1], forward(HIDDEN, LOGITS)[1])
    layer.leave()
    assert torch.equal(compiled(HIDDEN, LOGITS)[1], best_two(HIDDEN, LOGITS, 2, True)[1].to(torch.int32))


def test_routing_that_a_router_cannot_stand_for_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planned_router, "_on_cpu", lambda: True)
    kind = type(stock_router())
    experts = SimpleNamespace(use_grouped_topk=False, custom_routing_function=None)
    assert not unserved(stock_router(), experts)
    assert "a router of its own (object)" in unserved(object(), experts)
    zero = type("ZeroExpertRouter", (kind,), {})(2, 6, best_two)
    assert "experts that compute nothing" in unserved(zero, experts)
    shared = stock_router()
    shared.num_fused_shared_experts = 1
    assert "shared experts are routed with the others" in unserved(shared, experts)


def test_layers_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planned_router, "_on_cpu", lambda: False)
    assert "none has been run on a GPU" in unserved(stock_router(), SimpleNamespace(use_grouped_topk=False))


def test_layers_that_draft_are_left_to_their_own_rule(monkeypatch: pytest.MonkeyPatch):
    """Their names are counted from 0 beside those of the model, in its own checkpoint."""
    router = planned_router.PlannedRouter()
    item = SimpleNamespace(options={"layers": "all"})
    plan = SimpleNamespace(of=lambda point: [])
    monkeypatch.setattr(planned_router, "inherited_plan", lambda: plan)
    monkeypatch.setattr(router, "_in_model", lambda number: True)
    router._plan, router._item = plan, item  # type: ignore[assignment]
    assert router._is_meant("model.layers.0.mlp.experts")
    assert not router._is_meant("mtp.layers.0.mlp.experts")


@pytest.mark.parametrize("strict", [True, False])
def test_experts_without_a_kernel_for_another_routing_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, strict: bool
):
    """Quantized ones on CPUs; a lenient plan leaves them to vLLM's own routing."""
    config, tried = SimpleNamespace(routing_method="stock"), []

    def make(layer_name, moe_config):
        tried.append(getattr(moe_config.routing_method, "name", moe_config.routing_method))
        if moe_config.routing_method != "stock":
            raise NotImplementedError("no backend supports it")

    router, refused = planned_router.PlannedRouter(), []

    def refuse(item, name, reason):
        refused.append((name, reason))
        if strict:
            raise StartError(reason)

    monkeypatch.setattr(planned_router, "_on_cpu", lambda: True)
    monkeypatch.setattr(router, "_is_meant", lambda name: True)
    monkeypatch.setattr(router, "_refuse", refuse)
    router._item = SimpleNamespace(name="r")  # type: ignore[assignment]
    if strict:
        with pytest.raises(StartError, match="no kernel for its experts"):
            router.make_experts(make, ("model.layers.0.mlp.experts", config), {})
    else:
        router.make_experts(make, ("model.layers.0.mlp.experts", config), {})
    assert refused[0][0] == "model.layers.0.mlp.experts"
    assert "no backend supports it" in refused[0][1]
    assert tried == (["Custom"] if strict else ["Custom", "stock"])
