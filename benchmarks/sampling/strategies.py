"""What the strategies that ship cost in a step, each and all together, beside other ways to do the same.

    PYTHONPATH=src python -m benchmarks.sampling.strategies [--device cuda|cpu] [--batch 256] [--vocabulary 131072]

Needs torch, and on a GPU Triton; no vLLM. Every row of the batch asks for the strategy, and XTC's draw always says yes.
On a GPU a step's time is what the device takes, the median between two events, while the host is ahead of it; what the
host takes is beside it. On the host it is CPU time of one thread. Logits are put back before each step and that is not
counted. For the single strategies the history is at hand: where tokens are "on the device" as a tensor, where they are
"on the host" each step finds one token more. "all four" goes through the pipeline as in a worker: with guards,
meters, and on a GPU the last tokens kept near the device. So does "another package's", a strategy that scales its rows:
on a copy of them, as strategies of other packages work, beside in place, as those that ship do. The rows "json" are
constrained-json, with a vocabulary made of random words and documents that grow.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from benchmarks.sampling import other_ways
from benchmarks.sampling.batch import Batch, lists, rows_of, tensors
from benchmarks.sampling.documents import Documents
from benchmarks.sampling.worker import Worker

from vllm_graft.contracts import Key, SamplingStrategy
from vllm_graft.contracts.kernels import has_triton, mask_below
from vllm_graft.contracts.kernels import statistics as row_statistics
from vllm_graft.plugins.samplers.dry import Dry
from vllm_graft.plugins.samplers.no_repeat_ngram import NoRepeatNgram
from vllm_graft.plugins.samplers.top_n_sigma import TopNSigma
from vllm_graft.plugins.samplers.xtc import Xtc, exclude_top

LIMIT_US = 500.0
_BUSY = 4_000_000
"""Cycles: about two milliseconds."""
WINDOW = 4096
KEYS = {
    Dry: {"dry_multiplier": 0.8, "dry_sequence_breakers": []},
    NoRepeatNgram: {"no_repeat_ngram_size": 3},
    TopNSigma: {"top_n_sigma": 1.0},
    Xtc: {"xtc_probability": 1.0},
}


class Scaled(SamplingStrategy):
    """What an author may write in a few lines."""

    keys = (Key("scaled", "float", 1.0, switch=True),)

    def setup(self, model):
        self.factors = model.per_slot(1.0)

    def open(self, slot, params):
        self.factors[slot] = params.number("scaled")
        return True

    def step(self, logits, rows):
        logits[rows.rows] *= self.factors.of(rows)[:, None]


class ScaledInPlace(Scaled):
    """The same without a net."""

    atomic = True


Step = Callable[[torch.Tensor], None]
Way = tuple[str, Step, Callable[[], None]]
"""Its name, a step, and what happens before each step without being counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each way is tried")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = Batch(args.device, args.batch or (256 if args.device == "cuda" else 32), args.vocabulary, WINDOW)
    report = {**machine(args.device), "batch": batch.size, "vocabulary": batch.vocabulary, "window": WINDOW, "rows": []}
    show(report, args.json)
    for strategy, ways in cases(batch):
        ours = None
        for way, step, before in ways:
            times, host = measure(batch, step, before, args.seconds)
            us = statistics.median(times)
            ours = ours or us
            row = {
                "strategy": strategy, "way": way, "us": round(us, 1), "p90_us": round(quantile(times, 0.9), 1),
                "host_us": round(host, 1), "times_ours": round(us / ours, 2), "steps": len(times),
            }  # fmt: skip
            report["rows"].append(row)
            show_row(row, args.json)
    if args.json:
        print(json.dumps(report, indent=1))


def cases(batch: Batch) -> Iterator[tuple[str, list[Way]]]:
    """Each strategy with its ways, ours first."""
    device, host = tensors(batch), lists(batch)
    yield "dry", history_ways(batch, Dry, device, host, other_ways.dry_loop(batch))
    yield "dry, only circles", history_ways(batch, Dry, tensors(batch, batch.circles), lists(batch, circles=True), None)
    yield "no-repeat-ngram", history_ways(batch, NoRepeatNgram, device, host, other_ways.ngram_loop(batch))

    sigma = opened(TopNSigma, batch)
    yield (
        "top-n-sigma",
        [
            ("ours", lambda logits: truncate(sigma, logits, rows_of(batch, device)), nothing),
            ("eager torch", other_ways.sigma_eager, nothing),
            ("a loop over rows in Python", other_ways.sigma_loop, nothing),
        ],
    )

    xtc = opened(Xtc, batch)
    every = torch.ones(batch.size, dtype=torch.bool, device=batch.device)
    shares = torch.full((batch.size,), 0.1, device=batch.device).log()
    yield (
        "xtc",
        [
            ("ours", lambda logits: xtc.step(logits, rows_of(batch, device)), nothing),
            ("eager torch", lambda logits: exclude_top(logits, batch.rows, every, shares), nothing),
            ("sort, and ask for each row", other_ways.xtc_sorted, nothing),
        ],
    )

    worker = Worker(batch, KEYS)
    yield (
        "all four",
        [
            ("ours", worker.step, worker.grow),
            ("loops and eager torch", lambda logits: other_ways.all_eager(batch, logits, every, shares), nothing),
        ],
    )

    alone, direct = (Worker(batch, {kind: {"scaled": 0.5}}, package) for kind, package in OTHERS)
    yield (
        "another package's",
        [("ours, a copy of its rows", alone.step, alone.grow), ("in place", direct.step, direct.grow)],
    )

    for name, asked in {"greedy": {"temperature": 0.0}, "top_p 0.95": {"temperature": 0.8, "top_p": 0.95}}.items():
        documents = Documents(batch, **asked)
        yield f"json, {name}", [("ours", documents.step, documents.grow)]


OTHERS = ((Scaled, "another"), (ScaledInPlace, "vllm-graft"))


def history_ways(batch: Batch, kind: type, device: tensors, host: lists, loop: Step | None) -> list[Way]:
    """On a GPU the device has the tokens first of all, on the host the host."""
    by_kernel, by_torch, by_host = (opened(kind, batch) for _ in range(3))
    at = rows_of(batch, device)
    ways: list[Way] = [
        ("ours, tokens on the device", lambda logits: by_kernel.step(logits, at), nothing),
        ("ours, tokens on the host", lambda logits: by_host.step(logits, rows_of(batch, host)), host.grow),
    ]
    if has_triton(batch.logits):
        ways.append(
            ("eager torch", lambda logits: by_torch._change_by_torch(logits, at, device.tokens(at, WINDOW)), nothing)
        )
    else:
        ways.reverse()
    return [*ways, ("a loop over rows in Python", loop, nothing)] if loop is not None else ways


def nothing() -> None:
    """Before a step that needs no preparation."""


def opened(kind: type, batch: Batch):
    strategy = kind({"window": WINDOW} if "window" in kind.options else {})
    strategy.setup(batch.model)
    for slot in range(batch.size):
        assert strategy.open(slot, batch.params(kind, KEYS[kind]))
    return strategy


def truncate(strategy: TopNSigma, logits: torch.Tensor, rows) -> None:
    """As the bindings do it for all truncations of a step together."""
    stats = row_statistics(logits, rows.rows)
    mask_below(logits, rows.rows, strategy.threshold(stats, rows), stats.max)


def measure(batch: Batch, step: Step, before: Callable[[], None], seconds: float) -> tuple[list[float], float]:
    """Microseconds of each step after some to warm up, and the CPU time that the host needs for one."""
    times, host = [], []
    until = None
    while until is None or len(times) < 3 or (time.monotonic() < until and len(times) < 2000):
        before()
        logits = batch.restored()
        began = time.thread_time()
        if batch.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The device is kept busy while the host hands over all of the step, as a model keeps it busy.
            torch.cuda._sleep(_BUSY)
            first.record()
            step(logits)
            last.record()
            spent = time.thread_time() - began
            last.synchronize()
            took = first.elapsed_time(last) * 1e3
        else:
            step(logits)
            spent = time.thread_time() - began
            took = spent * 1e6
        if until is None and len(host) < (10 if took < 1e5 else 1):
            host.append(spent)
            continue
        until = until or time.monotonic() + seconds
        times.append(took)
        host.append(spent)
    return times, statistics.median(host) * 1e6


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def machine(device: str) -> dict[str, object]:
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    return {"machine": name, "python": platform.python_version(), "torch": torch.__version__, "triton": version}


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def show(report: dict[str, object], quiet: bool) -> None:
    if not quiet:
        print("  ".join(f"{key} {value}" for key, value in report.items() if key != "rows"))
        print(f"{'strategy':20}{'way':30}{'us a step':>12}{'p90':>12}{'host us':>12}{'times ours':>12}")


def show_row(row: dict[str, object], quiet: bool) -> None:
    text = f"{row['strategy']:20}{row['way']:30}{row['us']:12,.0f}{row['p90_us']:12,.0f}{row['host_us']:12,.0f}"
    mark = "  over 0.5 ms" if str(row["way"]).startswith("ours") and float(str(row["us"])) > LIMIT_US else ""
    print(f"{text}{row['times_ours']:12}{mark}", file=sys.stderr if quiet else sys.stdout, flush=True)


if __name__ == "__main__":
    main()
