"""The figures of a run, and the goals that they are held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.scheduling.policies import ADMISSION

from vllm_graft.simulator.workload import Spread

Row = dict[str, Any]

LONG_S = 30.0
"""The wait that nobody is to exceed."""

SAME = 0.02
"""How far a figure may lie from FCFS's where there is nothing for a scheduler to do."""


def row_of(workload: str, policy: str, seed: int, results: list[Row], preemptions: int, long_s: float = LONG_S) -> Row:
    """One row: times of requests that were served, waits of all that were scheduled, tokens until the last arrival."""
    done = [each for each in results if each["state"] == "done"]
    waits = [each["queue_s"] for each in results if each["queue_s"] is not None]
    first, last = (_spread(done, priority) for priority in (1, 5))
    every = Spread.of(each["ttft_s"] for each in done)
    return {
        "workload": workload,
        "policy": policy,
        "seed": seed,
        "p1_mean_ms": _ms(first and first.mean),
        "p1_p99_ms": _ms(first and first.p99),
        "p5_mean_ms": _ms(last and last.mean),
        "max_wait_s": round(max(waits), 2),
        "over_30_s": sum(wait > long_s for wait in waits),
        "tokens_per_s": round(_tokens_per_s(done), 1),
        "shed": len(results) - len(done),
        "mean_ttft_ms": _ms(every and every.mean),
        "requests": len(results),
        "preemptions": preemptions,
        "shed_by_class": dict(sorted(Counter(each["group"] for each in results if each["state"] != "done").items())),
        "groups_mean_ms": {name: _ms(spread.mean) for name, spread in _groups(done)},
    }


def capacity_of(results: list[Row]) -> float:
    """Requests per second while the device was full: those that ended between a fifth and four fifths of the run."""
    ends = sorted(each["finished_at"] for each in results)
    low, high = len(ends) // 5, 4 * len(ends) // 5
    return (high - low) / (ends[high] - ends[low])


def goals(rows: Iterable[Row]) -> Iterator[Row]:
    """Each goal with its figure, where the rows that it compares are there."""
    by = {(row["workload"], row["policy"], row["seed"]): row for row in rows}
    for (workload, policy, seed), row in by.items():
        fcfs, strict = by.get((workload, "fcfs", seed)), by.get((workload, "priority", seed))
        if fcfs is None or policy in ("fcfs", "priority"):
            continue
        for name, value, limit, least in _judged(workload, policy, row, fcfs, strict):
            met = value >= limit if least else value <= limit
            told = {"workload": workload, "policy": policy, "seed": seed, "goal": name}
            yield {**told, "value": round(value, 4), "limit": round(limit, 4), "met": met}


def _judged(
    workload: str, policy: str, row: Row, fcfs: Row, strict: Row | None
) -> Iterator[tuple[str, float, float, bool]]:
    if workload in ("burst", "burst-uniform") and policy.startswith("priority-fairness"):
        yield "P1 mean / FCFS's", row["p1_mean_ms"] / fcfs["p1_mean_ms"], 0.05, False
        yield "P1 P99 / FCFS's", row["p1_p99_ms"] / fcfs["p1_p99_ms"], 0.10, False
        bound = LONG_S if fcfs["max_wait_s"] <= LONG_S else fcfs["max_wait_s"] + 5
        yield "longest wait, s", row["max_wait_s"], bound, False
        yield "tokens per second / FCFS's", row["tokens_per_s"] / fcfs["tokens_per_s"], 0.99, True
        if strict is not None:
            yield "P1 mean / priority's", row["p1_mean_ms"] / strict["p1_mean_ms"], 1.3, False
            yield "longest wait / priority's", row["max_wait_s"] / strict["max_wait_s"], 0.5, False
    elif workload == "overload" and policy.startswith("priority-fairness"):
        yield "P1 mean / FCFS's", row["p1_mean_ms"] / fcfs["p1_mean_ms"], 0.02, False
        if policy.startswith(ADMISSION):
            yield "longest wait, s", row["max_wait_s"], LONG_S, False
            yield "turned away, share", row["shed"] / row["requests"], 0.15, False
            yield "of P1 and P2 turned away", sum(row["shed_by_class"].get(name, 0) for name in ("P1", "P2")), 0, False
    elif workload == "steady":
        for name, key in (("P1 mean", "p1_mean_ms"), ("mean", "mean_ttft_ms"), ("tokens per second", "tokens_per_s")):
            yield f"{name}, off FCFS's by", abs(row[key] / fcfs[key] - 1), SAME, False
    elif workload == "tenants" and policy.startswith("tenant-fairness"):
        light = row["groups_mean_ms"]["light"] / fcfs["groups_mean_ms"]["light"]
        yield "light tenant's mean / FCFS's", light, 0.05, False
        yield "tokens per second / FCFS's", row["tokens_per_s"] / fcfs["tokens_per_s"], 0.98, True


def _spread(done: list[Row], priority: int) -> Spread | None:
    return Spread.of(each["ttft_s"] for each in done if each["priority"] == priority)


def _groups(done: list[Row]) -> Iterator[tuple[str, Spread]]:
    for name in sorted({each["group"] for each in done}):
        spread = Spread.of(each["ttft_s"] for each in done if each["group"] == name)
        if spread is not None:
            yield name, spread


def _tokens_per_s(done: list[Row]) -> float:
    """Tokens of answers until the last arrival; those of a request come evenly from its first token to its last.

    After the last arrival the engine empties, and how long that takes hangs on the length of the last few answers.
    """
    end = max(each["at"] for each in done)
    total = 0.0
    for each in done:
        first, last = each["first_token_at"], each["finished_at"]
        if last <= end:
            total += each["output_tokens"]
        elif first < end:
            total += each["output_tokens"] * (end - first) / (last - first)
    return total / end


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
