"""The tokens of servers with planned attention beside Hugging Face with the mask written out, on the device at hand.

    PYTHONPATH=src:SITE python -m benchmarks.attention tokens MODEL [--json FILE] [--only "V1;V2"]

MODEL is a folder such as `vllm-graft model --tiny` prints. The same prompts, some much longer than the window, are
answered greedily twice in a row by servers with the plans `sink-window`, `compact-window` (on the model with a sliding
window of 100 tokens, which begins inside of blocks) and `scored-blocks`, with a policy that evicts every other block
and with the kernel of the tutorial. The reference is one forward pass over prompt and answer with the mask written out,
in float32 on the host; policies that evict have written down what and when. In bfloat16 near ties may fall to either
side, so the difference of the log probabilities of the chosen tokens is given too.
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
from typing import Any

from benchmarks.attention.serving import policy_figures

from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.testing.packages import lay_out

SINKS, WINDOW, ANSWER = 4, 192, 120
LENGTHS = (40, 150, 300, 500, 777)
PLANS = {
    "sink-window": f"[options.sink-window]\nsink_tokens = {SINKS}\nwindow = {WINDOW}\n",
    "own windows": f'[options.sink-window]\nsink_tokens = {SINKS}\nwindow = {WINDOW}\ndefault = "full"\n',
    "compact-window": "",
    "every-other": "",
    "recorded-scores": (
        "[options.recorded-scores]\nkeep = 0.5\nfirst = 32\nrecent = 64\nmin_tokens = 128\nevery = 4\nlayers = 'all'\n"
    ),
    "plain-attention": "",
}
OWN = (None, 128, None, 128, WINDOW)
"""With the plan "own windows", the ``kv_window`` of each prompt; the others have full attention."""
EVICTING = ("every-other", "recorded-scores")
POLICIES = """
import json, os
from vllm_graft import KVPolicy
from vllm_graft.plugins.attention.scored_blocks import ScoredBlocks

def record(request, gone):
    with open(os.environ["EVICTED"], "a") as file:
        print(json.dumps([request.request_id, request.tokens, list(gone)]), file=file)
    return gone

class EveryOther(KVPolicy):
    def evict(self, request):
        return record(request, [block for block in request.evictable[1:-4] if block % 2])

class RecordedScores(ScoredBlocks):
    def evict(self, request):
        return record(request, super().evict(request))
"""
TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "first-attention-kernel.md"
ENGINE: dict[str, Any] = {
    "gpu_memory_utilization": 0.1,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "seed": 0,
    "block_size": 32,
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
OWN_WINDOW = {"hf_overrides": {"sliding_window": 100}}
FLOAT32 = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "V2": ("sink-window", "1", {}),
    "V1": ("sink-window", "0", {}),
    "V2, eager": ("sink-window", "1", {"enforce_eager": True}),
    "V2, float32, Triton": ("sink-window", "1", FLOAT32),
    "V1, float32, Triton, no prefix cache": ("sink-window", "0", {**FLOAT32, "enable_prefix_caching": False}),
    "V2, float32, Triton, drafts": ("sink-window", "1", {**FLOAT32, "speculative_config": DRAFTS}),
    "V2, float32, Triton, blocks of 16": ("sink-window", "1", {**FLOAT32, "block_size": 16}),
    "V2, float32, Triton, evicted": ("every-other", "1", {**FLOAT32, "async_scheduling": False}),
    "V1, float32, Triton, evicted": ("every-other", "0", {**FLOAT32, "async_scheduling": False}),
    "V2, float32, Triton, eager": ("sink-window", "1", {**FLOAT32, "enforce_eager": True}),
    "V2, float32, Triton, evicted, eager": (
        "every-other",
        "1",
        {**FLOAT32, "async_scheduling": False, "enforce_eager": True},
    ),
    "V2, own windows": ("own windows", "1", {}),
    "V2, float32, Triton, own windows": ("own windows", "1", FLOAT32),
    "V1, float32, Triton, own windows": ("own windows", "0", FLOAT32),
    "V2, scored": ("recorded-scores", "1", {"async_scheduling": False}),
    "V2, float32, Triton, scored": ("recorded-scores", "1", {**FLOAT32, "async_scheduling": False}),
    "V1, float32, Triton, scored": ("recorded-scores", "0", {**FLOAT32, "async_scheduling": False}),
    "V2, compact": ("compact-window", "1", OWN_WINDOW),
    "V1, compact": ("compact-window", "0", OWN_WINDOW),
    "V2, compact, eager": ("compact-window", "1", {**OWN_WINDOW, "enforce_eager": True}),
    "V2, compact, blocks of 16, drafts": (
        "compact-window",
        "1",
        {**OWN_WINDOW, "block_size": 16, "speculative_config": DRAFTS},
    ),
    "V2, float32, Triton, compact": ("compact-window", "1", {**FLOAT32, **OWN_WINDOW}),
    "V2, tutorial kernel": ("plain-attention", "1", {"dtype": "float32"}),
    "V1, tutorial kernel": ("plain-attention", "0", {"dtype": "float32"}),
}
"""The plan, the model runner (VLLM_USE_V2_MODEL_RUNNER) and the engine's arguments of each case."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=";".join(CASES))
    parser.add_argument("--at-a-time", type=int, default=3, help="engines on the device at a time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("RESULT", json.dumps(answer(args.model, args.one)))
        return
    results = {}
    cases = args.only.split(";")
    with ThreadPoolExecutor(args.at_a_time) as pool:
        for case, found in zip(cases, pool.map(lambda case: run_apart(args.model, case), cases), strict=True):
            results[case] = found
            print(case, found, flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")


def run_apart(model: str, case: str) -> Any:
    """Run one case in a process of its own."""
    plan, runner, _ = CASES[case]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        item = "sink-window" if plan == "own windows" else plan
        (folder / "graft.toml").write_text(f'[defaults]\nattention = "{item}"\n{PLANS[plan]}')
        lay_out(folder, "vllm-graft", {"vllm.general_plugins": {"graft": "vllm_graft.boot:register"}})
        entries = {
            "every-other": "evicting:EveryOther",
            "recorded-scores": "evicting:RecordedScores",
            "plain-attention": "acme_attention:PlainAttention",
        }
        kernel = TUTORIAL.read_text().partition("```python\n")[2].partition("```")[0]
        modules = {"evicting": POLICIES, "acme_attention": kernel}
        lay_out(folder, "planned-attention", {"vllm_graft.plugins": entries}, modules)
        sources = [str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        variables = {
            **os.environ,
            "VLLM_USE_V2_MODEL_RUNNER": runner,
            "EVICTED": str(folder / "evicted"),
            "PYTHONPATH": os.pathsep.join([name, *sources, str(Path.cwd())]),
        }
        command = [sys.executable, "-m", "benchmarks.attention", "tokens", str(Path(model).resolve()), "--one", case]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return json.loads(line.removeprefix("RESULT "))
    return {"failed": done.returncode, "log": (done.stdout + done.stderr)[-3000:]}


def answer(model: str, case: str) -> dict[str, Any]:
    """Answer the prompts twice, and compare with the reference."""
    import torch
    from vllm import LLM, SamplingParams

    plan, _, more = CASES[case]
    arguments = {**ENGINE, **more}
    llm = LLM(model=model, kv_cache_memory_bytes=1 << 30, **arguments)
    generator = torch.Generator().manual_seed(1)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [torch.randint(5, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    windows = OWN if plan == "own windows" else (None,) * len(prompts)
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=ANSWER,
            ignore_eos=True,
            logprobs=1,
            extra_args={"kv_window": own} if own else None,
        )
        for own in windows
    ]

    def ask(prompts: list[list[int]]) -> list[Any]:
        asked = [{"prompt_token_ids": each} for each in prompts]
        return llm.generate(asked, params[: len(asked)], use_tqdm=False)

    # What is evicted is told apart by the request, so those run one after another.
    rounds = [[ask([each])[0] for each in prompts] if plan in EVICTING else ask(prompts) for _ in range(2)]
    evicted = _evictions()
    equal = again = total = blocks_gone = 0
    difference = 0.0
    for prompt, own, first, second in zip(prompts, windows, *rounds, strict=True):
        tokens = list(first.outputs[0].token_ids)
        logprobs = [step[token].logprob for step, token in zip(first.outputs[0].logprobs, tokens, strict=True)]
        gone = evicted.pop(0) if plan in EVICTING and evicted else []
        blocks_gone += sum(len(blocks) for _, blocks in gone)
        seen = seen_keys(plan, len(prompt), len(tokens), arguments["block_size"], gone, own)
        reference = reference_logprobs(model, prompt + tokens, seen)[len(prompt) - 1 : -1]
        equal += sum(a == b for a, b in zip(reference.argmax(-1).tolist(), tokens, strict=True))
        again += sum(a == b for a, b in zip(tokens, second.outputs[0].token_ids, strict=True))
        total += len(tokens)
        ours = reference.gather(1, torch.tensor(tokens)[:, None]).flatten()
        difference = max(difference, float((ours - torch.tensor(logprobs)).abs().max()))
    return {
        "equal": equal,
        "again": again,
        "of": total,
        "logprob_difference": round(difference, 5),
        "cached": [output.num_cached_tokens for output in rounds[1]],
        **({"evicted_blocks": blocks_gone} if plan in EVICTING else {}),
        "figures": policy_figures(),
    }


def _evictions() -> list[list[tuple[int, list[int]]]]:
    """What was evicted of each request, in the order of the requests: the tokens computed by then, and the blocks."""
    file = Path(os.environ["EVICTED"])
    found: dict[str, list[tuple[int, list[int]]]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        request, tokens, gone = json.loads(line)
        found.setdefault(request, []).append((tokens, gone))
    return list(found.values())


def seen_keys(
    plan: str, prompt: int, answer: int, block_size: int, evicted: list[tuple[int, list[int]]], own: int | None
) -> Any:
    """The keys that each query sees, as a matrix of booleans."""
    import torch

    query, key = torch.arange(prompt + answer)[:, None], torch.arange(prompt + answer)[None]
    seen = key <= query
    if plan == "sink-window" or own:
        shape = WindowShape.fit(SINKS, own or WINDOW, block_size)
        seen &= (key < shape.first) | (key >= query // shape.step * shape.step - shape.before)
    if plan == "compact-window":
        seen &= key > query - OWN_WINDOW["hf_overrides"]["sliding_window"]
    step = ENGINE["max_num_batched_tokens"]
    for position in range(prompt + answer):
        start = position if position >= prompt else position // step * step
        for tokens, gone in evicted:
            for block in gone if tokens <= start else ():
                seen[position, block * block_size : (block + 1) * block_size] = False
    return seen


def reference_logprobs(model: str, tokens: list[int], seen: Any) -> Any:
    """Log probabilities after each token, by Hugging Face in float32 with the explicit mask."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        return network(torch.tensor([tokens]), attention_mask=mask).logits[0].log_softmax(-1)


if __name__ == "__main__":
    main()
