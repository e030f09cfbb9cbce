"""The tokens of a windowed server beside Hugging Face with the explicit mask, on the device that is here.

    PYTHONPATH=src:SITE python -m benchmarks.attention tokens MODEL [--json FILE] [--only "V1;V2"]

MODEL is a folder such as `vllm-graft model --tiny` prints. The same prompts, some much longer than the window, are
answered greedily by a server with the plan `sink-window`, twice in a row; the reference is one forward pass over prompt
and answer with the mask written out, in float32 on the host. In bfloat16 near ties may fall to either side, so the
difference of the log probabilities of the chosen tokens is given too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.testing.packages import lay_out

SINKS, WINDOW, ANSWER = 4, 192, 120
LENGTHS = (40, 150, 300, 500, 777)
PLAN = f'[defaults]\nattention = "sink-window"\n[options.sink-window]\nsink_tokens = {SINKS}\nwindow = {WINDOW}\n'
ENGINE: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 256, "seed": 0, "block_size": 32}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "V2": ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, {}),
    "V1": ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, {}),
    "V2, eager": ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, {"enforce_eager": True}),
    "V2, float32, Triton": (
        {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        {"dtype": "float32", "attention_backend": "TRITON_ATTN"},
    ),
    "V1, float32, Triton, no prefix cache": (
        {"VLLM_USE_V2_MODEL_RUNNER": "0"},
        {"dtype": "float32", "attention_backend": "TRITON_ATTN", "enable_prefix_caching": False},
    ),
    "V2, float32, Triton, drafts": (
        {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        {"dtype": "float32", "attention_backend": "TRITON_ATTN", "speculative_config": DRAFTS},
    ),
    "V2, float32, Triton, preempted": (
        {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        {"dtype": "float32", "attention_backend": "TRITON_ATTN", "num_gpu_blocks_override": 40},
    ),
    "V2, float32, Triton, blocks of 16": (
        {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        {"dtype": "float32", "attention_backend": "TRITON_ATTN", "block_size": 16},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=";".join(CASES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("RESULT", json.dumps(answer(args.model, args.one)))
        return
    results = {}
    for case in args.only.split(";"):
        results[case] = run_apart(args.model, case)
        print(case, results[case], flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")


def run_apart(model: str, case: str) -> Any:
    """Run one case in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "graft.toml").write_text(PLAN)
        lay_out(Path(folder), "vllm-graft", {"vllm.general_plugins": {"graft": "vllm_graft.boot:register"}})
        sources = [str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        path = os.pathsep.join([folder, *sources, str(Path.cwd())])
        variables = {**os.environ, **CASES[case][0], "PYTHONPATH": path}
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

    arguments = {**ENGINE, **CASES[case][1]}
    llm = LLM(model=model, gpu_memory_utilization=0.3, **arguments)
    generator = torch.Generator().manual_seed(1)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [torch.randint(5, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=1)
    rounds = [llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False) for _ in range(2)]
    equal = again = total = 0
    difference = 0.0
    for prompt, first, second in zip(prompts, *rounds, strict=True):
        tokens = list(first.outputs[0].token_ids)
        logprobs = [step[token].logprob for step, token in zip(first.outputs[0].logprobs, tokens, strict=True)]
        reference = reference_logprobs(model, prompt + tokens, arguments["block_size"])[len(prompt) - 1 : -1]
        equal += sum(a == b for a, b in zip(reference.argmax(-1).tolist(), tokens, strict=True))
        again += sum(a == b for a, b in zip(tokens, second.outputs[0].token_ids, strict=True))
        total += len(tokens)
        ours = reference.gather(1, torch.tensor(tokens)[:, None]).flatten()
        difference = max(difference, float((ours - torch.tensor(logprobs)).abs().max()))
    cached = [output.num_cached_tokens for output in rounds[1]]
    return {"equal": equal, "again": again, "of": total, "logprob_difference": round(difference, 5), "cached": cached}


def reference_logprobs(model: str, tokens: list[int], block_size: int) -> Any:
    """Log probabilities after each token, by Hugging Face in float32 with the explicit mask."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    shape = WindowShape.fit(SINKS, WINDOW, block_size)
    query, key = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))[None]
    seen = (key <= query) & ((key < shape.first) | (key >= query // shape.step * shape.step - shape.before))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        return network(torch.tensor([tokens]), attention_mask=mask).logits[0].log_softmax(-1)


if __name__ == "__main__":
    main()
