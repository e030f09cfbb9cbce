"""Plays workloads under one policy in a process of its own: a plan belongs to a process.

    python -m benchmarks.scheduling.play JOB.json

The job: {"runs": [{"workload": FILE, "engine": {...}, "results": FILE}, ...], "device": "L40S"}.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scheduling.policies import Policy
from benchmarks.scheduling.workloads import DEVICE, engine_of

from vllm_graft.simulator.workload import Workload, read, run


@dataclass(frozen=True)
class Played:
    """One run: what became of each request, and what was counted besides."""

    results: list[dict[str, Any]]
    preemptions: int
    wall_s: float


@dataclass(frozen=True)
class Machine:
    """What the workloads are played on: a device, described by further tables of ``graft.toml`` if it does not ship."""

    device: str = DEVICE
    tables: str = ""
    engine: Mapping[str, Any] | None = None
    """What vLLM is given; None for what the workload's name says."""


def play(policy: Policy, runs: Sequence[tuple[str, Workload]], machine: Machine | None = None) -> Iterator[Played]:
    """Run by run, as each ends."""
    machine = machine or Machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {"device": machine.device, "runs": []}
        for number, (kind, workload) in enumerate(runs):
            file = folder / f"{number}.jsonl"
            file.write_text("".join(f"{line}\n" for line in workload.lines()), encoding="utf-8")
            engine = {**(engine_of(kind) if machine.engine is None else machine.engine), **policy.engine()}
            job["runs"].append({"workload": str(file), "engine": engine, "results": str(folder / f"{number}.out")})
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        environment = {**surroundings(policy, folder, machine.tables), "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [sys.executable, "-m", "benchmarks.scheduling.play", str(folder / "job.json")]
        with (folder / "said").open("w+", encoding="utf-8") as said:
            child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True)
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    facts = json.loads(line)
                    rows = Path(facts["results"]).read_text(encoding="utf-8").splitlines()
                    yield Played([json.loads(row) for row in rows], facts["preemptions"], facts["wall_s"])
                if child.wait():
                    said.seek(0)
                    raise SystemExit(f"{policy.name}: {last_words(said.read())}")
            finally:
                child.kill()
                child.wait()


def surroundings(policy: Policy, folder: Path, tables: str = "") -> dict[str, str]:
    """The environment of a child that runs under a policy: what is on our path first, then the folder."""
    first = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, [*first, str(folder), str(Path.cwd())]))
    state = {"GRAFT_STATE_DIR": str(folder / "state"), "PYTHONPATH": path}
    return {**os.environ, **policy.write(folder, tables), **state}


def last_words(said: str) -> str:
    """The error that ended a process, on one line; its last lines where none can be made out."""
    errors = re.findall(r"^(?:\w+\.)*(\w*Error|\w*Exception|SystemExit): (.+)$", said, re.MULTILINE)
    return f"{errors[-1][0]}: {errors[-1][1]}" if errors else f"the run failed\n{said[-2000:]}"


def main() -> None:
    """Play a job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for each in job["runs"]:
        report = run(read(each["workload"]), each["engine"], {"device": job["device"], "speed": "virtual"})
        rows = "".join(json.dumps(result.as_dict()) + "\n" for result in report.results)
        Path(each["results"]).write_text(rows, encoding="utf-8")
        facts = {"results": each["results"], "wall_s": round(report.wall_s, 1), "preemptions": report.preemptions}
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
