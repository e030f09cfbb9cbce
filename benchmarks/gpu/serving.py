"""One workload on a real H200 and on the simulated one: what a server's users would see, side by side.

    PYTHONPATH=src:SITE python benchmarks/gpu/serving.py --measure FILE     # on the GPU; SITE has a CUDA build of vLLM
    python benchmarks/gpu/serving.py [--speed virtual,1]                 # anywhere: simulate, and compare

The workload is `serving.toml`: bursts, chat-like lengths, shared prefixes, on a Llama-3-8B shape with dummy weights.
The real run goes through vLLM's asynchronous engine by the clock. The simulated one runs in virtual time, where the
host costs nothing, or with speed 1 by the clock too, where this machine is the host. All have the same scheduler and
the same settings. The recorded result of the H200 is `serving.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graft.plugins.platforms.simulated.devices import DEVICES
from vllm_graft.plugins.platforms.simulated.models import find_model
from vllm_graft.plugins.platforms.simulated.roofline import Roofline
from vllm_graft.plugins.platforms.simulated.settings import Settings
from vllm_graft.plugins.platforms.simulated.shape import shape_of
from vllm_graft.plugins.platforms.simulated.workload import Request, Workload, read, run

HERE = Path(__file__).resolve().parent
ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8192, "gpu_memory_utilization": 0.92}
MODEL = "llama-3-8b"


async def measure(workload: Workload, steps: Path | None) -> dict[str, Any]:
    """Play the workload on the device that is here; its steps are written to a file where one is named."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_graft.plugins.platforms.simulated.workload.drive import Tape
    from vllm_graft.plugins.platforms.simulated.workload.engine import preemption_counter
    from vllm_graft.plugins.platforms.simulated.workload.prompts import prompt_of
    from vllm_graft.plugins.platforms.simulated.workload.realtime import _all

    folder = str(find_model(MODEL).folder)
    args = AsyncEngineArgs(
        model=folder, served_model_name=MODEL, load_format="dummy", skip_tokenizer_init=True, **ENGINE
    )
    if steps is not None:
        args.worker_cls = "recording.RecordingWorker"
    config = args.create_engine_config()
    counter = preemption_counter(alone=False)
    engine = AsyncLLM.from_vllm_config(config, stat_loggers=[counter])
    try:
        warm = Workload(
            tuple(Request(at=0.02 * n, max_tokens=64, prompt_tokens=300 + n, id=f"warm-{n}") for n in range(96)),
            "warm-up",
        )
        for played in (warm, workload):
            tape = Tape(played, Settings(), config)
            prompts = [prompt_of(request, tape.vocabulary) for request in played]
            if steps is not None:
                await engine.collective_rpc("forget_steps")
            start = time.monotonic() + 0.5
            await _all(tape, engine, prompts, start)
        if steps is not None:
            steps.write_text(json.dumps((await engine.collective_rpc("recorded_steps"))[0]), encoding="utf-8")
        cache = config.cache_config
        tape.measured |= {"preemptions": counter.seen, "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size}
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {**tape.report().as_dict(), "device": name, "workload": "serving.toml"}
    finally:
        engine.shutdown()


def table(real: dict[str, Any], simulated: dict[str, dict[str, Any]]) -> list[str]:
    """The real run and the simulated ones, by their speed, side by side."""
    named = ["virtual time" if speed == "virtual" else f"speed {speed}" for speed in simulated]
    rows = [" | ".join(["| | H200", *(f"{name} | difference" for name in named)]) + " |"]
    rows.append("|---" * (2 + 2 * len(named)) + "|")
    facts = [real, *simulated.values()]
    rows.append(_row("requests served", [each["done"] for each in facts], "{:.0f}"))
    rows.append(_row("output tokens/s", [each["output_tokens_per_s"] for each in facts], "{:.0f}"))
    for key, name in (("ttft_s", "time to first token"), ("tpot_s", "time per token"), ("e2e_s", "end to end")):
        for part in ("mean", "p50", "p99"):
            rows.append(_row(f"{name}, {part}", [1000 * each[key][part] for each in facts], "{:.1f} ms"))
    rows.append(_row("prompt tokens from the cache", [each["cached_tokens"] for each in facts], "{:.0f}"))
    return rows


KINDS = (
    ("decode only", 0, 0),
    ("and 1 to 256 tokens of prompts", 1, 256),
    ("and 257 to 1024", 257, 1024),
    ("and 1025 to 4096", 1025, 4096),
    ("and more", 4097, 1 << 30),
)
"""Steps by the new tokens of prompts in them: name, least and most."""


def step_table(steps: list[dict[str, Any]]) -> list[str]:
    """The recorded steps beside the modelled ones, by what they are made of."""
    roofline = Roofline(shape_of(find_model(MODEL).config), DEVICES["H200"])
    rows = [
        "| steps | how many | requests | measured | modelled | difference | launched in |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, least, most in KINDS:
        chosen = [each for each in steps if least <= sum(new for new, _ in each["shares"] if new > 1) <= most]
        if not chosen:
            continue
        ms = statistics.mean(each["ms"] for each in chosen)
        modelled = 1000 * statistics.mean(roofline.seconds([Work(*one) for one in each["shares"]]) for each in chosen)
        requests = statistics.mean(len(each["shares"]) for each in chosen)
        host = statistics.mean(each["host"] for each in chosen)
        rows.append(
            f"| {name} | {len(chosen)} | {requests:.0f} | {ms:.2f} ms | {modelled:.2f} ms | "
            f"{100 * (modelled / ms - 1):+.1f} % | {host:.2f} ms |"
        )
    return rows


class Work(NamedTuple):
    """One request's part of a recorded step."""

    new_tokens: int
    context: int


def _row(name: str, figures: list[float], form: str) -> str:
    first, *others = figures
    cells = [f"{form.format(each)} | {100 * (each / first - 1):+.1f} %" for each in others]
    return " | ".join([f"| {name}", form.format(first), *cells]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FILE", help="play it on the GPU that is here, and record")
    parser.add_argument(
        "--recorded", type=Path, default=HERE / "serving.json", help="the recorded result to compare to"
    )
    parser.add_argument(
        "--steps", type=Path, metavar="FILE", help="with --measure: record each step too; else compare them"
    )
    parser.add_argument("--speed", default="virtual", help="virtual, 1, or both, with a comma between them")
    args = parser.parse_args()
    workload = read(HERE / "serving.toml")
    if args.measure is not None:
        measured = asyncio.run(measure(workload, args.steps))
        args.measure.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({key: value for key, value in measured.items() if key != "groups"}))
        return 0
    if args.steps is not None:
        print("\n".join(step_table(json.loads(args.steps.read_text(encoding="utf-8")))))
        return 0
    real = json.loads(args.recorded.read_text(encoding="utf-8"))
    simulated = {
        speed: run(workload, {"model": MODEL, **ENGINE}, {"device": "H200", "speed": speed}).as_dict()
        for speed in args.speed.split(",")
    }
    print("\n".join(table(real, simulated)))
    for speed, facts in simulated.items():
        busy = f"device busy {100 * facts['device_busy_share']:.1f} %"
        print(f"speed {speed}: {facts['modelled_s']:.1f} s in {facts['wall_s']:.1f} s, {busy}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
