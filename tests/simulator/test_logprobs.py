"""Invented log probabilities: consistent, and the same wherever and whenever they are asked for."""

import math
from itertools import pairwise

import numpy as np
import pytest

from vllm_graft.simulator.logprobs import LogprobModel, output_table
from vllm_graft.simulator.tokens import Vocabulary

PROMPT = tuple(range(10, 60))


@pytest.fixture
def scores(make):
    def open_(vocabulary=None, seed=0, **given):
        return LogprobModel(seed, vocabulary or Vocabulary(997)).open(
            make.new(**{"prompt": PROMPT, "num_logprobs": 5, **given})
        )

    return open_


@pytest.fixture
def outputs(scores):
    def table(index, tokens, vocabulary=None, **given):
        return output_table([(scores(vocabulary, **given), index, tokens)])

    return table


def rows(table):
    """Each position's {token: (value, rank)}; the chosen token's comes first, the others' ranks count from 1."""
    ids, values, ranks = table
    return [
        dict(zip(row, zip(line, [rank, *range(1, len(row))], strict=True), strict=True))
        for row, line, rank in zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
    ]


def test_a_request_that_asks_for_none_gets_none(scores):
    assert scores(num_logprobs=None) is None


def test_only_what_is_asked_for_is_computed(scores):
    assert scores(prompt_logprobs=None).prompt() is None
    assert scores(num_logprobs=None, prompt_logprobs=3).count is None


@pytest.mark.parametrize("size", [1, 2, 3, 259, 997, 128_256])
def test_the_chosen_token_is_there_and_values_fall_with_the_rank(outputs, size):
    table = outputs(0, [token % size for token in range(7, 37)], Vocabulary(size))
    for token, row in zip(range(7, 37), rows(table), strict=True):
        assert next(iter(row)) == token % size
        ordered = sorted(row.values(), key=lambda entry: entry[1])
        assert len({rank for _, rank in ordered}) == len(row)
        assert all(high > low for (high, _), (low, _) in pairwise(ordered))
        assert ordered[0][0] <= 0
        assert sum(math.exp(value) for value, _ in ordered) <= 1.000001


def test_the_whole_vocabulary_adds_up_to_one(outputs):
    (row,) = rows(outputs(3, [77], num_logprobs=-1))
    assert sorted(row) == list(range(997))
    assert sum(math.exp(value) for value, _ in row.values()) == pytest.approx(1)


def test_zero_asks_for_the_chosen_token_alone(outputs):
    assert [list(row) for row in rows(outputs(0, [4, 9], num_logprobs=0))] == [[4], [9]]


def test_named_tokens_have_the_values_they_have_in_the_whole(outputs):
    (whole,) = rows(outputs(3, [77], num_logprobs=-1))
    ids, values, _ = outputs(3, [77], num_logprobs=3, logprob_token_ids=[5, 900, 77])
    assert ids.tolist() == [[77, 5, 900, 77]]
    assert values.tolist() == [[whole[token][0] for token in (77, 5, 900, 77)]]


def test_ids_past_the_tokenizer_come_last(outputs):
    padded = Vocabulary(90, padding=6)
    (row,) = rows(outputs(0, [5], padded, num_logprobs=-1))
    assert sorted(row, key=lambda token: -row[token][0])[90:] == [90, 91, 92, 93, 94, 95]
    ids, _, ranks = outputs(0, [93], padded)
    assert (ids[0, 0], ranks[0]) == (93, 94)


def test_ids_that_only_a_larger_tokenizer_has_are_as_unlikely_as_the_last(scores, outputs):
    """vLLM lets them through; a prompt with one must not end the engine."""
    ids, values, _ = scores(prompt=(5, 4000, 6), prompt_logprobs=2).prompt()
    assert ids[0][0] == 4000
    assert values[0][0] == min(row[0] for row in outputs(0, [7], num_logprobs=-1)[1].T.tolist())
    named = outputs(0, [7], logprob_token_ids=[3, 5000])
    assert np.isfinite(named[1]).all()


def test_several_tokens_at_once_have_the_values_they_have_one_by_one(scores, outputs):
    together = outputs(4, [8, 9, 10])
    alone = output_table([(scores(), 4 + place, [token]) for place, token in enumerate([8, 9, 10])])
    for part, parts in zip(together, alone, strict=True):
        assert np.array_equal(part, parts)


def test_another_seed_or_prompt_has_others(outputs):
    ranks = [outputs(0, range(20), **given)[2].tolist() for given in ({}, {"seed": 1}, {"prompt": (1, 2, 3)})]
    assert ranks[0] != ranks[1]
    assert ranks[0] != ranks[2]


@pytest.mark.parametrize(
    ("given", "last"),
    [({"temperature": 0}, 1), ({"top_k": 3}, 3), ({"top_p": 0.3}, 1), ({"min_p": 0.3}, 2), ({}, 997)],
)
def test_the_chosen_token_has_a_rank_that_sampling_permits(outputs, given, last):
    _, _, ranks = outputs(0, [5] * 2000, **given)
    assert ranks.min() == 1
    assert ranks.max() <= last
    assert len(set(ranks.tolist())) >= min(last, 50)


def test_a_prompts_values_leave_its_first_token_out(scores):
    table = scores(prompt_logprobs=3).prompt()
    assert [next(iter(row)) for row in rows(table)] == list(PROMPT[1:])
    assert table[0].shape == (len(PROMPT) - 1, 4)


def test_a_prompt_of_one_token_has_no_values(scores):
    """vLLM cannot send a table without rows: the engine would never answer again."""
    assert scores(prompt_logprobs=3, prompt=(7,)).prompt() is None


def test_prompts_that_begin_alike_have_the_same_values_there(scores):
    one = scores(prompt_logprobs=3).prompt()
    other = scores(prompt_logprobs=3, prompt=(*PROMPT[:30], 900, *PROMPT[31:])).prompt()
    for part, changed in zip(one, other, strict=True):
        assert np.array_equal(part[:29], changed[:29])
        assert not np.array_equal(part[30:], changed[30:])


def test_requests_that_want_different_things_share_a_table(scores):
    wishes = [(scores(num_logprobs=1), 0, [5]), (scores(logprob_token_ids=[8, 9]), 0, [6, 7]), (scores(), 3, [4])]
    ids, values, ranks = output_table(wishes)
    assert (ids.shape, values.shape, ranks.shape) == ((4, 6), (4, 6), (4,))
    assert ids[:, 0].tolist() == [5, 6, 7, 4]
    assert ids[1, 1:3].tolist() == [8, 9]
    assert values[0, 2:].tolist() == [-math.inf] * 4
