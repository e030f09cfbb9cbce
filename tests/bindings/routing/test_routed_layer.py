"""One layer's router: its answers checked, in any form that an author may come up with, and the way back to stock."""

from collections.abc import Callable
from typing import Any

import pytest

from vllm_graft.bindings.routing.planned_router import _ranges
from vllm_graft.bindings.routing.routed_layer import RoutedLayer, RouterState, rows_to_replace
from vllm_graft.contracts import MoeLayerView, MoeRouter
from vllm_graft.ledger import Ledger
from vllm_graft.plan import PlanItem
from vllm_graft.plugins.routers.expert_mask import ExpertMask

torch = pytest.importorskip("torch")

ITEM = PlanItem("router", "mine", "acme:Mine", "acme", ("worker",), {"layers": "all"}, "graft.toml:2")
VIEW = MoeLayerView("model.layers.3.mlp.experts", 3, 6, 2, 8)
HIDDEN = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
LOGITS = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


def softmax(hidden: Any, logits: Any, input_ids: Any) -> tuple[Any, Any]:
    weights, ids = logits.softmax(-1).topk(2)
    return weights, ids.to(torch.int32)


def layer_of(route: Callable[..., Any] | MoeRouter) -> tuple[RoutedLayer, Ledger]:
    router = route if isinstance(route, MoeRouter) else type("Mine", (MoeRouter,), {"route": route})()
    router.layer = VIEW
    ledger = Ledger()
    ledger.set_item("router", "mine", "applied")
    return RoutedLayer(router, softmax, RouterState(ITEM, ledger)), ledger


def state_of(ledger: Ledger) -> tuple[str, str]:
    (item,) = ledger._items.values()
    return item.state, item.reason


def test_the_models_own_rule_comes_back_bit_for_bit():
    layer, ledger = layer_of(lambda self, hidden, logits, top_k: self.stock(hidden, logits))
    for ours, stock in zip(layer.route(HIDDEN, LOGITS), softmax(HIDDEN, LOGITS, None), strict=True):
        assert torch.equal(ours, stock)
    assert state_of(ledger) == ("applied", "")
    assert ledger.hook("mine", "route").reading().calls == 1


def test_weights_and_ids_come_in_the_form_that_kernels_read():
    """Kernels for CPUs read them without their strides."""

    def route(self, hidden, logits, top_k):
        weights, ids = logits.double().softmax(-1).sort(descending=True)
        return ids[:, :top_k], weights[:, :top_k]

    weights, ids = layer_of(route)[0].route(HIDDEN, LOGITS)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    assert torch.equal(ids, softmax(HIDDEN, LOGITS, None)[1])


BAD = [
    (lambda s, h, g, k: 1 / 0, "ZeroDivisionError: division by zero"),
    (lambda s, h, g, k: None, r"returned NoneType instead of \(ids, weights\)"),
    (lambda s, h, g, k: s.stock(h, g)[0], r"returned Tensor instead of \(ids, weights\)"),
    (lambda s, h, g, k: ([1, 2], s.stock(h, g)[1]), "returned list as ids instead of a tensor"),
    (lambda s, h, g, k: (s.stock(h, g)[0][:1], s.stock(h, g)[1]), r"returned ids of \[1, 2\] instead of \[5, 2\]"),
    (lambda s, h, g, k: (s.stock(h, g)[0], s.stock(h, g)[1][:, :1]), r"weights of \[5, 1\] instead of \[5, 2\]"),
    (lambda s, h, g, k: (s.stock(h, g)[0].float(), s.stock(h, g)[1]), "ids of torch.float32, which are not whole"),
    (lambda s, h, g, k: (s.stock(h, g)[0], s.stock(h, g)[1].int()), "weights of torch.int32, which are not float"),
    (lambda s, h, g, k: s.stock(h, g)[::-1], "returned ids of torch.float32"),
    (lambda s, h, g, k: (s.stock(h, g)[0] + 5, s.stock(h, g)[1]), r"returned the expert \d+, but there are 0 to 5"),
    (lambda s, h, g, k: (s.stock(h, g)[0] - 9, s.stock(h, g)[1]), r"returned the expert -\d+, but there are 0 to 5"),
    (lambda s, h, g, k: (s.stock(h, g)[0], s.stock(h, g)[1] * float("nan")), "NaN or infinite, for 5 of 5 tokens"),
    (lambda s, h, g, k: (s.stock(h, g)[0], s.stock(h, g)[1].to("meta")), "weights on meta for logits on cpu"),
    (lambda s, h, g, k: exit(1), "SystemExit: 1"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "reason"), BAD)
def test_a_router_that_fails_is_put_aside_within_the_step(route, reason):
    import re

    layer, ledger = layer_of(route)
    for _ in range(2):
        for ours, stock in zip(layer.route(HIDDEN, LOGITS), softmax(HIDDEN, LOGITS, None), strict=True):
            assert torch.equal(ours, stock)
    state, why = state_of(ledger)
    assert state == "quarantined"
    assert why.startswith("model.layers.3.mlp.experts: ")
    assert re.search(reason, why)
    assert ledger.hook("mine", "route").reading().calls == 1, "it is not asked again"


@pytest.mark.parametrize(("route", "reason"), BAD)
def test_a_trial_raises(route, reason):
    with pytest.raises(BaseException, match=reason.partition(": ")[2] if "Error: " in reason else None):
        layer_of(route)[0].trial(HIDDEN, LOGITS)


def test_no_router_is_blamed_for_rows_that_only_pad_a_batch():
    """They may hold NaN; what their experts are does not matter, as long as there are such experts."""
    layer, ledger = layer_of(lambda self, hidden, logits, top_k: self.stock(hidden, logits))
    logits = LOGITS.clone()
    logits[3:] = float("nan")
    weights, ids = layer.route(HIDDEN, logits)
    assert torch.equal(weights[:3], softmax(HIDDEN, LOGITS, None)[0][:3])
    assert state_of(ledger)[0] == "applied"
    assert int(ids.max()) < 6


def test_on_a_device_a_bad_row_is_replaced_at_once_and_all_rows_from_then_on():
    """Without the host: so it holds in a graph that is replayed, too."""
    seen, logits = torch.zeros(1, dtype=torch.int32), LOGITS.clone()
    logits[4] = float("nan")
    rows = [torch.tensor([at == row for at in range(5)]) for row in (9, 4, 1, 9)]
    found = [rows_to_replace(bad, logits, seen).tolist() for bad in rows]
    assert found == [[False] * 5, [False] * 4 + [True], [True] * 5, [True] * 5]


def test_all_layers_of_a_process_go_back_together():
    """Half of a router is no router."""
    first, _ = layer_of(lambda s, h, g, k: 1 / 0)
    second = RoutedLayer(layer_of(lambda s, h, g, k: (s.stock(h, g)[0] * 0, s.stock(h, g)[1]))[0].router, softmax,
                         first._state)  # fmt: skip
    assert not second.route(HIDDEN, LOGITS)[1].any()
    first.route(HIDDEN, LOGITS)
    assert torch.equal(second.route(HIDDEN, LOGITS)[1], softmax(HIDDEN, LOGITS, None)[1])


def test_a_layer_that_was_refused_is_left_to_the_model():
    layer, ledger = layer_of(lambda s, h, g, k: 1 / 0)
    layer.leave()
    assert torch.equal(layer.route(HIDDEN, LOGITS)[1], softmax(HIDDEN, LOGITS, None)[1])
    assert state_of(ledger)[0] == "applied"


def test_the_numbers_of_layers_are_shown_as_the_option_takes_them():
    assert _ranges([f"model.layers.{number}.mlp.experts" for number in (7, 0, 1, 2, 9, 10)]) == "0-2, 7, 9-10"


class TestExpertMask:
    """The router that ships."""

    def routed(self, *experts: str) -> tuple[Any, Any]:
        layer, _ = layer_of(ExpertMask({"experts": list(experts)}))
        layer.trial(HIDDEN, LOGITS)
        return layer.route(HIDDEN, LOGITS)

    def test_without_experts_it_is_the_models_own_rule(self):
        for ours, stock in zip(self.routed(), softmax(HIDDEN, LOGITS, None), strict=True):
            assert torch.equal(ours, stock)

    def test_no_token_goes_to_those_that_are_named(self):
        before = LOGITS.clone()
        weights, ids = self.routed("0", "3", "3")
        assert not set(ids.flatten().tolist()) & {0, 3}
        assert torch.equal(before, LOGITS), "what it is given is not its own"
        kept = LOGITS[:, [1, 2, 4, 5]].softmax(-1).topk(2).values
        assert torch.allclose(weights, kept)

    @pytest.mark.parametrize(
        ("experts", "reason"), [(["6"], "there is no expert 6"), (["0", "1", "2", "3", "4"], "needs 2 experts, but 1")]
    )
    def test_what_cannot_be_left_out_is_said_at_the_trial(self, experts, reason):
        with pytest.raises(ValueError, match=reason):
            self.routed(*experts)

    def test_options_that_cannot_work_are_refused(self):
        for options, reason in ({"experts": ["two"]}, "'two', which is not the number"), ({"layers": "x"}, "'x'"):
            with pytest.raises(Exception, match=reason):
                ExpertMask.check_options({**ExpertMask.options, **options})
