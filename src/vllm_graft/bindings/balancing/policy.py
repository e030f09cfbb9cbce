"""The policy that vLLM's EPLB calls: the planned balancer, guarded, with one answer for all ranks.

Every rank of vLLM computes a placement of its own and relies on all being equal. A balancer may fail or overrun on one
rank alone, and its answer need not be the same twice. So the first rank asks it, and the others get the answer, or the
news that the balancer was put aside, by the same collective on the same group that vLLM's rearranging uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from vllm_graft.bindings.instantiate import guard_method, instantiate
from vllm_graft.contracts import ExpertBalancer, ExpertLoad
from vllm_graft.ledger import Ledger, current
from vllm_graft.plan import Plan, PlanItem, inherited_plan, inherited_run

if TYPE_CHECKING:
    from vllm_graft.contracts.balancing import Placement

_ASIDE: Final = "the first rank has put it aside; vLLM's own policy answers on all ranks"


def planned_policy(stock: Any) -> Any:
    """Return the policy for an ``EplbState`` that has picked this one; the same one if nothing is planned."""
    if isinstance(stock, BalancerPolicy):
        return stock
    plan, run = inherited_plan(), inherited_run()
    left_out = run.left_out if run is not None else {}
    for item in plan.of("expert-balancer") if plan is not None else ():
        if plan is not None and item.name not in left_out:
            return BalancerPolicy(item, plan, stock, current())
    return stock


class BalancerPolicy:
    """Stands where vLLM keeps the class of its policy, and is called as that is.

    stock: vLLM's own policy, which answers once the balancer is put aside
    """

    def __init__(self, item: PlanItem, plan: Plan, stock: Any, ledger: Ledger) -> None:
        self.stock = stock
        self._item, self._ledger = item, ledger
        self._aside = False
        balancer = instantiate(item, ExpertBalancer, plan, ledger)
        # Without one, in a lenient plan, a rank still follows what the first rank says.
        self._place = guard_method(item, "place", _checked(balancer), ledger) if balancer is not None else None
        self._moved = self._rearranged = 0

    def rebalance_experts(
        self,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the expert of each slot, as ``AbstractEplbPolicy.rebalance_experts`` does."""
        sizes = (num_replicas, num_groups, num_nodes, num_ranks)
        before = old_global_expert_indices

        def stock() -> torch.Tensor:
            return self.stock.rebalance_experts(weight, *sizes, before)

        if self._aside or before is None or before.shape[1] != num_replicas:
            return stock()
        if not bool(weight.any()):
            # As in vLLM's profile run, on every rank: there is nothing to balance by.
            return before.cpu().clone()
        load, present = weight.double().cpu().numpy().copy(), before.long().cpu().numpy().copy()
        load.setflags(write=False)
        present.setflags(write=False)
        experts = ExpertLoad(
            load, present, num_groups, num_nodes, num_ranks, lambda: stock().cpu().long().numpy().copy()
        )
        placement = self._agreed(experts)
        if placement is None:
            return stock()
        return torch.from_numpy(placement).to(before.dtype)

    def _agreed(self, experts: ExpertLoad) -> Placement | None:
        """Return the first rank's placement, on every rank; None once it has put the balancer aside."""
        from vllm.distributed.parallel_state import get_eplb_group

        group = get_eplb_group()
        first = group.rank_in_group == 0
        placement = self._place(experts) if first and self._place is not None else None
        if group.world_size > 1:
            # A sum in which all but the first rank have zeros; its first number says if there is an answer.
            message = torch.zeros(1 + experts.placement.size, dtype=torch.int64)
            if placement is not None:
                message[0] = 1
                message[1:] = torch.from_numpy(placement.reshape(-1))
            torch.distributed.all_reduce(message, group=group.cpu_group)
            answered = bool(message[0])
            placement = message[1:].numpy().reshape(experts.placement.shape).copy() if answered else None
        if placement is None:
            self._aside = True
            if not first and self._place is not None:
                self._place.put_aside(_ASIDE)
            return None
        if first:
            self._report(experts, placement)
        return placement

    def _report(self, experts: ExpertLoad, placement: Placement) -> None:
        """Set the figures; on one rank alone, as ``/metrics`` adds up those of all."""
        self._rearranged += 1
        self._moved += int(experts.moves(placement).sum())
        figures = {
            "rearrangements": self._rearranged,
            "experts moved": self._moved,
            "balance before, per mille": round(1000 * experts.balance(experts.placement)),
            "balance after, per mille": round(1000 * experts.balance(placement)),
        }
        for name, value in figures.items():
            self._ledger.figure(self._item.name, name).set(value)


def _checked(balancer: ExpertBalancer) -> Any:
    def place(experts: ExpertLoad) -> Placement:
        return experts.check(np.asarray(balancer.place(experts)))

    return place
