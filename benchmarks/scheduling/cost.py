"""What a queue adds to each step and to each abort of vLLM's real scheduler, with many requests waiting.

    python -m benchmarks.scheduling.cost [--waiting 50000] [--policy NAME ...] [--json]

Own cost of a step: the time spent in the planned queue during one ``schedule()``, everything between vLLM and the
author's methods included, with 128 requests running, of which one ends and one is admitted in every step; the modelled
L40S has 0.7 of that. Cost of an abort: one ``finish_requests`` of a request that waits. Medians; stock policies beside.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scheduling.policies import KNOWN, policy_of
from benchmarks.scheduling.workloads import DEVICE, ENGINE

from vllm_graft.errors import ConfigError

STEPS = 300
ENDING = 1
ABORTS = 200


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--waiting", default="1000,50000", help="how many requests wait, with commas between")
    parser.add_argument("--policy", action="append", help=f"one of {', '.join(KNOWN)} or module:Class; may be repeated")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        for waiting in args.waiting.split(","):
            print(json.dumps(measured(json.loads(args.here), int(waiting))), flush=True)
        return 0
    try:
        policies = [policy_of(each) for each in args.policy or KNOWN]
    except ConfigError as error:
        parser.error(str(error))
    rows = []
    for policy in policies:
        with tempfile.TemporaryDirectory() as name:
            path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), name, str(Path.cwd())])
            environment = {**os.environ, **policy.write(Path(name)), "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
            command = [sys.executable, "-m", "benchmarks.scheduling.cost", "--waiting", args.waiting]
            command += ["--here", json.dumps(policy.engine())]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{policy.name}: {done.stderr[-3000:]}")
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        rows += [{"policy": policy.name, **row} for row in found]
        if not args.json:
            for row in found:
                print(f"{policy.name:20} " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))
    return 0


def measured(engine: dict[str, Any], waiting: int) -> dict[str, Any]:
    """One engine in this process, filled with requests and stepped by hand."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["GRAFT_SIMULATE"] = DEVICE
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_graft.simulator.workload.player import engine_config, with_model_folder

    config = engine_config(
        with_model_folder({**ENGINE, **engine, "async_scheduling": False, "enable_prefix_caching": False}), text=False
    )
    core = LLMEngine.from_vllm_config(config).engine_core.engine_core
    scheduler = core.scheduler
    spent = _watched(getattr(scheduler, "planned", None))
    requests = _fill(scheduler, 0, waiting + 128)
    steps, own = [], []
    for _ in range(STEPS):
        before, began = spent[0], time.perf_counter_ns()
        output = scheduler.schedule()
        steps.append(time.perf_counter_ns() - began)
        own.append(spent[0] - before)
        _step(scheduler, output)
        requests += _fill(scheduler, len(requests), ENDING)
    aborts = []
    from vllm.v1.request import RequestStatus

    held = [each for each in reversed(requests) if each.request_id in scheduler.requests]
    for request in [each for each in held if each.status == RequestStatus.WAITING][:: max(1, len(held) // ABORTS)]:
        began = time.perf_counter_ns()
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        aborts.append(time.perf_counter_ns() - began)
    core.shutdown()
    return {
        "waiting": waiting,
        "schedule_ms": _ms(steps),
        "own_ms": _ms(own),
        "own_p99_ms": _ms(own, 0.99),
        "abort_ms": _ms(aborts),
    }


def _watched(planned: Any) -> list[int]:
    """Counts the time spent in the planned queue; in stock policies there is none."""
    spent = [0]
    names = ("add_request", "peek_request", "pop_request", "prepend_request", "prepend_requests", "end_step")
    for name in names if planned is not None else ():
        call = getattr(planned, name)

        def timed(*args: Any, call: Any = call) -> Any:
            began = time.perf_counter_ns()
            try:
                return call(*args)
            finally:
                spent[0] += time.perf_counter_ns() - began

        setattr(planned, name, timed)
    return spent


def _fill(scheduler: Any, first: int, count: int) -> list[Any]:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    made = []
    start = time.time() - 20
    for number in range(first, first + count):
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=[number % 1000] * 16,
            sampling_params=SamplingParams(max_tokens=400, extra_args={"tenant": f"t{number % 50}"}),
            pooling_params=None,
            arrival_time=start + number * 1e-4,
            priority=number % 5 + 1,
        )
        made.append(request)
        scheduler.add_request(request)
    return made


def _step(scheduler: Any, output: Any) -> None:
    """What a model would have answered; then the oldest request ends."""
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    names = list(output.num_scheduled_tokens)
    tokens = [[1] for _ in names]
    facts = {"req_ids": names, "req_id_to_index": {name: index for index, name in enumerate(names)}}
    made = ModelRunnerOutput(
        **facts, sampled_token_ids=tokens, logprobs=None, prompt_logprobs_dict={}, pooler_output=[]
    )
    scheduler.update_from_output(output, made)
    scheduler.finish_requests([each.request_id for each in scheduler.running[:ENDING]], RequestStatus.FINISHED_ABORTED)


def _ms(values: list[int], share: float = 0.5) -> float:
    return round(sorted(values)[int(share * (len(values) - 1))] / 1e6, 4)


if __name__ == "__main__":
    sys.exit(main())
