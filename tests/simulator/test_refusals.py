"""What the device cannot do is said before it is tried; which adapters it holds."""

from types import SimpleNamespace

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.simulator import refusals
from vllm_graft.simulator.worker import AdapterCache


class TestAdapters:
    def test_the_longest_unused_adapter_leaves_unless_it_is_pinned(self):
        cache = AdapterCache(2)
        assert [cache.add(1), cache.add(2), cache.pin(1), cache.add(3)] == [True] * 4
        assert cache.ids() == {1, 3}
        assert [cache.remove(1), cache.remove(1), cache.pin(9)] == [True, False, False]


class TestRefusals:
    def config(self, *, parallel=None, **given):
        usual = {"distributed_executor_backend": "uni", "nnodes": 1}
        return SimpleNamespace(parallel_config=SimpleNamespace(**{**usual, **(parallel or {})}), **given)

    def test_a_plain_configuration_passes(self):
        model = SimpleNamespace(runner_type="generate", logits_processors=[], logprobs_mode="raw_logprobs")
        refusals.check_config(self.config(model_config=model))

    @pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "eagle3", "mtp", "draft_model"])
    def test_drafting_that_differs_in_nothing_but_numbers_passes(self, method):
        drafting = SimpleNamespace(method=method, rejection_sample_method="standard")
        refusals.check_config(self.config(speculative_config=drafting))

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"speculative_config": SimpleNamespace(method="dspark")}, "'dspark'"),
            ({"speculative_config": SimpleNamespace(method="eagle", rejection_sample_method="synthetic")}, "synthetic"),
            ({"model_config": SimpleNamespace(logprobs_mode="processed_logits")}, "processed_logits"),
            ({"model_config": SimpleNamespace(logits_processors=["mod:Cls"])}, "logits_processors"),
            ({"model_config": SimpleNamespace(runner_type="pooling")}, "pooling"),
            ({"model_config": SimpleNamespace(is_hybrid=True)}, "state-space"),
            ({"parallel": {"distributed_executor_backend": "ray"}}, "'ray'"),
            ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size"),
        ],
    )
    def test_what_cannot_be_honoured_is_named(self, given, named):
        with pytest.raises(ConfigError, match=named):
            refusals.check_config(self.config(**given))

    @pytest.mark.parametrize("ends", [0, 2, [2, 3]])
    def test_answers_that_can_end_pass(self, ends):
        model = SimpleNamespace(skip_tokenizer_init=True, try_get_generation_config=lambda: {"eos_token_id": ends})
        refusals.check_ending(self.config(model_config=model))

    def test_a_tokenizer_knows_how_a_text_ends(self):
        refusals.check_ending(self.config(model_config=SimpleNamespace(skip_tokenizer_init=False)))
        refusals.check_ending(self.config(model_config=None))

    @pytest.mark.parametrize("generation", [{}, {"eos_token_id": None}, {"eos_token_id": []}])
    def test_natural_lengths_are_refused_where_no_token_ends_a_text(self, generation):
        model = SimpleNamespace(skip_tokenizer_init=True, try_get_generation_config=lambda: generation)
        with pytest.raises(ConfigError, match=r"output_tokens would have no effect.* Next: add eos_token_id to"):
            refusals.check_ending(self.config(model_config=model))
