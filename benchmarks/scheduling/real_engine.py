"""One policy on a real engine, by the clock, in a process of its own: what it can serve, then one cycle of the burst.

    python -m benchmarks.scheduling.real_engine JOB.json

The job: {"engine": {...}, "lengths": TEXT, "saturated": 120, "capacity": null, "seed": 101, "scale": 0.6,
"results": FILE}. Requests go through vLLM's asynchronous engine, whose core has a process of its own, as in a server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.scheduling.figures import capacity_of
from benchmarks.scheduling.workloads import cycle, saturated

from vllm_graft.ledger import runs
from vllm_graft.simulator.settings import SimulationSettings
from vllm_graft.simulator.workload import Workload, WorkloadRequest
from vllm_graft.simulator.workload.player import Recording, preemption_counter, rejection_errors
from vllm_graft.simulator.workload.requests import build_prompt

TOLD_EVERY_S = 10.0


class Player:
    """Plays workloads on an engine that is up."""

    def __init__(self, engine: Any, config: Any) -> None:
        self._engine, self._config = engine, config
        self.latest = 0.0
        """By how much the client itself was late with a request, at most."""

    async def play(self, workload: Workload) -> list[dict[str, Any]]:
        """What became of each request. What takes three times as long as it should, and two minutes, is stuck."""
        recording = Recording(workload, SimulationSettings(), self._config)
        # Made beforehand, as a client's are: by the clock they would count as the engine's time.
        prompts = [build_prompt(request, recording.vocabulary) for request in workload]
        self.latest, start = 0.0, time.monotonic() + 0.5
        told = asyncio.create_task(self._tell(recording, start))
        try:
            async with asyncio.timeout(120 + 3 * workload.requests[-1].at), asyncio.TaskGroup() as group:
                for request, prompt in zip(workload, prompts, strict=True):
                    group.create_task(self._one(recording, request, prompt, start))
        finally:
            told.cancel()
        return [result.as_dict() for result in recording.report().results]

    async def _one(self, recording: Recording, request: WorkloadRequest, prompt: dict[str, Any], start: float) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        await asyncio.sleep(start + request.at - time.monotonic())
        self.latest = max(self.latest, time.monotonic() - start - request.at)
        last = None
        try:
            async for output in self._engine.generate(
                prompt, _sampling(request), request.id, priority=request.priority
            ):
                last = output
        except EngineDeadError:
            raise
        except rejection_errors() as error:
            recording.add_rejection(request, error, time.monotonic() - start)
            return
        if last is not None:
            recording.add_output(request, last, start, time.monotonic() - start)

    @staticmethod
    async def _tell(recording: Recording, start: float) -> None:
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            done, now = len(recording.results), time.monotonic() - start
            _say(f"{recording.workload.name}: {done} of {len(recording.workload)} requests after {now:.0f} s")


def _sampling(request: WorkloadRequest) -> Any:
    """Greedy, and exactly as many tokens as the workload says."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    count = request.max_tokens
    fixed = {"max_tokens": count, "min_tokens": count, "ignore_eos": True, "temperature": 0.0}
    return SamplingParams(**fixed, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


async def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Start, warm up, measure what can be served, play the cycle."""
    import torch
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.monotonic()
    config = AsyncEngineArgs(**job["engine"]).create_engine_config()
    counter: Any = preemption_counter(alone=False)
    engine = AsyncLLM.from_vllm_config(config, stat_loggers=[counter])
    try:
        start_s = time.monotonic() - began
        _say(f"the engine is up after {start_s:.0f} s")
        player = Player(engine, config)
        await player.play(_warm_up(job["engine"]["max_num_seqs"]))
        full = await player.play(saturated(job["saturated"], job["lengths"]))
        here = capacity_of(full)
        capacity = job["capacity"] or here
        _say(f"serves {here:.2f} requests per second; the cycle is one for {capacity:.2f}")
        before, load = counter.seen, os.getloadavg()[0]
        results = await player.play(cycle(capacity, job["seed"], job["scale"], job["lengths"]))
        return {
            "capacity": capacity,
            "capacity_here": here,
            "start_s": round(start_s, 1),
            "preemptions": counter.seen - before,
            "client_late_ms": round(1000 * player.latest, 1),
            "load": [round(load, 2), round(os.getloadavg()[0], 2)],
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {os.cpu_count()} cores",
            "vllm": vllm.__version__,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "scheduler": str(config.scheduler_config.scheduler_cls or config.scheduler_config.policy),
            "findings": [f"{each.code} {each.subject}" for view in runs() for each in view.findings()],
            "results": results,
        }
    finally:
        engine.shutdown()


def _warm_up(at_a_time: int) -> Workload:
    rows = [WorkloadRequest(at=0.02 * number, max_tokens=16, prompt_tokens=16 + number) for number in range(at_a_time)]
    return Workload(rows, "warm-up")


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = asyncio.run(measure(job))
    Path(job["results"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
