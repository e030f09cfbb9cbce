"""How true real time is to the model, and how fast virtual time is, on the simulated accelerator.

    python benchmarks/simulated_time.py [--repeat 3] [--only real,virtual]

Real time: a saturated engine (Llama-3-8B on a modelled H200, 32, 64 and 128 requests at a time) is played by the clock,
with asynchronous and with synchronous scheduling. Two ratios: the wall's time over the modelled time of the steps that
were run, target with asynchronous scheduling within 5 %; and the makespan over that of the same workload in virtual
time, where the host costs nothing at all and requests that come at once are all there at once.

Virtual time: modelled seconds per second of processor time (and of wall time, which other work on the machine makes
longer), target at least 10, and whether two runs have equal digests. Beside it the limit, from a third run: what the
ratio would be if nothing but vLLM's own scheduler (`schedule` and `update_from_output`) took time.

Real-time figures mean something on a quiet machine only; the load is printed beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTHS = """
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

SATURATED = (
    """
[workload]
arrivals = "at-once"
requests = {requests}
"""
    + LENGTHS
)

BUSY = (
    """
[workload]
seed = 1
requests = 300
rate = {rate}
"""
    + LENGTHS
)

TIMED = "--timed"
"""The first word of a run of this file that plays the command and times vLLM's scheduler."""

VIRTUAL = (
    ("L40S", "llama-3-8b", 14, ()),
    ("H200", "llama-3-8b", 60, ()),
    ("H200", "llama-3-70b", 14, ("--tensor-parallel-size", "2")),
)
"""Device, shape, requests per second (near what it serves), and what else vLLM is told."""


def play(
    folder: Path, text: str, device: str, model: str, speed: str, *more: str, at_a_time: int = 128, timed: bool = False
) -> dict[str, Any]:
    """One run of the command, in a process of its own; ``timed`` adds the seconds of vLLM's scheduler."""
    file = folder / "workload.toml"
    file.write_text(text, encoding="utf-8")
    command = [sys.executable, *((__file__, TIMED) if timed else ("-m", "vllm_graft.cli"))]
    command += ["simulate", "--model", model, "--device", device]
    command += ["--speed", speed, "--workload", str(file), "--json", "--max-num-seqs", str(at_a_time), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    facts: dict[str, Any] = json.loads(done.stdout)
    return {**facts, "scheduler_s": float(done.stderr.splitlines()[-1])} if timed else facts


def timed_command(words: list[str]) -> int:
    """The command in this process, with the seconds that vLLM's scheduler took as the last line on standard error."""
    os.environ["GRAFT_SIMULATE"] = "1"  # before vLLM chooses its platform
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_graft.cli import main as command

    clock, spent = time.perf_counter, 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            began = clock()
            try:
                return method(*args, **kwargs)
            finally:
                spent += clock() - began

        return call

    for name in ("schedule", "update_from_output"):
        setattr(Scheduler, name, timed(getattr(Scheduler, name)))
    status = command(words)
    print(spent, file=sys.stderr)
    return status


def real_time(folder: Path, repeat: int, sizes: tuple[int, ...]) -> None:
    print("real time, Llama-3-8B on a modelled H200: wall over modelled time, and makespan over that in virtual time")
    for size in sizes:
        text = SATURATED.format(requests=6 * size)
        for name, flag in (("asynchronous", "--async-scheduling"), ("synchronous", "--no-async-scheduling")):
            reference = play(folder, text, "H200", "llama-3-8b", "virtual", flag, at_a_time=size)
            shown = []
            for _ in range(repeat):
                load = os.getloadavg()[0]
                facts = play(folder, text, "H200", "llama-3-8b", "1", flag, at_a_time=size)
                assert facts["output_tokens"] == reference["output_tokens"]
                longer = facts["makespan_s"] / reference["makespan_s"]
                shown.append(f"{1 / facts['device_busy_share']:.3f} and {longer:.3f} (load {load:.1f})")
            modelled = f"{reference['makespan_s']:6.2f} s in virtual time"
            print(f"  {size:4} at a time, {name:12}  {modelled}: {', '.join(shown)}", flush=True)


def virtual_time(folder: Path) -> None:
    print("virtual time, 300 requests, 128 at a time")
    for device, model, rate, more in VIRTUAL:
        text = BUSY.format(rate=rate)
        load = os.getloadavg()[0]
        first, second = (play(folder, text, device, model, "virtual", *more) for _ in range(2))
        same = "equal digests" if first["digest"] == second["digest"] else "DIGESTS DIFFER"
        walls = " and ".join(f"{facts['modelled_per_wall']:.1f}" for facts in (first, second))
        cpus = " and ".join(f"{facts['modelled_s'] / facts['cpu_s']:.1f}" for facts in (first, second))
        third = play(folder, text, device, model, "virtual", *more, timed=True)
        limit = f"{third['modelled_s'] / third['cpu_s']:.1f} of {third['modelled_s'] / third['scheduler_s']:.1f}"
        busy = f"device busy {100 * first['device_busy_share']:.0f} %"
        print(
            f"  {model:12} on {device:5} {' '.join(more):26} {first['modelled_s']:7.1f} s modelled: {cpus} times the "
            f"processor's time, {walls} times the wall's, {busy}, {same}; "
            f"{limit} that vLLM's scheduler alone would permit (load {load:.1f})",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="runs by the clock for each setting")
    parser.add_argument("--only", default="virtual,real", help="virtual, real or both")
    parser.add_argument("--at-a-time", default="32,64,128", help="how many requests run at a time, in real time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if "virtual" in args.only:
            virtual_time(Path(name))
        if "real" in args.only:
            real_time(Path(name), args.repeat, tuple(int(each) for each in args.at_a_time.split(",")))
    return 0


if __name__ == "__main__":
    sys.exit(timed_command(sys.argv[2:]) if sys.argv[1:2] == [TIMED] else main())
