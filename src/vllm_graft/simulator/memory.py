"""The memory of the simulated accelerator: the size of its KV cache, and what each layer keeps there.

No memory is allocated: vLLM divides the number of bytes into blocks, and to its scheduler the blocks are real. The size
is that of a real device: its memory, times the share for vLLM, less weights, activations and a reserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.bindings.attention.layers import planned_layers, unserved_cache, unserved_engine
from vllm_graft.contracts import LayerView
from vllm_graft.errors import ConfigError
from vllm_graft.simulator.model_shape import FILE, ConfigFields, ModelShape, read_shape, read_windows
from vllm_graft.simulator.roofline import Roofline
from vllm_graft.simulator.settings import VARIABLES, SimulationSettings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

INSTANT_KV_BYTES = 1 << 30
"""The KV cache of the instant device, unless its size is set."""

# VllmConfig._set_cudagraph_sizes takes the smaller one of this and 2 * max_num_seqs * tokens per decode.
_LARGEST_GRAPH = 512
"""The most tokens of a CUDA graph by vLLM's defaults."""

_WHERE = "simulated accelerator"


def build_roofline(
    vllm_config: VllmConfig,
    settings: SimulationSettings,
    windows: Sequence[int | WindowShape | None] | None = None,
) -> Roofline | None:
    """Build the modelled device of a configuration; None for the instant one.

    ``windows`` are those of each layer under the plan; without them the model's own count.
    """
    if settings.device is None:
        return None
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    # The limits of vLLM's CUDA graphs by its own defaults, although on this platform graphs are off.
    drafting = vllm_config.speculative_config
    decode = 1 + (drafting.num_speculative_tokens if drafting else 0)
    largest = 0 if model.enforce_eager else 2 * decode * vllm_config.scheduler_config.max_num_seqs
    shape = _model_shape(model)
    if windows is not None:
        layers = zip(shape.layers, windows, strict=True)
        shape = replace(shape, layers=tuple(replace(layer, window=window) for layer, window in layers))
    return Roofline(
        shape,
        settings.device,
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        data=parallel.data_parallel_size,
        kv_bytes=_kv_dtype(vllm_config).itemsize,
        decode=decode,
        graph_tokens=min(largest, _LARGEST_GRAPH),
    )


def _model_shape(model: ModelConfig) -> ModelShape:
    """Read a model's shape with the KV heads that vLLM found, which ``kv_cache_specs`` has too."""
    config: dict[str, Any] = model.hf_text_config.to_dict()
    # --quantization quantizes a model whose file describes no quantization.
    quantized = getattr(model.hf_config, "quantization_config", None)
    if quantized is None and model.quantization:
        quantized = {"quant_method": model.quantization}
    if quantized is not None:
        config["quantization_config"] = quantized.to_dict() if hasattr(quantized, "to_dict") else quantized
    heads, head = model.get_total_num_kv_heads(), model.get_head_size()
    # With multi-head latent attention get_head_size is the width of the latent vector that all heads share.
    latent = model.use_mla
    found = read_shape(
        config,
        str(model.model),
        model.dtype.itemsize,
        kv_heads=None if latent else heads,
        head=None if latent else head,
    )
    kept = head if latent else 2 * heads * head
    if found.kv_width != kept:
        raise ConfigError(
            f"a layer keeps {kept} numbers per token as vLLM runs the model, but {found.kv_width} by its configuration",
            where=str(model.model),
            fix="unset VLLM_MLA_DISABLE if it is set; otherwise take another model, or the device 'instant'",
        )
    return found


def kv_cache_bytes(vllm_config: VllmConfig, settings: SimulationSettings) -> int:
    """Return the size of this model's KV cache: as configured, else what the memory leaves.

    Raises ConfigError if the weights, or one request of full length, would not fit: vLLM would say so too, but
    advise settings that may have no effect here.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    size: int = cache.kv_cache_memory_bytes or settings.kv_bytes or remaining_bytes(vllm_config, settings)
    if cache.num_gpu_blocks_override is not None or model.original_max_model_len == -1:
        return size  # the number of blocks is given, or vLLM shortens the requests until they fit
    # The page on top: vLLM keeps one block for itself.
    specs = kv_cache_specs(vllm_config).values()
    need = sum(spec.max_memory_usage_bytes(vllm_config) + spec.page_size_bytes for spec in specs)
    if need > size:
        if cache.kv_cache_memory_bytes:
            more = f"raise --kv-cache-memory-bytes to {need} or more"
        elif settings.device is None or settings.kv_bytes:
            more = f"set {VARIABLES['kv_bytes']} to {need} or more"
        else:
            more = _MORE_DEVICES
        raise ConfigError(
            f"one request of max_model_len {model.max_model_len} needs {need} bytes of KV cache, but there are {size}",
            where=_WHERE,
            fix=f"{more}, or lower --max-model-len",
        )
    return size


_MORE_DEVICES = "raise --tensor-parallel-size, take a device with more memory"


def remaining_bytes(vllm_config: VllmConfig, settings: SimulationSettings) -> int:
    """Return what the modelled device's memory leaves for the KV cache; ConfigError if the model does not fit."""
    modelled = build_roofline(vllm_config, settings)
    if modelled is None:
        return INSTANT_KV_BYTES
    scheduler, device = vllm_config.scheduler_config, modelled.device
    share: float = vllm_config.cache_config.gpu_memory_utilization
    usable = share * device.memory_bytes - 1e9 * device.reserve_gb
    activations = modelled.activation_bytes(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    left = usable - modelled.weight_bytes - activations
    if left <= 0:
        raise ConfigError(
            f"the model's weights take {modelled.weight_bytes / 1e9:.1f} GB of each {settings.name} and a step "
            f"{activations / 1e9:.1f} GB; vLLM may use {usable / 1e9:.1f} GB (gpu_memory_utilization {share:g} of "
            f"{device.memory_gb:g} GB, less {device.reserve_gb:g} GB), which leaves nothing for the KV cache",
            where=_WHERE,
            fix=f"{_MORE_DEVICES}, or lower --max-num-batched-tokens",
        )
    return int(left)


def kv_cache_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Return what each attention layer of this rank keeps per token, by the layer's name."""
    start, end = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    return dict(list(_layer_specs(vllm_config).items())[start:end])


def attention_windows(vllm_config: VllmConfig) -> list[int | WindowShape | None]:
    """Return the tokens that attention sees in each layer of the model, on all ranks; None for all tokens."""
    specs = _layer_specs(vllm_config).values()
    return [getattr(spec, "shape", None) or getattr(spec, "sliding_window", None) for spec in specs]


def _layer_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Return what each attention layer of the model keeps per token, by the plan if one names a KV policy."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    common = {
        "block_size": cache.block_size,
        "num_kv_heads": model.get_num_kv_heads(parallel),
        "head_size": model.get_head_size(),
        "dtype": _kv_dtype(vllm_config),
    }
    # None if --disable-sliding-window is set, whatever the file says.
    window = model.get_sliding_window()
    config = ConfigFields(model.hf_text_config.to_dict(), FILE)
    windows = read_windows(config, model.get_total_num_hidden_layers())

    def unserved() -> str:
        """Return why the layers of a real device could not have a window; empty if they could."""
        if model.use_mla:
            return "its attention is latent (MLA), but windows are for plain causal self-attention"
        return unserved_cache(str(cache.cache_dtype)) or unserved_engine(vllm_config)

    specs: dict[str, KVCacheSpec] = {}
    for index, own in enumerate(windows):
        slides = bool(window and own is not None)
        if model.use_mla:
            spec: KVCacheSpec = MLAAttentionSpec(**common)
        elif slides:
            spec = SlidingWindowSpec(**common, sliding_window=window)
        else:
            spec = FullAttentionSpec(**common)
        view = LayerView(
            name=f"model.layers.{index}.self_attn.attn",
            index=index,
            layers=len(windows),
            window=window if slides else None,
            heads=model.get_num_attention_heads(parallel),
            kv_heads=common["num_kv_heads"],
            head_size=common["head_size"],
            block_size=common["block_size"],
            max_tokens=model.max_model_len,
        )
        specs[view.name] = planned_layers.adapt_spec(view, spec, vllm_config, unserved)
    return specs


def _kv_dtype(vllm_config: VllmConfig) -> Any:
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    return kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, vllm_config.model_config)
