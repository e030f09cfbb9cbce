"""What a model costs, from its configuration alone: weights, KV bytes per token, arithmetic per token.

Dense models and mixtures of experts, grouped-query and multi-head latent attention, sliding windows. Parameters that
do not matter for time or memory (norms, biases, rotary tables) are left out: together well under 1 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_graft.errors import ConfigError

_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_ACTIVE: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_EXPERT_WIDTH: Final = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size", "ffn_hidden_size")

_WEIGHT_BYTES: Final[Mapping[str, float]] = {
    "fp8": 1.0,
    "fbgemm_fp8": 1.0,
    "modelopt": 1.0,
    "mxfp4": 0.53,
    "modelopt_fp4": 0.56,
    "nvfp4": 0.56,
    "awq": 0.53,
    "awq_marlin": 0.53,
    "gptq": 0.53,
    "gptq_marlin": 0.53,
    "bitsandbytes": 0.53,
}
"""Bytes per weight of a quantized model, scales included, where its configuration does not say how many bits."""

_NOT_MODELLED: Final = ("llama4",)
"""Models with parts that their configuration does not tell of."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the model: parameters that every token uses, experts, and how far attention looks back."""

    shared: int
    """Parameters of attention, router, shared experts, or the whole of a dense layer."""
    expert: int = 0
    """Parameters of one expert."""
    experts: int = 0
    active: int = 0
    """Experts per token."""
    window: int | None = None
    """Tokens that attention sees; None for all."""

    def weights(self, tokens: int) -> float:
        """Parameters read for a batch of so many tokens: experts that no token chose stay where they are.

        Counted as if every token chose its experts at random.
        """
        return self.shared + self.chosen(tokens)

    def chosen(self, tokens: int) -> float:
        """Parameters of the experts among them."""
        if not self.experts:
            return 0.0
        untouched = (1 - self.active / self.experts) ** tokens
        return self.expert * self.experts * (1 - untouched)

    @property
    def per_token(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.shared + self.expert * self.active

    @property
    def total(self) -> int:
        """All parameters."""
        return self.shared + self.expert * self.experts


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layers and widths."""

    layers: tuple[Layer, ...]
    hidden: int
    vocabulary: int
    tied: bool
    attention_width: int
    """Query heads times their width: what attention arithmetic is made of when decoding."""
    prefill_width: int
    """The same for a prompt: latent attention multiplies it out."""
    kv_width: int
    """Numbers that a layer keeps per token."""
    kv_heads: int
    """How many devices can share the KV cache; 1 for latent attention, which every device keeps whole."""
    widest: int
    """The widest activation of a token inside a layer."""
    weight_bytes: float
    """Bytes per parameter."""

    @property
    def parameters(self) -> int:
        """Of the whole model, embeddings included."""
        return sum(layer.total for layer in self.layers) + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def embedding_bytes(self) -> float:
        """The table that maps tokens to vectors, and the one that maps them back; both stay in 16 bits."""
        return 2.0 * self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def total_bytes(self) -> float:
        """The weights' memory."""
        return sum(layer.total for layer in self.layers) * self.weight_bytes + self.embedding_bytes


def shape_of(config: Mapping[str, Any], where: str = "config.json", element_bytes: float = 2.0) -> Shape:
    """The shape that a ``config.json`` describes; a ConfigError names what is missing or impossible in it."""
    reader = _Reader(config.get("text_config") or config, where)
    kind = str(reader.get("model_type", ""))
    if kind.startswith(_NOT_MODELLED):
        raise ConfigError(
            f"models of the type {kind!r} are not modelled",
            where=where,
            fix="take another model, or the device 'instant', whose steps take no time",
        )
    heads = reader.count("num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = reader.count("hidden_size", "n_embd", "d_model")
    number = reader.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    kv_heads = reader.optional("num_key_value_heads", "num_kv_heads", "multi_query_group_num") or heads
    if heads % kv_heads:
        raise reader.wrong("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
    head = reader.optional("head_dim") or hidden // heads
    if not head:
        raise reader.wrong("hidden_size", f"{hidden} is less than the {heads} attention heads")
    latent = reader.optional("kv_lora_rank")
    if latent:
        attention, width, prefill_width, kv_width = _latent(reader, hidden, heads, latent)
        kv_heads = 1
    else:
        attention = hidden * head * (2 * heads + 2 * kv_heads)
        width = prefill_width = heads * head
        kv_width = 2 * kv_heads * head
    windows = _windows(reader, number)
    layers = tuple(_layer(reader, index, hidden, attention, windows[index]) for index in range(number))
    inner = reader.optional("intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    return Shape(
        layers=layers,
        hidden=hidden,
        vocabulary=reader.count("vocab_size"),
        tied=bool(reader.get("tie_word_embeddings", kind.startswith("gemma"))),
        attention_width=width,
        prefill_width=prefill_width,
        kv_width=kv_width,
        kv_heads=kv_heads,
        widest=max(inner, reader.optional("moe_intermediate_size") or 0),
        weight_bytes=_weight_bytes(config, element_bytes, where),
    )


def _layer(reader: _Reader, index: int, hidden: int, attention: int, window: int | None) -> Layer:
    experts = reader.optional(*_EXPERTS)
    if experts and not _is_dense(reader, index):
        active = reader.optional(*_ACTIVE) or 1
        if active > experts:
            raise reader.wrong("num_experts_per_tok", f"{active} is more than the {experts} experts")
        expert = 3 * hidden * (reader.optional(*_EXPERT_WIDTH) or 4 * hidden)
        always = (reader.optional("n_shared_experts", "num_shared_experts") or 0) * expert
        always += 3 * hidden * (reader.optional("shared_expert_intermediate_size") or 0)
        return Layer(attention + hidden * experts + always, expert, experts, active, window)
    inner = reader.optional("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    gates = 2 if reader.get("model_type") in _UNGATED else 3
    return Layer(attention + gates * hidden * inner, window=window)


_UNGATED: Final = ("gpt2", "gpt_neox", "opt", "bloom", "phi", "falcon", "starcoder2", "gpt_bigcode", "mpt")
"""Models whose feed-forward part has two matrices, not three."""


def _is_dense(reader: _Reader, index: int) -> bool:
    """Whether this layer of a mixture of experts has no experts."""
    if index < (reader.optional("first_k_dense_replace") or 0) or index in (reader.get("mlp_only_layers") or ()):
        return True
    every = reader.optional("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step") or 1
    return (index + 1) % every != 0


def _latent(reader: _Reader, hidden: int, heads: int, latent: int) -> tuple[int, int, int, int]:
    """Of multi-head latent attention: parameters, the arithmetic's width in decode and prefill, numbers per token."""
    rotary = reader.count("qk_rope_head_dim")
    plain, value = reader.count("qk_nope_head_dim"), reader.count("v_head_dim")
    query = reader.optional("q_lora_rank")
    queries = hidden * query + query * heads * (plain + rotary) if query else hidden * heads * (plain + rotary)
    parameters = queries + hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden
    return parameters, heads * (latent + rotary // 2), heads * (plain + rotary + value) // 2, latent + rotary


def layer_windows(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """How far attention looks back in each layer; None for all the way."""
    return _windows(_Reader(config, "config.json"), layers)


def _windows(reader: _Reader, layers: int) -> list[int | None]:
    window = reader.optional("sliding_window")
    if not window or reader.get("use_sliding_window", True) is False:
        return [None] * layers
    kinds = reader.get("layer_types")
    if isinstance(kinds, list | tuple) and len(kinds) >= layers:
        return [window if kind == "sliding_attention" else None for kind in kinds[:layers]]
    every = reader.optional("sliding_window_pattern")
    if every:
        return [window if (index + 1) % every else None for index in range(layers)]
    return [window] * layers


def _weight_bytes(config: Mapping[str, Any], element_bytes: float, where: str) -> float:
    quantized = config.get("quantization_config")
    if not isinstance(quantized, Mapping):
        return element_bytes
    bits = quantized.get("bits") or quantized.get("w_bit") or _group_bits(quantized)
    if isinstance(bits, int | float) and not isinstance(bits, bool) and bits > 0:
        # Scales come on top: one of 16 bits for every 64 weights or so where the weights are small.
        return float(bits) / 8 + (0.03 if bits < 8 else 0.0)
    if quantized.get("load_in_8bit"):
        return 1.0
    names = [str(quantized.get(key, "")).lower() for key in ("quant_algo", "quant_method")]
    for name in names:
        if name in _WEIGHT_BYTES:
            return _WEIGHT_BYTES[name]
    raise ConfigError(
        f"quantization_config: how many bytes a weight has under {names[-1]!r} is not known",
        where=where,
        fix='add "bits" to quantization_config, or leave quantization_config out',
    )


def _group_bits(quantized: Mapping[str, Any]) -> object:
    """The width of the weights where they are described in groups, as compressed-tensors does."""
    groups = quantized.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("num_bits"):
            return weights["num_bits"]
    return None


class _Reader:
    """Reads numbers by any of the names that models give them."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where

    def get(self, name: str, default: Any = None) -> Any:
        return self._config.get(name, default)

    def optional(self, *names: str) -> int | None:
        """The first of the names that holds a whole number above 0."""
        for name in names:
            value = self._config.get(name)
            if isinstance(value, list) and value and all(isinstance(part, int) for part in value):
                value = max(value)
            if value in (None, 0, False):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.wrong(name, f"must be a whole number above 0, and is {value!r}")
            return value
        return None

    def count(self, *names: str) -> int:
        """The same, and an error where it is missing."""
        value = self.optional(*names)
        if value is None:
            raise self.wrong(names[0], "is missing" if names[0] not in self._config else "must be above 0")
        return value

    def wrong(self, name: str, what: str) -> ConfigError:
        return ConfigError(
            f"{name}: {what}", where=self._where, fix="give the config.json of a decoder model, as it was published"
        )
