"""``fewest-moves``: valid, as even as vLLM's own policy, and with as few experts moved as brute force finds."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.eplb.policy import DefaultEplbPolicy

from vllm_graft.contracts import ExpertLoad, OptionError
from vllm_graft.plugins.balancers.fewest_moves import FewestMoves, best_names
from vllm_graft.plugins.balancers.stock import StockBalancer

PATIENT = 60.0


def expert_load(load, placement, groups=1, nodes=1, ranks=2) -> ExpertLoad:
    """Return what a balancer is given, with the policy of the installed vLLM."""
    load, placement = np.asarray(load, dtype=np.float64), np.asarray(placement)
    sizes = (placement.shape[1], groups, nodes, ranks)

    def stock():
        given = torch.from_numpy(load), *sizes, torch.from_numpy(placement)
        return DefaultEplbPolicy.rebalance_experts(*given).numpy()

    return ExpertLoad(load, placement, groups, nodes, ranks, stock)


@st.composite
def loads(draw: st.DrawFn, layers: int = 3, experts: int = 16, slots: int = 64) -> ExpertLoad:
    """Draw a model with its load and placement; groups and nodes as vLLM allows them."""
    nodes = draw(st.sampled_from([1, 1, 2]))
    ranks = nodes * draw(st.integers(1, 4))
    groups = draw(st.sampled_from([1, 2, 4])) * (1 if nodes == 1 else 2)
    count = groups * draw(st.integers(1, max(1, experts // groups)))
    step = ranks
    few = -(-count // step) * step
    total = draw(st.integers(few // step, max(few // step, slots // step))) * step
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    load = random.exponential(1, (layers, count)) ** draw(st.sampled_from([0, 1, 3])) * draw(st.sampled_from([1, 1e6]))
    load[random.random(load.shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    rows = [random.permutation([*range(count), *random.integers(0, count, total - count)]) for _ in range(layers)]
    return expert_load(load.round(), rows, groups, nodes, ranks)


@settings(max_examples=60, deadline=None)
@given(loads(), st.sampled_from([0.0, 0.02, 0.5]), st.sampled_from([1e-9, PATIENT]))
def test_it_is_valid_and_no_rank_exceeds_its_mark(experts: ExpertLoad, tolerance: float, seconds: float):
    """On any load, with any groups and nodes, and without time to search."""
    found = experts.check(FewestMoves({"tolerance": tolerance, "seconds": seconds}).place(experts))
    stock = experts.stock()
    marks = experts.rank_loads(stock).max(axis=1) * (1 + tolerance)
    assert (experts.rank_loads(found).max(axis=1) <= marks * (1 + 1e-6)).all()


@settings(max_examples=60, deadline=None)
@given(loads())
def test_it_never_moves_more_than_vllms_own_policy(experts: ExpertLoad):
    """Layer by layer."""
    found = FewestMoves({"tolerance": 0.0, "seconds": PATIENT}).place(experts)
    assert (experts.moves(found) <= experts.moves(experts.stock())).all()


@settings(max_examples=40, deadline=None)
@given(loads())
def test_what_is_even_enough_stays(experts: ExpertLoad):
    """A second rearrangement under the same load moves nothing."""
    balancer = FewestMoves({"tolerance": 0.02, "seconds": PATIENT})
    first = balancer.place(experts)
    again = expert_load(experts.load, first, experts.groups, experts.nodes, experts.ranks)
    assert (balancer.place(again) == first).all()


@settings(max_examples=40, deadline=None)
@given(loads())
def test_groups_stay_on_one_node(experts: ExpertLoad):
    """If vLLM deals the groups out to the nodes, so that tokens stay on few."""
    if experts.groups % experts.nodes:
        return
    start = expert_load(experts.load, experts.stock(), experts.groups, experts.nodes, experts.ranks)
    drifted = expert_load(start.load[:, ::-1].copy(), start.placement, experts.groups, experts.nodes, experts.ranks)
    found = FewestMoves({"tolerance": 0.02, "seconds": PATIENT}).place(drifted)
    size = experts.experts // experts.groups
    for row in found.reshape(experts.layers, experts.nodes, -1):
        homes = [set((node // size).tolist()) for node in row]
        assert sum(map(len, homes)) == experts.groups


def fewest(experts: ExpertLoad, mark: float) -> int:
    """Return the fewest moves of any placement in which no rank exceeds the mark, by trying all."""
    rows = itertools.product(range(experts.experts), repeat=experts.slots)
    every = np.array([row for row in rows if len(set(row)) == experts.experts])
    layers = len(every)
    placement = np.repeat(experts.placement, layers, axis=0)
    wide = expert_load(np.repeat(experts.load, layers, axis=0), placement, ranks=experts.ranks)
    fits = wide.rank_loads(every).max(axis=1) <= mark * (1 + 1e-9)
    return int(wide.moves(every)[fits].min())


TINY = ((4, 4, 2), (4, 6, 2), (4, 6, 3), (5, 6, 2), (6, 6, 3), (3, 6, 3))


def test_it_moves_as_few_as_brute_force_finds():
    """Over 360 tiny models: the very fewest in at least 95 of 100, never more than one above."""
    random = np.random.default_rng(7)
    above = []
    for count, slots, ranks in TINY:
        for number in range(30):
            row = random.permutation([*range(count), *random.integers(0, count, slots - count)])
            load = random.integers(0, 100, (1, count)) if number % 2 else random.exponential(10, (1, count)) ** 2
            experts = expert_load(load, row[None], ranks=ranks)
            busiest = experts.rank_loads(experts.stock()).max()
            for tolerance in (0.0, 0.05):
                found = FewestMoves({"tolerance": tolerance, "seconds": PATIENT}).place(experts)
                above.append(int(experts.moves(found)[0]) - fewest(experts, busiest * (1 + tolerance)))
    assert len(above) == 360
    assert min(above) == 0
    assert max(above) <= 1
    assert above.count(0) >= 0.95 * len(above)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.randoms(use_true_random=False))
def test_names_are_the_best_of_all_permutations(count: int, random):
    """The ranks of vLLM's placement are renamed so that most experts stay."""
    common = np.array([[float(random.randint(0, 5)) for _ in range(count)] for _ in range(count)])
    names = best_names(common)
    best = max(
        sum(common[row, name] for row, name in enumerate(order)) for order in itertools.permutations(range(count))
    )
    assert sorted(names) == list(range(count))
    assert common[np.arange(count), names].sum() == best


@pytest.mark.parametrize(
    "options",
    [{"tolerance": -0.1, "seconds": 1.0}, {"tolerance": 1.1, "seconds": 1.0}, {"tolerance": 0.0, "seconds": 0}],
)
def test_options_that_cannot_work_are_refused(options):
    """Before anything starts."""
    with pytest.raises(OptionError):
        FewestMoves.check_options(options)
    FewestMoves.check_options(FewestMoves.options)


def test_the_stock_balancer_answers_what_vllm_would():
    """Through the contract."""
    experts = expert_load([[5, 1, 1, 1]], [[0, 1, 2, 3, 0, 1]])
    assert (StockBalancer().place(experts) == experts.stock()).all()
