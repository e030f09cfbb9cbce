"""The time that a device takes for a batch: the slower of memory and arithmetic, for weights and for attention.

    linear    = max(weights read / bandwidth, multiplications / arithmetic)
    attention = for each request, max(KV read / bandwidth, multiplications / arithmetic)
    step      = linear + attention + a constant per layer and per request + exchange between devices

A step with prompts in it takes at least the host's time for its launch, if the device's table gives one. Tensor
parallel devices share weights, KV cache and arithmetic, and exchange each layer's activations twice. Pipeline stages
hold consecutive layers; a batch passes from one to the next. Data parallel engines share only the experts: all are
assumed equally busy, and each holds its part and computes it for the tokens of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.simulator.devices import Device
from vllm_graft.simulator.model_shape import LayerShape, ModelShape

ACTIVATION_BYTES = 2.0

FEW = 16
"""The most new tokens that are taken for drafts in verification; more are a prompt."""


class Work(Protocol):
    """One request's part of a step. ``window`` is the window that it asked for, if it has that attribute."""

    @property
    def new_tokens(self) -> int:
        """Tokens computed now."""

    @property
    def context(self) -> int:
        """Tokens in its KV cache afterwards."""


@dataclass(eq=False)
class Roofline:
    """The time and the memory of one model on one kind of device.

    tensor, pipeline, data: the parallel sizes
    kv_bytes:     bytes of one number in the KV cache
    decode:       new tokens of a decoding request in one step, its drafts included
    graph_tokens: the largest step for which vLLM has a CUDA graph
    """

    shape: ModelShape
    device: Device
    _: KW_ONLY
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    kv_bytes: float = 2.0
    decode: int = 1
    graph_tokens: int = 512

    def __post_init__(self) -> None:
        layers = self.shape.layers
        self._stages = [_Stage(layers[first:end]) for first, end in _split(len(layers), self.pipeline)]

    def stage_seconds(self, batch: Iterable[Work]) -> list[float]:
        """Return the seconds of each pipeline stage for a batch; 0 for an empty one."""
        works = list(batch)
        tokens = sum(work.new_tokens for work in works)
        if not tokens:
            return [0.0] * len(self._stages)
        last = len(self._stages) - 1
        # The host's time for the launch; a step that only decodes replays a CUDA graph, which costs nothing.
        launch = 1e-3 * self.device.launch_ms
        if tokens > self.graph_tokens:
            launch = max(launch, 1e-3 * self.device.eager_ms)
        elif launch and not any(work.new_tokens > self.decode for work in works):
            launch = 0.0
        launch /= len(self.shape.layers)
        seconds = [
            self._linear(stage, tokens, len(works) if index == last else 0)
            + sum(count * self._attention(window, works) for window, count in stage.windows.items())
            + 1e-6 * self.device.layer_us * stage.depth
            + 1e-6 * self.device.request_us * len(works) * (index == last)
            + self._exchange(stage, tokens, passes_on=index != last)
            for index, stage in enumerate(self._stages)
        ]
        return [max(each, launch * stage.depth) for each, stage in zip(seconds, self._stages, strict=True)]

    def seconds(self, batch: Iterable[Work]) -> float:
        """Return the seconds of a batch from end to end."""
        return sum(self.stage_seconds(batch))

    @property
    def weight_bytes(self) -> float:
        """The weights on the device that holds most of them."""
        # With several stages the input and the output embedding are on different devices, unless they are one tensor.
        embeddings = self.shape.embedding_bytes / (2 if len(self._stages) > 1 and not self.shape.tied else 1)
        held = max(stage.shared + stage.experts / self.data for stage in self._stages)
        return (held * self.shape.weight_bytes + embeddings) / self.tensor

    def activation_bytes(self, batched_tokens: int, sequences: int) -> float:
        """Return the most memory that a step holds besides weights and KV cache."""
        inner = (3 * self.shape.widest / self.tensor + 4 * self.shape.hidden) * ACTIVATION_BYTES
        return batched_tokens * inner + 12.0 * sequences * self.shape.vocabulary / self.tensor

    def _linear(self, stage: _Stage, tokens: int, sampled: int) -> float:
        # The output embedding works on the last token of each request, in the last stage.
        head = self.shape.vocabulary * self.shape.hidden if sampled else 0
        read = self.shape.weight_bytes * sum(
            (layer.shared + layer.chosen(tokens * self.data) / self.data) * count
            for layer, count in stage.kinds.items()
        )
        multiplied = 2.0 * (stage.per_token * tokens + head * sampled)
        return max(
            (read + ACTIVATION_BYTES * head) / self.tensor / (1e9 * self.device.bandwidth_gb_s * self.device.weights),
            multiplied / self.tensor / (1e12 * self.device.tflops * self.device.compute),
        )

    def _attention(self, window: int | WindowShape | None, works: list[Work]) -> float:
        """Return the seconds of one layer's attention."""
        # More devices than KV heads replicate the heads, as in vLLM.
        shared = min(self.tensor, self.shape.kv_heads)
        read = self.shape.kv_width * self.kv_bytes / shared / (1e9 * self.device.bandwidth_gb_s * self.device.kv)
        flops = 1e12 * self.device.tflops * self.device.compute
        decode = 4.0 * self.shape.attention_width / self.tensor / flops
        prefill = 4.0 * self.shape.prefill_width / self.tensor / flops
        seconds = 0.0
        for work in works:
            count = work.new_tokens
            multiply = decode if count <= FEW else prefill
            if window is None:
                seconds += max(work.context * read, count * (work.context - (count - 1) / 2) * multiply)
            elif isinstance(window, WindowShape):
                # Rows of one request share what they see of the window, which the device's cache holds between them.
                own = getattr(work, "window", None)
                shape = window.narrowed(own) if own is not None else window
                keys = work.context - shape.gap(work.context - count)
                seconds += max(keys * read, shape.pairs(work.context - count, work.context) * multiply)
            else:
                seen = min(work.context - (count - 1) / 2, window)
                seconds += max(min(work.context, window + count - 1) * read, count * seen * multiply)
        return seconds

    def _exchange(self, stage: _Stage, tokens: int, *, passes_on: bool) -> float:
        size = tokens * self.shape.hidden * ACTIVATION_BYTES
        link, least = 1e9 * self.device.link_gb_s, 1e-6 * self.device.link_us
        seconds = (size / link + least) if passes_on else 0.0
        if self.tensor > 1:
            # A ring all-reduce sends each byte this often.
            ring = 2 * (self.tensor - 1) / self.tensor
            seconds += 2 * stage.depth * (ring * size / link + least)
        if self.data > 1:
            seconds += 2 * stage.mixtures * ((self.data - 1) * size / link + least)
        return seconds


class _Stage:
    """Consecutive layers, counted by kind: a model has dozens of layers but only one or two kinds."""

    def __init__(self, layers: tuple[LayerShape, ...]) -> None:
        self.depth = len(layers)
        self.kinds = Counter(layers)
        self.windows = Counter(layer.window for layer in layers)
        self.per_token = sum(layer.per_token for layer in layers)
        self.shared = sum(layer.shared for layer in layers)
        self.experts = sum(layer.expert * layer.experts for layer in layers)
        self.mixtures = sum(layer.experts > 0 for layer in layers)


def _split(layers: int, stages: int) -> list[tuple[int, int]]:
    """Divide layers among stages evenly; the stages before the last take the remainder, as in vLLM."""
    each, extra = divmod(layers, stages)
    ends, first = [], 0
    for stage in range(stages):
        end = first + each + (1 if stages - 1 - extra <= stage < stages - 1 else 0)
        ends.append((first, end))
        first = end
    return ends
