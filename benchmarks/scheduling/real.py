"""The burst once, by the clock on a real engine; the same simulated, and the ratios side by side.

    python -m benchmarks.scheduling.real --device cpu --out FILE                            # all policies
    PYTHONPATH=src:SITE python -m benchmarks.scheduling.real --device cuda --out FILE       # SITE has a CUDA vLLM
    python -m benchmarks.scheduling.real --report FILE                                      # simulate, and compare

One cycle: 45 s at 1.5 times what can be served, then 105 s at 0.65 times, all times multiplied by --cycle-scale and
max_wait_sec with them. What can be served is measured first, with all requests at once; every policy of a file then has
the same requests at the same times. On a GPU a Llama-3-8B shape runs with dummy weights, on a CPU the embedded model
with short prompts and answers. Real times hang on what else runs on the machine: the load is recorded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.scheduling.figures import LONG_S, row_of
from benchmarks.scheduling.machines import KINDS, Kind
from benchmarks.scheduling.play import surroundings
from benchmarks.scheduling.policies import Policy, policy_of
from benchmarks.scheduling.real_report import report

from vllm_graft.errors import ConfigError
from vllm_graft.testing.packages import lay_out

POLICIES = ("fcfs", "priority", "priority-fairness")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=sorted(KINDS), help="what the engine runs on")
    parser.add_argument("--model", help="a shape that ships, or a model's folder; without it the device's own")
    parser.add_argument("--policy", action="append", help=f"may be repeated; without it {', '.join(POLICIES)}")
    parser.add_argument("--cycle-scale", type=float, default=0.6, help="what all times are multiplied by (%(default)s)")
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where results are added, policy by policy")
    parser.add_argument("--report", type=Path, metavar="FILE", help="compare what is there, beside the same simulated")
    args = parser.parse_args()
    try:
        if args.report is not None:
            report(args.report)
            return 0
        if args.device is None or args.out is None:
            parser.error("give --device and --out to measure, or --report to compare")
        if not 0 < args.cycle_scale <= 10:
            raise ConfigError("must be above 0 and at most 10", where="--cycle-scale", fix="correct it")
        measure(args, [policy_of(text) for text in args.policy or POLICIES])
    except ConfigError as error:
        parser.error(str(error))
    return 0


def measure(args: argparse.Namespace, policies: list[Policy]) -> None:
    """One policy after the other, each added to the file as it ends."""
    kind = KINDS[args.device]
    facts = {
        "kind": args.device,
        "model": args.model or kind.model,
        "cycle_scale": args.cycle_scale,
        "seed": args.seed,
        "engine": dict(kind.engine),
    }
    record = opened(args.out, facts)
    for number, policy in enumerate(policies, 1):
        _say(f"run {number} of {len(policies)}: {policy.name}, a cycle of {150 * args.cycle_scale:.0f} s")
        # Everybody else's requests are those of the first: its measured capacity is in the file.
        found = played(policy.waiting_at_most(LONG_S * args.cycle_scale), kind, record)
        record.setdefault("capacity", found["capacity"])
        row = row_of("cycle", policy.name, args.seed, found["results"], found["preemptions"], LONG_S * args.cycle_scale)
        about = {key: value for key, value in found.items() if key not in ("results", "capacity", "preemptions")}
        record["runs"] = [run for run in record["runs"] if run["policy"] != policy.name] + [{**row, **about}]
        record.pop("simulated", None)
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _say(json.dumps(record["runs"][-1]))


def opened(file: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The record of that file, or a new one. One that was measured otherwise is refused: nothing could be compared."""
    if not file.exists():
        if not file.absolute().parent.is_dir():
            raise ConfigError("has no folder to lie in", where=str(file), fix="make it, or name another")
        return {**facts, "runs": []}
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for key, value in facts.items():
        if record.get(key) != value:
            told = f"was measured with {key} {record.get(key)!r}, and not {value!r}"
            raise ConfigError(told, where=str(file), fix="name another file, or give the same")
    return record


def played(policy: Policy, kind: Kind, record: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own found, whose words go on to our own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {
            "engine": {**kind.engine_args(record["model"]), **policy.engine()},
            "lengths": kind.lengths,
            "saturated": kind.saturated,
            "capacity": record.get("capacity"),
            "seed": record["seed"],
            "scale": record["cycle_scale"],
            "results": str(folder / "results.json"),
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        environment = {**surroundings(policy, folder), **quiet, **kind.variables}
        _offer(folder)
        command = [sys.executable, "-m", "benchmarks.scheduling.real_engine", str(folder / "job.json")]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{policy.name}: the run failed with status {done.returncode}; its last words are above")
        found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        return found


def _offer(folder: Path) -> None:
    """Where only the sources are on the path, nothing tells vLLM of us: a package's metadata does."""
    try:
        metadata.distribution("vllm-graft")
    except metadata.PackageNotFoundError:
        points = {"vllm.general_plugins": {"graft": "vllm_graft.boot:register"}}
        points["vllm.platform_plugins"] = {"graft": "vllm_graft.boot:platform"}
        lay_out(folder, "vllm-graft", points)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
