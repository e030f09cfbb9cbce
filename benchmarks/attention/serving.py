"""Long chats end to end on a real vLLM: milliseconds of a decode step, and how many chats fit at once.

    PYTHONPATH=src:SITE python -m benchmarks.attention serving               # on a GPU: steps
    python -m benchmarks.attention serving --chats                           # anywhere, on the simulated H200: chats

An 8B shape with dummy weights, 24 requests of 30,000 tokens. Each way runs in a process of its own:

- full:            the model as it is
- stock window:    the model with a sliding window of 4,096 by `hf_overrides`
- compact-window:  the same model with the plan `compact-window`
- sink-window:     the model as it is with the plan `sink-window`, 64 first tokens and a window of 4,032
- scored-blocks:   the model as it is with the plan `scored-blocks`, which keeps a seventh of each request's blocks

A step is the time between two outputs while all requests decode, its median; "ms_at_the_end" is that of the last 32
steps, because `scored-blocks` frees nothing before the first scores have come. "figures" are the policy's own, such as
the KV blocks that are held while all requests decode. For the number of chats the KV cache holds
eight times 30,000 tokens, and more chats than can run are sent; the most that decode at once count. "blocks per chat"
is what the block pool has handed out then, by its own count, for each request that runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_graft.testing.packages import lay_out

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("", {}),
    "stock window": ("", {"hf_overrides": {"sliding_window": 4096}}),
    "compact-window": ('[defaults]\nattention = "compact-window"\n', {"hf_overrides": {"sliding_window": 4096}}),
    "sink-window": (
        '[defaults]\nattention = "sink-window"\n[options.sink-window]\nsink_tokens = 64\nwindow = 4032\n',
        {},
    ),
    "scored-blocks": (
        '[defaults]\nattention = "scored-blocks"\n[options.scored-blocks]\nkeep = 0.1366\nrecent = 256\n',
        {},
    ),
}
REQUESTS, TOKENS, DECODED = 24, 30_000, 160
ENGINE = {"max_num_batched_tokens": 8192, "max_model_len": 32768, "gpu_memory_utilization": 0.9, "block_size": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--chats", action="store_true", help="count the chats that fit instead of timing steps")
    args = parser.parse_args()
    if args.one:
        print("RESULT", json.dumps((count_chats if args.chats else time_steps)(args.one)))
        return
    results: dict[str, Any] = {}
    for way in args.ways.split(","):
        with tempfile.TemporaryDirectory() as folder:
            results[way] = run_apart(way, folder, chats=args.chats)
        print(way, results[way], flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")


def run_apart(way: str, folder: str, *, chats: bool) -> Any:
    """Run one way in a process of its own, in a folder with its plan."""
    plan = WAYS[way][0]
    if plan:
        (Path(folder) / "graft.toml").write_text(plan)
    entries = {
        "vllm.general_plugins": {"graft": "vllm_graft.boot:register"},
        "vllm.platform_plugins": {"graft": "vllm_graft.boot:platform"},
    }
    lay_out(Path(folder), "vllm-graft", entries)
    sources = [str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    path = os.pathsep.join([folder, *sources, str(Path.cwd())])
    simulated = {"GRAFT_SIMULATE": "H200", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if chats else {}
    command = [sys.executable, "-m", "benchmarks.attention", "serving", "--one", way, *(["--chats"] if chats else [])]
    variables = {**os.environ, **simulated, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return json.loads(line.removeprefix("RESULT "))
    return {"failed": done.returncode, "log": (done.stdout + done.stderr)[-3000:]}


def make(way: str, **more: Any) -> Any:
    """The engine of one way."""
    from vllm import LLM

    from vllm_graft.simulator.model_shape import find_model

    folder = str(find_model("llama-3-8b").folder)
    overrides = {"max_position_embeddings": 131072, **WAYS[way][1].get("hf_overrides", {})}
    return LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, hf_overrides=overrides, **{**ENGINE, **more}
    )  # fmt: skip


def prompts(number: int, tokens: int) -> list[dict[str, list[int]]]:
    """Prompts without a common prefix."""
    return [{"prompt_token_ids": [(7 * n + 13 * i) % 100_000 + 10 for i in range(tokens)]} for n in range(number)]


def time_steps(way: str) -> dict[str, Any]:
    """Milliseconds of a decode step with all requests in it."""
    from vllm import SamplingParams

    llm = make(way)
    params = SamplingParams(max_tokens=DECODED, ignore_eos=True, detokenize=False, temperature=0)
    for n, prompt in enumerate(prompts(REQUESTS, TOKENS)):
        llm.llm_engine.add_request(str(n), prompt, params)
    began, moments, figures = time.perf_counter(), [], {}
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        if len(outputs) == REQUESTS and not any(output.finished for output in outputs):
            moments.append(time.perf_counter())
            if len(moments) % 16 == 0:
                figures = policy_figures()
                # The reading is no part of a step.
                moments[-1] = time.perf_counter()
    steps = [1000 * (b - a) for a, b in itertools.pairwise(moments[8:])]
    return {
        "ms_per_step": round(statistics.median(steps), 3),
        "ms_at_the_end": round(statistics.median(steps[-32:]), 3),
        "steps": len(steps),
        "prefill_s": round(moments[0] - began, 1) if moments else 0.0,
        "tokens_per_s": round(1000 * REQUESTS / statistics.median(steps)),
        "figures": figures,
    }


def policy_figures() -> dict[str, int]:
    """The figures of the planned policy, from engine core and the worker."""
    from vllm_graft.ledger import current

    items = [item for row in current().rows() for item in row["items"] if item["point"] == "attention"]
    return {name: number for item in items for name, number in item.get("figures", {}).items()}


def count_chats(way: str) -> dict[str, float]:
    """How many chats of 30,000 tokens decode at once in a KV cache of eight times as many tokens."""
    from vllm import SamplingParams

    blocks = 8 * -(-TOKENS // 16)
    llm = make(way, num_gpu_blocks_override=blocks, max_num_batched_tokens=2048)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    params = SamplingParams(max_tokens=3000, ignore_eos=True, detokenize=False, temperature=0)
    for n, prompt in enumerate(prompts(80, TOKENS - 3000)):
        llm.llm_engine.add_request(str(n), prompt, params)
    most, held, finished = 0, 0.0, False
    # The first that ends has had the others beside it for its whole answer.
    while not finished:
        finished = any(output.finished for output in llm.llm_engine.step())
        decoding = sum(request.num_computed_tokens >= request.num_prompt_tokens for request in scheduler.running)
        if decoding > most:
            most, held = decoding, (pool.num_gpu_blocks - pool.get_num_free_blocks()) / len(scheduler.running)
    return {"chats_at_once": most, "blocks_per_chat": round(held, 1), "blocks": blocks}


if __name__ == "__main__":
    main()
