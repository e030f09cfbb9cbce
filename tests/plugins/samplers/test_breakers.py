"""Which tokens break a match: those that contain a text; and sets of tokens for each slot."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_steps import CPU, Words

from vllm_graft.contracts import ServedModel
from vllm_graft.plugins.samplers.matching.breakers import Breakers, TextIndex, decode_vocabulary
from vllm_graft.plugins.samplers.matching.sets import TokenSet, TokenSets

letters = st.text(alphabet="ab\n:\0é\U0001f600\ud800", max_size=5)


@settings(max_examples=150, deadline=None)
@given(st.lists(letters, max_size=20), letters.filter(bool))
def test_the_index_finds_what_searching_finds(texts, wanted):
    """Texts of any characters, empty ones and the separator's among them."""
    assert TextIndex(texts).containing(wanted).tolist() == [wanted in text for text in texts]


def tokens_in(found, vocabulary):
    return {token for token in range(vocabulary) if token in found}


def test_texts_that_tokens_contain_and_texts_that_none_does():
    """Else the last token of the encoding; what has none either breaks nothing; empty texts say nothing."""
    words = Words(["x", "\n", ".\n", "ab", "b", "a:", "c"])
    breakers = Breakers(lambda: words, 9)
    assert tokens_in(breakers.tokens(["\n", ":"]), 9) == {1, 2, 5}
    assert tokens_in(breakers.tokens(["b", ""]), 9) == {3, 4}
    assert tokens_in(breakers.tokens(["xcxb"]), 9) == {4}
    assert not breakers.tokens(["☃"])
    assert not breakers.tokens([])


def test_a_text_that_the_tokenizer_cannot_encode_breaks_nothing(caplog):
    """An unpaired surrogate, as tokenizers written in Rust refuse it: the other texts still count."""

    class Strict(Words):
        def encode(self, text, **options):
            text.encode()
            return super().encode(text, **options)

    words = Strict(["x", "\n", "ab"])
    breakers = Breakers(lambda: words, 3)
    assert tokens_in(breakers.tokens(["\ud800", "\n"]), 3) == {1}
    assert r"the breaker '\ud800' matches nothing: UnicodeEncodeError" in caplog.text


def test_the_vocabulary_is_decoded_once_and_only_when_needed():
    """A list without texts needs no tokenizer at all."""
    words = Words(["a", "b", "c"])
    breakers = Breakers(lambda: words, 3)
    breakers.tokens([])
    assert words.decoded == 0
    for texts in (["a"], ["b"], ["a", "c"], ["c", "a"]):
        breakers.tokens(texts)
    assert words.decoded == 3

    def none():
        raise RuntimeError("served without a tokenizer")

    assert not Breakers(none, 3).tokens([])
    with pytest.raises(RuntimeError, match="without a tokenizer"):
        Breakers(none, 3).tokens(["a"])


def test_a_new_list_cannot_stall_the_engine():
    """Sixty-four common texts that were never asked for before, in a vocabulary of 100,000."""
    parts = [first + second for first in "etaoinshrd" for second in "etaoinshrd"]
    texts = [parts[number % 100] + parts[number // 100 % 100] + str(number) for number in range(100_000)]
    index = TextIndex(texts)
    started = time.thread_time()
    for part in parts[:64]:
        assert index.containing(part).any()
    assert time.thread_time() - started < 0.5


def test_a_fast_tokenizer_decodes_all_tokens_in_one_call():
    """The tokenizers package, and what a tokenizer does not know."""
    tokenizers = pytest.importorskip("tokenizers")
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b\n": 1, "[U]": 2}, unk_token="[U]"))

    class Wrapped:
        backend_tokenizer = fast

        def __len__(self):
            return 3

    assert decode_vocabulary(Wrapped(), 5) == ["a", "b\n", "[U]", "", ""]
    assert decode_vocabulary(Wrapped(), 2) == ["a", "b\n"]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(-3, 100))), max_size=20))
def test_each_slot_has_the_set_that_was_assigned_last(vocabulary, assigned):
    """More distinct sets over time than there is room for, and ids that the vocabulary does not have."""
    sets = TokenSets(ServedModel("a model", vocabulary, 3, CPU))
    own = {}
    asked = torch.tensor([list(range(-4, 110))] * 4)
    for slot, tokens in assigned:
        sets.assign(slot, TokenSet.of(tokens, vocabulary))
        own[slot] = {token for token in tokens if 0 <= token < vocabulary}
        found = sets.contains(torch.arange(4), asked)
        for row in range(4):
            assert set(asked[row][found[row]].tolist()) == own.get(row, set())


def test_slots_with_the_same_tokens_share_a_set():
    """The table holds distinct sets."""
    sets = TokenSets(ServedModel("a model", 40, 3, CPU))
    for slot in range(3):
        sets.assign(slot, TokenSet.of([5, 33], 40))
    assert (sets.table != 0).any(1).sum() == 1
    assert TokenSet.of([1], 40) | TokenSet.of([33], 40) == TokenSet.of([33, 1], 40)
