"""How true real time is to the model, and how fast virtual time is, on the simulated accelerator.

    python benchmarks/simulated_time.py [--repeat 3] [--only real,virtual]

Real time: a saturated engine (Llama-3-8B on a modelled H200, 32, 64 and 128 requests at a time) is played by the clock,
with asynchronous and with synchronous scheduling. Two ratios: the wall's time over the modelled time of the steps that
were run, target with asynchronous scheduling within 5 %; and the makespan over that of the same workload in virtual
time, where the host costs nothing at all and requests that come at once are all there at once.

Virtual time: modelled seconds per second of processor time (and of wall time, which other work on the machine makes
longer), target at least 10, and whether two runs have equal digests.

Real-time figures mean something on a quiet machine only; the load is printed beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
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

VIRTUAL = (
    ("L40S", "llama-3-8b", 14, ()),
    ("H200", "llama-3-8b", 60, ()),
    ("H200", "llama-3-70b", 14, ("--tensor-parallel-size", "2")),
)
"""Device, shape, requests per second (near what it serves), and what else vLLM is told."""


def play(
    folder: Path, text: str, device: str, model: str, speed: str, *more: str, at_a_time: int = 128
) -> dict[str, Any]:
    """One run of the command, in a process of its own."""
    file = folder / "workload.toml"
    file.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "vllm_graft.cli", "simulate", "--model", model, "--device", device]
    command += ["--speed", speed, "--workload", str(file), "--json", "--max-num-seqs", str(at_a_time), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


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
        print(
            f"  {model:12} on {device:5} {' '.join(more):26} {first['modelled_s']:7.1f} s modelled: {cpus} times the "
            f"processor's time, {walls} times the wall's, device busy {100 * first['device_busy_share']:.0f} %, {same} "
            f"(load {load:.1f})",
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
    sys.exit(main())
