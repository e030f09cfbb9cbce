"""The memory of the modelled device: the shape that its KV cache is sized by."""

from types import SimpleNamespace

import pytest
from model_configs import DEEPSEEK, FALCON_7B, LLAMA

from vllm_graft.errors import ConfigError
from vllm_graft.simulator import memory
from vllm_graft.simulator.model_shape import read_shape


class TestVllmsReading:
    """Of KV heads and their width there is one truth, vLLM's: the KV cache is made by it."""

    def model(self, config, *, latent=False, heads=8, head=128):
        return SimpleNamespace(
            model="models/x",
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(to_dict=lambda: dict(config)),
            quantization=None,
            dtype=SimpleNamespace(itemsize=2),
            use_mla=latent,
            get_total_num_kv_heads=lambda: heads,
            get_head_size=lambda: head,
        )

    def test_it_is_taken_whatever_the_file_calls_them(self):
        found = memory._model_shape(self.model({**LLAMA, "num_key_value_heads": None}, heads=4, head=64))
        assert (found.kv_heads, found.kv_width) == (4, 2 * 4 * 64)
        assert memory._model_shape(self.model(FALCON_7B, heads=1, head=64)) == read_shape(FALCON_7B)

    def test_latent_attention_keeps_its_own_measure(self):
        found = memory._model_shape(self.model(DEEPSEEK, latent=True, heads=128, head=576))
        assert found == read_shape(DEEPSEEK)

    @pytest.mark.parametrize(
        ("config", "given"),
        [(DEEPSEEK, {"heads": 128, "head": 192}), (LLAMA, {"latent": True, "head": 576})],
    )
    def test_a_model_that_vllm_runs_in_another_way_is_refused(self, config, given):
        with pytest.raises(ConfigError, match=r"models/x: a layer keeps \d+ numbers per token as vLLM runs the model"):
            memory._model_shape(self.model(config, **given))

    def test_a_quantization_that_is_no_object_is_refused(self):
        model = self.model(LLAMA)
        model.hf_config.quantization_config = "awq"
        with pytest.raises(ConfigError, match="quantization_config: must be an object"):
            memory._model_shape(model)
