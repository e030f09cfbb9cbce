"""The debug check of freed KV blocks: what is filled and emptied, and what a layer's output says."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_graft.bindings.attention.freed_block_check import (
    FREE,
    FreedBlocks,
    attach_free,
    checked,
    search_output,
    unchecked,
)
from vllm_graft.errors import ServingError

torch = pytest.importorskip("torch")


def block(number: int, *, held: int = 0, cached: object = None) -> Any:
    return SimpleNamespace(block_id=number, ref_cnt=held, block_hash=cached, is_null=number == 0)


def test_blocks_that_are_held_or_cached_are_not_free():
    pool = SimpleNamespace(blocks=[block(0), block(1), block(2, held=1), block(3, cached=b"x"), block(4)])
    output = SimpleNamespace()
    attach_free(pool, output)
    assert getattr(output, FREE).tolist() == [1, 4]


@pytest.mark.parametrize("null", [True, False])
def test_freed_blocks_are_filled_and_emptied_when_they_are_handed_out(null: bool):
    counted: list[int] = []
    caches = [torch.ones(5, 2, 4, 6), torch.ones(5, 2, 4, 6).transpose(1, 2)]
    freed = FreedBlocks(5, null, counted.append)
    freed.fill(caches, np.array([1, 4]))
    freed.fill(caches, np.array([4]))
    for cache in caches:
        assert cache[4].isnan().all()
        assert not cache[1].any()
        assert (cache[2:4] == 1).all()
        assert cache[0].isnan().all() if null else (cache[0] == 1).all()
    assert counted == ([3, 4] if null else [2, 2])


def test_the_states_of_other_layers_are_left_alone():
    """Those of Mamba layers are bytes, or several tensors."""
    bytes_, states = torch.ones(5, 4, dtype=torch.int8), [torch.ones(5, 4)]
    FreedBlocks(5, True, lambda count: None).fill([bytes_, states], np.array([1]))
    assert bytes_.all()
    assert states[0].all()


def test_a_cache_in_another_order_is_refused():
    with pytest.raises(ServingError, match="does not begin with its 5 blocks"):
        FreedBlocks(5, True, lambda count: None).fill([torch.ones(2, 5, 4)], np.array([1]))


def test_nan_in_the_output_of_a_layer_is_raised_with_its_name():
    """Unless it came in with the query, or is in the padding."""

    def attend(layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any) -> Any:
        return output.copy_(query + kv_cache)

    layer = SimpleNamespace(layer_name="l.0", impl=SimpleNamespace(forward=attend))
    search_output(layer)
    plain, wrong = torch.zeros(4, 2), torch.tensor([[0.0], [0.0], [float("nan")], [0.0]]).expand(4, 2)

    def call(query: Any, cache: Any, tokens: int | None) -> None:
        metadata = SimpleNamespace(num_actual_tokens=tokens) if tokens is not None else None
        layer.impl.forward(layer, query, plain, plain, cache, metadata, output=torch.zeros(4, 2))

    call(plain, plain, 4)
    call(wrong, plain, 4)
    call(plain, wrong, 2)
    call(plain, wrong, None)
    with pytest.raises(ServingError, match=r"l\.0: its output has NaN but its input does not"):
        call(plain, wrong, 4)


def test_it_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GRAFT_CHECK_KV", raising=False)
    assert not checked()
    for value, on in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("GRAFT_CHECK_KV", value)
        assert checked() is on


@pytest.mark.parametrize("eager", [True, False])
def test_graphs_cannot_be_checked(eager: bool):
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=eager))
    assert ("start with --enforce-eager" in unchecked(config)) is not eager
