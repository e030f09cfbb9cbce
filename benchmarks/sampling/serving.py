"""Tokens per second of a real server with the samplers absent, loaded and idle, and in use.

    python -m benchmarks.sampling.serving [--json] [--rounds 5]                 # CPU: the embedded model
    PYTHONPATH=src:SITE python -m benchmarks.sampling.serving --gpu [--json]    # GPU: Llama-3-8B's shape, dummy weights

Two servers run at the same time, one stock (GRAFT_DISABLE=1), one with the plan, and are asked in turns: stock, idle,
each strategy, all of them; round by round, so that a slow minute of the machine falls on all alike. Each figure is the
median over the rounds, each ratio the median of the rounds' own ratios to stock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_graft.testing import Session
from vllm_graft.testing.packages import lay_out
from vllm_graft.versions import vllm_version

PLAN = '[defaults]\nsamplers = ["dry", "xtc", "top-n-sigma", "no-repeat-ngram"]\n'

USES: dict[str, dict[str, object]] = {
    "stock": {},
    "loaded, idle": {},
    "dry": {"dry_multiplier": 0.8},
    "xtc": {"xtc_probability": 0.5},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "no-repeat-ngram": {"no_repeat_ngram_size": 8},
    "all": {"dry_multiplier": 0.8, "xtc_probability": 0.5, "top_n_sigma": 1.0, "no_repeat_ngram_size": 8},
}


def gpu_model(folder: Path) -> Path:
    """Llama-3-8B's shape, and a tokenizer that has a word for each of its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from vllm_graft.simulator.model_shape import find_model

    made = folder / "llama-3-8b"
    made.mkdir()
    config = json.loads((find_model("llama-3-8b").folder / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config))
    words = {f"t{number}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return made


def ask(server, model: str, count: int, tokens: int, extra: dict[str, object], seed: int) -> float:
    """So many requests at once; tokens per second."""

    def one(number: int) -> int:
        body = {
            "model": model,
            "prompt": [100 + (seed * 7919 + number * 31 + at) % 5000 for at in range(64)],
            "max_tokens": tokens,
            "temperature": 0.8,
            "seed": number,
            "ignore_eos": True,
            **extra,
        }
        status, text = server.post("/v1/completions", body)
        if status != 200:
            raise SystemExit(f"{status}: {text}")
        return int(json.loads(text)["usage"]["completion_tokens"])

    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        total = sum(pool.map(one, range(count)))
    return total / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, help="at a time (CPU: 8, GPU: 128)")
    parser.add_argument("--tokens", type=int, help="of each (CPU: 48, GPU: 256)")
    args = parser.parse_args()
    count = args.requests or (128 if args.gpu else 8)
    tokens = args.tokens or (256 if args.gpu else 48)
    with tempfile.TemporaryDirectory() as name:
        rates = measured(Path(name), args, count, tokens)
    stock = rates["stock"]
    rows = [
        {
            "case": case,
            "tokens_per_s": round(statistics.median(found), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(found, stock, strict=True)), 4),
            "ratios": [round(a / b, 4) for a, b in zip(found, stock, strict=True)],
        }
        for case, found in rates.items()
    ]
    facts = {
        "machine": gpu_name() if args.gpu else f"{platform.machine()}, {os.cpu_count()} cores",
        "vllm": vllm_version(),
        "requests": count,
        "tokens": tokens,
        "rounds": args.rounds,
        "rows": rows,
    }
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    print(f"{facts['machine']}, vLLM {facts['vllm']}: {count} requests at a time, {tokens} tokens each")
    for row in rows:
        print(
            f"  {row['case']:16} {row['tokens_per_s']:10.1f} tokens/s   {row['ratio']:.3f} of stock   {row['ratios']}"
        )
    return 0


def measured(folder: Path, args: argparse.Namespace, count: int, tokens: int) -> dict[str, list[float]]:
    if args.gpu:
        model = gpu_model(folder)
        more = ["--load-format", "dummy", "--max-model-len", "2048", "--gpu-memory-utilization", "0.4"]
        more += ["--max-num-seqs", str(count)]
    else:
        from vllm_graft.testing import embedded_model

        model = embedded_model()
        more = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "32"]
    servers = {}
    sessions = []
    for kind in ("stock", "planned"):
        home = folder / kind
        home.mkdir()
        session = Session(home)
        sessions.append(session)
        session.plan(PLAN)
        if args.gpu:
            lay_out(home / "site", "vllm-graft", {"vllm.general_plugins": {"graft": "vllm_graft.boot:register"}})
        if kind == "stock":
            session.env["GRAFT_DISABLE"] = "1"
        servers[kind] = session.server("--served-model-name", "m", "--no-enable-prefix-caching", *more, model=model)
    try:
        for server in servers.values():
            server.start()
            server.wait_healthy(timeout_s=400)
        return rounds(servers, args.rounds, count, tokens)
    finally:
        for session in sessions:
            session.close()


def rounds(servers: dict, number: int, count: int, tokens: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {case: [] for case in USES}
    for turn in range(number + 1):
        for case, extra in USES.items():
            server = servers["stock" if case == "stock" else "planned"]
            rate = ask(server, "m", count, tokens, extra, turn)
            if turn:  # the first round warms up
                rates[case].append(rate)
            print(f"round {turn}: {case}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
    return rates


def gpu_name() -> str:
    import torch

    return str(torch.cuda.get_device_name())


if __name__ == "__main__":
    raise SystemExit(main())
