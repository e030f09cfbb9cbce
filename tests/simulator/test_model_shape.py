"""The shape of a model, read from its ``config.json``."""

import json
from pathlib import Path

import pytest
from model_configs import DBRX, DEEPSEEK, ERNIE, FALCON_7B, FALCON_40B, LLAMA, MIXTRAL

from vllm_graft.errors import ConfigError
from vllm_graft.simulator.model_shape import find_model, read_shape, shipped_models


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
            ({"num_hidden_layers": -4}, "num_hidden_layers: must be a whole number above 0, but is -4"),
            ({"num_attention_heads": "many"}, "num_attention_heads: must be a whole number above 0, but is 'many'"),
            ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide the 32 attention heads"),
            ({"hidden_size": 16}, "hidden_size: 16 is less than the 32 attention heads"),
            ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok: 8 is more than the 4 experts"),
            ({"quantization_config": {"quant_method": "new"}}, "how many bytes a weight has under 'new' is not known"),
            ({"quantization_config": "awq"}, "quantization_config: must be an object, but is 'awq'"),
            ({"text_config": "x"}, "text_config: must be an object, but is 'x'"),
            ({"num_experts": 4, "mlp_only_layers": 3}, "mlp_only_layers: must be a list, but is 3"),
            (
                {"num_experts": 4, "mlp_only_layers": ["x"]},
                r"mlp_only_layers: must be a list of layers, but is \['x'\]",
            ),
            ({"sliding_window": 9, "layer_types": "x"}, "layer_types: must be a list, but is 'x'"),
            (
                {"sliding_window": 9, "layer_types": ["full_attention"]},
                "layer_types: has 1 entries for 32 layers",
            ),
            ({"tie_word_embeddings": "x"}, "tie_word_embeddings: must be true or false, but is 'x'"),
            ({"model_type": 3}, "model_type: must be a name, but is 3"),
            ({"ffn_config": []}, r"ffn_config: must be an object, but is \[\]"),
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


class TestModels:
    def test_the_shapes_that_ship_have_the_size_of_their_names(self):
        sizes = {name: find_model(name).shape.parameters / 1e9 for name in shipped_models()}
        assert sizes == pytest.approx(
            {"gemma-3-12b": 11.8, "llama-3-70b": 70.6, "llama-3-8b": 8.0, "mixtral-8x7b": 46.7, "qwen3-30b-a3b": 30.5},
            abs=0.1,
        )

    def test_gemma_slides_in_five_of_six_layers(self):
        windows = [layer.window for layer in find_model("gemma-3-12b").shape.layers]
        assert windows == ([1024] * 5 + [None]) * 8

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("{", "is not JSON"),
            ("[" * 50_000, "is not JSON: maximum recursion depth exceeded"),
            ("[]", "is not a JSON object but list"),
            ("{}", "architectures: is missing"),
            ('{"architectures": ["X"]}', "num_attention_heads: is missing"),
            (
                '{"architectures": ["X"], "num_attention_heads": 3, "hidden_size": 8, "num_hidden_layers": 1, '
                '"num_key_value_heads": 2, "vocab_size": 9}',
                "does not divide",
            ),
        ],
    )
    def test_a_bad_file_is_refused_by_name(self, tmp_path: Path, content: str, says: str):
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
        for given in (tmp_path, tmp_path / "config.json"):
            with pytest.raises(ConfigError, match=says) as caught:
                find_model(str(given))
            assert "config.json" in caught.value.where

    def test_a_model_that_is_not_modelled_has_no_shape_but_a_folder(self, tmp_path: Path):
        """The device 'instant' takes it, and needs no shape."""
        config = {**find_model("llama-3-8b").config, "num_kv_shared_layers": 10}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = find_model(str(tmp_path))
        assert model.folder == tmp_path
        with pytest.raises(ConfigError, match=r"num_kv_shared_layers: .* are not modelled"):
            _ = model.shape

    def test_what_does_not_exist_is_refused(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="did you mean 'llama-3-8b'"):
            find_model("llama-3-9b")
        with pytest.raises(ConfigError, match=r"has no config\.json"):
            find_model(str(tmp_path))
