"""Top-n-sigma, and the statistics and the mask that all truncations share."""

import math
import statistics as reference

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_steps import Lists, made, params_of, rows_of

from vllm_graft.contracts import kernels
from vllm_graft.contracts.request_keys import read_keys
from vllm_graft.plugins.samplers.top_n_sigma import TopNSigma

pytestmark = pytest.mark.usefixtures("both_host_paths")

values = st.one_of(st.floats(-50, 50, width=32), st.just(-math.inf), st.integers(-3, 3).map(float))
lines = st.integers(1, 12).flatmap(lambda size: st.lists(st.lists(values, min_size=size, max_size=size), min_size=1))


def expected(row):
    """Of the finite entries, in double precision."""
    finite = [value for value in row if value > -math.inf]
    if not finite:
        return [-math.inf, -math.inf, 0.0, 0.0]
    total = math.fsum(math.exp(value - max(finite)) for value in finite)
    return [max(finite), max(finite) + math.log(total), reference.fmean(finite), reference.pstdev(finite)]


def table(stats):
    return torch.stack([stats.max, stats.logsumexp, stats.mean, stats.std], 1)


@settings(max_examples=150, deadline=None)
@given(lines, st.randoms(use_true_random=False))
def test_statistics_of_rows(rows, draw):
    """On the host and by plain torch, for the rows asked for in the order asked; never a NaN."""
    logits = torch.tensor(rows)
    which = draw.sample(range(len(rows)), draw.randint(1, len(rows)))
    wanted = torch.tensor([expected(rows[row]) for row in which])
    for found in (
        kernels.statistics(logits, torch.tensor(which)),
        kernels._statistics_by_torch(logits, torch.tensor(which)),
    ):
        torch.testing.assert_close(table(found), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits, torch.tensor(rows))


def test_statistics_far_from_zero_and_far_apart():
    """A spread that is small beside the mean, and exponentials beyond float32."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.stack([torch.randn(4000, generator=draw) * 0.01 + 900.0, torch.randn(4000, generator=draw) * 40])
    rows[1, 7] = 500.0
    wanted = torch.tensor([expected(row) for row in rows.tolist()])
    for way in (kernels.statistics, kernels._statistics_by_torch):
        torch.testing.assert_close(table(way(rows, torch.arange(2))), wanted, rtol=1e-3, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(lines, st.data())
def test_what_is_below_goes_and_the_greatest_stays(rows, data):
    """The threshold itself stays; other rows are not touched; inf, -inf and no number are thresholds too."""
    which = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True))
    limits = [data.draw(st.one_of(values, st.sampled_from([math.inf, math.nan]))) for _ in which]
    after = [list(row) for row in rows]
    for row, limit in zip(which, limits, strict=True):
        least = min(limit, max(rows[row])) if not math.isnan(limit) else -math.inf
        after[row] = [value if value >= least else -math.inf for value in rows[row]]
    for greatest in (None, torch.tensor([max(rows[row]) for row in which])):
        logits = torch.tensor(rows)
        kernels.mask_below(logits, torch.tensor(which), torch.tensor(limits), greatest)
        assert torch.equal(logits, torch.tensor(after))


def test_top_n_sigma_keeps_what_is_near_the_greatest():
    """By its definition, and a grammar's mask does not change the spread."""
    strategy = made(TopNSigma, 5, slots=3)
    assert strategy.open(1, params_of(TopNSigma, top_n_sigma=1.0))
    logits = torch.tensor([[4.0, 3.0, 1.0, 0.0, -math.inf], [5.0, 5.0, 5.0, 5.0, 5.0], [-math.inf] * 5])
    rows = rows_of({0: 1, 1: 1, 2: 1}, Lists({}))
    limits = strategy.threshold(kernels.statistics(logits, rows.rows), rows)
    assert limits.tolist() == [pytest.approx(4.0 - reference.pstdev([4.0, 3.0, 1.0, 0.0])), 5.0, -math.inf]
    kernels.mask_below(logits, rows.rows, limits)
    assert (logits > -math.inf).tolist() == [[True, True] + [False] * 3, [True] * 5, [False] * 5]


def test_top_n_sigma_for_nobody_and_for_those_who_switch_it_off():
    """No limit, and never a NaN; -1 and 0 are off, greedy requests are let alone."""
    strategy = made(TopNSigma, 4, slots=3)
    assert strategy.open(0, params_of(TopNSigma, top_n_sigma=1e300))
    assert not strategy.open(1, params_of(TopNSigma, top_n_sigma=-1.0))
    assert not strategy.open(2, params_of(TopNSigma, top_n_sigma=1.0, temperature=0.0))
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.0]]).repeat(4, 1)
    rows = rows_of({0: 0, 1: 1, 2: 2, 3: 3}, Lists({}))
    limits = strategy.threshold(kernels.statistics(logits, rows.rows), rows)
    assert limits.tolist() == [2.0, -math.inf, -math.inf, -math.inf]
    assert not TopNSigma.is_requested({"top_n_sigma": -1.0})
    assert not TopNSigma.is_requested({"top_n_sigma": 0.0})
    assert TopNSigma.is_requested(read_keys(TopNSigma.request_keys(), {"nsigma": 1.5}))
    assert TopNSigma.is_requested(read_keys(TopNSigma.request_keys(), {"top_nsigma": 1}))
