"""The shape of a model, from its ``config.json`` alone: weights, KV cache per token, arithmetic per token.

Dense models and mixtures of experts, grouped-query and multi-head latent attention, sliding windows. Parameters that
do not matter for time or memory (norms, biases, rotary tables) are left out: together well under 1 %.

``find_model`` takes a ``config.json``, a folder that has one, or the name of a model whose configuration ships.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.errors import ConfigError, nearest
from vllm_graft.fields import Fields

FILE: Final = "config.json"

_SHIPPED: Final = Path(__file__).parent / "model_configs"
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json")

_NESTED: Final[Mapping[str, tuple[str, ...]]] = {
    "attn_config": ("kv_n_heads",),
    "ffn_config": ("ffn_hidden_size", "moe_num_experts", "moe_top_k"),
}
"""Keys that DBRX and MPT keep in tables of their own, and other models beside the rest."""

_KV_HEADS: Final = (
    *("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"),
    "kv_n_heads",
)
"""Names of the number of KV heads, in the order of vLLM's search."""
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
"""Models with parts that their configuration does not show."""

_UNMODELLED: Final[Mapping[str, tuple[str, ...]]] = {
    "layers without a KV cache of their own": ("num_kv_shared_layers", "use_cla"),
    "embeddings for every layer": ("hidden_size_per_layer_input",),
    "sparse attention layers": ("index_topk", "sparse_attention_config"),
    "layers with a compressed KV cache": ("compress_ratios",),
    "keys and values of different widths": ("qk_nope_dim",),
    "experts that compute nothing": ("zero_expert_num",),
    "experts within attention": ("mova_num_experts",),
    "layers that a token passes more than once": ("loop_num", "total_ut_steps", "H_cycles"),
    "layers that differ in their attention": (
        *("per_layer_config", "global_head_dim", "block_configs", "hybrid_layer_pattern", "moe_layers_enum"),
        *("attention_other_setting", "num_attention_heads_per_layer", "swa_num_key_value_heads", "sliding_windows"),
        "interleaved_sliding_window",
    ),
}
"""Keys of models that vLLM serves and this module would get wrong, by what they stand for."""

_WEIGHT_BYTES: Final[Mapping[str, float]] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "modelopt"), 1.0),
    **dict.fromkeys(("mxfp4", "awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes"), 0.53),
    **dict.fromkeys(("modelopt_fp4", "nvfp4"), 0.56),
}
"""Bytes per weight of a quantized model, scales included, if its configuration does not say how many bits."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: parameters that every token uses, experts, and how far attention looks back."""

    shared: int
    """Parameters of attention, router, shared experts, or the whole of a dense layer."""
    expert: int = 0
    """Parameters of one expert."""
    experts: int = 0
    active: int = 0
    """Experts per token."""
    window: int | WindowShape | None = None
    """Tokens that attention sees, the last ones or a planned window; None for all."""

    def chosen(self, tokens: int) -> float:
        """Return the parameters of the experts that a batch of tokens touches, each token choosing at random."""
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
class ModelShape:
    """A model's layers and widths."""

    layers: tuple[LayerShape, ...]
    hidden: int
    vocabulary: int
    tied: bool
    attention_width: int
    """Query heads times their width, which attention's arithmetic is proportional to in decode."""
    prefill_width: int
    """Its counterpart in prefill: latent attention multiplies the latent vectors out there."""
    kv_width: int
    """Numbers that a layer keeps per token."""
    kv_heads: int
    """The most devices that can share the KV cache; 1 for latent attention, which every device keeps whole."""
    widest: int
    """The widest activation of a token inside a layer."""
    weight_bytes: float
    """Bytes per parameter."""

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, embeddings included."""
        return sum(layer.total for layer in self.layers) + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def embedding_bytes(self) -> float:
        """The memory of the input and output embeddings, which stay in 16 bits when a model is quantized."""
        return 2.0 * self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def total_bytes(self) -> float:
        """The memory of all weights."""
        return sum(layer.total for layer in self.layers) * self.weight_bytes + self.embedding_bytes


class UnmodelledError(ConfigError):
    """A valid model of an unsupported architecture, which only the device 'instant' takes."""


class ConfigFields(Fields):
    """The text part of a ``config.json``: each value by any of the names that models give it."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        super().__init__(config, where, lambda key: where)
        self._values = self.part("text_config") or config
        for name, keys in _NESTED.items():
            part = self.part(name)
            self._values = {**{key: part[key] for key in keys if key in part}, **self._values}

    @property
    def kind(self) -> str:
        """The model's type; empty if the file has none."""
        return self._typed("model_type", str, "a name") or ""

    def part(self, name: str) -> Mapping[str, Any]:
        """Return a nested table; empty if there is none."""
        return self._typed(name, Mapping, "an object") or {}

    def switch(self, name: str, default: bool) -> bool:
        """Return true or false; published files write 0 and 1 too."""
        value = self.raw(name)
        if value is not None and value not in (True, False):
            raise self.unfit(name, value, "true or false")
        return default if value is None else bool(value)

    def entries(self, name: str) -> tuple[Any, ...]:
        """Return a list's entries; none if there is no list."""
        return tuple(self._typed(name, (list, tuple), "a list") or ())

    def _typed(self, name: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        value = self.raw(name)
        if value is not None and not isinstance(value, kind):
            raise self.unfit(name, value, wanted)
        return value

    def optional(self, *names: str) -> int | None:
        """Return the first whole number above 0 among the names; None if there is none."""
        for name in names:
            value = self.raw(name)
            if isinstance(value, list | tuple) and value:
                if any(each != value[0] for each in value):
                    raise self.unmodelled(f"{name}: parts or layers that differ")
                value = value[0]
            if value in (None, 0, False):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.unfit(name, value, "a whole number above 0")
            return value
        return None

    def required(self, *names: str) -> int:
        """Return the first whole number above 0 among the names; ConfigError if there is none."""
        value = self.optional(*names)
        if value is None:
            raise self.wrong(names[0], "is missing" if names[0] not in self._values else "must be above 0")
        return value

    def wrong(self, key: str | None, what: str, fix: str = "") -> ConfigError:
        """Return the error about an impossible value."""
        published = "give the config.json of a decoder model, as it was published"
        return ConfigError(f"{key}: {what}", where=self._where(key), fix=fix or published)

    def unfit(self, key: str, value: object, wanted: str) -> ConfigError:
        """Return the error about a value of another kind."""
        return self.wrong(key, f"must be {wanted}, but is {value!r}")

    def unmodelled(self, what: str) -> UnmodelledError:
        """Return the error about a valid model of an unsupported architecture."""
        return UnmodelledError(
            f"{what} are not modelled",
            where=self._where(None),
            fix="take another model, or the device 'instant', whose steps take no time",
        )


def read_shape(
    values: Mapping[str, Any],
    where: str = FILE,
    element_bytes: float = 2.0,
    *,
    kv_heads: int | None = None,
    head: int | None = None,
) -> ModelShape:
    """Read the shape from a ``config.json``; a ConfigError names what is missing, impossible or not modelled.

    ``kv_heads`` and ``head`` (the width of one) are those of the file unless given.
    """
    config = ConfigFields(values, where)
    if config.kind.startswith(_UNMODELLED_TYPES):
        raise config.unmodelled(f"models of the type {config.kind!r}")
    for what, keys in _UNMODELLED.items():
        if present := next(filter(config.raw, keys), None):
            raise config.unmodelled(f"{present}: {what}")
    heads = config.required("num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = config.required("hidden_size", "n_embd", "d_model")
    number = config.required("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    # Falcon's newer models set multi_query too, and have more KV heads nevertheless.
    single = config.switch("multi_query", False) and not config.switch("new_decoder_architecture", False)
    kv_heads = kv_heads or (1 if single else config.optional(*_KV_HEADS)) or heads
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
    head = head or config.optional("head_dim") or hidden // heads
    if not head:
        raise config.wrong("hidden_size", f"{hidden} is less than the {heads} attention heads")
    # DeepSeek's key for multi-head latent attention, which other families took over.
    latent = config.optional("kv_lora_rank")
    if latent:
        rotary = config.required("qk_rope_head_dim")
        plain, value = config.required("qk_nope_head_dim"), config.required("v_head_dim")
        query = config.optional("q_lora_rank")
        queries = hidden * query + query * heads * (plain + rotary) if query else hidden * heads * (plain + rotary)
        attention = queries + hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden
        width, prefill_width = heads * (latent + rotary // 2), heads * (plain + rotary + value) // 2
        kv_width, kv_heads = latent + rotary, 1
    else:
        attention = hidden * head * (2 * heads + 2 * kv_heads)
        width = prefill_width = heads * head
        kv_width = 2 * kv_heads * head
    # GPT-2 leaves n_inner out and means four times the width.
    inner = config.optional(*_WIDTH) or 4 * hidden
    dense = LayerShape(attention + (2 if config.kind in _UNGATED else 3) * hidden * inner)
    mixture = _read_mixture(config, hidden, attention)
    without = _read_dense_layers(config, number) if mixture is not None else set()
    return ModelShape(
        layers=tuple(
            replace(dense if mixture is None or index in without else mixture, window=window)
            for index, window in enumerate(read_windows(config, number))
        ),
        hidden=hidden,
        vocabulary=config.required("vocab_size", "padded_vocab_size"),
        # transformers ties Gemma's embeddings by default, and Gemma's files do not say so.
        tied=config.switch("tie_word_embeddings", config.kind.startswith("gemma")),
        attention_width=width,
        prefill_width=prefill_width,
        kv_width=kv_width,
        kv_heads=kv_heads,
        widest=max(inner, config.optional("moe_intermediate_size") or 0),
        weight_bytes=_read_weight_bytes(values, config, element_bytes),
    )


def _read_mixture(config: ConfigFields, hidden: int, attention: int) -> LayerShape | None:
    """Read a layer with experts; None if no layer has any."""
    experts = config.optional(*_EXPERTS)
    if not experts or not config.switch("use_moe", True):
        return None
    active = config.optional(*_ACTIVE) or 1
    if active > experts:
        raise config.wrong("num_experts_per_tok", f"{active} is more than the {experts} experts")
    expert = 3 * hidden * (config.optional(*_EXPERT_WIDTH) or 4 * hidden)
    always = (config.optional(*_SHARED_EXPERTS) or 0) * expert
    always += 3 * hidden * (config.optional("shared_expert_intermediate_size", "shared_intermediate_size") or 0)
    return LayerShape(attention + hidden * experts + always, expert, experts, active)


def _read_dense_layers(config: ConfigFields, number: int) -> set[int]:
    """Read which layers of a mixture of experts have none: each family of models says it in its own way."""
    first = config.optional("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or 0
    end = config.raw("moe_layer_end_index")
    last = number - 1 if end in (None, -1) else config.optional("moe_layer_end_index") or 0
    every = config.optional("decoder_sparse_step", "moe_layer_interval") or 1
    found = {index for index in range(number) if not first <= index <= last or (index + 1) % every}
    if isinstance(config.raw("moe_layer_freq"), list | tuple):
        found.update(index for index, sparse in enumerate(config.entries("moe_layer_freq")) if not sparse)
    else:
        freq = config.optional("moe_layer_freq") or 1
        found.update(index for index in range(number) if index % freq)
    found.update(index for index, kind in enumerate(config.entries("mlp_layer_types")) if kind == "dense")
    only = config.entries("mlp_only_layers")
    if not all(isinstance(index, int) for index in only):
        raise config.unfit("mlp_only_layers", list(only), "a list of layers")
    return found.union(only)


def read_windows(config: ConfigFields, layers: int) -> list[int | None]:
    """Read how many tokens attention looks back in each layer; None for all."""
    window = config.optional("sliding_window")
    kinds = config.entries("layer_types")
    # Qwen's files give a window and switch it off.
    if not window or not config.switch("use_sliding_window", True):
        return [None] * layers
    if kinds:
        if len(kinds) < layers:
            raise config.wrong("layer_types", f"has {len(kinds)} entries for {layers} layers")
        return [window if kind == "sliding_attention" else None for kind in kinds[:layers]]
    # Gemma 3 and Cohere 2: the last layer of each period sees everything.
    every = config.optional("sliding_window_pattern")
    if every:
        return [window if (index + 1) % every else None for index in range(layers)]
    return [window] * layers


def _read_weight_bytes(values: Mapping[str, Any], config: ConfigFields, element_bytes: float) -> float:
    """Return the bytes per weight: an element's, unless the whole file or its text part describes a quantization."""
    quantized = values.get("quantization_config")
    if quantized is None:
        quantized = config.raw("quantization_config")
    if quantized is None or quantized == {}:
        return element_bytes
    if not isinstance(quantized, Mapping):
        raise config.unfit("quantization_config", quantized, "an object")
    bits = quantized.get("bits") or quantized.get("w_bit")
    groups = quantized.get("config_groups")
    # compressed-tensors describes the weights in groups.
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            bits = bits or weights.get("num_bits")
    if isinstance(bits, int | float) and not isinstance(bits, bool) and 0 < bits <= 32:
        # Plus scales: one of 16 bits for about every 64 weights, if the weights are small.
        return float(bits) / 8 + (0.03 if bits < 8 else 0.0)
    if quantized.get("load_in_8bit"):
        return 1.0
    names = [str(quantized.get(key, "")).lower() for key in ("quant_algo", "quant_method")]
    for name in names:
        if name in _WEIGHT_BYTES:
            return _WEIGHT_BYTES[name]
    raise config.wrong(
        "quantization_config",
        f"how many bytes a weight has under {names[-1]!r} is not known",
        'add "bits" to quantization_config, or leave quantization_config out',
    )


@dataclass(frozen=True, slots=True)
class Model:
    """A model to simulate: its name and its configuration."""

    name: str
    """The name of a shipped configuration, or the path as given."""
    file: Path
    """Its ``config.json``."""
    config: dict[str, Any]

    @property
    def shape(self) -> ModelShape | None:
        """The shape; None if the file leaves a value to vLLM's own defaults.

        Raises ConfigError for an architecture that is not modelled.
        """
        try:
            return read_shape(self.config, str(self.file))
        except ConfigError as error:
            if error.what.endswith("is missing") and self.config.get("model_type"):
                return None
            raise

    @property
    def folder(self) -> Path:
        """The folder to give to vLLM."""
        return self.file.parent

    @property
    def shipped(self) -> bool:
        """True if the configuration ships with the package."""
        return self.folder.parent == _SHIPPED

    @property
    def has_tokenizer(self) -> bool:
        """True if a tokenizer lies beside the file."""
        return any((self.folder / name).is_file() for name in _TOKENIZERS)


def shipped_models() -> list[str]:
    """Return the names of the models whose configurations ship."""
    return sorted(folder.name for folder in _SHIPPED.iterdir() if (folder / FILE).is_file())


def find_model(given: str) -> Model:
    """Return the model of that name or path; a ConfigError says what is wrong with it."""
    path = Path(given).expanduser().absolute()
    if given.lower() in shipped_models():
        path = _SHIPPED / given.lower() / FILE
    elif (path / FILE).is_file():
        path = path / FILE
    elif path.is_dir():
        raise ConfigError(f"the folder has no {FILE}", where=str(path), fix=f"put the model's {FILE} there")
    elif not path.is_file():
        raise ConfigError(
            f"there is neither a file or folder {given!r} nor a shape of that name{nearest(given, shipped_models())}",
            where="--model",
            fix=f"give a {FILE}, a folder that has one, or one of {', '.join(shipped_models())}",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path), fix="make it readable UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where=str(path), fix="give a model's config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"is not a JSON object but {type(config).__name__}", where=str(path), fix="give a model's config.json"
        )
    if not config.get("architectures"):
        raise ConfigError(
            "architectures: is missing, and vLLM chooses the model's class by it",
            where=str(path),
            fix="give the config.json of a decoder model, as it was published",
        )
    model = Model(given, path, config)
    with contextlib.suppress(UnmodelledError):  # the device 'instant' takes those; a modelled one asks again
        _ = model.shape
    return model
