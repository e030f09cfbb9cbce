"""One workload on a real H200 and on the simulated one: what a server's users would see, side by side.

    PYTHONPATH=src:SITE python benchmarks/gpu/serving.py --measure FILE     # on the GPU; SITE has a CUDA build of vLLM
    python benchmarks/gpu/serving.py                                     # anywhere: simulate, and compare

The workload is `serving.toml`: bursts, chat-like lengths, shared prefixes, on a Llama-3-8B shape with dummy weights.
The real run goes through vLLM's asynchronous engine by the clock, the simulated one in virtual time; both have the
same scheduler and the same settings. The recorded result is `serving.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm_graft.plugins.platforms.simulated.models import find_model
from vllm_graft.plugins.platforms.simulated.settings import Settings
from vllm_graft.plugins.platforms.simulated.workload import Request, Workload, read, run

HERE = Path(__file__).resolve().parent
ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8192, "gpu_memory_utilization": 0.92}
MODEL = "llama-3-8b"


async def measure(workload: Workload) -> dict[str, Any]:
    """Play the workload on the device that is here."""
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
            start = time.monotonic() + 0.5
            await _all(tape, engine, prompts, start)
        cache = config.cache_config
        tape.measured |= {"preemptions": counter.seen, "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size}
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {**tape.report().as_dict(), "device": name, "workload": "serving.toml"}
    finally:
        engine.shutdown()


def table(real: dict[str, Any], simulated: dict[str, Any]) -> list[str]:
    """The two side by side."""
    rows = ["| | H200 | simulated | difference |", "|---|---|---|---|"]
    rows.append(f"| requests served | {real['done']} | {simulated['done']} | |")
    rows.append(_row("output tokens/s", real["output_tokens_per_s"], simulated["output_tokens_per_s"], "{:.0f}"))
    for key, name in (("ttft_s", "time to first token"), ("tpot_s", "time per token"), ("e2e_s", "end to end")):
        for part in ("mean", "p50", "p99"):
            rows.append(_row(f"{name}, {part}", 1000 * real[key][part], 1000 * simulated[key][part], "{:.1f} ms"))
    rows.append(_row("prompt tokens from the cache", real["cached_tokens"], simulated["cached_tokens"], "{:.0f}"))
    return rows


def _row(name: str, real: float, simulated: float, form: str) -> str:
    return f"| {name} | {form.format(real)} | {form.format(simulated)} | {100 * (simulated / real - 1):+.1f} % |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FILE", help="play it on the GPU that is here, and record")
    parser.add_argument(
        "--recorded", type=Path, default=HERE / "serving.json", help="the recorded result to compare to"
    )
    args = parser.parse_args()
    workload = read(HERE / "serving.toml")
    if args.measure is not None:
        measured = asyncio.run(measure(workload))
        args.measure.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({key: value for key, value in measured.items() if key != "groups"}))
        return 0
    real = json.loads(args.recorded.read_text(encoding="utf-8"))
    simulated = run(workload, {"model": MODEL, **ENGINE}, {"device": "H200", "speed": "virtual"}).as_dict()
    print("\n".join(table(real, simulated)))
    print(f"simulated {simulated['modelled_s']:.1f} s in {simulated['wall_s']:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
