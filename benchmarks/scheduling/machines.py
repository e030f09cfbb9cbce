"""The machines on which the burst is played by the clock: what vLLM is given there, and what stands for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.scheduling.workloads import ENGINE, LENGTHS

SHORT: Final = """
[prompt]
mean = 24
sigma = 0.9
min = 4
max = 112

[output]
mean = 12
sigma = 0.7
min = 2
max = 28
"""
"""Lengths for two slow cores: about a fourteenth of the others, so that one cycle has some hundred requests."""

EMBEDDED: Final = "embedded"


@dataclass(frozen=True)
class Kind:
    """A kind of machine."""

    model: str
    """A shape that ships, with dummy weights; or the embedded model with its own."""
    engine: Mapping[str, Any]
    """What both vLLMs are given, the real and the simulated."""
    own: Mapping[str, Any]
    """What only the real one is given."""
    variables: Mapping[str, str]
    lengths: str
    saturated: int
    """How many requests at once show what it can serve."""
    device: str
    """The simulated device that stands for it."""
    slowed: bool = False
    """Whether that device is made slower until it serves as many requests per second."""

    def engine_args(self, model: str) -> dict[str, Any]:
        """The real engine's arguments; prompts are token ids, so that no tokenizer is needed."""
        return {**self.engine, **self.own, "model": str(_folder(model)), "skip_tokenizer_init": True}


KINDS: Final[Mapping[str, Kind]] = {
    "cpu": Kind(
        model=EMBEDDED,
        engine={"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 160},
        own={"dtype": "float32", "enforce_eager": True},
        variables={"VLLM_CPU_KVCACHE_SPACE": "1"},
        lengths=SHORT,
        saturated=120,
        device="L40S",
        slowed=True,
    ),
    "cuda": Kind(
        model="llama-3-8b",
        engine={**{key: value for key, value in ENGINE.items() if key != "model"}, "max_model_len": 2048},
        own={"load_format": "dummy", "gpu_memory_utilization": 0.9},
        variables={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
        lengths=LENGTHS,
        saturated=900,
        device="H200",
    ),
}
"""By the name of the device."""


def _folder(model: str) -> Path:
    if model == EMBEDDED:
        from vllm_graft.testing import embedded_model

        return embedded_model()
    from vllm_graft.simulator.model_shape import find_model

    return find_model(model).folder
