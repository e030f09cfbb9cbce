"""How many bytes a weight takes, from what a model's configuration says of its quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm_graft.errors import ConfigError
from vllm_graft.plugins.platforms.simulated.reader import Reader

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


def weight_bytes(config: Mapping[str, Any], reader: Reader, element_bytes: float) -> float:
    """Bytes per weight: those of an element, unless the configuration or its text part says how it is quantized."""
    quantized = config.get("quantization_config")
    if quantized is None:
        quantized = reader.get("quantization_config")
    if quantized is None or quantized == {}:
        return element_bytes
    if not isinstance(quantized, Mapping):
        raise reader.wrong("quantization_config", f"must be an object, and is {quantized!r}")
    bits = quantized.get("bits") or quantized.get("w_bit") or _group_bits(quantized)
    if isinstance(bits, int | float) and not isinstance(bits, bool) and 0 < bits <= 32:
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
        where=reader.where,
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
