"""Where tokens come from: the same for the same request, what a request demands, where a text ends."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_graft.simulator.tokens import (
    HashedTokens,
    LengthModel,
    Vocabulary,
    allowed_tokens,
    read_tokenizer,
    read_vocabulary,
    skew,
)
from vllm_graft.splitmix import splitmix64


@pytest.fixture
def first(make):
    def tokens(count, **given):
        stream = make.stream(**given)
        return [stream.token(index, None) for index in range(count)]

    return tokens


class TestTokens:
    def test_the_same_request_gets_the_same_tokens(self, first):
        assert first(50) == first(50, name="another id")

    @pytest.mark.parametrize("other", [{"prompt": (5, 6, 8)}, {"engine_seed": 1}, {"seed": 1}, {"lora": "adapter"}])
    def test_another_prompt_seed_or_adapter_gets_others(self, first, other):
        assert first(50) != first(50, **other)

    def test_a_request_with_a_seed_of_its_own_does_not_depend_on_the_engines(self, make):
        own = [HashedTokens(engine, Vocabulary(1000)).open(make.new(seed=7)).token(0, None) for engine in (0, 1)]
        assert own[0] == own[1]

    def test_no_token_is_special_or_ends_the_request(self, make, first):
        small = Vocabulary(8, frozenset({0, 1}))
        assert set(first(200, vocabulary=small, all_stop_token_ids={make.eos, 7})) == {3, 4, 5, 6}

    def test_a_vocabulary_of_nothing_but_special_tokens_still_gives_one(self, first):
        assert first(1, vocabulary=Vocabulary(2, frozenset({0, 1})))[0] in (0, 1)

    def test_allowed_token_ids_are_honoured(self, first):
        assert set(first(50, allowed_token_ids=[40, 41])) == {40, 41}

    def test_a_trace_is_replayed(self, first):
        assert first(3, trace_decode_token_ids=[9, 8, 7]) == [9, 8, 7]

    def test_numbers_are_stable_for_good(self):
        assert splitmix64(0, 0) == 0xE220A8397B1DCDAF


class TestDemands:
    SMALL = Vocabulary(8, frozenset({0, 1, 2}))

    def test_a_bias_of_minus_100_forbids_a_token(self, first):
        assert set(first(200, vocabulary=self.SMALL, logit_bias={3: -100.0, 4: -100.0})) == {5, 6, 7}

    def test_a_bias_of_100_leaves_no_other(self, first):
        assert set(first(200, vocabulary=self.SMALL, logit_bias={3: 100.0, 4: 100.0, 5: 1.0})) == {3, 4}

    def test_a_weak_bias_is_a_soft_wish(self, first):
        assert first(50, logit_bias={3: 5.0, 4: -5.0}) == first(50)

    def test_the_last_token_of_a_bad_word_is_not_used(self, first):
        assert set(first(200, vocabulary=self.SMALL, bad_words_token_ids=[[3], [4, 5]])) == {4, 6, 7}

    def test_they_narrow_allowed_token_ids(self, first):
        given = {"allowed_token_ids": [40, 41, 42, 43], "logit_bias": {40: 100.0, 41: 100.0, 42: -100.0}}
        assert set(first(50, **given)) == {40, 41}
        assert set(first(50, allowed_token_ids=[40, 41], logit_bias={41: -100.0})) == {40}

    def test_a_grammar_yields_no_forbidden_token_where_it_has_another(self, make):
        stream = make.stream(logit_bias={3: -100.0})
        assert {stream.token(index, make.mask(3, 500)) for index in range(20)} == {500}
        assert stream.token(0, make.mask(3)) == 3


class TestLengths:
    def test_a_text_ends_with_its_end_token_where_its_length_says(self, make, first):
        lengths = LengthModel(20)
        tokens = first(400, lengths=lengths)
        assert tokens[: tokens.index(make.eos)] == first(400)[: tokens.index(make.eos)]
        assert make.eos not in first(400)

    def test_the_mean_is_the_one_asked_for_and_no_length_is_below_one(self):
        lengths = [LengthModel(100).length(splitmix64(1, index)) for index in range(20_000)]
        assert 98 < sum(lengths) / len(lengths) < 102
        assert 76 < sorted(lengths)[10_000] < 80
        assert LengthModel(1).length(0) == 1

    @pytest.mark.parametrize("number", [0, 1, 2**63, 2**64 - 1])
    def test_any_number_stands_for_a_length(self, number):
        assert LengthModel(20).length(number) >= 1

    def test_a_mean_of_nothing_is_refused(self):
        with pytest.raises(ValueError, match="above 0"):
            LengthModel(0)

    def test_the_same_prompt_ends_at_the_same_place_and_another_elsewhere(self, make, first):
        ends = [first(400, lengths=LengthModel(50), prompt=(5, 6, number)).index(make.eos) for number in (1, 1, 2, 3)]
        assert ends[0] == ends[1]
        assert len(set(ends)) == 3

    def test_min_tokens_delays_the_end(self, make, first):
        natural = first(400, lengths=LengthModel(20)).index(make.eos)
        assert first(400, lengths=LengthModel(20), min_tokens=natural + 9).index(make.eos) == natural + 9

    @pytest.mark.parametrize(
        "given",
        [
            {"ignore_eos": True},
            {"eos_token_id": None},
            {"logit_bias": {2: -100.0}},
            {"allowed_token_ids": [40, 41]},
        ],
    )
    def test_a_request_that_cannot_end_goes_on(self, make, first, given):
        assert make.eos not in first(400, lengths=LengthModel(20), **given)

    def test_without_a_tokenizer_the_model_names_the_end(self, first):
        given = {"eos_token_id": None, "stop_token_ids": [2, 500], "all_stop_token_ids": {2, 500}}
        tokens = first(400, lengths=LengthModel(20), **given)
        assert 2 in tokens
        assert 500 not in tokens


class TestGrammar:
    def test_a_token_the_grammar_allows_is_chosen(self, make):
        tokens = make.stream()
        assert {tokens.token(index, make.mask(3, 500, 999)) for index in range(50)} == {3, 500, 999}

    def test_the_text_ends_as_soon_as_it_may(self, make):
        assert make.stream().token(4, make.mask(3, make.eos, 999)) == make.eos

    def test_but_not_before_min_tokens(self, make):
        tokens = make.stream(min_tokens=5)
        mask = make.mask(3, make.eos)
        assert (tokens.token(4, mask), tokens.token(5, mask)) == (3, make.eos)

    def test_min_tokens_yields_to_a_grammar_that_allows_nothing_else(self, make):
        assert make.stream(min_tokens=5).token(0, make.mask(make.eos)) == make.eos

    def test_an_id_that_no_token_has_is_no_way_out(self, make):
        stops = {"stop_token_ids": [-1, 5000], "all_stop_token_ids": {-1, 5000}}
        tokens = make.stream(Vocabulary(1024), allowed_token_ids=[-1, 999], **stops)
        assert {tokens.token(index, make.mask(999, 1023, size=1024)) for index in range(50)} == {999}

    def test_a_row_with_all_bits_set_is_no_constraint(self, make):
        free = np.full(32, -1, dtype=np.int32)
        assert make.stream().token(3, free) == make.stream().token(3, None)

    def test_a_grammar_without_a_way_out_does_not_raise(self, make):
        assert 0 <= make.stream().token(0, make.mask()) < 1000

    def test_allowed_token_ids_narrow_it_further_where_they_can(self, make):
        tokens = make.stream(allowed_token_ids=[500, 600])
        assert (tokens.token(0, make.mask(3, 500)), tokens.token(0, make.mask(3))) == (500, 3)

    def test_bits_beyond_the_vocabulary_are_ignored(self, make):
        assert np.flatnonzero(allowed_tokens(make.mask(3, 40, 63, size=64), 40)).tolist() == [3]

    @pytest.mark.parametrize("count", [1, 2, 64, 65, 128_000])
    def test_a_choice_stays_in_range(self, count):
        picks = {skew(number, count) for number in (0, 1, 2**63, 2**64 - 1, *(splitmix64(1, i) for i in range(500)))}
        assert min(picks) >= 0
        assert max(picks) < count


class TestVocabulary:
    def test_the_tokenizers_file_names_special_ids_and_the_end(self, tmp_path):
        content = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}, {"id": 5}]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        assert read_tokenizer(tmp_path / "tokenizer.json") == Vocabulary(6, frozenset({2, 5}))

    def model(self, folder, generation=None):
        """A model; with a generation configuration, one that has no tokenizer."""
        return SimpleNamespace(
            get_vocab_size=lambda: 64,
            hf_text_config=SimpleNamespace(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=None),
            tokenizer=None,
            model=str(folder),
            skip_tokenizer_init=generation is not None,
            try_get_generation_config=lambda: generation,
        )

    def test_a_model_is_its_configuration_alone_where_there_is_no_such_file(self, tmp_path):
        assert read_vocabulary(self.model(tmp_path / "not-there")) == Vocabulary(64, frozenset({1, 2, 3}))

    @pytest.mark.parametrize(("ends", "special"), [(7, {1, 2, 3, 7}), ([3, 8], {1, 2, 3, 8}), (None, {1, 2, 3})])
    def test_without_a_tokenizer_a_text_may_end_where_the_generation_configuration_says(self, tmp_path, ends, special):
        assert read_vocabulary(self.model(tmp_path, {"eos_token_id": ends})).special == special

    def test_what_a_model_has_beyond_its_tokenizer_is_padding(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 49}}}))
        assert read_vocabulary(self.model(tmp_path)) == Vocabulary(50, frozenset({1, 2, 3}), padding=14)
