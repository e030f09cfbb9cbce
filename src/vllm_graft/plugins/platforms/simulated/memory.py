"""How much the simulated accelerator's KV cache may hold, and what one layer puts there.

No memory is taken: vLLM divides the number of bytes into blocks, and the blocks are real to its scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_graft.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

KV_BYTES_VARIABLE = "GRAFT_SIMULATED_KV_BYTES"
DEFAULT_KV_BYTES = 1 << 30


def kv_bytes(environ: Mapping[str, str] | None = None) -> int:
    """The bytes for the KV cache of one simulated device: ``$GRAFT_SIMULATED_KV_BYTES``, else 1 GiB."""
    text = (os.environ if environ is None else environ).get(KV_BYTES_VARIABLE, "").strip()
    if not text:
        return DEFAULT_KV_BYTES
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(
            f"{text!r} is not a number of bytes",
            where=KV_BYTES_VARIABLE,
            fix=f"set a whole number above 0, such as {DEFAULT_KV_BYTES}, or unset it",
        )
    return int(text)


def available_bytes(vllm_config: VllmConfig) -> int:
    """What a device offers for this model's KV cache: vLLM's own setting where it is given, else ``kv_bytes()``.

    Raises ConfigError where one request of full length would not fit. vLLM would say so too, but advise a setting that
    has no effect here.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    size: int = cache.kv_cache_memory_bytes or kv_bytes()
    if cache.num_gpu_blocks_override is not None or model.original_max_model_len == -1:
        return size  # the number of blocks is given, or vLLM shortens the requests until they fit
    # The page on top: vLLM keeps one block for itself.
    specs = kv_cache_specs(vllm_config).values()
    need = sum(spec.max_memory_usage_bytes(vllm_config) + spec.page_size_bytes for spec in specs)
    if need > size:
        raise ConfigError(
            f"one request of max_model_len {model.max_model_len} needs {need} bytes of KV cache, and there are {size}",
            where="simulated accelerator",
            fix=f"set {KV_BYTES_VARIABLE} to {need} or more, or lower --max-model-len",
        )
    return size


def kv_cache_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """What each attention layer of this rank keeps per token, by the layer's name."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    common = {
        "block_size": cache.block_size,
        "num_kv_heads": model.get_num_kv_heads(parallel),
        "head_size": model.get_head_size(),
        "dtype": kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
    }
    window = model.get_sliding_window()
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    start, end = model.get_layers_start_end_indices(parallel)
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(start, end):
        slides = window and layer < len(kinds) and kinds[layer] == "sliding_attention"
        if model.use_mla:
            spec: KVCacheSpec = MLAAttentionSpec(**common)
        elif slides:
            spec = SlidingWindowSpec(**common, sliding_window=window)
        else:
            spec = FullAttentionSpec(**common)
        specs[f"model.layers.{layer}.self_attn.attn"] = spec
    return specs
