"""What a layer gets of a planned policy, without an engine: windows that cannot be served are refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.bindings.attention import layers
from vllm_graft.contracts import LayerView, Window


def view(window: int | None = None) -> LayerView:
    return LayerView("model.layers.0.self_attn.attn", 0, 2, window, 4, 2, 32, 16, 2048)


def config(*, transfer: object = None, hybrid: bool = True) -> Any:
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid)
    return SimpleNamespace(kv_transfer_config=transfer, scheduler_config=scheduler)


@pytest.mark.parametrize(
    ("answer", "of", "given", "reason"),
    [
        (Window(0, 256), view(512), config(), r"only Window\(0, 512\) can be served"),
        (Window(0, 256), view(), config(transfer=object()), "a KV connector brings the tokens of the window alone"),
        (Window(0, 256), view(), config(hybrid=False), "hybrid KV-cache manager is off"),
    ],
)
def test_a_window_that_cannot_be_served_is_refused(answer: Window, of: LayerView, given: Any, reason: str):
    with pytest.raises(ValueError, match=reason):
        layers._planned_spec(SimpleNamespace(block_size=16), of, answer, given, lambda: "")


def test_an_answer_that_is_no_window_is_refused():
    with pytest.raises(TypeError, match="which is no Window"):
        layers._planned_spec(SimpleNamespace(), view(), 256, config(), lambda: "")  # type: ignore[arg-type]


def test_a_layers_own_reason_comes_first():
    with pytest.raises(ValueError, match="it has ALiBi"):
        layers._planned_spec(SimpleNamespace(), view(), Window(0, 256), config(), lambda: "it has ALiBi")


def test_the_models_own_window_stays_as_it_is():
    spec = SimpleNamespace(block_size=16)
    assert layers._planned_spec(spec, view(512), Window(0, 512), config(hybrid=False), lambda: "") is spec


@pytest.mark.parametrize(
    ("dtype", "served"), [("auto", True), ("bfloat16", True), ("fp8_e4m3", False), ("int8", False)]
)
def test_quantized_caches_are_not_served(dtype: str, served: bool):
    assert bool(layers.unserved_cache(dtype)) is not served
