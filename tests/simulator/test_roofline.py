"""How long the modelled device works on a batch."""

from dataclasses import replace
from typing import NamedTuple

import pytest
from model_configs import DEEPSEEK, LLAMA, MIXTRAL

from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.simulator.devices import Device
from vllm_graft.simulator.model_shape import read_shape
from vllm_graft.simulator.roofline import Roofline


class Work(NamedTuple):
    new_tokens: int
    context: int


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

    def test_a_planned_window_bounds_it_too(self, device):
        """First tokens and window: 64 and 1024, which move by 64 tokens at a time."""
        window = WindowShape.fit(64, 1024, 16)
        shape = read_shape(LLAMA)
        layers = tuple(
            replace(layer, window=window if index < 16 else None) for index, layer in enumerate(shape.layers)
        )
        some = Roofline(replace(shape, layers=layers), device)
        every = Roofline(replace(shape, layers=tuple(replace(layer, window=window) for layer in shape.layers)), device)
        full = Roofline(shape, device)
        # The last query of a step sees all of them.
        assert window.most == 1088
        assert every.seconds([Work(1, 64 * 1000)]) == full.seconds([Work(1, 1088)])
        assert every.seconds([Work(1, 64 * 1000 + 1)]) == full.seconds([Work(1, 1088 - 63)])
        assert every.seconds([Work(1, 900)]) == full.seconds([Work(1, 900)])
        long = [Work(1, 64 * 1000)] * 8
        assert some.seconds(long) == pytest.approx((every.seconds(long) + full.seconds(long)) / 2)
        # A prompt is arithmetic: each token with what it sees.
        pairs = sum(min(place + 1, place + 1 - window.gap(place)) for place in range(8192))
        assert full.seconds([Work(8192, 8192)]) - every.seconds([Work(8192, 8192)]) == pytest.approx(
            4 * 32 * 4096 * (8192 * 8193 / 2 - pairs) / 1e14, rel=1e-6
        )

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
