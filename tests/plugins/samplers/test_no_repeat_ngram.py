"""No sequence twice: against a reference that looks, as vLLM's own processor for OCR models does."""

import ast
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_steps import Lists, Tensors, made, params_of, rows_of

from vllm_graft.contracts.request_keys import read_keys
from vllm_graft.plugins.samplers.no_repeat_ngram import NoRepeatNgram

VOCABULARY = 12
WINDOW = 48

requests = st.fixed_dictionaries(
    {"no_repeat_ngram_size": st.integers(1, 5)},
    optional={
        "no_repeat_ngram_window": st.sampled_from([0, 1, 3, 10, 500]),
        "no_repeat_ngram_whitelist": st.lists(st.sampled_from([-5, 0, 1, 2, 9, 4000]), max_size=3),
    },
)
texts = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.sampled_from([0, 1, 2, 11, 12, 400]), max_size=30),
    st.builds(lambda part: (part * 60)[:100], st.lists(st.integers(0, 5), max_size=6)),
)


def banned(text, request):
    """Every sequence within the window, one by one."""
    size = request["no_repeat_ngram_size"]
    window = min(request.get("no_repeat_ngram_window", 0) or WINDOW, WINDOW)
    prefix = text[len(text) - (size - 1) :]
    found = set()
    for start in range(max(0, len(text) - window), len(text) - size + 1):
        if text[start : start + size - 1] == prefix:
            found.add(text[start + size - 1])
    return {token for token in found if token not in request.get("no_repeat_ngram_whitelist", [])}


def reference(logits, text, request):
    """The row with its bans, or as it was where none would stay."""
    after = logits.clone()
    for token in banned(text, request):
        if 0 <= token < VOCABULARY:
            after[token] = -math.inf
    return after if (after > -math.inf).any() else logits


@st.composite
def rows_of_logits(draw):
    """Some possible, some masked by a grammar, perhaps none possible."""
    possible = draw(st.sets(st.integers(0, VOCABULARY - 1)))
    return torch.tensor([float(token) if token in possible else -math.inf for token in range(VOCABULARY)])


@settings(max_examples=50, deadline=None)
@given(texts, requests, rows_of_logits())
def test_one_request_at_every_prefix(text, request, row):
    """Host, device and reference agree, and doing a step twice does it once."""
    strategy = made(NoRepeatNgram, VOCABULARY, options={"window": WINDOW})
    assert strategy.open(2, params_of(NoRepeatNgram, **request))
    for end in range(1, len(text) + 1, 7):
        expected = reference(row, text[:end], request)
        for history in (Lists, Tensors, Lists, Tensors):
            logits = row.clone()[None]
            strategy.step(logits, rows_of({0: 2}, history({2: text[:end]})))
            assert torch.equal(logits[0], expected)


@pytest.mark.parametrize("history", [Lists, Tensors])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(texts, requests, rows_of_logits()), min_size=1, max_size=4), st.permutations(range(6)))
def test_a_batch_is_its_rows(history, requests, order):
    """Rows and slots in any order; the rows of others and of nobody stay as they are."""
    strategy = made(NoRepeatNgram, VOCABULARY, slots=6, options={"window": WINDOW})
    slots = order[: len(requests)]
    before = torch.randn(8, VOCABULARY)
    places = {7 - number: slot for number, slot in enumerate(slots)}
    expected = before.clone()
    for (row, slot), (text, request, line) in zip(places.items(), requests, strict=True):
        strategy.open(slot, params_of(NoRepeatNgram, **request))
        before[row] = line
        expected[row] = reference(line, text, request)
    text_of = {slot: text for slot, (text, _, _) in zip(slots, requests, strict=True)}
    logits = before.clone()
    nobody = {} if history is Lists else {0: 6}
    strategy.step(logits, rows_of({**places, **nobody}, history({**text_of, 6: [1, 1, 1, 1]})))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("history", [Lists, Tensors])
def test_a_slot_that_is_opened_again_forgets(history):
    """Nothing of the request before is left; one that does not ask is left alone."""
    strategy = made(NoRepeatNgram, VOCABULARY)
    strategy.open(0, params_of(NoRepeatNgram, no_repeat_ngram_size=1, no_repeat_ngram_whitelist=[6]))
    strategy.step(torch.zeros(1, VOCABULARY), rows_of({0: 0}, history({0: [1, 2, 3, 6]})))
    strategy.open(0, params_of(NoRepeatNgram, no_repeat_ngram_size=2))
    logits = torch.zeros(1, VOCABULARY)
    strategy.step(logits, rows_of({0: 0}, history({0: [5, 6, 5]})))
    assert logits.nonzero().tolist() == [[0, 6]]
    assert not strategy.open(0, params_of(NoRepeatNgram))
    if history is Tensors:
        logits = torch.zeros(1, VOCABULARY)
        strategy.step(logits, rows_of({0: 0}, history({0: [5, 6, 5]})))
        assert not logits.any()


def vllms_own():
    """The class out of its module, which needs packages that not every vLLM comes with."""
    places = getattr(find_spec("vllm"), "submodule_search_locations", None) or pytest.skip("no vLLM here")
    source = Path(places[0], "model_executor/models/deepseek_ocr.py").read_text()
    (found,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "NoRepeatNGramLogitsProcessor")
    names = {"torch": torch}
    exec(compile(ast.Module([found], []), "deepseek_ocr", "exec"), names)
    return names[found.name]


def test_vllms_own_processor_says_the_same():
    """The one of DeepSeek-OCR, for every size but 1, where it forbids nothing."""
    theirs = vllms_own()
    text = [int(digit) for digit in "3141592653589793238462643383279502884197169399375105820974944592307816406286"]
    for size, window in [(2, 10), (2, 48), (3, 40), (3, 3), (4, 48)]:
        for end in range(1, len(text)):
            request = {"no_repeat_ngram_size": size, "no_repeat_ngram_window": window}
            row = theirs(size, window)(text[:end], torch.zeros(VOCABULARY))
            assert torch.equal(row, reference(torch.zeros(VOCABULARY), text[:end], request))


def test_keys_as_clients_of_ocr_models_send_them():
    """The names of vLLM's own processor are aliases."""
    sent = {"ngram_size": 30, "window_size": 90, "whitelist_token_ids": [128821, 128822]}
    assert read_keys(NoRepeatNgram.request_keys(), sent) == {
        "no_repeat_ngram_size": 30,
        "no_repeat_ngram_window": 90,
        "no_repeat_ngram_whitelist": [128821, 128822],
    }
    assert not NoRepeatNgram.is_requested({"no_repeat_ngram_size": 0, "no_repeat_ngram_window": 90})
