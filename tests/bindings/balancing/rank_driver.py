"""One of two ranks that share experts, on a CPU: vLLM's own EplbState, groups and transfers, with gloo.

vLLM refuses EPLB on CPUs, so the state is made by hand as its model runner makes it, and the events with which it times
a rearrangement on an accelerator are replaced by ones that do nothing. The model is a table of weights that say which
expert they belong to.
"""

import json
import os
import sys
from types import SimpleNamespace

import torch

from vllm_graft.boot.process import process
from vllm_graft.contracts import ExpertBalancer
from vllm_graft.ledger import current
from vllm_graft.plan import Plan, PlanItem, Run, export_plan
from vllm_graft.plan.catalogue import SHIPPED

LAYERS, EXPERTS, SLOTS, RANKS, STEPS = 3, 8, 12, 2, 4


class Random(ExpertBalancer):
    """Answers differently on every rank."""

    def place(self, experts):
        torch.seed()
        more = SLOTS - EXPERTS
        rows = [torch.cat([torch.randperm(EXPERTS), torch.randint(EXPERTS, (more,))]) for _ in range(LAYERS)]
        return torch.stack(rows)


class Raises(ExpertBalancer):
    """Fails at the second rearrangement."""

    def __init__(self, options=None):
        super().__init__(options)
        self.calls = 0

    def place(self, experts):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("no idea")
        return experts.placement.tolist()


class Loses(ExpertBalancer):
    """Has no slot for expert 7."""

    def place(self, experts):
        return experts.placement % 7


class Writes(ExpertBalancer):
    """Writes into what it is given."""

    def place(self, experts):
        experts.placement[:] = 0
        return experts.placement


class FailsOnOneRank(ExpertBalancer):
    """Cannot be made on the second rank, such as for want of a file there."""

    def __init__(self, options=None):
        super().__init__(options)
        if os.environ["RANK"] == "1":
            raise OSError("no such file")

    def place(self, experts):
        return experts.stock()


class Event:
    """An event of an accelerator that is not there."""

    def __init__(self, *args, **kwargs):
        """Take what vLLM passes."""

    def record(self, *args):
        """Do nothing."""

    def synchronize(self):
        """Do nothing."""

    def elapsed_time(self, other):
        return 0.0


def groups(rank: int) -> None:
    """Make the groups that a worker with expert parallelism has."""
    from vllm.distributed import parallel_state

    torch.distributed.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=RANKS)
    made = {}
    for name in ("ep", "eplb"):
        made[name] = parallel_state.GroupCoordinator(
            group_ranks=[list(range(RANKS))],
            local_rank=rank,
            torch_distributed_backend="gloo",
            use_device_communicator=False,
            group_name=name,
        )
    parallel_state._EP, parallel_state._EPLB, parallel_state._NODE_COUNT = made["ep"], made["eplb"], 1


def new_model(rank: int) -> SimpleNamespace:
    """Return the part of a mixture of experts that EPLB sees; each weight says its layer and expert."""
    initial = [*range(EXPERTS), *range(SLOTS - EXPERTS)]
    own = initial[rank * SLOTS // RANKS : (rank + 1) * SLOTS // RANKS]
    weights = [
        [torch.tensor([[100.0 * layer + expert] * 3 for expert in own]) + each for each in (0.0, 0.5)]
        for layer in range(LAYERS)
    ]
    return SimpleNamespace(
        num_routed_experts=EXPERTS, num_logical_experts=EXPERTS, num_redundant_experts=SLOTS - EXPERTS,
        num_physical_experts=SLOTS, num_local_physical_experts=SLOTS // RANKS, num_moe_layers=LAYERS,
        num_expert_groups=1, expert_weights=weights, moe_layers=[], set_eplb_state=lambda *args: None,
    )  # fmt: skip


def weights_fit(model: SimpleNamespace, mapping: torch.Tensor, rank: int) -> bool:
    """Tell whether the weights in this rank's slots are those of the experts that vLLM's map names."""
    half = SLOTS // RANKS
    return all(
        torch.equal(
            weight, (100.0 * layer + mapping[layer, rank * half : (rank + 1) * half, None] + each).expand(-1, 3)
        )
        for layer in range(LAYERS)
        for each, weight in zip((0.0, 0.5), model.expert_weights[layer], strict=True)
    )


def new_state():
    """Return vLLM's state of expert balancing, for a model that is given to it later."""
    from vllm.distributed.eplb.eplb_state import EplbState

    eplb = SimpleNamespace(
        use_async=False, window_size=2, step_interval=10, policy="default", communicator="torch_nccl",
        log_balancedness_interval=1,
    )  # fmt: skip
    parallel = SimpleNamespace(eplb_config=eplb, enable_elastic_ep=False, num_ubatches=0, data_parallel_size=1)
    return EplbState(parallel, torch.device("cpu"))


def play(rank: int, name: str) -> dict[str, object]:
    """Rearrange a few times under loads that drift, and return what this rank saw."""
    state, model = new_state(), new_model(rank)
    state.add_model(model, SimpleNamespace(compute_hash=lambda: "m", model="m"))
    made = next(iter(state.model_states.values()))
    state.rearrange(is_profile=True)
    maps, fits = [], []
    for step in range(STEPS):
        drift = torch.Generator().manual_seed(step)
        load = torch.zeros_like(made.expert_load_window)
        load[0, :] = (torch.rand(LAYERS, SLOTS, generator=drift) ** 4 * 1000).int() + step
        made.expert_load_window.copy_(load)
        state.rearrange()
        maps.append(made.physical_to_logical_map.tolist())
        fits.append(weights_fit(model, made.physical_to_logical_map, rank))
    ledger = current()
    item = ledger.record.item(name) if ledger.record is not None else None
    view = ledger.view()
    return {
        "maps": maps, "fits": fits, "policy": getattr(state.policy, "__name__", type(state.policy).__name__),
        "state": item.state if item else "", "reason": item.reason if item else "",
        "figures": dict(view.figures.get(name, {})) if view else {},
        "calls": {hook: found.calls for hook, found in view.readings.get(name, {}).items()} if view else {},
    }  # fmt: skip


def main(rank: int, names: list[str]) -> dict[str, object]:
    """Return what this rank saw with each balancer; ``none`` comes first, without a plan."""
    torch.Event = torch.cuda.Event = Event
    groups(rank)
    seen = {}
    for name in names:
        if name != "none":
            target = SHIPPED.get(name, f"__main__:{name}")
            plan = Plan((PlanItem("expert-balancer", name, target, "tests", ("worker",)),), "warn", model="m")
            run = Run("1-balancer", os.getpid())
            export_plan(plan, run)
            if process.plan is None:
                process.adopt_plan(plan, run, "worker")
        seen[name] = play(rank, name)
    return seen


if __name__ == "__main__":
    seen = main(int(os.environ["RANK"]), sys.argv[2:])
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(seen, file)
