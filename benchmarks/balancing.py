"""How even the experts of a model are and how many move, with vLLM's own policy and with ``fewest-moves``.

    python benchmarks/balancing.py
    python benchmarks/balancing.py --json benchmarks/balancing.json

Both policies see the same synthetic loads, window after window, each from the placement that it has left itself:

- steady: popularity by Zipf's law, and the noise of the tokens that a window has
- drift:  the popularity of every expert walks at random
- bursts: in each window another twentieth of the experts is eight times as popular

Balance is the mean rank's load over the busiest rank's, summed over layers (what vLLM logs as balancedness): before a
rearrangement, and after it on the same load. Moved is the share of slots whose expert came from another rank; the
first rearrangement, which leaves vLLM's initial placement, is apart. Seconds are CPU time of a rearrangement, on the
mean and at most; ``fewest-moves`` may take a minute here, and 1.5 s unless told otherwise. Nothing but the policies
runs: no weights move, and no accelerator is needed. The policy of the installed vLLM is its only one (0.26 to 0.32).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import vllm
from vllm.distributed.eplb.policy import EPLB_POLICIES, DefaultEplbPolicy

from vllm_graft.contracts import ExpertBalancer, ExpertLoad
from vllm_graft.plugins.balancers.fewest_moves import FewestMoves
from vllm_graft.plugins.balancers.stock import StockBalancer

WINDOWS = 6
PATIENT = 60.0  # seconds for fewest-moves: placements that do not depend on how busy this machine is
TOKENS = 200_000  # routed to the experts of a layer in one window

SHAPES = {
    "16 layers, 128 experts in 144 slots, 8 ranks": (16, 128, 144, 1, 1, 8),
    "16 layers, 128 experts in 128 slots, 8 ranks": (16, 128, 128, 1, 1, 8),
    "12 layers, 256 experts in 288 slots, 32 ranks on 4 nodes, 8 groups": (12, 256, 288, 8, 4, 32),
    "12 layers, 256 experts in 288 slots, 32 ranks": (12, 256, 288, 1, 1, 32),
}


def windows(kind: str, layers: int, experts: int) -> Iterator[np.ndarray]:
    """Yield the load of each window."""
    random = np.random.default_rng(42)
    weights = np.array([random.permutation(1 / np.arange(1, experts + 1) ** 0.8) for _ in range(layers)])
    for _ in range(WINDOWS):
        if kind == "drift":
            weights = weights * np.exp(random.normal(0, 0.2, weights.shape))
        hot = random.random(weights.shape) < 0.05
        now = np.where(hot, 8 * weights, weights) if kind == "bursts" else weights
        yield np.array([random.multinomial(TOKENS, row / row.sum()) for row in now], dtype=np.float64)


def play(balancer: ExpertBalancer, kind: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Rearrange after each window, and return what came of it."""
    layers, experts, slots, groups, nodes, ranks = shape
    placement = np.tile([*range(experts), *range(slots - experts)], (layers, 1))
    rows = []
    for load in windows(kind, layers, experts):

        def stock(load: np.ndarray = load, placement: np.ndarray = placement) -> np.ndarray:
            given = torch.from_numpy(load), slots, groups, nodes, ranks, torch.from_numpy(placement)
            return DefaultEplbPolicy.rebalance_experts(*given).numpy()

        seen = ExpertLoad(load, placement, groups, nodes, ranks, stock)
        began = time.thread_time()
        found = seen.check(balancer.place(seen))
        took = time.thread_time() - began
        moved = 100 * seen.moves(found).sum() / found.size
        rows.append((seen.balance(placement), seen.balance(found), moved, took))
        placement = found
    before, after, moved, took = np.array(rows).T
    return {
        "before": before[1:].mean(), "after": after[1:].mean(), "moved_first": moved[0], "moved": moved[1:].mean(),
        "seconds": took.mean(), "seconds_most": took.max(),
    }  # fmt: skip


def main() -> None:
    """Print a table for each shape; with ``--json``, write the figures too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    file = parser.parse_args().json
    balancers: dict[str, ExpertBalancer] = {"stock-balancer": StockBalancer()}
    balancers["fewest-moves"] = FewestMoves({"tolerance": 0.02, "seconds": PATIENT})
    balancers["  tolerance = 0"] = FewestMoves({"tolerance": 0.0, "seconds": PATIENT})
    record: dict[str, object] = {"vllm": vllm.__version__, "policies_of_vllm": sorted(EPLB_POLICIES), "rows": []}
    rows: list[dict[str, object]] = []
    print(f"vLLM {vllm.__version__}, whose policies are: {', '.join(EPLB_POLICIES)}; {WINDOWS} windows")
    for title, shape in SHAPES.items():
        heads = "".join(f"{each:>9}" for each in ("before", "after", "moved", "first", "CPU s", "most"))
        print(f"\n{title}\n{'load':8}{'balancer':20}{heads}")
        for kind in ("steady", "drift", "bursts"):
            for name, balancer in balancers.items():
                found = play(balancer, kind, shape)
                rows.append({"shape": title, "load": kind, "balancer": name.strip(), **found})
                print(
                    f"{kind:8}{name:20}{found['before']:9.3f}{found['after']:9.3f}{found['moved']:8.1f}%"
                    f"{found['moved_first']:8.1f}%{found['seconds']:9.2f}{found['seconds_most']:9.2f}",
                    flush=True,
                )
    if file is not None:
        file.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
