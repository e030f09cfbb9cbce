"""The demo's burst: five classes of requests under three schedulers, in virtual time on vLLM's real scheduler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_graft.cli.table import table
from vllm_graft.errors import StartError

PLAN: Final = '[defaults]\nscheduler = "priority-fairness"   # a class goes first, and nobody waits for ever\n'

_LENGTHS: Final = """
[prompt]
mean = 320
sigma = 0.9
min = 8
max = 1500

[output]
mean = 220
sigma = 0.7
min = 8
max = 500
"""

_PHASES: Final = ((25, 26.0), (45, 10.0))
"""Seconds, and requests per second; the modelled device serves about 17."""

_SHARES: Final = (10, 20, 40, 20, 10)

WAYS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "vLLM, fcfs": ("", ()),
    "vLLM, priority": ("", ("--scheduling-policy", "priority")),
    "priority-fairness": (PLAN, ()),
}
"""Name, plan, and what vLLM is told."""

COLUMNS: Final = ("SCHEDULER", "CLASS 1, MEAN", "CLASS 1, P99", "CLASS 5, MEAN", "LONGEST WAIT", "TOKENS/S")


def workload() -> str:
    """What arrives: a burst of half as much again as can be served, then less."""
    seconds = sum(length for length, _ in _PHASES)
    rows = [f"[workload]\nseed = 7\nseconds = {seconds}\n{_LENGTHS}"]
    rows += [f"\n[[phase]]\nseconds = {length}\nrate = {rate}\n" for length, rate in _PHASES]
    rows += [
        f'\n[[group]]\nname = "P{number}"\nshare = {share}\npriority = {number}\n'
        for number, share in enumerate(_SHARES, 1)
    ]
    return "".join(rows)


def play(folder: Path, tell: Callable[[str], None]) -> tuple[str, bool]:
    """The table, and whether it shows what it should: the first class soon served, and the longest wait no starving."""
    file = folder / "burst.toml"
    file.write_text(workload(), encoding="utf-8")
    found = {}
    for name, (plan, arguments) in WAYS.items():
        tell(name)
        found[name] = _simulated(folder, file, plan, arguments)
    fcfs, strict, ours = found.values()
    fair = ours["queue_s"]["max"] < 0.7 * strict["queue_s"]["max"]
    soon = _first(ours)["mean"] < 0.1 * _first(fcfs)["mean"]
    return table(COLUMNS, [_row(name, facts) for name, facts in found.items()]), fair and soon


def _row(name: str, facts: dict[str, Any]) -> tuple[str, ...]:
    first, last = _first(facts), facts["groups"]["P5"]["ttft_s"]
    return (
        name,
        f"{first['mean']:.2f} s",
        f"{first['p99']:.2f} s",
        f"{last['mean']:.1f} s",
        f"{facts['queue_s']['max']:.1f} s",
        f"{facts['output_tokens_per_s']:,.0f}",
    )


def _first(facts: dict[str, Any]) -> dict[str, float]:
    spread: dict[str, float] = facts["groups"]["P1"]["ttft_s"]
    return spread


def _simulated(folder: Path, file: Path, plan: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    config = folder / "burst-plan.toml"
    config.write_text(plan, encoding="utf-8")
    command = [sys.executable, "-m", "vllm_graft.cli", "simulate", "--model", "llama-3-8b", "--device", "L40S"]
    command += ["--speed", "virtual", "--workload", str(file), "--json", "--max-num-seqs", "128", *arguments]
    environment = {**os.environ, "GRAFT_CONFIG": str(config), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["no word"]
        raise StartError(f"the burst could not be played: {said[0]}", where=" ".join(command), fix="run that by hand")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts
