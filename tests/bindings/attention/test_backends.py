"""Backends whose metadata builder compacts the rows of each step; what they compute is in test_engine.py."""

from types import SimpleNamespace

import pytest

from vllm_graft.errors import ServingError

pytest.importorskip("vllm")


def test_attention_to_later_tokens_is_refused_with_the_layer():
    """As some drafters ask for; the rows of one release have an answer each."""
    import torch
    from vllm.v1.attention.backend import AttentionCGSupport

    from vllm_graft.bindings.attention.backends import compacting_backend

    class Builder:
        _cudagraph_support = AttentionCGSupport.ALWAYS

        def __init__(self, spec, names, config, device) -> None:
            self.layer_names = names

    class Backend:
        @staticmethod
        def get_builder_cls() -> type:
            return Builder

    made = compacting_backend(Backend, lambda names: None, lambda: None, None)  # type: ignore[arg-type, return-value]
    spec = SimpleNamespace(block_size=16, sliding_window=100)
    builder = made.get_builder_cls()(spec, ["model.layers.3.self_attn.attn"], None, torch.device("cpu"))
    for causal in (False, torch.tensor([True, False])):
        with pytest.raises(
            ServingError, match=r"model\.layers\.3\.self_attn\.attn: vLLM asks for attention to later tokens"
        ):
            builder.build(0, SimpleNamespace(causal=causal))
