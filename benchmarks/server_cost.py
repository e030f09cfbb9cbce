"""Requests per second and CPU time per request of a real API server, stock and with a full plan.

    python benchmarks/server_cost.py [--json] [--rounds 5] [--each]

The servers run side by side on the tiny model (CPU engine) and are asked in turns, round by round, so that a slow
minute of the machine falls on all alike. CPU time is that of every process of a server, read from the kernel before and
after a round: on a noisy machine it says more than the rate. The tiny model's step costs next to nothing, so these
ratios are the worst case: with a real model the same milliseconds disappear in the time of a step.

`--each` adds a server for each part of the plan alone, to see which part costs what.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_graft.launcher.server import ServerProcess
from vllm_graft.testing import Session
from vllm_graft.versions import vllm_version

KEY = "benchmark"
CALLERS = f'[[caller]]\ntenant = "acme"\nkey_sha256 = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]\n'

PARTS = {
    "samplers": 'samplers = ["dry", "xtc", "top-n-sigma", "no-repeat-ngram", "constrained-json"]',
    "scheduler": 'scheduler = "priority-fairness"',
    "callers": 'callers = "callers.toml"',
    "stats": 'stats = ["request-log"]',
    "patches": 'patches = ["stat-logger-guard"]',
}

USES: Mapping[str, Mapping[str, object]] = {
    "dry": {"dry_multiplier": 0.8},
    "xtc": {"xtc_probability": 0.5},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "no-repeat-ngram": {"no_repeat_ngram_size": 8},
    "constrained-json": {"vllm_xargs": {"json_sampler": True}, "ignore_eos": False},
    "the first four": {
        "dry_multiplier": 0.8, "xtc_probability": 0.5, "top_n_sigma": 1.0, "no_repeat_ngram_size": 8,
    },
}  # fmt: skip
"""What a request carries, for each case in which samplers are in use."""


def plan_text(parts: Mapping[str, str]) -> str:
    """A graft.toml with these parts."""
    return "\n".join(["[defaults]", *parts.values(), ""])


def start(folder: Path, name: str, parts: Mapping[str, str]) -> tuple[Session, ServerProcess]:
    """A server that is starting, with a plan of these parts; none of them is the stock server."""
    home = folder / name.replace(" ", "-")
    home.mkdir()
    session = Session(home)
    (home / "callers.toml").write_text(CALLERS, encoding="utf-8")
    if parts:
        session.plan(plan_text(parts))
    else:
        session.env["GRAFT_DISABLE"] = "1"
    server = session.server("--served-model-name", "m", "--max-num-seqs", "64", "--disable-uvicorn-access-log")
    return session, server.start()


def cpu_seconds(server: ServerProcess) -> dict[str, float]:
    """CPU time so far of the API server, and of all other processes of the server together."""
    times = {"api": 0.0, "engine": 0.0}
    for pid in server.leftovers():
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        times["api" if pid == server.pid else "engine"] += (int(fields[11]) + int(fields[12])) / os.sysconf(
            "SC_CLK_TCK"
        )
    return times


def ask(
    server: ServerProcess, requests: int, at_once: int, tokens: int, extra: Mapping[str, object]
) -> dict[str, float]:
    """Send a round of requests: requests per second, and CPU milliseconds per request."""

    def one(number: int) -> None:
        body = {
            "model": "m", "prompt": [3 + (number * 31 + at) % 200 for at in range(32)], "max_tokens": tokens,
            "temperature": 0.8, "ignore_eos": True, **extra,
        }  # fmt: skip
        status, text = server.post("/v1/completions", body, headers={"Authorization": f"Bearer {KEY}"})
        if status != 200:
            raise SystemExit(f"{status}: {text}")

    before, began = cpu_seconds(server), time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, range(requests)))
    wall, after = time.perf_counter() - began, cpu_seconds(server)
    spent = {kind: 1000 * (after[kind] - before[kind]) / requests for kind in before}
    return {"rate": requests / wall, "api_ms": spent["api"], "engine_ms": spent["engine"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--each", action="store_true", help="each part of the plan alone too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="of a round")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    plans: dict[str, Mapping[str, str]] = {"stock": {}, "whole plan": PARTS}
    if args.each:
        plans |= {name: {name: text} for name, text in PARTS.items()}
    with tempfile.TemporaryDirectory() as name:
        rounds = measure(Path(name), plans, args)
    rows = [summarize(case, found, rounds["stock"]) for case, found in rounds.items()]
    facts = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores", "vllm": vllm_version(), "rounds": args.rounds,
        "requests": args.requests, "at_once": args.at_once, "tokens": args.tokens, "rows": rows,
    }  # fmt: skip
    print(json.dumps(facts, indent=1) if args.json else table(facts))
    return 0


def measure(folder: Path, plans: Mapping[str, Mapping[str, str]], args: argparse.Namespace) -> dict[str, list[dict]]:
    """Every round of every case. The first round warms up and does not count."""
    sessions, servers = [], {}
    try:
        for name, parts in plans.items():
            session, servers[name] = start(folder, name, parts)
            sessions.append(session)
            servers[name].wait_healthy(timeout_s=400)
        cases: dict[str, tuple[ServerProcess, Mapping[str, object]]] = {
            name: (server, {}) for name, server in servers.items()
        }
        cases |= {f"in use: {name}": (servers["whole plan"], keys) for name, keys in USES.items()}
        found: dict[str, list[dict]] = {name: [] for name in cases}
        for turn in range(args.rounds + 1):
            for name, (server, extra) in cases.items():
                one = ask(server, args.requests, args.at_once, args.tokens, extra)
                print(f"round {turn}: {name}: {one['rate']:.1f} requests/s", file=sys.stderr, flush=True)
                if turn:
                    found[name].append(one)
        return found
    finally:
        for session in sessions:
            session.close()


def summarize(case: str, found: list[dict], stock: list[dict]) -> dict[str, object]:
    """Medians over the rounds, and the median of the rounds' own ratios to stock."""
    ratios = [one["rate"] / other["rate"] for one, other in zip(found, stock, strict=True)]
    return {
        "case": case,
        **{name: round(statistics.median(one[name] for one in found), 2) for name in ("rate", "api_ms", "engine_ms")},
        "rate_ratio": round(statistics.median(ratios), 3),
        "cpu_ratio": round(
            statistics.median(
                (one["api_ms"] + one["engine_ms"]) / (other["api_ms"] + other["engine_ms"])
                for one, other in zip(found, stock, strict=True)
            ),
            3,
        ),
    }


def table(facts: dict) -> str:
    """The figures for a reader."""
    lines = [
        f"{facts['machine']}, vLLM {facts['vllm']}, tiny model: {facts['at_once']} requests at a time, "
        f"{facts['tokens']} tokens each, {facts['rounds']} rounds of {facts['requests']}",
        f"{'':26} {'requests/s':>10} {'of stock':>9} {'API ms':>7} {'engine ms':>9} {'CPU of stock':>12}",
    ]
    lines += [
        f"{row['case']:26} {row['rate']:10.1f} {row['rate_ratio']:9.3f} {row['api_ms']:7.2f} {row['engine_ms']:9.2f} "
        f"{row['cpu_ratio']:12.3f}"
        for row in facts["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
