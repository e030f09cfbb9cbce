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
import time
from pathlib import Path
from typing import Any

from benchmarks.scheduling.figures import capacity_of, goals, row_of
from benchmarks.scheduling.page import Run, page
from benchmarks.scheduling.play import play
from benchmarks.scheduling.policies import KNOWN, Policy, policy_of
from benchmarks.scheduling.workloads import WORKLOADS, saturated

from vllm_graft.errors import ConfigError

COLUMNS = (
    *("workload", "policy", "seed", "p1_mean_ms", "p1_p99_ms", "p5_mean_ms", "max_wait_s", "over_30_s"),
    *("tokens_per_s", "shed", "mean_ttft_ms"),
)
JUDGED = ("workload", "policy", "seed", "goal", "value", "limit", "met")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", default="burst", help=f"some of {', '.join(WORKLOADS)}, or all")
    parser.add_argument("--seeds", default="101", help="whole numbers with commas between")
    parser.add_argument(
        "--policy",
        action="append",
        help=f"one of {', '.join(KNOWN)} or module:Class, with options after it; may be repeated, all without it",
    )
    parser.add_argument("--capacity", type=float, help="requests per second that can be served; measured without it")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--goals", action="store_true", help="hold the rows against the goals")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw waits and shares over time, on one page")
    args = parser.parse_args()
    try:
        jobs = wanted(args)
        if args.html is not None and not args.html.absolute().parent.is_dir():
            raise ConfigError("has no folder to lie in", where=str(args.html), fix="make it, or name another")
    except ConfigError as error:
        parser.error(str(error))
    capacity, runs = measured(jobs, args.capacity)
    rows = [run.row for run in runs]
    judged = list(goals(rows)) if args.goals or args.html else []
    if args.html is not None:
        args.html.write_text(page(capacity, runs, judged, COLUMNS, JUDGED), encoding="utf-8")
        say(f"the page is {args.html}")
    show(rows, judged if args.goals else None, capacity if args.json else None)
    return 0


def wanted(args: argparse.Namespace) -> list[tuple[Policy, list[tuple[str, int]]]]:
    """The policies, each with its workloads and seeds; a ConfigError where something makes no sense."""
    names = list(WORKLOADS) if args.workload == "all" else list(dict.fromkeys(args.workload.split(",")))
    for name in names:
        if name not in WORKLOADS:
            known = ", ".join([*WORKLOADS, "all"])
            raise ConfigError(f"there is no workload {name!r}", where="--workload", fix=f"name some of {known}")
    try:
        seeds = list(dict.fromkeys(int(seed) for seed in args.seeds.split(",")))
    except ValueError:
        fix = "write whole numbers with commas between"
        raise ConfigError(f"{args.seeds!r} are no seeds", where="--seeds", fix=fix) from None
    if args.capacity is not None and not args.capacity > 0:
        raise ConfigError("must be above 0", where="--capacity", fix="correct it, or leave it out to measure it")
    runs = [(name, seed) for name in names for seed in seeds]
    return [(policy_of(text), runs) for text in dict.fromkeys(args.policy or KNOWN)]


def measured(jobs: list[tuple[Policy, list[tuple[str, int]]]], capacity: float | None) -> tuple[float, list[Run]]:
    """All runs, in the order of the workloads; on the way it is said how far they are."""
    progress = Progress(sum(len(own) for _, own in jobs) + (capacity is None))
    if capacity is None:
        progress.begins("fcfs, saturated, for the capacity")
        [played] = play(policy_of("fcfs"), [("saturated", saturated())])
        capacity = capacity_of(played.results)
    say(f"capacity {capacity:.2f} requests per second")
    runs: list[Run] = []
    for policy, own in jobs:
        found = play(policy, [(name, WORKLOADS[name](capacity, seed)) for name, seed in own])
        for name, seed in own:
            progress.begins(f"{policy.name}, {name}, seed {seed}")
            played = next(found)
            runs.append(Run(row_of(name, policy.name, seed, played.results, played.preemptions), played.results))
            say(json.dumps(runs[-1].row))
        assert next(found, None) is None
    names = list(WORKLOADS)
    runs.sort(key=lambda run: (names.index(run.row["workload"]), run.row["seed"]))
    return capacity, runs


class Progress:
    """Which run of how many begins, and how long the rest will take if all are like those before."""

    def __init__(self, total: int) -> None:
        self._total, self._begun, self._start = total, 0, time.monotonic()

    def begins(self, what: str) -> None:
        took = time.monotonic() - self._start
        left = took / self._begun * (self._total - self._begun) if self._begun else None
        self._begun += 1
        rest = "" if left is None else f"; {took:.0f} s so far, about {left:.0f} s to go"
        say(f"run {self._begun} of {self._total}: {what}{rest}")


def show(rows: list[dict[str, Any]], judged: list[dict[str, Any]] | None, capacity: float | None) -> None:
    """The rows, and the goals beside them if asked for: as tables, as JSON where a capacity is given."""
    if capacity is not None:
        found = rows if judged is None else {"capacity": round(capacity, 3), "rows": rows, "goals": judged}
        print(json.dumps(found, indent=1))
        return
    table(COLUMNS, rows)
    if judged:
        print()
        table(JUDGED, judged)


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
