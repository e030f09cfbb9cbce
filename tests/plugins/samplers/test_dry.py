"""DRY against a reference that looks: on the host and on the device, alone and in a batch, twice, and in any slot."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_steps import Lists, Tensors, lengths_of, made, params_of, rows_of

from vllm_graft.contracts.request_keys import read_keys
from vllm_graft.errors import ConfigError
from vllm_graft.plugins.samplers.dry import GREATEST, Dry

VOCABULARY = 12
WINDOW = 48
# Token 0 reads "a", token 1 "b", ...
BREAKERS = st.lists(st.sampled_from(["a", "b", "k"]), max_size=2)

requests = st.fixed_dictionaries(
    {},
    optional={
        "dry_base": st.sampled_from([1.0, 1.75, 4.0, 1e20]),
        "dry_allowed_length": st.integers(1, 4),
        "dry_sequence_breakers": BREAKERS,
        "dry_penalty_last_n": st.sampled_from([-1, 0, 1, 5, 20, 500]),
    },
)
texts = st.one_of(
    st.lists(st.integers(0, 3), max_size=70),
    st.lists(st.sampled_from([-1, 0, 1, 2, 11, 12, 400]), max_size=30),
    st.builds(lambda part: (part * 60)[:100], st.lists(st.integers(0, 5), max_size=6)),
)


def reference(logits, text, multiplier, request):
    """What DRY says, token after token."""
    get = params_of(Dry, **request).values
    window = get["dry_penalty_last_n"] if get["dry_penalty_last_n"] > 0 else WINDOW
    broken = {ord(text) - 97 for text in get["dry_sequence_breakers"] if text.isalpha()}
    greatest = {}
    for token, length in lengths_of(text, min(window, WINDOW), broken):
        beyond = length - get["dry_allowed_length"]
        if beyond >= 0 and 0 <= token < VOCABULARY:
            # Logarithms, because the greatest powers are beyond any float.
            magnitude = math.log(multiplier) + beyond * math.log(get["dry_base"])
            greatest[token] = max(math.exp(min(magnitude, math.log(GREATEST))), greatest.get(token, 0.0))
    return torch.tensor([value - greatest.get(token, 0.0) for token, value in enumerate(logits.tolist())])


def random_logits(rows, seed=0):
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, 3] = -math.inf
    return logits


@settings(max_examples=50, deadline=None)
@given(texts, requests, st.sampled_from([0.8, 3.0, 1e30]))
def test_one_request_at_every_prefix(text, request, multiplier):
    """Host, device and reference agree, and doing a step twice does it once."""
    dry = made(Dry, VOCABULARY, options={"window": WINDOW})
    assert dry.open(2, params_of(Dry, dry_multiplier=multiplier, **request))
    for end in range(1, len(text) + 1, 7):
        before = random_logits(1)
        expected = reference(before[0], text[:end], multiplier, request)
        for history in (Lists, Tensors, Lists, Tensors):
            logits = before.clone()
            dry.step(logits, rows_of({0: 2}, history({2: text[:end]})))
            torch.testing.assert_close(logits[0], expected, rtol=2e-5, atol=1e-5)
            assert logits[0, 3] == -math.inf
            assert not logits.isnan().any()


@pytest.mark.parametrize("history", [Lists, Tensors])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(texts, requests), min_size=1, max_size=4), st.permutations(range(6)))
def test_a_batch_is_its_rows(history, requests, order):
    """Rows and slots in any order; the rows of others and of nobody stay as they are."""
    dry = made(Dry, VOCABULARY, slots=6, options={"window": WINDOW})
    slots = order[: len(requests)]
    for slot, (_, request) in zip(slots, requests, strict=True):
        dry.open(slot, params_of(Dry, dry_multiplier=1.0, **request))
    before = random_logits(8)
    places = {7 - 2 * number if number < 4 else number: slot for number, slot in enumerate(slots)}
    text_of = {slot: text for slot, (text, _) in zip(slots, requests, strict=True)}
    expected = before.clone()
    for (row, slot), (_, request) in zip(places.items(), requests, strict=True):
        expected[row] = reference(before[row], text_of[slot], 1.0, request)
    logits = before.clone()
    nobody = {} if history is Lists else {0: 6}
    dry.step(logits, rows_of({**places, **nobody}, history({**text_of, 6: [1, 1, 1, 1]})))
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("history", [Lists, Tensors])
def test_a_slot_that_is_opened_again_forgets(history):
    """Nothing of the request before is left: not its text, not its keys, not its breakers."""
    dry = made(Dry, VOCABULARY, options={"window": WINDOW})
    dry.open(0, params_of(Dry, dry_multiplier=9.0, dry_allowed_length=1, dry_sequence_breakers=["b"]))
    dry.step(random_logits(1), rows_of({0: 0}, history({0: [1, 2, 1, 2, 1]})))
    dry.open(0, params_of(Dry, dry_multiplier=1.0, dry_sequence_breakers=[]))
    text = [5, 1, 6, 5, 1]
    before = random_logits(1)
    logits = before.clone()
    dry.step(logits, rows_of({0: 0}, history({0: text})))
    changed = (logits != before).nonzero().tolist()
    assert changed == [[0, 6]]
    assert logits[0, 6] == before[0, 6] - 1.0


def test_a_slot_whose_request_does_not_ask_is_nobodys():
    """Its row comes out unchanged, whoever had the slot before."""
    dry = made(Dry, VOCABULARY, options={"window": WINDOW})
    assert dry.open(0, params_of(Dry, dry_multiplier=9.0, dry_allowed_length=1))
    assert not dry.open(0, params_of(Dry))
    assert not dry.open(1, params_of(Dry, dry_multiplier=1.0, dry_allowed_length=1000))
    before = random_logits(2)
    logits = before.clone()
    dry.step(logits, rows_of({0: 0, 1: 1}, Tensors({0: [1] * 200, 1: [1] * 200})))
    assert torch.equal(logits, before)


def test_rows_that_lie_apart_in_memory():
    """Logits that are a part of a wider tensor, as with a padded vocabulary."""
    dry = made(Dry, VOCABULARY, options={"window": WINDOW})
    dry.open(0, params_of(Dry, dry_multiplier=1.0, dry_allowed_length=1))
    for history in (Lists, Tensors):
        wide = torch.zeros(3, VOCABULARY + 5)
        dry.step(wide[:, :VOCABULARY], rows_of({1: 0}, history({0: [4, 5, 4]})))
        assert wide.nonzero().tolist() == [[1, 5]]


def test_the_penalty_is_finite_whatever_is_asked():
    """Values beyond float32 too."""
    for history in (Lists, Tensors):
        dry = made(Dry, VOCABULARY, options={"window": WINDOW})
        dry.open(0, params_of(Dry, dry_multiplier=1e300, dry_base=1e300, dry_allowed_length=1))
        logits = torch.zeros(1, VOCABULARY)
        dry.step(logits, rows_of({0: 0}, history({0: [5] * 40})))
        assert logits[0, 5].item() == pytest.approx(-GREATEST)


def test_keys_as_clients_send_them():
    """Both names of the range, lists as JSON, and what is refused."""
    keys = Dry.request_keys()
    assert read_keys(keys, {"dry_range": 5}) == {"dry_penalty_last_n": 5}
    assert read_keys(keys, {"dry_sequence_breakers": '["\\n"]'}) == {"dry_sequence_breakers": ["\n"]}
    for bad in ({"dry_multiplier": -1}, {"dry_base": 0.5}, {"dry_allowed_length": 0}, {"dry_range": -2}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            read_keys(keys, bad)
    with pytest.raises(ValueError, match="64"):
        read_keys(keys, {"dry_sequence_breakers": ["a"] * 65})
    with pytest.raises(ValueError, match="64 characters"):
        Dry.check({"dry_sequence_breakers": ["a" * 65]})
    assert Dry.is_requested({"dry_multiplier": 0.8})
    assert not Dry.is_requested({"dry_multiplier": 0.0, "dry_base": 2.0})


def test_a_window_that_holds_no_text_is_refused():
    """With the item and the option."""
    with pytest.raises(ConfigError, match="window"):
        Dry({"window": 1})
    assert Dry().window == 4096
