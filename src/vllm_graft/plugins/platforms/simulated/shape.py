"""What a model costs, from its configuration alone: weights, KV bytes per token, arithmetic per token.

Dense models and mixtures of experts, grouped-query and multi-head latent attention, sliding windows. Parameters that
do not matter for time or memory (norms, biases, rotary tables) are left out: together well under 1 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm_graft.plugins.platforms.simulated.reader import Reader
from vllm_graft.plugins.platforms.simulated.weights import weight_bytes

_KV_HEADS: Final = (
    *("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"),
    "kv_n_heads",
)
"""In the order that vLLM looks for them."""
_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_ACTIVE: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_EXPERT_WIDTH: Final = (
    *("moe_intermediate_size", "expert_intermediate_size", "expert_hidden_dim", "intermediate_size"),
    "ffn_hidden_size",
)
_SHARED_EXPERTS: Final = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_WIDTH: Final = ("prefix_dense_intermediate_size", "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")

_UNGATED: Final = (
    *("gpt2", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "phi", "falcon", "RefinedWeb", "RefinedWebModel"),
    *("starcoder2", "mpt", "nemotron", "arcee", "apertus", "jais2"),
)
"""Models whose feed-forward part has two matrices, not three."""

_UNMODELLED_TYPES: Final = ("llama4", "arctic")
"""Models with parts that their configuration does not tell of."""

_UNLIKE: Final = "layers that differ in their attention"
_UNMODELLED: Final[Mapping[str, str]] = {
    "num_kv_shared_layers": "layers without a KV cache of their own",
    "use_cla": "layers without a KV cache of their own",
    "hidden_size_per_layer_input": "embeddings for every layer",
    "index_topk": "sparse attention layers",
    "sparse_attention_config": "sparse attention layers",
    "compress_ratios": "layers with a compressed KV cache",
    "qk_nope_dim": "keys and values of different widths",
    "zero_expert_num": "experts that compute nothing",
    "mova_num_experts": "experts within attention",
    "loop_num": "layers that a token passes more than once",
    "total_ut_steps": "layers that a token passes more than once",
    "H_cycles": "layers that a token passes more than once",
    "per_layer_config": _UNLIKE,
    "global_head_dim": _UNLIKE,
    "block_configs": _UNLIKE,
    "hybrid_layer_pattern": _UNLIKE,
    "moe_layers_enum": _UNLIKE,
    "attention_other_setting": _UNLIKE,
    "num_attention_heads_per_layer": _UNLIKE,
    "swa_num_key_value_heads": _UNLIKE,
    "sliding_windows": _UNLIKE,
    "interleaved_sliding_window": _UNLIKE,
}
"""Keys of models that vLLM serves and this module would get wrong: what they stand for."""


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

    def chosen(self, tokens: int) -> float:
        """Parameters of the experts that some of so many tokens choose, as if each chose at random."""
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


def shape_of(
    config: Mapping[str, Any],
    where: str = "config.json",
    element_bytes: float = 2.0,
    *,
    kv_heads: int | None = None,
    head: int | None = None,
) -> Shape:
    """The shape that a ``config.json`` describes; a ConfigError names what is missing, impossible or not modelled.

    ``kv_heads`` and ``head`` (the width of one) are those of the file unless given.
    """
    reader = Reader(config, where)
    _check_kind(reader)
    heads = reader.count("num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = reader.count("hidden_size", "n_embd", "d_model")
    number = reader.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    kv_heads = kv_heads or _kv_heads(reader) or heads
    if heads % kv_heads:
        raise reader.wrong("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
    head = head or reader.optional("head_dim") or hidden // heads
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
    return Shape(
        layers=_layers(reader, number, hidden, attention),
        hidden=hidden,
        vocabulary=reader.count("vocab_size", "padded_vocab_size"),
        tied=reader.flag("tie_word_embeddings", reader.kind.startswith("gemma")),
        attention_width=width,
        prefill_width=prefill_width,
        kv_width=kv_width,
        kv_heads=kv_heads,
        widest=max(reader.optional(*_WIDTH) or 4 * hidden, reader.optional("moe_intermediate_size") or 0),
        weight_bytes=weight_bytes(config, reader, element_bytes),
    )


def _check_kind(reader: Reader) -> None:
    if reader.kind.startswith(_UNMODELLED_TYPES):
        raise reader.unmodelled(f"models of the type {reader.kind!r}")
    for key, what in _UNMODELLED.items():
        if reader.get(key):
            raise reader.unmodelled(f"{key}: {what}")


def _kv_heads(reader: Reader) -> int | None:
    # Falcon's newer models set multi_query too, and do not mean it.
    if reader.flag("multi_query", False) and not reader.flag("new_decoder_architecture", False):
        return 1
    return reader.optional(*_KV_HEADS)


def _layers(reader: Reader, number: int, hidden: int, attention: int) -> tuple[Layer, ...]:
    inner = reader.optional(*_WIDTH) or 4 * hidden
    dense = Layer(attention + (2 if reader.kind in _UNGATED else 3) * hidden * inner)
    mixture = _mixture(reader, hidden, attention)
    without = _without_experts(reader, number) if mixture is not None else set()
    return tuple(
        replace(dense if mixture is None or index in without else mixture, window=window)
        for index, window in enumerate(_windows(reader, number))
    )


def _mixture(reader: Reader, hidden: int, attention: int) -> Layer | None:
    """A layer with experts; None where no layer has any."""
    experts = reader.optional(*_EXPERTS)
    if not experts or not reader.flag("use_moe", True):
        return None
    active = reader.optional(*_ACTIVE) or 1
    if active > experts:
        raise reader.wrong("num_experts_per_tok", f"{active} is more than the {experts} experts")
    expert = 3 * hidden * (reader.optional(*_EXPERT_WIDTH) or 4 * hidden)
    always = (reader.optional(*_SHARED_EXPERTS) or 0) * expert
    always += 3 * hidden * (reader.optional("shared_expert_intermediate_size", "shared_intermediate_size") or 0)
    return Layer(attention + hidden * experts + always, expert, experts, active)


def _without_experts(reader: Reader, number: int) -> set[int]:
    """The layers of a mixture of experts that have none."""
    first = reader.optional("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or 0
    end = reader.get("moe_layer_end_index")
    last = number - 1 if end in (None, -1) else reader.optional("moe_layer_end_index") or 0
    every = reader.optional("decoder_sparse_step", "moe_layer_interval") or 1
    found = {index for index in range(number) if not first <= index <= last or (index + 1) % every}
    if isinstance(reader.get("moe_layer_freq"), list | tuple):
        found.update(index for index, sparse in enumerate(reader.entries("moe_layer_freq")) if not sparse)
    else:
        freq = reader.optional("moe_layer_freq") or 1
        found.update(index for index in range(number) if index % freq)
    found.update(index for index, kind in enumerate(reader.entries("mlp_layer_types")) if kind == "dense")
    only = reader.entries("mlp_only_layers")
    if not all(isinstance(index, int) for index in only):
        raise reader.wrong("mlp_only_layers", f"must be a list of layers, and is {list(only)!r}")
    return found.union(only)


def _latent(reader: Reader, hidden: int, heads: int, latent: int) -> tuple[int, int, int, int]:
    """Of multi-head latent attention: parameters, the arithmetic's width in decode and prefill, numbers per token."""
    rotary = reader.count("qk_rope_head_dim")
    plain, value = reader.count("qk_nope_head_dim"), reader.count("v_head_dim")
    query = reader.optional("q_lora_rank")
    queries = hidden * query + query * heads * (plain + rotary) if query else hidden * heads * (plain + rotary)
    parameters = queries + hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden
    return parameters, heads * (latent + rotary // 2), heads * (plain + rotary + value) // 2, latent + rotary


def layer_windows(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """How far attention looks back in each layer; None for all the way."""
    return _windows(Reader(config, "config.json"), layers)


def _windows(reader: Reader, layers: int) -> list[int | None]:
    window = reader.optional("sliding_window")
    kinds = reader.entries("layer_types")
    if not window or not reader.flag("use_sliding_window", True):
        return [None] * layers
    if kinds:
        if len(kinds) < layers:
            raise reader.wrong("layer_types", f"has {len(kinds)} entries for {layers} layers")
        return [window if kind == "sliding_attention" else None for kind in kinds[:layers]]
    every = reader.optional("sliding_window_pattern")
    if every:
        return [window if (index + 1) % every else None for index in range(layers)]
    return [window] * layers
