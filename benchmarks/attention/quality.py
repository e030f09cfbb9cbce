"""What KV policies cost in quality: perplexity on long texts, and answers about a long context. Without vLLM.

    python -m benchmarks.attention quality [--model DIR] [--texts N] [--device cuda] [--json FILE] [--svg FILE]
    python -m benchmarks.attention quality --record benchmarks/attention/quality.json [--svg FILE]  # of an earlier run

The model is computed by Hugging Face in float32, over exactly the tokens that a policy keeps. For a window, a server
computes the same function, which the tests and `tokens` show. A process for each core, with about 2.5 GB each for the
embedded model; `python -m benchmarks.attention.qwen DIR` makes a larger one.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from benchmarks.attention.lanes import Lane, Network, Reading
from benchmarks.attention.policies import Policy, all_policies, tokens_held
from benchmarks.attention.prompts import CONTEXT, CONTEXTS, TEXTS, TOKENS, make_context
from benchmarks.attention.quality_picture import draw

from vllm_graft.bindings.attention.compaction import SMALLEST_STEP
from vllm_graft.testing import embedded_model

Row = dict[str, Any]
Job = tuple[str, int]
"""``text`` or ``context``, and its number."""

ANSWER: Final = 16
"""Tokens of an answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder in Hugging Face's format; else the embedded model")
    parser.add_argument(
        "--texts", type=int, default=2, choices=range(1, len(TEXTS) + 1), help="how many texts are read"
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu", help="where the model is computed, such as cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--record", type=Path, help="show the record of an earlier run; nothing is computed")
    args = parser.parse_args()
    record: Row = json.loads(args.record.read_text()) if args.record else {}
    if not args.record:
        for record in measure(args.model or embedded_model(), args.texts, args.processes, args.device):
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(*tables(record), sep="\n\n")
    if args.svg:
        args.svg.write_text(draw(record), encoding="utf-8")


def measure(folder: Path, texts: int, processes: int, device: str) -> Iterator[Row]:
    """Run all jobs, each in a process with one thread; yield the record as it grows."""
    jobs = [*(("text", i) for i in range(texts)), *(("context", i) for i in range(CONTEXTS))]
    done: list[Row] = []
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes, _prepare, (folder, device)) as pool:
        for result in pool.imap_unordered(_run, jobs, chunksize=1):
            done.append(result)
            print(f"{result['kind']} {result['number']}: {result['seconds']:.0f} s", flush=True)
            yield summarize(folder.name, done, time.monotonic() - start)


_network: Network


def _prepare(folder: Path, device: str) -> None:
    """Load the model in a process of the pool."""
    global _network
    # Two threads on cores that others use too wait for each other at every product.
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.disable_progress_bar()
    _network = Network(folder, device)
    # Lanes, positions and masks are made beside the model.
    torch.set_default_device(device)


def _run(job: Job) -> Row:
    kind, number = job
    start = time.monotonic()
    found = read_text(_network, number) if kind == "text" else answer_questions(_network, number)
    return {"kind": kind, "number": number, **found, "seconds": round(time.monotonic() - start, 1)}


def read_text(network: Network, number: int) -> Row:
    """Read a text under all policies; how well is each token of the second half predicted?"""
    tokens = torch.tensor(network.tokenize(TEXTS[number].load())[:TOKENS])
    policies = all_policies()
    reading = Reading(network, policies, TOKENS)
    rows = {policy: {"policy": policy.name, "loss": 0.0, "changed": 0, "seen": 0} for policy in policies}
    predicted = 0
    for begin, states in reading.read(tokens):
        following = tokens[begin + 1 : begin + 1 + len(states[policies[0]])]
        if begin < TOKENS // 2:
            continue
        predicted += len(following)
        # Policies without a lane of their own share its states, and what follows from them.
        outcomes: dict[Lane, tuple[float, torch.Tensor]] = {}
        for policy, row in rows.items():
            lane = reading.lane_of[policy]
            if lane not in outcomes:
                logits = network.logits(states[policy][: len(following)])
                loss = torch.nn.functional.cross_entropy(logits, following, reduction="sum")
                outcomes[lane] = float(loss), logits.argmax(-1)
            loss, choice = outcomes[lane]
            row["loss"] += loss
            row["changed"] += int((choice != outcomes[reading.base][1]).sum())
            # The tokens of this block see, in the mean, half of it.
            row["seen"] += (len(lane.held) - len(following) / 2) * len(following)
    for row in rows.values():
        row["seen"] = round(row["seen"] / predicted)
        row["loss"] = round(row["loss"], 3)
    return {"predicted": predicted, "text": TEXTS[number].describe(), "rows": list(rows.values())}


def answer_questions(network: Network, number: int) -> Row:
    """Read a context under all policies, and answer the questions about it, each as if it were the only one."""
    context = make_context(number, network.tokenize)
    lengths = torch.tensor([len(question) for question in context.questions])
    if lengths.max() + ANSWER > SMALLEST_STEP:
        raise ValueError(f"a question of {lengths.max()} tokens and its answer are more than a step of the windows")
    count = len(lengths)
    policies = all_policies()
    reading = Reading(network, policies, CONTEXT + int(lengths.sum()) + count * ANSWER)
    for _ in reading.read(torch.tensor(context.tokens)):
        pass
    reading.retain(CONTEXT)
    branches = torch.arange(count)
    questions = torch.tensor([token for question in context.questions for token in question])
    positions = torch.cat([torch.arange(CONTEXT, CONTEXT + length) for length in lengths])
    states = reading.step(questions, positions, branches.repeat_interleave(lengths))
    last = {policy: each[lengths.cumsum(0) - 1] for policy, each in states.items()}
    answers: dict[Policy, list[torch.Tensor]] = {policy: [] for policy in policies}
    for said in range(ANSWER):
        choice = {reading.lane_of[policy]: network.logits(last[policy]).argmax(-1) for policy in policies}
        for policy in policies:
            answers[policy].append(choice[reading.lane_of[policy]])
        tokens = torch.stack([choice[lane] for lane in reading.lanes])
        last = reading.step(tokens, CONTEXT + lengths + said, branches)
    rows = []
    for policy in policies:
        texts = [network.decode(each.tolist()) for each in torch.stack(answers[policy], 1)]
        rows.append({"policy": policy.name, "answers": texts})
    facts = [{"attribute": fact.attribute, "word": fact.word, "place": fact.place} for fact in context.facts]
    return {"facts": facts, "tokens": CONTEXT, "rows": rows}


def summarize(model: str, done: list[Row], seconds: float) -> Row:
    """Return the record of a run: a row for each policy, and what it was computed from."""
    done = sorted(done, key=lambda job: (job["kind"], job["number"]))
    texts = [job for job in done if job["kind"] == "text"]
    contexts = [job for job in done if job["kind"] == "context"]
    rows: list[Row] = []
    for number, policy in enumerate(all_policies()):
        row: Row = {"policy": policy.name, "family": policy.family}
        if texts:
            row |= _text_figures(number, texts)
        if contexts:
            row |= {"held": tokens_held(policy, CONTEXT), **_answer_figures(number, contexts)}
        rows.append(row)
    sources = [{**job["text"], "predicted": job["predicted"]} for job in texts]
    return {"model": model, "seconds": round(seconds), "texts": sources, "rows": rows, "jobs": done}


def _text_figures(number: int, texts: list[Row]) -> Row:
    predicted = sum(job["predicted"] for job in texts)
    rows = [job["rows"][number] for job in texts]
    return {
        "seen": round(sum(row["seen"] for row in rows) / len(rows)),
        "perplexity": round(math.exp(sum(row["loss"] for row in rows) / predicted), 3),
        "perplexities": [
            round(math.exp(row["loss"] / job["predicted"]), 3) for row, job in zip(rows, texts, strict=True)
        ],
        "changed": round(sum(row["changed"] for row in rows) / predicted, 4),
    }


def _answer_figures(number: int, contexts: list[Row]) -> Row:
    equal = 0
    found: dict[str, list[int]] = {}
    for job in contexts:
        full, own = job["rows"][0]["answers"], job["rows"][number]["answers"]
        equal += sum(a == b for a, b in zip(full, own, strict=True))
        for fact, answer in zip(job["facts"], own, strict=True):
            hits = found.setdefault(f"{fact['place']:g}", [0, 0])
            hits[0] += fact["word"] in answer.lower()
            hits[1] += 1
    questions = sum(len(job["facts"]) for job in contexts)
    return {"questions": questions, "equal": equal, "found": dict(sorted(found.items()))}


def tables(record: Row) -> list[str]:
    """Write the record as two tables in Markdown: the texts, and the questions."""
    full = record["rows"][0]
    texts = ["| policy | tokens seen | perplexity | beside full | next token differs |", "|---|--:|--:|--:|--:|"]
    questions = [
        "| policy | tokens held | answers as with full | fact at 10 % found | at 50 % | at 90 % |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in record["rows"]:
        if "perplexity" in row:
            more = f"{100 * row['perplexity'] / full['perplexity'] - 100:+.1f} %" if row is not full else ""
            changed = f"{100 * row['changed']:.1f} %" if row is not full else ""
            texts.append(f"| {row['policy']} | {row['seen']:,} | {row['perplexity']:.2f} | {more} | {changed} |")
        if "found" in row:
            equal = f"{row['equal']} of {row['questions']}" if row is not full else ""
            found = " | ".join(f"{hits} of {of}" for hits, of in row["found"].values())
            questions.append(f"| {row['policy']} | {row['held']:,} | {equal} | {found} |")
    return ["\n".join(lines) for lines in (texts, questions) if len(lines) > 2]
