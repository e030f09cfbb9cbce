"""One workload on a real H200 and on the simulated one: what a server's users would see, side by side.

    PYTHONPATH=src:SITE python benchmarks/gpu/serving.py --measure FOLDER   # on the GPU; SITE has a CUDA build of vLLM
    python benchmarks/gpu/serving.py [--speed virtual,1]                 # anywhere: simulate, and compare

The workload is `serving.toml`: bursts, chat-like lengths, shared prefixes, on a Llama-3-8B shape with dummy weights.
The real run goes through vLLM's asynchronous engine by the clock, and each step is noted: what it was made of, how long
the host took to launch it, and how long it was on the device. The simulated runs are in virtual time, where vLLM's own
work costs nothing, or with speed 1 by the clock too. Each is played twice: as the device alone would do it, and with
`launch_ms` and `eager_ms` of the recorded host, which are read off every second step. All have the same scheduler and
the same settings. What was recorded on the H200 lies in `serving.json` and `serving_steps.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graft.simulator.devices import DEVICES
from vllm_graft.simulator.model_shape import find_model, read_shape
from vllm_graft.simulator.roofline import Roofline
from vllm_graft.simulator.settings import SimulationSettings
from vllm_graft.simulator.workload import Workload, WorkloadRequest, read, run

HERE = Path(__file__).resolve().parent
ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8192, "gpu_memory_utilization": 0.92}
MODEL = "llama-3-8b"


async def measure(workload: Workload) -> tuple[dict[str, Any], list[Any]]:
    """Play the workload on the device that is here: what its users would see, and each step."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_graft.simulator.workload.player import Recording, preemption_counter, send_all
    from vllm_graft.simulator.workload.requests import build_prompt

    folder = str(find_model(MODEL).folder)
    args = AsyncEngineArgs(
        model=folder, served_model_name=MODEL, load_format="dummy", skip_tokenizer_init=True, **ENGINE
    )
    args.worker_cls = "recording.RecordingWorker"
    config = args.create_engine_config()
    counter = preemption_counter(alone=False)
    engine = AsyncLLM.from_vllm_config(config, stat_loggers=[counter])
    try:
        warm = Workload(
            tuple(
                WorkloadRequest(at=0.02 * n, max_tokens=64, prompt_tokens=300 + n, id=f"warm-{n}") for n in range(96)
            ),
            "warm-up",
        )
        for played in (warm, workload):
            recording = Recording(played, SimulationSettings(), config)
            prompts = [build_prompt(request, recording.vocabulary) for request in played]
            await engine.collective_rpc("forget_steps")
            start = time.monotonic() + 0.5
            await send_all(recording, engine, prompts, start)
        steps = (await engine.collective_rpc("recorded_steps"))[0]
        cache = config.cache_config
        recording.measured |= {"preemptions": counter.seen, "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size}
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {**recording.report().as_dict(), "device": name, "workload": "serving.toml"}, steps
    finally:
        engine.shutdown()


def table(real: dict[str, Any], simulated: dict[str, dict[str, Any]]) -> list[str]:
    """The real run and the simulated ones, by name, side by side."""
    rows = [" | ".join(["| | H200", *(f"{name} | difference" for name in simulated)]) + " |"]
    rows.append("|---" * (2 + 2 * len(simulated)) + "|")
    facts = [real, *simulated.values()]
    rows.append(_row("requests served", [each["done"] for each in facts], "{:.0f}"))
    rows.append(_row("output tokens/s", [each["output_tokens_per_s"] for each in facts], "{:.0f}"))
    for key, name in (("ttft_s", "time to first token"), ("tpot_s", "time per token"), ("e2e_s", "end to end")):
        for part in ("mean", "p50", "p99"):
            rows.append(_row(f"{name}, {part}", [1000 * each[key][part] for each in facts], "{:.1f} ms"))
    rows.append(_row("prompt tokens from the cache", [each["cached_tokens"] for each in facts], "{:.0f}"))
    return rows


KINDS = (
    ("decode only, after such a step", 0, 0, False),
    ("decode only, after one with prompts", 0, 0, True),
    ("with 1 to 256 tokens of prompts", 1, 256, None),
    ("with 257 to 1024", 257, 1024, None),
    ("with 1025 to 4096", 1025, 4096, None),
    ("with more", 4097, 1 << 30, None),
)
"""Steps by the new tokens of prompts in them: name, least, most, and whether the step before had prompts."""

GRAPH = 512
"""The largest step that vLLM had as a CUDA graph, with the 256 requests at a time of this run."""


def recorded_steps(folder: Path) -> list[Step]:
    """The steps of the real run."""
    return [Step(*each) for each in json.loads((folder / "serving_steps.json").read_text(encoding="utf-8"))]


def launches(steps: list[Step]) -> dict[str, float]:
    """``launch_ms`` and ``eager_ms`` of the host: the mean time to launch a step with prompts, of every second step."""
    chosen = [each for each in steps[::2] if each.prompts]
    small = [each.host_ms for each in chosen if each.tokens <= GRAPH]
    large = [each.host_ms for each in chosen if each.tokens > GRAPH]
    return {"launch_ms": round(statistics.mean(small), 1), "eager_ms": round(statistics.mean(large), 1)}


def step_table(steps: list[Step]) -> list[str]:
    """Steps that ``launches`` has not seen beside the modelled ones, without and with the host, by what is in them."""
    shape = read_shape(find_model(MODEL).config)
    models = [Roofline(shape, replace(DEVICES["H200"], **keys)) for keys in ({}, launches(steps))]
    rows = [
        "| steps | how many | launched in | took | modelled | mean error | with the host | mean error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    pairs = list(itertools.pairwise(steps))[::2]
    for name, least, most, after in KINDS:
        chosen = [
            each
            for before, each in pairs
            if least <= sum(new for new, _ in each.prompts) <= most and after in (None, bool(before.prompts))
        ]
        host, ms = (statistics.mean(getattr(each, key) for each in chosen) for key in ("host_ms", "ms"))
        cells = [name, f"{len(chosen)}", f"{host:.1f} ms", f"{ms:.1f} ms"]
        for model in models:
            modelled = [1000 * model.seconds(each.works()) for each in chosen]
            errors = [abs(one / each.ms - 1) for one, each in zip(modelled, chosen, strict=True)]
            cells += [f"{statistics.mean(modelled):.1f} ms", f"{100 * statistics.mean(errors):.1f} %"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


class Step(NamedTuple):
    """One step as `recording.py` notes it."""

    decoding: int
    context: int
    """The mean one of those that decode."""
    prompts: list[list[int]]
    """New tokens and context of each."""
    ms: float
    host_ms: float

    @property
    def tokens(self) -> int:
        """All new tokens."""
        return self.decoding + sum(new for new, _ in self.prompts)

    def works(self) -> list[Work]:
        """Its requests; reading the KV cache takes a time in proportion, so a mean serves as well."""
        return [Work(1, self.context)] * self.decoding + [Work(*prompt) for prompt in self.prompts]


class Work(NamedTuple):
    """One request's part of a recorded step."""

    new_tokens: int
    context: int


def _row(name: str, figures: list[float], form: str) -> str:
    first, *others = figures
    cells = [f"{form.format(each)} | {100 * (each / first - 1):+.1f} %" for each in others]
    return " | ".join([f"| {name}", form.format(first), *cells]) + " |"


def simulate(workload: Workload, speed: str, host: dict[str, float]) -> dict[str, Any]:
    """Play the workload on the modelled device, with what its host needs to launch a step."""
    keys = "".join(f"{key} = {value}\n" for key, value in host.items())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graft.toml"
        file.write_text(f'[device.this]\nbased_on = "H200"\n{keys}', encoding="utf-8")
        os.environ["GRAFT_CONFIG"] = str(file)
        return run(workload, {"model": MODEL, **ENGINE}, {"device": "this", "speed": speed}).as_dict()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="play it on the GPU that is here, and record")
    parser.add_argument("--recorded", type=Path, default=HERE, metavar="FOLDER", help="the recorded results")
    parser.add_argument("--speed", default="virtual", help="virtual, 1, or both, with a comma between them")
    args = parser.parse_args()
    workload = read(HERE / "serving.toml")
    if args.measure is not None:
        measured, steps = asyncio.run(measure(workload))
        (args.measure / "serving.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        lines = ",\n".join(map(json.dumps, steps))
        (args.measure / "serving_steps.json").write_text(f"[{lines}]\n", encoding="utf-8")
        print(json.dumps({key: value for key, value in measured.items() if key != "groups"}))
        return 0
    steps = recorded_steps(args.recorded)
    host = launches(steps)
    print(f"the host, from every second step: {host}\n")
    print("\n".join(step_table(steps)), end="\n\n")
    real = json.loads((args.recorded / "serving.json").read_text(encoding="utf-8"))
    simulated = {}
    for speed in args.speed.split(","):
        name = "virtual time" if speed == "virtual" else f"speed {speed}"
        for label, keys in ((name, {}), (f"{name}, with the host", host)):
            facts = simulated[label] = simulate(workload, speed, keys)
            busy = f"device busy {100 * facts['device_busy_share']:.1f} %"
            print(f"{label}: {facts['modelled_s']:.1f} s in {facts['wall_s']:.1f} s, {busy}", file=sys.stderr)
    print("\n".join(table(real, simulated)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
