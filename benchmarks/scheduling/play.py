"""Plays workloads under one policy in a process of its own: a plan belongs to a process.

    python -m benchmarks.scheduling.play JOB.json

The job: {"runs": [{"workload": FILE, "engine": {...}, "results": FILE}, ...], "device": "L40S"}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scheduling.policies import Policy
from benchmarks.scheduling.workloads import DEVICE, engine_of

from vllm_graft.plugins.platforms.simulated.workload import Workload, read, run


def play(
    policy: Policy, runs: Sequence[tuple[str, Workload]], say: Callable[[str], None] = lambda text: None
) -> Iterator[list[dict[str, Any]]]:
    """What became of each request, run by run, as each ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {"device": DEVICE, "runs": []}
        for number, (kind, workload) in enumerate(runs):
            file = folder / f"{number}.jsonl"
            file.write_text("".join(f"{line}\n" for line in workload.lines()), encoding="utf-8")
            engine = {**engine_of(kind), **policy.engine()}
            job["runs"].append({"workload": str(file), "engine": engine, "results": str(folder / f"{number}.out")})
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        path = os.pathsep.join(filter(None, [*_first(), str(folder), str(Path.cwd())]))
        environment = {**os.environ, **policy.write(folder), "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [sys.executable, "-m", "benchmarks.scheduling.play", str(folder / "job.json")]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stdout is not None
        try:
            for (kind, _), line in zip(runs, child.stdout, strict=False):
                say(f"{policy.name}: {kind}, {line.strip()}")
                rows = Path(json.loads(line)["results"]).read_text(encoding="utf-8").splitlines()
                yield [json.loads(row) for row in rows]
            _, said = child.communicate()
            if child.returncode:
                raise SystemExit(f"{policy.name}: the run failed\n{said[-3000:]}")
        finally:
            child.kill()
            child.wait()


def _first() -> list[str]:
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)


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
