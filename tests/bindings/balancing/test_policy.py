"""The policy that stands for vLLM's: what a balancer is given, what is accepted, and when vLLM's own answers."""

import time
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from vllm.distributed.eplb.policy import DefaultEplbPolicy

from vllm_graft.bindings.balancing import policy as policies
from vllm_graft.bindings.balancing.engine_arguments import unusable_balancers
from vllm_graft.bindings.balancing.policy import BalancerPolicy, planned_policy
from vllm_graft.contracts import ExpertBalancer
from vllm_graft.errors import ConfigError, StartError
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.guard import LONG_CALLS_IN_A_ROW
from vllm_graft.ledger.record import Record
from vllm_graft.plan import Plan, PlanItem, Run
from vllm_graft.server.metrics import item_families

SIZES = (6, 1, 1, 2)  # slots, groups, nodes, ranks
LOAD = torch.tensor([[10, 20, 30, 40], [0, 0, 0, 9]], dtype=torch.int32)
BEFORE = torch.tensor([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 3]])


class Asked(ExpertBalancer):
    """Keeps what it was given, and answers what it is told."""

    given: ClassVar[list] = []
    answer: object = None

    def place(self, experts):
        type(self).given.append(experts)
        return experts.stock() if self.answer is None else self.answer


class Unmade(ExpertBalancer):
    """Cannot be made."""

    def __init__(self, options=None):
        raise OSError("no such file")

    def place(self, experts):
        raise NotImplementedError


def planned(kind: type, on_failure: str = "stop") -> Plan:
    target = f"{__name__}:{kind.__name__}"
    return Plan((PlanItem("expert-balancer", "asked", target, "tests", ("worker",), {}, "here"),), on_failure)


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger()
    made.record = Record.of_this_process("run", "hash", "m", ["worker"], "0.32.0", "V1")
    return made


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, and the classes of this file."""
    group = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_eplb_group", lambda: group)
    kinds = {kind.__name__: kind for kind in (Asked, Unmade)}
    found = "vllm_graft.bindings.instantiate.load"
    monkeypatch.setattr(found, lambda target, name, package: kinds[target.rpartition(":")[2]])
    Asked.given, Asked.answer = [], None


@pytest.fixture
def policy(ledger: Ledger) -> BalancerPolicy:
    plan = planned(Asked)
    return BalancerPolicy(next(iter(plan)), plan, DefaultEplbPolicy, ledger)


def stock() -> torch.Tensor:
    return DefaultEplbPolicy.rebalance_experts(LOAD, *SIZES, BEFORE)


def test_a_balancer_is_given_the_load_and_the_present_placement(policy: BalancerPolicy):
    """As arrays of its own, whatever vLLM's tensors are."""
    policy.rebalance_experts(LOAD, *SIZES, BEFORE.int())
    (given,) = Asked.given
    assert given.load.tolist() == LOAD.tolist()
    assert given.placement.tolist() == BEFORE.tolist()
    assert (given.layers, given.experts, given.slots, given.slots_per_rank) == (2, 4, 6, 3)
    assert (given.groups, given.nodes, given.ranks) == (1, 1, 2)
    assert given.stock().tolist() == stock().tolist()
    for array in (given.load, given.placement):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1


def test_vllm_gets_a_map_of_the_type_that_it_gave(policy: BalancerPolicy):
    """It copies the map into a tensor of its own and asserts where it is."""
    for dtype in (torch.int32, torch.int64):
        found = policy.rebalance_experts(LOAD, *SIZES, BEFORE.to(dtype))
        assert (found.dtype, found.device.type) == (dtype, "cpu")
        assert found.tolist() == stock().tolist()


def test_without_any_load_experts_stay(policy: BalancerPolicy):
    """As in vLLM's profile run: there is nothing to balance by, and nobody is asked."""
    found = policy.rebalance_experts(torch.zeros_like(LOAD), *SIZES, BEFORE)
    assert found.tolist() == BEFORE.tolist()
    assert Asked.given == []


@pytest.mark.parametrize("answer", [BEFORE, BEFORE.tolist(), BEFORE.numpy(), BEFORE.numpy().astype("int32")])
def test_tensors_lists_and_arrays_are_accepted(policy: BalancerPolicy, answer: object):
    """An author need not know which vLLM wants."""
    Asked.answer = answer
    assert policy.rebalance_experts(LOAD, *SIZES, BEFORE).tolist() == BEFORE.tolist()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([[0, 1, 2, 3, 0, 1]], "shape"),
        (np.full((2, 6), 0.5), "whole numbers"),
        ([[0, 1, 2, 3, 0, 4], [3, 2, 1, 0, 3, 3]], "slot 5 of layer 0 holds expert 4"),
        ([[0, 1, 2, 3, 0, -1], [3, 2, 1, 0, 3, 3]], "slot 5 of layer 0 holds expert -1"),
        ([[0, 1, 2, 3, 0, 1], [3, 2, 1, 1, 3, 3]], "expert 0 of layer 1 is in no slot"),
        ([[0], [1, 2]], "inhomogeneous"),
        ("nothing", "shape"),
    ],
)
def test_a_wrong_answer_puts_it_aside_for_good(policy: BalancerPolicy, ledger: Ledger, answer: object, reason: str):
    """vLLM's own policy answers instead, in the same call."""
    Asked.answer = answer
    for _ in range(2):
        assert policy.rebalance_experts(LOAD, *SIZES, BEFORE).tolist() == stock().tolist()
    assert len(Asked.given) == 1
    item = ledger.record.item("asked")
    assert item.state == "quarantined"
    assert reason in item.reason


def test_calls_that_overrun_put_it_aside(policy: BalancerPolicy, ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    """Each that was in time counts, and the one that was too many is still used."""
    clock = [0]

    def slow(experts: object) -> np.ndarray:
        clock[0] += 10_000_000_000
        return BEFORE.numpy()

    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(policy._place, "_call", slow)
    for _ in range(LONG_CALLS_IN_A_ROW):
        assert policy.rebalance_experts(LOAD, *SIZES, BEFORE).tolist() == BEFORE.tolist()
    assert "budget" in ledger.record.item("asked").reason
    assert policy.rebalance_experts(LOAD, *SIZES, BEFORE).tolist() == stock().tolist()


def test_figures_say_what_it_did(policy: BalancerPolicy, ledger: Ledger):
    """They add up over rearrangements; the balance is that of the last one."""
    policy.rebalance_experts(LOAD, *SIZES, BEFORE)
    policy.rebalance_experts(LOAD, *SIZES, BEFORE)
    figures = ledger.view().figures["asked"]
    given = Asked.given[0]
    assert figures == {
        "rearrangements": 2,
        "experts moved": 2 * int(given.moves(stock().numpy()).sum()),
        "balance before, per mille": round(1000 * given.balance(given.placement)),
        "balance after, per mille": round(1000 * given.balance(stock().numpy())),
    }
    metrics = "".join(family.text(openmetrics=False) for family in item_families([ledger.view()], planned(Asked)))
    own = 'item="asked",point="expert-balancer",role="worker"'
    assert f'vllm_graft_item_figure{{figure="rearrangements",{own}}} 2' in metrics
    assert f'vllm_graft_item_calls_total{{hook="place",{own}}} 2' in metrics


def test_another_number_of_slots_is_vllms_own_business(policy: BalancerPolicy):
    """The ranks change then, with elastic expert parallelism, which is refused with a balancer."""
    asked = []
    policy.stock = SimpleNamespace(rebalance_experts=lambda *given: asked.append(given))
    policy.rebalance_experts(LOAD, 8, 1, 1, 2, BEFORE)
    policy.rebalance_experts(LOAD, *SIZES)
    assert [given[1] for given in asked] == [8, 6]
    assert Asked.given == []


def test_one_that_cannot_be_made_stops_the_start(ledger: Ledger):
    """With a lenient plan vLLM's own policy answers."""
    strict, lenient = planned(Unmade), planned(Unmade, "warn")
    with pytest.raises(StartError, match="no such file"):
        BalancerPolicy(next(iter(strict)), strict, DefaultEplbPolicy, ledger)
    made = BalancerPolicy(next(iter(lenient)), lenient, DefaultEplbPolicy, ledger)
    assert made.rebalance_experts(LOAD, *SIZES, BEFORE).tolist() == stock().tolist()
    assert ledger.record.item("asked").state == "refused"


def test_a_second_model_has_the_same_policy(policy: BalancerPolicy, monkeypatch: pytest.MonkeyPatch):
    """A draft model's experts are in the same state of vLLM's; nothing is wrapped twice."""
    assert planned_policy(policy) is policy
    monkeypatch.setattr(policies, "inherited_plan", lambda: planned(Asked))
    monkeypatch.setattr(policies, "inherited_run", lambda: Run("1", 1, left_out={"asked": "no"}))
    assert planned_policy(DefaultEplbPolicy) is DefaultEplbPolicy
    monkeypatch.setattr(policies, "inherited_plan", lambda: None)
    assert planned_policy(DefaultEplbPolicy) is DefaultEplbPolicy


@pytest.mark.parametrize(
    ("eplb", "elastic", "reason"), [(False, False, "--enable-eplb"), (True, True, "elastic"), (True, False, "")]
)
def test_an_engine_that_would_never_ask_is_refused(eplb: bool, elastic: bool, reason: str):
    """A lenient plan leaves the balancer out, which is a finding."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=eplb, enable_elastic_ep=elastic))
    if not reason:
        assert unusable_balancers(config, planned(Asked)) == {}
        return
    with pytest.raises(ConfigError, match=reason):
        unusable_balancers(config, planned(Asked))
    assert reason in unusable_balancers(config, planned(Asked, "warn"))["asked"]
    assert unusable_balancers(config, Plan(())) == {}
