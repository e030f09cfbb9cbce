"""XTC against a reference that sorts: ties, masked tokens, rows of others, and what a draw decides."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampler_steps import Lists, made, params_of, rows_of

from vllm_graft.plugins.samplers.xtc import Xtc, exclude_top

pytestmark = pytest.mark.usefixtures("both_host_paths")

values = st.one_of(st.integers(-4, 4).map(float), st.just(-math.inf), st.floats(-8, 8, width=32))


def reference(row, threshold):
    """Probabilities in double precision, sorted; of the probable ones only the last stay."""
    finite = [value for value in row if value > -math.inf]
    if not finite:
        return row
    total = math.fsum(math.exp(value) for value in finite)
    shares = [math.exp(value) / total for value in row]
    # What is as probable as the threshold but for rounding may count or not.
    assume(all(abs(share - threshold) > 1e-6 for share in shares if share))
    probable = sorted(value for value, share in zip(row, shares, strict=True) if share and share >= threshold)
    if len(probable) < 2:
        return row
    return [-math.inf if value > probable[0] else value for value in row]


@settings(max_examples=200, deadline=None)
@given(st.lists(values, min_size=2, max_size=9), st.sampled_from([0.0, 0.01, 0.1, 0.2, 0.45, 0.9]))
def test_a_row_that_is_drawn(row, threshold):
    """Both ways of torch; a second step over the first one's result is not asked for, the same step again is."""
    xtc = made(Xtc, len(row))
    xtc.open(1, params_of(Xtc, xtc_probability=1.0, xtc_threshold=threshold))
    expected = torch.tensor(reference(row, threshold))
    for _ in range(2):
        logits = torch.tensor([row])
        xtc.step(logits, rows_of({0: 1}, Lists({})))
        assert torch.equal(logits[0], expected)
    logits = torch.tensor([row])
    exclude_top(logits, torch.tensor([0]), torch.tensor([True]), torch.tensor([threshold]).log())
    assert torch.equal(logits[0], expected)


@pytest.mark.parametrize("width", [511, 512, 513, 2000])
def test_wide_rows(width):
    """Rows of several blocks, with probable tokens anywhere and the last in an incomplete block."""
    xtc = made(Xtc, width)
    xtc.open(0, params_of(Xtc, xtc_probability=1.0))
    logits = torch.full((1, width), -3.0)
    logits[0, [0, width // 2, width - 2, width - 1]] = torch.tensor([12.0, 11.5, 12.2, 11.0])
    xtc.step(logits, rows_of({0: 0}, Lists({})))
    assert torch.isneginf(logits).nonzero()[:, 1].tolist() == [0, width // 2, width - 2]


def test_only_rows_that_are_drawn_change():
    """The draw of each row is below its own probability or not; nobody's rows are never drawn."""
    xtc = made(Xtc, 5, slots=3)
    for slot, chance in enumerate([0.2, 0.5, 1.0]):
        xtc.open(slot, params_of(Xtc, xtc_probability=chance))
    before = torch.tensor([2.0, 1.5, 1.0, -1.0, -2.0]).repeat(6, 1)
    logits = before.clone()
    rows = rows_of({5: 0, 4: 1, 3: 2, 1: 3}, Lists({}), {0: 0.3, 1: 0.3, 2: 0.99, 3: 0.0})
    xtc.step(logits, rows)
    changed = (logits != before).any(1)
    assert changed.tolist() == [False, False, False, True, True, False]
    assert logits[4].tolist() == [-math.inf, -math.inf, 1.0, -1.0, -2.0]


def test_who_is_taken_in():
    """Not greedy requests, which keep their most probable token, and not those that switch it off."""
    xtc = made(Xtc, 5)
    assert xtc.open(0, params_of(Xtc, xtc_probability=0.5))
    assert not xtc.open(0, params_of(Xtc, xtc_probability=0.5, temperature=0.0))
    assert not xtc.open(1, params_of(Xtc))
    logits = torch.tensor([[2.0, 1.9, 1.8, -1.0, -2.0]])
    xtc.step(logits, rows_of({0: 0}, Lists({})))
    assert not torch.isneginf(logits).any()
    assert not Xtc.is_requested({"xtc_probability": 0.0, "xtc_threshold": 0.2})
