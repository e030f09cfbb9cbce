"""What a logits processor of an installed package sees under asynchronous scheduling, without async-history and with.

    PYTHONPATH=src:SITE python benchmarks/gpu/async_history.py MODEL [--json FILE]

SITE holds a CUDA build of vLLM, MODEL is a folder such as `vllm-graft model --tiny` prints. A processor that vLLM finds
through its entry point makes every token follow from all before it, so that the answers tell what it saw. The same
batch runs three times on the V1 model runner: scheduled synchronously, asynchronously, asynchronously with the patch.
Printed for each: how many requests follow the real tokens, how many follow placeholders (-1), and what every process
says of itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_graft.testing.packages import lay_out, python_path

PROCESSORS = """
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

def follows(tokens):
    return (7 * sum(tokens) + 3 * len(tokens)) % 50 + 20

def follow(tokens, logits):
    wanted = follows(tokens)
    logits[:] = float("-inf")
    logits[wanted] = 0.0
    return logits

class Chain(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False
    def new_req_logits_processor(self, params):
        return follow
"""

PLAN = '[defaults]\npatches = ["async-history"]\n'

CASES = {
    "synchronous": {"GRAFT_DISABLE": "1", "ASYNCHRONOUS": "0"},
    "asynchronous": {"GRAFT_DISABLE": "1", "ASYNCHRONOUS": "1"},
    "asynchronous, async-history": {"GRAFT_DISABLE": "0", "ASYNCHRONOUS": "1"},
}

REQUESTS = 96
AT_A_TIME = 32


def child(model: str) -> None:
    """One engine; requests of many lengths, of which a third fits at a time, so that they join and leave the batch."""
    from gpu_chain import follows
    from vllm import LLM, SamplingParams

    from vllm_graft.ledger import runs

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=AT_A_TIME,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 28,
        skip_tokenizer_init=True,
        async_scheduling=os.environ["ASYNCHRONOUS"] == "1",
    )
    lengths = [16 + 7 * number % 97 for number in range(REQUESTS)]
    prompts = [{"prompt_token_ids": [10 + number, 20, 30 + number]} for number in range(REQUESTS)]
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False) for n in lengths]
    llm.generate(prompts[:2], params[:2], use_tqdm=False)
    outputs = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    config = llm.llm_engine.vllm_config
    result = {
        "runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
        "asynchronous": config.scheduler_config.async_scheduling,
        "requests": REQUESTS,
        "follow_the_tokens": sum(all(follows(t[:n]) == t[n] for n in range(len(t))) for t in outputs),
        "follow_placeholders": sum(all(follows([-1] * n) == t[n] for n in range(len(t))) for t in outputs),
        "lengths_right": [len(tokens) for tokens in outputs] == lengths,
        "processes": [
            {
                "name": row["name"],
                "roles": row["roles"],
                "vllm": row["vllm"],
                "items": {item["name"]: [item["state"], item["calls"]] for item in row["items"]},
            }
            for view in runs()
            for row in view.rows()
            if row["life"] == "running"
        ],
        "findings": [finding.as_dict() for view in runs() for finding in view.findings()],
    }
    print("RESULT " + json.dumps(result), flush=True)


def engine(model: str, folder: Path, case: str) -> dict[str, object]:
    env = {
        **os.environ,
        **CASES[case],
        "PYTHONPATH": python_path(folder),
        "GRAFT_CONFIG": str(folder / "graft.toml"),
        "GRAFT_STATE_DIR": str(folder / case.replace(", ", "-")),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, model, "--child"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"the engine failed ({case}):\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return {"case": case, **json.loads(line[7:])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model)
        return 0
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(folder, "vllm-graft", {"vllm.general_plugins": {"graft": "vllm_graft.boot:register"}})
        lay_out(
            folder, "gpu-chain", {"vllm.logits_processors": {"chain": "gpu_chain:Chain"}}, {"gpu_chain": PROCESSORS}
        )
        (folder / "graft.toml").write_text(PLAN, encoding="utf-8")
        for case in CASES:
            results.append(engine(args.model, folder, case))
            print(json.dumps(results[-1], indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
