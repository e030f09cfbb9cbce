"""The modelled device: what a model weighs, how long a batch takes, how settings and clocks are chosen."""

import importlib.util
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.simulator import memory
from vllm_graft.simulator.clock import RealClock, Timeline, VirtualClock
from vllm_graft.simulator.devices import DEVICES, Device, find_device
from vllm_graft.simulator.model_shape import find_model, read_shape, shipped_models
from vllm_graft.simulator.roofline import Roofline
from vllm_graft.simulator.settings import SimulationSettings, resolve_settings

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIMULATOR_FIGURES = BENCHMARKS.parent / "docs" / "explanation" / "benchmarks" / "simulator.md"

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
FALCON_7B = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "multi_query": True,
    "new_decoder_architecture": False,
    "vocab_size": 65024,
    "tie_word_embeddings": True,
}
FALCON_40B = {
    **FALCON_7B,
    "hidden_size": 8192,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
}
DBRX = {
    "model_type": "dbrx",
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "vocab_size": 100352,
    "attn_config": {"kv_n_heads": 8, "model_type": ""},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4, "model_type": ""},
}
ERNIE = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_k": 6,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "vocab_size": 103424,
    "tie_word_embeddings": True,
}


class Work(NamedTuple):
    new_tokens: int
    context: int


class TestShape:
    @pytest.mark.parametrize(
        ("config", "billions"),
        [
            (LLAMA, 8.03),
            ({**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
             | {"num_attention_heads": 64}, 70.55),
            (MIXTRAL, 46.70),
            (DEEPSEEK, 671.0),
            (FALCON_7B, 6.92),
            (FALCON_40B, 41.3),
            (DBRX, 131.6),
            (ERNIE, 21.83),
        ],
    )  # fmt: skip
    def test_published_models_have_their_published_size(self, config, billions):
        assert read_shape(config).parameters / 1e9 == pytest.approx(billions, rel=0.002)

    def test_a_token_meets_only_its_experts(self):
        layer = read_shape(MIXTRAL).layers[0]
        assert 32 * layer.per_token / 1e9 == pytest.approx(12.6, rel=0.01)
        assert layer.chosen(1) == pytest.approx(2 * layer.expert)
        assert layer.chosen(10_000) == pytest.approx(layer.expert * layer.experts)

    def test_what_a_layer_keeps_per_token(self):
        assert read_shape(LLAMA).kv_width == 2 * 8 * 128
        assert read_shape(DEEPSEEK).kv_width == 512 + 64
        assert read_shape(DEEPSEEK).kv_heads == 1

    @pytest.mark.parametrize(
        ("config", "heads"),
        [
            (LLAMA, 8),
            ({**LLAMA, "num_key_value_heads": None}, 32),
            (FALCON_7B, 1),
            (FALCON_40B, 8),
            ({**FALCON_7B, "multi_query": False}, 71),
            ({**LLAMA, "num_key_value_heads": None, "multi_query_group_num": 2}, 2),
            ({**LLAMA, "num_key_value_heads": None, "num_attention_groups": 4}, 4),
            (DBRX, 8),
        ],
    )
    def test_kv_heads_by_any_of_their_names(self, config, heads):
        assert read_shape(config).kv_heads == heads

    def test_dense_layers_of_a_mixture(self):
        layers = read_shape(DEEPSEEK).layers
        assert [layer.experts for layer in layers[:4]] == [0, 0, 0, 256]

    @pytest.mark.parametrize(
        ("more", "sparse"),
        [
            ({}, range(1, 28)),
            ({"moe_layer_start_index": 3, "moe_layer_end_index": 20}, range(3, 21)),
            ({"moe_layer_end_index": -1, "moe_layer_interval": 2}, range(1, 28, 2)),
            ({"moe_layer_start_index": 0, "moe_layer_end_index": 0}, [0]),
            ({"use_moe": False}, []),
            ({"moe_layer_start_index": 0, "num_dense_layers": 2}, range(2, 28)),
            ({"moe_layer_start_index": 0, "moe_layer_freq": [0, 0, 0] + [1] * 25}, range(3, 28)),
            ({"moe_layer_start_index": 0, "moe_layer_freq": 2}, range(0, 28, 2)),
            ({"moe_layer_start_index": 0, "mlp_layer_types": ["dense"] + ["sparse"] * 27}, range(1, 28)),
            ({"mlp_only_layers": [1, 27]}, range(2, 27)),
        ],
    )
    def test_which_layers_have_experts(self, more, sparse):
        layers = read_shape({**ERNIE, **more}).layers
        assert [index for index, layer in enumerate(layers) if layer.experts] == list(sparse)

    def test_experts_that_every_token_meets(self):
        alone = read_shape({**ERNIE, "moe_num_shared_experts": 0}).layers[1]
        assert read_shape(ERNIE).layers[1].shared - alone.shared == 2 * alone.expert
        assert read_shape({**MIXTRAL, "shared_intermediate_size": 1024}).layers[0].shared == (
            read_shape(MIXTRAL).layers[0].shared + 3 * 4096 * 1024
        )

    def test_some_models_have_two_matrices_where_others_have_three(self):
        two, three = (read_shape({**LLAMA, "model_type": kind}).layers[0].shared for kind in ("nemotron", "llama"))
        assert three - two == 4096 * 14336

    def test_a_value_for_every_layer_is_one_value_where_all_are_equal(self):
        assert read_shape({**MIXTRAL, "num_experts_per_tok": [2] * 32}) == read_shape(MIXTRAL)

    @pytest.mark.parametrize(
        ("more", "windows"),
        [
            ({}, [None] * 32),
            ({"sliding_window": 4096}, [4096] * 32),
            ({"sliding_window": 4096, "use_sliding_window": False}, [None] * 32),
            ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}, [512, None] * 16),
            ({"sliding_window": 512, "sliding_window_pattern": 4}, ([512] * 3 + [None]) * 8),
        ],
    )
    def test_windows(self, more, windows):
        assert [layer.window for layer in read_shape({**LLAMA, **more}).layers] == windows

    @pytest.mark.parametrize(
        ("quantized", "size"),
        [
            (None, 2.0),
            ({"quant_method": "fp8"}, 1.0),
            ({"quant_method": "gptq", "bits": 4}, 0.53),
            ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}, 0.53),
            ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}}, 1.0),
            ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.56),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
        ],
    )
    def test_quantized_weights(self, quantized, size):
        assert read_shape({**LLAMA, "quantization_config": quantized}).weight_bytes == pytest.approx(size)

    def test_a_model_of_several_parts_is_its_text_part(self):
        assert read_shape({"model_type": "gemma3", "text_config": LLAMA}) == read_shape(LLAMA)
        quantized = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
        assert read_shape({"model_type": "gemma3", "text_config": quantized}).weight_bytes == 1.0

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"hidden_size": None}, "hidden_size: is missing|hidden_size: must be above 0"),
            ({"num_hidden_layers": -4}, "num_hidden_layers: must be a whole number above 0, and is -4"),
            ({"num_attention_heads": "many"}, "num_attention_heads: must be a whole number above 0, and is 'many'"),
            ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide the 32 attention heads"),
            ({"hidden_size": 16}, "hidden_size: 16 is less than the 32 attention heads"),
            ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok: 8 is more than the 4 experts"),
            ({"quantization_config": {"quant_method": "new"}}, "how many bytes a weight has under 'new' is not known"),
            ({"quantization_config": "awq"}, "quantization_config: must be an object, and is 'awq'"),
            ({"text_config": "x"}, "text_config: must be an object, and is 'x'"),
            ({"num_experts": 4, "mlp_only_layers": 3}, "mlp_only_layers: must be a list, and is 3"),
            (
                {"num_experts": 4, "mlp_only_layers": ["x"]},
                r"mlp_only_layers: must be a list of layers, and is \['x'\]",
            ),
            ({"sliding_window": 9, "layer_types": "x"}, "layer_types: must be a list, and is 'x'"),
            (
                {"sliding_window": 9, "layer_types": ["full_attention"]},
                "layer_types: has 1 entries for 32 layers",
            ),
            ({"tie_word_embeddings": "x"}, "tie_word_embeddings: must be true or false, and is 'x'"),
            ({"model_type": 3}, "model_type: must be a name, and is 3"),
            ({"ffn_config": []}, r"ffn_config: must be an object, and is \[\]"),
            ({"num_experts": 4, "moe_layer_end_index": -2}, "moe_layer_end_index: must be a whole number"),
        ],
    )
    def test_a_configuration_that_cannot_be_is_named(self, change, says):
        with pytest.raises(ConfigError, match=says) as caught:
            read_shape({**LLAMA, **change}, "models/x/config.json")
        assert "models/x/config.json" in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"model_type": "llama4_text"}, "models of the type 'llama4_text'"),
            ({"num_kv_shared_layers": 10}, "num_kv_shared_layers: layers without a KV cache of their own"),
            ({"index_topk": 2048}, "index_topk: sparse attention layers"),
            (
                {"per_layer_config": {"05": {"head_dim": 512}}},
                "per_layer_config: layers that differ in their attention",
            ),
            ({"block_configs": [{}]}, "block_configs: layers that differ in their attention"),
            ({"num_key_value_heads": [8, 4]}, "num_key_value_heads: parts or layers that differ"),
        ],
    )
    def test_a_model_that_would_come_out_wrong_is_refused_with_the_reason(self, change, says):
        with pytest.raises(
            ConfigError, match=f"^models/x/config.json: {says} are not modelled. Next: take another model"
        ):
            read_shape({**LLAMA, **change}, "models/x/config.json")

    def test_what_a_model_says_it_does_not_have_is_no_reason(self):
        off = {"num_kv_shared_layers": 0, "index_topk": None, "block_configs": [], "use_cla": False}
        assert read_shape({**LLAMA, **off}) == read_shape(LLAMA)

    @pytest.mark.parametrize("name", shipped_models())
    def test_no_value_of_a_file_ends_in_anything_but_a_shape_or_its_name(self, name):
        config = find_model(name).config
        more = ("text_config", "quantization_config", "sliding_window", "layer_types", "mlp_only_layers", "num_experts")
        wrong = set()
        for key in {*config, *more}:
            for value in ("x", -1, 0, 3.5, [], ["x"], {}, None, True):
                try:
                    read_shape({**config, key: value})
                except ConfigError as error:
                    wrong.add((key, error.what.partition(":")[0]))
        assert {key for key, _ in wrong} > {"hidden_size", "text_config", "quantization_config"}
        assert not [(key, named) for key, named in wrong if key != named]


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


class TestRoofline:
    @pytest.fixture
    def device(self):
        perfect = {"compute": 1.0, "weights": 1.0, "kv": 1.0, "layer_us": 0.0, "request_us": 0.0, "link_us": 0.0}
        return Device(memory_gb=100, bandwidth_gb_s=1000, tflops=100, link_gb_s=100, **perfect)

    def test_one_token_takes_the_reading_of_all_weights(self, device):
        read = 2 * (read_shape(LLAMA).parameters - 128256 * 4096)
        assert Roofline(read_shape(LLAMA), device).seconds([Work(1, 1)]) == pytest.approx(read / 1e12, rel=1e-3)

    def test_a_long_prompt_takes_its_arithmetic(self, device):
        linear = 2 * (read_shape(LLAMA).parameters - 2 * 128256 * 4096) * 8192
        attention = 4 * 32 * 4096 * 8192 * 8192 / 2
        seconds = Roofline(read_shape(LLAMA), device).seconds([Work(8192, 8192)])
        assert seconds == pytest.approx((linear + attention) / 1e14, rel=1e-3)

    def test_decoding_reads_the_kv_cache(self, device):
        model = Roofline(read_shape(LLAMA), device)
        kv = 64 * 4000 * 2 * 32 * 2 * 8 * 128
        longer, short = [Work(1, 4001)] * 64, [Work(1, 1)] * 64
        assert model.seconds(longer) - model.seconds(short) == pytest.approx(kv / 1e12, rel=1e-6)

    def test_a_window_bounds_it(self, device):
        model = Roofline(read_shape({**LLAMA, "sliding_window": 1000}), device)
        assert model.seconds([Work(1, 50_000)]) == model.seconds([Work(1, 1000)])
        assert model.seconds([Work(1, 900)]) < model.seconds([Work(1, 1000)])

    def test_latent_attention_multiplies_a_prompt_out(self):
        shape = read_shape(DEEPSEEK)
        assert (shape.attention_width, shape.prefill_width) == (128 * (512 + 32), 128 * (128 + 64 + 128) // 2)

    def test_an_empty_step_takes_no_time(self, device):
        assert Roofline(read_shape(LLAMA), device, pipeline=2).stage_seconds([]) == [0.0, 0.0]

    def test_tensor_parallel_devices_share_the_work_and_exchange(self, device):
        batch = [Work(1, 2000)] * 32
        one, two = (Roofline(read_shape(LLAMA), device, tensor=size).seconds(batch) for size in (1, 2))
        exchanged = 2 * 32 * (2 * 1 / 2) * (32 * 4096 * 2) / 100e9
        assert two == pytest.approx(one / 2 + exchanged, rel=1e-9)

    def test_data_parallel_engines_share_the_experts_and_nothing_else(self, device):
        alone, four = (Roofline(read_shape(MIXTRAL), device, data=size) for size in (1, 4))
        layers = read_shape(MIXTRAL).layers
        experts = 2 * sum(layer.expert * layer.experts for layer in layers)
        assert experts > 0.8 * alone.weight_bytes
        assert four.weight_bytes == pytest.approx(alone.weight_bytes - 0.75 * experts)
        # So many tokens that every expert is read: a quarter of them in each engine, and the exchange on top.
        batch = [Work(1, 10)] * 2000
        exchanged = 2 * len(layers) * 3 * (2000 * read_shape(MIXTRAL).hidden * 2) / 100e9
        read = Roofline(read_shape(MIXTRAL), replace(device, tflops=1e9))
        shared = Roofline(read_shape(MIXTRAL), replace(device, tflops=1e9), data=4)
        assert shared.seconds(batch) == pytest.approx(read.seconds(batch) - 0.75 * experts / 1e12 + exchanged, rel=1e-3)
        assert Roofline(read_shape(LLAMA), device, data=4).seconds(batch) == Roofline(
            read_shape(LLAMA), device
        ).seconds(batch)

    def test_more_devices_than_kv_heads_keep_copies(self, device):
        batch = [Work(1, 200_000)]
        eight, sixteen = (Roofline(read_shape(LLAMA), device, tensor=size) for size in (8, 16))
        assert sixteen.seconds(batch) > 0.8 * eight.seconds(batch)

    def test_pipeline_stages_share_the_layers(self, device):
        whole = Roofline(read_shape(LLAMA), device)
        staged = Roofline(read_shape(LLAMA), device, pipeline=4)
        seconds = staged.stage_seconds([Work(1, 100)] * 8)
        assert len(seconds) == 4
        assert sum(seconds) == pytest.approx(whole.seconds([Work(1, 100)] * 8), rel=0.01)
        assert staged.weight_bytes < 0.4 * whole.weight_bytes

    def test_a_step_with_prompts_takes_what_the_host_needs_to_launch_it(self, device):
        slow = replace(device, launch_ms=200.0, eager_ms=300.0)
        fast, model = Roofline(read_shape(LLAMA), device), Roofline(read_shape(LLAMA), slow, decode=5)
        decode, drafts, small, large, huge = (
            [Work(1, 900)] * 8,
            [Work(5, 900)] * 8,
            [Work(1, 900)] * 8 + [Work(504, 504)],
            [Work(1, 900)] * 8 + [Work(505, 505)],
            [Work(8192, 8192)],
        )
        assert model.seconds(decode) == fast.seconds(decode)
        assert model.seconds(drafts) == fast.seconds(drafts)
        assert fast.seconds(small) < 0.2
        assert model.seconds(small) == pytest.approx(0.2)
        assert fast.seconds(large) < 0.3
        assert model.seconds(large) == pytest.approx(0.3)
        assert model.seconds(huge) == fast.seconds(huge) > 0.3

    def test_any_step_that_has_no_graph_is_launched_operation_by_operation(self, device):
        eager = Roofline(read_shape(LLAMA), replace(device, launch_ms=200.0, eager_ms=300.0), graph_tokens=0)
        assert eager.seconds([Work(1, 900)]) == pytest.approx(0.3)
        small = Roofline(read_shape(LLAMA), replace(device, launch_ms=200.0, eager_ms=300.0), graph_tokens=8)
        assert small.seconds([Work(1, 900)] * 8) < 0.2
        assert small.seconds([Work(1, 900)] * 9) == pytest.approx(0.3)

    def test_a_larger_step_never_takes_less(self, device):
        for host in ({"launch_ms": 200.0}, {"launch_ms": 200.0, "eager_ms": 100.0}, {"eager_ms": 200.0}):
            model = Roofline(read_shape(LLAMA), replace(device, **host))
            seconds = [model.seconds([Work(count, count)]) for count in (1, 2, 3, 16, 17, 511, 512, 513, 600, 5000)]
            assert seconds == sorted(seconds)

    def test_each_stage_launches_its_own_layers(self, device):
        model = Roofline(read_shape(LLAMA), replace(device, launch_ms=400.0), pipeline=4)
        assert model.stage_seconds([Work(100, 100)]) == pytest.approx([0.1] * 4)

    def test_layers_that_do_not_divide_go_where_vllm_puts_them(self):
        from vllm_graft.simulator.roofline import _split

        assert _split(34, 4) == [(0, 8), (8, 17), (17, 26), (26, 34)]


def benchmark(name: str, file: str) -> ModuleType:
    """A benchmark's module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def calibration():
    """The benchmark's module, with the recorded steps."""
    return benchmark("calibration", "calibration.py")


class TestCalibration:
    def test_the_shipped_h200_is_within_a_fifth_of_the_measured_one(self, calibration):
        points, about = calibration.recorded("0.32.0", "llama-3-8b")
        assert about["device"] == "NVIDIA H200"
        model = Roofline(read_shape(calibration.SHAPES["llama-3-8b"]), DEVICES["H200"])
        unseen = [point for point in points[1::2] if point.kind == "decode" and point.batch >= 8]
        assert len(unseen) >= 12
        assert {point.batch for point in unseen} == {8, 16, 32, 64, 128, 256}
        assert max(abs(point.error(model)) for point in unseen) < 0.20

    def test_the_shipped_constants_are_the_fitted_ones(self, calibration):
        points, _ = calibration.recorded("0.32.0", "llama-3-8b")
        found = calibration.fit(points[::2], read_shape(calibration.SHAPES["llama-3-8b"]), DEVICES["H200"])
        for name in calibration.FITTED:
            assert getattr(DEVICES["H200"], name) == pytest.approx(getattr(found, name), rel=0.02), name

    def test_the_documentation_shows_the_tables(self, calibration):
        page = SIMULATOR_FIGURES.read_text(encoding="utf-8")
        assert "\n".join(calibration.tables(DEVICES["H200"])) in page

    def test_the_documentation_shows_a_servers_steps(self):
        serving = benchmark("serving", "gpu/serving.py")
        page = SIMULATOR_FIGURES.read_text(encoding="utf-8")
        steps = serving.recorded_steps(BENCHMARKS / "gpu")
        assert "\n".join(serving.step_table(steps)) in page
        for key, value in serving.launches(steps).items():
            assert f"\n{key} = {value} " in page


class TestDevices:
    def test_names_are_found_in_any_case(self):
        assert find_device("h200", {}, "") is DEVICES["H200"]
        assert find_device("Instant", {}, "") is None

    def test_a_device_of_ones_own(self):
        table = {"based_on": ("H100", "g:2"), "memory_gb": (96, "g:3"), "tflops": (1200.5, "g:4")}
        own = find_device("gh200", {"GH200": table}, "")
        assert own is not None
        assert (own.memory_gb, own.tflops, own.bandwidth_gb_s) == (96.0, 1200.5, 3350)

    @pytest.mark.parametrize(
        ("table", "says"),
        [
            ({"memory_gb": (96, "g:3")}, "lacks bandwidth_gb_s, tflops, link_gb_s"),
            ({"based_on": ("H1000", "g:2")}, "must be a device that ships, and is 'H1000'"),
            (
                {"based_on": ("H100", "g:2"), "memroy_gb": (96, "g:3")},
                r"has no key 'memroy_gb' \(did you mean 'memory_gb'\?\)",
            ),
            ({"based_on": ("H100", "g:2"), "tflops": (-1, "g:3")}, "tflops must be a number above 0, and is -1"),
            (
                {"based_on": ("H100", "g:2"), "kv": (1.5, "g:3")},
                "kv must be a number above 0 and at most 1, and is 1.5",
            ),
            ({"based_on": ("H100", "g:2"), "memory_gb": (math.nan, "g:3")}, "memory_gb must be a number above 0"),
            ({"based_on": ("H100", "g:2"), "memory_gb": (math.inf, "g:3")}, "memory_gb must be a number above 0"),
            ({"based_on": ("H100", "g:2"), "link_us": ("x", "g:3")}, "link_us must be a number, 0 or more, and is 'x'"),
        ],
    )
    def test_faults_are_named_with_their_place(self, table, says):
        with pytest.raises(ConfigError, match=says) as caught:
            find_device("mine", {"mine": table}, "GRAFT_SIMULATE")
        assert str(caught.value).startswith("g:")

    def test_an_unknown_device_is_answered_with_the_known_ones(self):
        with pytest.raises(
            ConfigError, match=r"no device 'H20' \(did you mean 'H200'\?\); known are H200, H100, A100, L40S"
        ):
            find_device("H20", {}, "GRAFT_SIMULATE")


class TestSettings:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("GRAFT_CONFIG", raising=False)
        return tmp_path

    def test_without_anything_steps_take_no_time(self):
        for off in ("1", "0", "no"):
            assert resolve_settings({"GRAFT_SIMULATE": off}) == SimulationSettings()
        assert resolve_settings({"GRAFT_SIMULATE": "Instant"}).named

    def test_a_variable_is_stronger_than_the_file(self, folder):
        (folder / "graft.toml").write_text('[simulated]\ndevice = "A100"\nspeed = 10\noutput_tokens = 200\n')
        from_file = resolve_settings({"GRAFT_SIMULATE": "1"})
        assert (from_file.name, from_file.device, from_file.speed) == ("A100", DEVICES["A100"], 10.0)
        given = resolve_settings({"GRAFT_SIMULATE": "H200", "GRAFT_SIMULATED_SPEED": "virtual"})
        assert (given.name, given.virtual, given.output_tokens) == ("H200", True, 200.0)

    def test_a_device_of_the_file(self, folder):
        (folder / "graft.toml").write_text('[device.mine]\nbased_on = "L40S"\nmemory_gb = 24\n')
        mine = resolve_settings({"GRAFT_SIMULATE": "mine"}).device
        assert mine is not None
        assert mine.memory_bytes == 24 * 10**9

    def test_they_travel_as_plain_data(self):
        for environ in ({}, {"GRAFT_SIMULATE": "H100", "GRAFT_SIMULATED_SPEED": "virtual"}):
            settings = resolve_settings(environ)
            assert SimulationSettings.from_dict(json.loads(json.dumps(settings.as_dict()))) == settings

    @pytest.mark.parametrize(
        ("name", "value", "says"),
        [
            ("GRAFT_SIMULATED_SPEED", "fast", "speed must be a number above 0 or 'virtual', and is 'fast'"),
            ("GRAFT_SIMULATED_SPEED", "0", "speed must be a number above 0"),
            ("GRAFT_SIMULATED_SPEED", "nan", "speed must be a number above 0"),
            ("GRAFT_SIMULATED_OUTPUT_TOKENS", "-1", "output_tokens must be a number, 0 or more"),
            ("GRAFT_SIMULATED_ACCEPTANCE", "70", "acceptance must be a number from 0 to 1, and is '70'"),
            ("GRAFT_SIMULATED_KV_BYTES", "4GB", "kv_bytes must be a whole number of bytes, 0 or more, and is '4GB'"),
            ("GRAFT_SIMULATED_KV_BYTES", "1.5", "kv_bytes must be a whole number of bytes"),
        ],
    )
    def test_a_wrong_variable_is_named(self, name, value, says):
        with pytest.raises(ConfigError, match=f"^{name}: {says}"):
            resolve_settings({"GRAFT_SIMULATE": "1", name: value})

    def test_a_wrong_line_is_named(self, folder):
        (folder / "graft.toml").write_text('[simulated]\ndevise = "H200"\n')
        with pytest.raises(
            ConfigError, match=r"graft.toml:2: \[simulated\] has no key 'devise' \(did you mean 'device'\?\)"
        ):
            resolve_settings({"GRAFT_SIMULATE": "1"})
        (folder / "graft.toml").write_text("[simulated]\ndevice = 200\n")
        with pytest.raises(ConfigError, match=r"graft.toml:2: device must be a name, and is 200"):
            resolve_settings({"GRAFT_SIMULATE": "1"})


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0
        self.waited: list[float] = []

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        self.waited.append(moment)


class TestTime:
    def test_steps_run_one_after_another(self):
        clock = FakeClock()
        timeline = Timeline(clock)  # type: ignore[arg-type]
        ends = [timeline.launch([2.0]), timeline.launch([3.0])]
        assert ends == [102.0, 105.0]
        timeline.wait(ends[0])
        timeline.wait()
        assert clock.waited == [102.0, 105.0]
        assert (timeline.steps, timeline.busy_s) == (2, 5.0)

    def test_an_idle_device_starts_at_once(self):
        clock = FakeClock()
        timeline = Timeline(clock)  # type: ignore[arg-type]
        timeline.launch([2.0])
        clock.time = 200.0
        assert timeline.launch([1.0]) == 201.0

    def test_stages_of_a_pipeline_work_at_the_same_time(self):
        timeline = Timeline(FakeClock())  # type: ignore[arg-type]
        assert [timeline.launch([1.0, 1.0]) for _ in range(3)] == [102.0, 103.0, 104.0]

    def test_a_request_does_not_overtake_its_own_token(self):
        timeline = Timeline(FakeClock())  # type: ignore[arg-type]
        assert timeline.launch([1.0, 1.0], needs=["a"], gives=["a"]) == 102.0
        assert timeline.launch([1.0, 1.0], needs=["b"]) == 103.0, "another one follows at once"
        assert timeline.launch([1.0, 1.0], needs=["b"]) == 104.0, "so does the next chunk of a prompt"
        assert timeline.launch([1.0, 1.0], needs=["a"], gives=["a"]) == 105.0
        assert timeline.launch([1.0, 1.0], needs=["a"], gives=["a"]) == 107.0

    def test_a_factor_divides_the_waiting(self, monkeypatch):
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
        clock = RealClock(speed=10.0)
        assert clock.now() == 50.0
        clock.wait_until(70.0)
        clock.wait_until(40.0)
        assert slept == [2.0]

    def test_a_moment_that_is_reached_has_come(self):
        clock = VirtualClock()
        start = clock.now()
        early = 0
        for number in range(1, 4000):
            moment = start + round(number * 0.001237, 6)
            clock.wait_until(moment)
            early += clock.now() < moment
            clock.reach(moment)
            assert moment <= clock.now() < moment + 1e-6
        assert early, "or there is nothing to test"

    def test_virtual_time_takes_the_place_of_pythons_and_gives_it_back(self):
        originals = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter", "time_ns")}
        clock = VirtualClock()
        clock.install(self)
        try:
            began = time.time()
            assert began == clock.now() == 1e9
            clock.wait_until(began + 3600.5)
            assert time.monotonic() - began == 3600.5
            assert time.time_ns() == 1_000_003_600_500_000_000
            clock.wait_until(began)
            assert time.perf_counter() - began == 3600.5, "it never goes back"
            assert clock.real() != time.perf_counter()
        finally:
            clock.remove()
        assert {name: getattr(time, name) for name in originals} == originals
        assert math.isclose(time.time(), originals["time"](), abs_tol=5)

    def test_virtual_time_stays_until_the_last_engine_has_ended(self):
        """One that is collected ends after the next was made in its process, and maybe twice."""
        original, clock, first, second = time.time, VirtualClock(), object(), object()
        clock.install(first)
        clock.install(second)
        try:
            for _ in range(2):
                clock.release(first)
                assert time.time() == 1e9
            clock.release(second)
            assert time.time is original
        finally:
            clock.remove()
