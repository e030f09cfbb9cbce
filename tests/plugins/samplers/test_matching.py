"""Where the end of a text occurred before: the host's and the device's answer equal what looking finds."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_steps import Lists, lengths_of

from vllm_graft.plugins.samplers.matching import MAX_MATCH
from vllm_graft.plugins.samplers.matching.by_torch import match_lengths, newest_first
from vllm_graft.plugins.samplers.matching.host import Matcher

texts = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(-1, 8), max_size=60),
    st.builds(lambda part, times: (part * times)[:90], st.lists(st.integers(0, 3), max_size=7), st.integers(1, 60)),
)


def followers(text, window, shortest, breakers=frozenset()):
    """The reference, in the host's form: each token that follows a match, with its longest."""
    found = {}
    for token, length in lengths_of(text, window, breakers):
        if length >= shortest:
            found[token] = max(length, found.get(token, 0))
    return found


def flags(breakers, vocabulary=8):
    return bytes(token in breakers for token in range(vocabulary))


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(2, 70), st.integers(0, 6), st.frozensets(st.integers(0, 7), max_size=2))
def test_the_host_keeps_up_with_every_token(text, window, shortest, breakers):
    """At every prefix, and the same when asked twice; where any token follows a match, lengths are not told."""
    matcher = Matcher(shortest, window, flags(breakers))
    for end in range(1, len(text) + 1):
        matcher.catch_up(Lists({0: text[:end]}), 0)
        expected = followers(text[:end], window, shortest, breakers)
        for _ in range(2):
            found = matcher.followers()
            assert found == expected if shortest else set(found) == set(expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 50), st.integers(1, 5), st.integers(1, 40))
def test_the_host_takes_many_tokens_at_a_time(seed, window, shortest, most):
    """Chunks of any size, also larger than the window, and a text that runs through several windows."""
    draw = random.Random(seed)
    text = []
    matcher = Matcher(shortest, window)
    while len(text) < 250:
        text += draw.choices(range(draw.choice([1, 2, 4])), k=draw.randint(1, most))
        matcher.catch_up(Lists({0: text}), 0)
        assert matcher.followers() == followers(text, window, shortest)


def test_a_circle_goes_in_and_out_of_the_dense_form():
    """Many matches are kept in another form, and few again in the first; both agree with looking."""
    draw = random.Random(5)
    text, forms = [], []
    matcher = Matcher(2, 150, flags({7}))
    for _ in range(14):
        part = draw.choices(range(7), k=draw.choice([1, 1, 2, 5]))
        for token in part * draw.choice([2, 100 // len(part)]) + [draw.choice([5, 6, 7])]:
            text.append(token)
            matcher.catch_up(Lists({0: text}), 0)
            forms.append(matcher._many)
            assert matcher.followers() == followers(text, 150, 2, {7})
    assert sum(one != next for one, next in pairwise(forms)) > 4


def test_many_matches_end_at_the_window_too():
    """The longest match of a token is the one that reaches out of the window."""
    phrase = list(range(10, 20))
    text = [*phrase, 1, *[17, 18, 19, 2] * 70, *phrase]
    for window in range(len(text) - 9, len(text) + 1):
        matcher = Matcher(2, window)
        for end in range(1, len(text) + 1):
            matcher.catch_up(Lists({0: text[:end]}), 0)
        assert matcher._many
        assert matcher.followers() == followers(text, window, 2)


def test_followers_of_many_kinds_are_all_found():
    """More distinct tokens after a match than are looked for one by one, some of them twice."""
    text = [token for other in [*range(2, 80), 5, 6] for token in (1, other, 0)] + [1]
    matcher = Matcher(1, 4096)
    matcher.catch_up(Lists({0: text}), 0)
    assert matcher._many
    assert matcher.followers() == followers(text, 4096, 1)


@pytest.mark.parametrize("after", [[1, 2], [5, 6, 5, 6, 5], [1, 2, 1, 2, 9, 9, 9]], ids=["shorter", "other", "longer"])
def test_a_text_that_is_no_continuation_is_read_anew(after):
    """A slot that has another request now, or one that was resumed."""
    matcher = Matcher(1, 100)
    matcher.catch_up(Lists({0: [1, 2, 1, 2, 1]}), 0)
    matcher.catch_up(Lists({0: after}), 0)
    assert matcher.followers() == followers(after, 100, 1)


def test_a_token_that_was_not_known_yet_is_read_again():
    """A placeholder at the end matches nothing, and is forgotten once the token is there."""
    matcher = Matcher(1, 100)
    matcher.catch_up(Lists({0: [1, 2, 1, -1]}), 0)
    assert matcher.followers() == {}
    matcher.catch_up(Lists({0: [1, 2, 1, 2]}), 0)
    assert matcher.followers() == {1: 2}


def test_what_no_window_reaches_is_forgotten():
    """The memory of a request is bounded by its window, however long it runs."""
    matcher = Matcher(2, 50)
    text = []
    for token in random.Random(1).choices(range(1000), k=3000):
        text.append(token)
        matcher.catch_up(Lists({0: text}), 0)
    assert len(matcher._tokens) <= 151
    assert len(matcher._index) + len(matcher._older) <= 100


def padded(lines, window):
    return torch.tensor([[-1] * (window - len(line[-window:])) + line[-window:] for line in lines])


@settings(max_examples=120, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(2, 70), st.data())
def test_torch_finds_every_length(lines, columns, data):
    """All rows at once, each with a window and breakers of its own."""
    windows = [data.draw(st.integers(0, columns)) for _ in lines]
    breakers = [data.draw(st.frozensets(st.integers(0, 7), max_size=2)) for _ in lines]
    tokens = padded(lines, columns)
    newest = newest_first(tokens)
    broken = torch.tensor([[t in own for t in line] for line, own in zip(newest.tolist(), breakers, strict=True)])
    found = match_lengths(tokens, torch.tensor(windows), broken)
    for row, (text, window, own) in enumerate(zip(lines, windows, breakers, strict=True)):
        expected = [length for _, length in lengths_of(text, min(window, columns), own)] if window else []
        assert found[row, columns - len(expected) :].tolist() == expected
        assert not found[row, : columns - len(expected)].any()


def test_matches_count_up_to_the_longest():
    """Host and device cut at the same length."""
    text = [3] * 300
    matcher = Matcher(1, 400)
    matcher.catch_up(Lists({0: text}), 0)
    assert matcher.followers() == {3: MAX_MATCH}
    assert match_lengths(padded([text], 400), torch.tensor([400])).max() == MAX_MATCH
