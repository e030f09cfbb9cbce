"""The workloads: what arrives when, from a seed and the number of requests per second that the device can serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from vllm_graft.simulator.workload import Workload, WorkloadRequest
from vllm_graft.simulator.workload.requests import generate

ENGINE: Final[dict[str, Any]] = {"model": "llama-3-8b", "max_num_seqs": 128, "max_num_batched_tokens": 2048}
"""What every run gives vLLM."""

DEVICE: Final = "L40S"

STARVED_BLOCKS: Final = 3000

LENGTHS: Final = """
[prompt]
mean = 320
sigma = 0.9
min = 8
max = 1500

[output]
mean = 220
sigma = 0.7
min = 8
max = 500
"""
"""Of prompts and answers, in tokens."""

_MIX: Final = (10, 20, 40, 20, 10)
"""Per cent of the classes 1 to 5."""


def saturated(requests: int = 900, lengths: str = LENGTHS) -> Workload:
    """More than the device can serve, all at once: shows what it can."""
    return generate(f'[workload]\narrivals = "at-once"\nrequests = {requests}\n{lengths}', "saturated")


def steady(capacity: float, seed: int) -> Workload:
    """Seven tenths of what can be served: next to no queue, and nothing to decide. At nine tenths one forms."""
    return _classes([(300.0, 0.7 * capacity)], 300, seed, _MIX, "steady")


def burst(capacity: float, seed: int, mix: tuple[int, ...] = _MIX) -> Workload:
    """45 s at one and a half times what can be served, then 105 s at two thirds, for ten minutes."""
    return _classes([(45.0, 1.5 * capacity), (105.0, 0.65 * capacity)], 600, seed, mix, "burst")


def cycle(capacity: float, seed: int, scale: float, lengths: str = LENGTHS) -> Workload:
    """The burst once, its times multiplied by a scale."""
    phases = [(45.0 * scale, 1.5 * capacity), (105.0 * scale, 0.65 * capacity)]
    return _classes(phases, 150 * scale, seed, _MIX, "cycle", lengths)


def burst_uniform(capacity: float, seed: int) -> Workload:
    """The burst with as many requests in each class."""
    return burst(capacity, seed, (20, 20, 20, 20, 20))


def overload(capacity: float, seed: int) -> Workload:
    """A quarter more than can be served, for five minutes."""
    return _classes([(300.0, 1.25 * capacity)], 300, seed, _MIX, "overload")


def starved(capacity: float, seed: int) -> Workload:
    """The burst where memory runs out before the slots do, and requests are preempted."""
    return _classes([(45.0, 1.1 * capacity), (105.0, 0.5 * capacity)], 600, seed, _MIX, "starved")


def tenants(capacity: float, seed: int) -> Workload:
    """One tenant floods with half as much again as can be served; a light one, and one that comes late, beside it."""
    made: list[WorkloadRequest] = []
    for number, (name, share, start) in enumerate((("flood", 1.38, 0), ("light", 0.10, 0), ("late", 0.28, 60))):
        head = f"[workload]\nseed = {seed * 10 + number}\nseconds = {180 - start}\nrate = {share * capacity}\n"
        rows = generate(f"{head}{LENGTHS}", name)
        made += [
            replace(row, at=row.at + start, id=f"{name}-{row.id}", group=name, extra={"tenant": name}) for row in rows
        ]
    return Workload(made, "tenants")


WORKLOADS: Final[dict[str, Callable[[float, int], Workload]]] = {
    "steady": steady,
    "burst": burst,
    "burst-uniform": burst_uniform,
    "overload": overload,
    "starved": starved,
    "tenants": tenants,
}
"""The workloads by name."""


def engine_of(name: str) -> dict[str, Any]:
    """What vLLM is given for a workload."""
    return {**ENGINE, "num_gpu_blocks_override": STARVED_BLOCKS} if name == "starved" else dict(ENGINE)


def _classes(
    phases: list[tuple[float, float]],
    seconds: float,
    seed: int,
    mix: tuple[int, ...],
    name: str,
    lengths: str = LENGTHS,
) -> Workload:
    text = f"[workload]\nseed = {seed}\nseconds = {seconds}\n{lengths}"
    text += "".join(f"\n[[phase]]\nseconds = {length}\nrate = {rate}\n" for length, rate in phases)
    text += "".join(
        f'\n[[group]]\nname = "P{number}"\nshare = {share}\npriority = {number}\n'
        for number, share in enumerate(mix, 1)
    )
    return generate(text, name)
