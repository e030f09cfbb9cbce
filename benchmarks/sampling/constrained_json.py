"""What ``constrained-json`` costs: start, a state that is new, and a step for batches of several sizes.

    python -m benchmarks.sampling.constrained_json [--tekken FILE] [--device cuda]

Documents are written on random logits in which structure is likely, over the vocabulary of the embedded model or, with
``--tekken``, one of Mistral's form (``mistral_common`` brings one with 131,072 tokens). On a CPU the time is that of
one thread; on another device it is the time until the tokens are there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from vllm_graft.contracts import Params, ServedModel
from vllm_graft.launcher.models import embedded_model
from vllm_graft.plugins.samplers.constrained_json import ConstrainedJSONSampler

LIMIT_US = 500
BATCHES = (1, 2, 4, 8, 16, 32)
MAX_TOKENS = 120
NOISES = 16


def clock(device: torch.device) -> float:
    return time.thread_time() if device.type == "cpu" else time.perf_counter()


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


class Writer:
    """Requests that write one document after another, on logits made beforehand."""

    def __init__(self, sampler: ConstrainedJSONSampler, model: ServedModel, batch: int, **asked: float) -> None:
        self.sampler, self.eos, self.asked = sampler, model.eos[0], asked
        self.choosing: list[float] = []
        torch.manual_seed(batch)
        likely = structure(sampler, model.vocabulary)
        noise = torch.randn(NOISES, batch, model.vocabulary) * 3 + likely
        self.noise = noise.to(model.device)
        self.requests = [self.enter(seed) for seed in range(batch)]
        self.entered = batch

    def enter(self, seed: int) -> tuple[Params, list[int]]:
        generated: list[int] = []
        keys = {"json_sampler": True, "json_max_depth": 8, "json_root": "object"}
        return Params(
            keys, seed=seed, max_tokens=MAX_TOKENS, generated_so_far=lambda: generated, **self.asked
        ), generated

    def step(self, at: int) -> float:
        """One step of all requests; the microseconds it took."""
        logits, params = self.noise[at % NOISES].clone(), [params for params, _ in self.requests]
        wait_for(logits.device)
        before = clock(logits.device)
        for one in params:
            self.sampler._choice(one)
        self.choosing.append((clock(logits.device) - before) * 1e6 / len(params))
        before = clock(logits.device)
        picked = self.sampler.sample(logits, params).tolist()
        took = clock(logits.device) - before
        for row, token in enumerate(picked):
            generated = self.requests[row][1]
            generated.append(token)
            if token == self.eos or len(generated) == MAX_TOKENS:
                self.entered += 1
                self.requests[row] = self.enter(self.entered)
        return took * 1e6


def structure(sampler: ConstrainedJSONSampler, vocabulary: int) -> torch.Tensor:
    """What makes brackets, quotes and commas likely."""
    likely = torch.zeros(vocabulary)
    likely[[token for token, text in sampler._texts.items() if set(text) & set(b'{}[]",:')]] = 6.0
    return likely


def of_embedded_model(device: torch.device) -> ServedModel:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded_model())
    eos = (tokenizer.eos_token_id,)
    return ServedModel("embedded", len(tokenizer), 64, device, eos, load_tokenizer=lambda: tokenizer)


def of_tekken(file: Path, device: torch.device) -> ServedModel:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    class Tokenizer:
        tokenizer = Tekkenizer.from_file(file)
        all_special_ids = tuple(range(tokenizer.num_special_tokens))

        def get_added_vocab(self) -> dict[str, int]:
            return {}

        def __len__(self) -> int:
            return self.tokenizer.n_words

    eos = (Tokenizer.tokenizer.eos_id,)
    return ServedModel("tekken", len(Tokenizer()), 64, device, eos, load_tokenizer=Tokenizer)


def show(name: str, times: list[float], limit: float = LIMIT_US) -> None:
    ordered = sorted(times)
    middle, late = statistics.median(ordered), ordered[int(len(ordered) * 0.99)]
    print(f"{name:<44}{middle:>9.0f} us   p99 {late:>8.0f} us   {'within' if middle <= limit else 'over'} {limit} us")


def time_new_states(sampler: ConstrainedJSONSampler, seen: list[tuple]) -> list[float]:
    """The time that working out each of these states takes when it is new."""
    times = []
    for state, depth in seen:
        before = time.thread_time()
        sampler._masks._allowed(state, depth).mask(None)
        times.append((time.thread_time() - before) * 1e6)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description="What constrained-json costs.")
    parser.add_argument("--tekken", type=Path, help="a vocabulary of Mistral's form")
    parser.add_argument("--device", default="cpu", help="where the logits are")
    parser.add_argument("--steps", type=int, default=600, help="steps of each batch size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    model = of_tekken(args.tekken, device) if args.tekken else of_embedded_model(device)
    sampler = ConstrainedJSONSampler()
    before = time.thread_time()
    sampler.setup(model)
    print(f"{model.name}, {model.vocabulary} tokens; start-up {time.thread_time() - before:.2f} s")

    seen: dict[tuple, None] = {}
    look_up = sampler._masks.allowed
    sampler._masks.allowed = lambda state, depth: seen.setdefault((state, depth)) or look_up(state, depth)
    writer = Writer(sampler, model, 4)
    for at in range(args.steps):
        writer.step(at)
    sampler._masks.allowed = look_up
    show(f"a new state, of {len(seen)}", time_new_states(sampler, list(seen)))
    show("a state that is known, per row", writer.choosing[args.steps // 4 :])
    for kind, asked in {
        "greedy": {"temperature": 0.0},
        "temperature 0.8": {"temperature": 0.8},
        "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
        "temperature 0.8, top_k 20": {"temperature": 0.8, "top_k": 20},
    }.items():
        for batch in BATCHES:
            writer = Writer(sampler, model, batch, **asked)
            times = [writer.step(at) for at in range(args.steps)][args.steps // 4 :]
            show(f"a step of {batch:>2}, {kind}", times)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
