"""Waits and throughput of schedulers, in virtual time on vLLM's real scheduler and the simulated accelerator.

    python -m benchmarks.scheduling --workload burst --seeds 101,102,103 [--policy NAME[,option=value] ...] [--json]

A row per workload, policy and seed. Waits are from the arrival to the first step; times to the first token those of
requests that were served; tokens per second those of answers until the last arrival. Only ratios within one run say
something: the device is modelled.
"""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.scheduling.figures import capacity_of, goals, row_of
from benchmarks.scheduling.play import play
from benchmarks.scheduling.policies import KNOWN, policy_of
from benchmarks.scheduling.workloads import WORKLOADS, saturated

COLUMNS = (
    *("workload", "policy", "seed", "p1_mean_ms", "p1_p99_ms", "p5_mean_ms", "max_wait_s", "over_30_s"),
    *("tokens_per_s", "shed", "mean_ttft_ms"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="burst", help=f"some of {', '.join(WORKLOADS)}, or all")
    parser.add_argument("--seeds", default="101", help="whole numbers with commas between")
    parser.add_argument("--policy", action="append", help=f"one of {', '.join(KNOWN)} or module:Class; may be repeated")
    parser.add_argument("--capacity", type=float, help="requests per second that can be served; measured without it")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--goals", action="store_true", help="hold the rows against the goals")
    args = parser.parse_args()
    names = list(WORKLOADS) if args.workload == "all" else args.workload.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        parser.error(f"there is no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    policies = [policy_of(each) for each in args.policy or KNOWN]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    capacity = args.capacity or capacity_of(next(iter(play(policy_of("fcfs"), [("saturated", saturated())]))))
    say(f"capacity {capacity:.2f} requests per second")
    rows = []
    jobs = [(name, seed) for name in names for seed in seeds]
    for policy in policies:
        runs = [(name, WORKLOADS[name](capacity, seed)) for name, seed in jobs]
        for (name, seed), results in zip(jobs, play(policy, runs, say), strict=True):
            rows.append(row_of(name, policy.name, seed, results))
            say(json.dumps(rows[-1]))
    rows.sort(key=lambda row: (names.index(row["workload"]), row["seed"]))
    judged = list(goals(rows)) if args.goals else []
    if args.json:
        print(
            json.dumps(
                {"capacity": round(capacity, 3), "rows": rows, "goals": judged} if args.goals else rows, indent=1
            )
        )
        return 0
    table(COLUMNS, rows)
    if judged:
        print()
        table(("workload", "policy", "seed", "goal", "value", "limit", "met"), judged)
    return 0


def table(columns, rows) -> None:
    """Columns as wide as they need to be."""
    cells = [[("-" if row[name] is None else str(row[name])) for name in columns] for row in rows]
    widths = [max(len(line[index]) for line in [list(columns), *cells]) for index in range(len(columns))]
    for line in [list(columns), *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def say(text: str) -> None:
    """How far it is, beside the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
