"""How long a step of the real engine takes on a GPU, by what is in its batch: what the simulated device is fitted to.

    PYTHONPATH=src:SITE python benchmarks/gpu/step_times.py --out FILE [--shape llama-3-8b] [--parts decode,prefill]

SITE holds a CUDA build of vLLM. A model of that shape runs with dummy weights and vLLM's own defaults (compilation,
CUDA graphs, asynchronous scheduling). A step's composition is what the scheduler put into it; its time is the time
between the end of the step before and its own, while the pipeline is full, so it is what a server gets. Decode steps
start from a KV cache that vLLM's DecodeBenchConnector fills, since computing 16k tokens for 64 requests would take
most of the time. The recorded results lie in `step_times/`; `benchmarks/calibration.py` fits and compares.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_graft.simulator.model_shape import find_model

SHAPES: dict[str, dict[str, Any]] = {name: find_model(name).config for name in ("llama-3-8b", "qwen3-30b-a3b")}
LONGEST = 16384
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
STEPS = 24  # per decode point; the first third warms up
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384)
PREFILLS = tuple((budget, length) for budget in BUDGETS for length in (512, 2048, 16384))
REPEATS = 6


class Recorder:
    """Notes what each step was made of, and when it ended."""

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[tuple[tuple[tuple[int, int], ...], float]] = []
        self._wrap(scheduler)

    def _wrap(self, scheduler: Any) -> None:
        schedule, update = scheduler.schedule, scheduler.update_from_output
        made: dict[int, tuple[tuple[int, int], ...]] = {}

        def noted_schedule(*args: Any, **kwargs: Any) -> Any:
            before = {name: request.num_computed_tokens for name, request in scheduler.requests.items()}
            output = schedule(*args, **kwargs)
            computed = before | {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
            made[id(output)] = tuple(
                sorted((count, computed[name] + count) for name, count in output.num_scheduled_tokens.items())
            )
            return output

        def noted_update(output: Any, *args: Any, **kwargs: Any) -> Any:
            self.steps.append((made.pop(id(output), ()), time.perf_counter()))
            return update(output, *args, **kwargs)

        scheduler.schedule, scheduler.update_from_output = noted_schedule, noted_update

    def durations(self) -> Iterator[tuple[tuple[tuple[int, int], ...], float]]:
        """Each step but the first, with the time since the end of the step before."""
        for (_, before), (shares, end) in zip(self.steps, self.steps[1:], strict=False):
            if shares:
                yield shares, end - before


def engine(shape: str, *, decode: bool, eager: bool) -> Any:
    """The engine in this process, with vLLM's defaults but for the sizes."""
    from vllm import LLM

    folder = Path(tempfile.mkdtemp())
    config = SHAPES[shape] | {"max_position_embeddings": LONGEST + 1024}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    connector = {"kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}} if decode else {}
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=LONGEST + 256,
        max_num_seqs=256,
        max_num_batched_tokens=LONGEST,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.92,
        enforce_eager=eager,
        disable_log_stats=True,
        **connector,
    )


def prompts(count: int, length: int) -> list[list[int]]:
    return [[100 + (index * 7919 + place) % 20000 for place in range(length)] for index in range(count)]


def submit(llm: Any, count: int, length: int, tokens: int) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    for number, prompt in enumerate(prompts(count, length)):
        llm.llm_engine.add_request(f"{time.perf_counter_ns()}-{number}", {"prompt_token_ids": prompt}, params)


def drain(llm: Any) -> None:
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def capacity(llm: Any) -> int:
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks) * int(cache.block_size)


def decode_points(llm: Any, scheduler: Any, recorder: Recorder) -> Iterator[dict[str, Any]]:
    for context in CONTEXTS:
        for batch in BATCHES:
            if batch * (context + STEPS + 32) > capacity(llm):
                continue
            recorder.steps.clear()
            submit(llm, batch, context, STEPS)
            drain(llm)
            seen = [(shares, seconds) for shares, seconds in recorder.durations() if _decodes(shares, batch)]
            seen = seen[STEPS // 3 : -1]
            if not seen:
                continue
            ms = sorted(1000 * seconds for _, seconds in seen)
            middle = seen[len(seen) // 2][0]
            yield {
                "kind": "decode",
                "batch": batch,
                "context": context,
                "shares": [[batch, 1, round(statistics.mean(end for _, end in middle))]],
                "ms": round(statistics.median(ms), 4),
                "spread": round((ms[-1 - len(ms) // 10] - ms[len(ms) // 10]) / statistics.median(ms), 3),
                "steps": len(ms),
            }


def _decodes(shares: tuple[tuple[int, int], ...], batch: int) -> bool:
    return len(shares) == batch and all(count == 1 for count, _ in shares)


def prefill_points(llm: Any, scheduler: Any, recorder: Recorder) -> Iterator[dict[str, Any]]:
    for budget, length in PREFILLS:
        scheduler.max_num_scheduled_tokens = budget
        recorder.steps.clear()
        count = max(1, REPEATS * max(budget, 1) // length) + (2 if length <= budget else 1)
        submit(llm, min(count, 220), length, 1)
        drain(llm)
        groups: dict[tuple[tuple[int, int], ...], list[float]] = defaultdict(list)
        for shares, seconds in list(recorder.durations())[1:-1]:
            if sum(new for new, _ in shares) == budget:
                groups[shares].append(1000 * seconds)
        # One long prompt in chunks gives as many compositions as chunks: eight of them say enough.
        chosen = list(groups.items())
        for shares, ms in chosen[:: max(1, len(chosen) // 8)]:
            yield {
                "kind": "prefill",
                "tokens": budget,
                "length": length,
                "shares": _merged(shares),
                "ms": round(statistics.median(ms), 4),
                "steps": len(ms),
            }


def mixed_points(llm: Any, scheduler: Any, recorder: Recorder) -> Iterator[dict[str, Any]]:
    """Decoding requests with a chunk of somebody's prompt among them, as a loaded server runs them."""
    for budget, batch in ((512, 32), (1024, 64), (2048, 128), (4096, 128)):
        scheduler.max_num_scheduled_tokens = LONGEST
        recorder.steps.clear()
        submit(llm, batch, 512, 60)
        for _ in range(8):
            llm.llm_engine.step()
        scheduler.max_num_scheduled_tokens = budget
        submit(llm, max(2, 12 * budget // 2048), 2048, 1)
        drain(llm)
        for shares, seconds in list(recorder.durations())[10:]:
            if sum(new for new, _ in shares) == budget and sum(new == 1 for new, _ in shares) == batch:
                yield {
                    "kind": "mixed",
                    "tokens": budget,
                    "batch": batch,
                    "shares": _merged(shares),
                    "ms": 1000 * seconds,
                }


def _merged(shares: tuple[tuple[int, int], ...]) -> list[list[int]]:
    """[how many, new tokens, context] instead of one entry per request."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for share in shares:
        counts[share] += 1
    return [[count, new, context] for (new, context), count in counts.items()]


def child(part: str, shape: str, eager: bool, out: Path) -> None:
    import torch
    import vllm

    began = time.perf_counter()
    llm = engine(shape, decode=part == "decode", eager=eager)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    recorder = Recorder(scheduler)
    config = llm.llm_engine.vllm_config
    about = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "shape": shape,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
        "compilation": str(config.compilation_config.mode),
        "cudagraphs": str(config.compilation_config.cudagraph_mode),
        "kv_tokens": capacity(llm),
        "start_s": round(time.perf_counter() - began, 1),
    }
    print(about, flush=True)
    submit(llm, 8, 512, 16)
    drain(llm)
    points = []
    makers = {"decode": (decode_points,), "prefill": (prefill_points, mixed_points)}[part]
    for maker in makers:
        for point in maker(llm, scheduler, recorder):
            points.append(point)
            print({key: value for key, value in point.items() if key != "shares"}, flush=True)
            out.write_text(json.dumps({"about": about, "points": points}), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the measured points go (JSON)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--parts", default="decode,prefill", help="decode, prefill or both")
    parser.add_argument("--eager", action="store_true", help="without compilation and CUDA graphs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.shape, args.eager, args.out)
        return 0
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    measured: list[dict[str, Any]] = []
    failed = 0
    for part in args.parts.split(","):
        piece = args.out.with_suffix(f".{part}.json")
        command = [sys.executable, __file__, "--child", part, "--shape", args.shape, "--out", str(piece)]
        failed |= subprocess.run(command + ["--eager"] * args.eager, check=False).returncode
        if piece.exists():
            measured.append(json.loads(piece.read_text(encoding="utf-8")))
            piece.unlink()
    args.out.write_text(json.dumps(measured, separators=(",", ":")) + "\n", encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
