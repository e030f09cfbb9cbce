"""The shipped samplers on a GPU, under both model runners of a real vLLM: the same tokens, no waits, nothing lost.

    PYTHONPATH=src:SITE python benchmarks/gpu/samplers.py MODEL [--json FILE]

SITE holds a CUDA build of vLLM, MODEL is a folder such as `vllm-graft model --tiny` prints. The same 48 requests, each
asking for another mix of samplers, run

- on the V1 runner and on the V2 runner: are the tokens the same? (vLLM's own random numbers differ between the two, so
  requests that are not greedy take the most probable token that is left, top_k = 1)
- on the V2 runner with VLLM_GPU_SYNC_CHECK=error, where vLLM raises on any wait for the device that is not its own
- on the V2 runner with drafts (n-gram speculation), and with a KV cache so small that requests are preempted
- on both with prompts that are read in parts and are longer than the 100 tokens that are looked at
- on the V2 runner with a sampler that raises for one request in five: how many requests are lost?
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_graft.testing.packages import lay_out, python_path

PLAN = """
[defaults]
samplers = ["dry", "xtc", "top-n-sigma", "no-repeat-ngram", "constrained-json", "raises", "last"]
[options.dry]
window = 100
[options.no-repeat-ngram]
window = 100
[options.raises]
on_error = "request"
"""

ITEMS = """
from vllm_graft import Key, Sampler, SamplingStrategy

class Raises(SamplingStrategy):
    keys = (Key("raises", "bool", False, switch=True),)
    def open(self, slot, params):
        return True
    def step(self, logits, rows):
        raise RuntimeError("on purpose")

class Last(Sampler):
    keys = (Key("last", "int", 0, low=1, high=9, switch=True),)
    def sample(self, logits, params):
        order = logits.argsort(dim=-1, descending=True)
        return [int(order[row, p["last"]]) for row, p in enumerate(params)]
"""

MIXES = [
    {},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": []},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": 24, "dry_sequence_breakers": []},
    {"no_repeat_ngram_size": 2},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"top_n_sigma": 1.0},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": [], "xtc_probability": 1.0, "xtc_threshold": 0.005},
    {"last": 2},
    {"json_sampler": True},
]

PICKS = ("last", "json_sampler")
REQUESTS = 54

CASES = {
    "V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    "V2, sync check": {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_GPU_SYNC_CHECK": "error", "NO_PICKS": "1"},
    "V2, drafts": {"VLLM_USE_V2_MODEL_RUNNER": "1", "DRAFTS": "1", "NO_PICKS": "1"},
    "V2, preempted": {"VLLM_USE_V2_MODEL_RUNNER": "1", "SMALL": "1"},
    "V1, preempted": {"VLLM_USE_V2_MODEL_RUNNER": "0", "SMALL": "1"},
    "V2, long": {"VLLM_USE_V2_MODEL_RUNNER": "1", "LONG": "1"},
    "V1, long": {"VLLM_USE_V2_MODEL_RUNNER": "0", "LONG": "1"},
    "V2, raising": {"VLLM_USE_V2_MODEL_RUNNER": "1", "RAISING": "1"},
}


def child(model: str) -> None:
    """One engine, all requests."""
    from vllm import LLM, SamplingParams

    from vllm_graft.ledger import runs

    arguments: dict[str, object] = {}
    if os.environ.get("DRAFTS"):
        arguments["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    if os.environ.get("SMALL"):
        arguments |= {"num_gpu_blocks_override": 96, "enable_prefix_caching": False}
    if os.environ.get("LONG"):
        arguments |= {"max_num_batched_tokens": 128, "enable_prefix_caching": False}
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=32,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=False,
        **arguments,
    )
    often = 60 if os.environ.get("LONG") else 1
    prompts = [{"prompt_token_ids": [10 + n % 7, 20, 30 + n, 10 + n % 7, 20] * often} for n in range(REQUESTS)]
    params = []
    for number in range(REQUESTS):
        extra = dict(MIXES[number % len(MIXES)])
        if os.environ.get("NO_PICKS"):
            extra = {key: value for key, value in extra.items() if key not in PICKS}
        if os.environ.get("RAISING") and number % 5 == 0:
            extra["raises"] = True
        params.append(
            SamplingParams(
                max_tokens=48 + number,
                temperature=1.0 if "xtc_probability" in extra or "top_n_sigma" in extra else 0.0,
                top_k=1,
                seed=number,
                ignore_eos="json_sampler" not in extra,
                detokenize=False,
                extra_args=extra or None,
            )
        )
    llm.generate(prompts[:1], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False), use_tqdm=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    texts = [llm.get_tokenizer().decode(one.outputs[0].token_ids, skip_special_tokens=True) for one in outputs]
    documents = [texts[n] for n in range(REQUESTS) if "json_sampler" in MIXES[n % len(MIXES)]]
    accepted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    result = {
        "runner": "V2" if getattr(llm.llm_engine.vllm_config, "use_v2_model_runner", False) else "V1",
        "preemptions": preempted,
        "accepted_drafts": accepted,
        "documents": documents,
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "reasons": [output.outputs[0].finish_reason for output in outputs],
        "items": {
            item["name"]: {
                "state": item["state"],
                "reason": item["reason"],
                "hooks": {name: [hook["calls"], round(hook["mean_us"])] for name, hook in item["hooks"].items()},
            }
            for view in runs()
            for row in view.rows()
            if row["life"] == "running" and "worker" in row["roles"]
            for item in row["items"]
        },
    }
    print("RESULT " + json.dumps(result), flush=True)


def engine(model: str, folder: Path, case: str) -> dict:
    env = {
        **os.environ,
        **CASES[case],
        "PYTHONPATH": python_path(folder),
        "GRAFT_CONFIG": str(folder / "graft.toml"),
        "GRAFT_STATE_DIR": str(folder / case.replace(", ", "-").replace(" ", "-")),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, model, "--child"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        return {"case": case, "failed": f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"}
    return {"case": case, **json.loads(line[7:])}


def summary(found: dict, base: dict) -> dict[str, object]:
    """One case beside the first V2 run."""
    if "failed" in found:
        return found
    pairs = list(zip(found["outputs"], base.get("outputs", found["outputs"]), strict=True))
    picks = [n for n in range(REQUESTS) if set(PICKS) & set(MIXES[n % len(MIXES)])]
    compared = [n for n in range(REQUESTS) if not (CASES[found["case"]].get("NO_PICKS") and n in picks)]
    ended = [n for n in range(REQUESTS) if found["reasons"][n] not in ("length", "stop")]
    return {
        "case": found["case"],
        "runner": found["runner"],
        "same_tokens_as_v2": sum(pairs[n][0] == pairs[n][1] for n in compared),
        "of": len(compared),
        "different": [n for n in compared if pairs[n][0] != pairs[n][1]],
        "ended_otherwise": {n: found["reasons"][n] for n in ended},
        "preemptions": found["preemptions"],
        "accepted_drafts": found["accepted_drafts"],
        "documents": [parses(text) for text in found["documents"]],
        "items": found["items"],
    }


def parses(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=";".join(CASES), help="cases, separated by semicolons")
    parser.add_argument("--at-a-time", type=int, default=3, help="engines on the GPU at a time")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model)
        return 0
    cases = [case for case in args.only.split(";") if case != "V2"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(folder, "vllm-graft", {"vllm.general_plugins": {"graft": "vllm_graft.boot:register"}})
        lay_out(
            folder,
            "gpu-samplers",
            {"vllm_graft.plugins": {"raises": "gpu_samplers:Raises", "last": "gpu_samplers:Last"}},
            {"gpu_samplers": ITEMS},
        )
        (folder / "graft.toml").write_text(PLAN, encoding="utf-8")
        with ThreadPoolExecutor(args.at_a_time) as pool:
            base, *others = pool.map(lambda case: engine(args.model, folder, case), ["V2", *cases])
        by_case = {found["case"]: found for found in (base, *others)}
        results = [
            summary(found, by_case.get("V2, long", base) if "long" in case else base) for case, found in by_case.items()
        ]
    for found in results:
        print(json.dumps(found, indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
