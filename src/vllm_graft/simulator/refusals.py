"""Refusals of what the simulated accelerator cannot do, at the start or in the answer to a request.

Tokens and log probabilities are invented and no logits exist, so whatever reads or shapes logits is refused rather than
ignored. Temperature, top-p, penalties and a weak logit bias are accepted: any token is a possible outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graft.errors import ConfigError
from vllm_graft.simulator.tokens import ending_ids

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

_WHERE = "simulated accelerator"
_REAL_DEVICE = "run it on a real device (unset GRAFT_SIMULATE)"

_SETTINGS: tuple[tuple[str, str], ...] = (
    ("diffusion_config", "diffusion decoding needs a model"),
    ("watermark_config", "watermarking needs logits"),
    ("kv_transfer_config", "there is no KV cache content to transfer"),
    ("ec_transfer_config", "there is no encoder output to transfer"),
    ("model_config.logits_processors", "logits processors need logits"),
    ("model_config.return_sampling_mask", "sampling masks need logits"),
    ("model_config.enable_return_routed_experts", "no expert is ever routed to"),
    ("speculative_config.enable_adaptive_verification", "there are no draft logits to adapt to"),
    ("aux_output_config.enabled", "there are no auxiliary outputs"),
)
"""Settings that must be off, by their path in VllmConfig; a release that lacks a setting has it off."""

_MODELS: tuple[tuple[str, str], ...] = (
    ("is_encoder_decoder", "an encoder-decoder model"),
    ("is_hybrid", "a model with state-space layers"),
    ("is_attention_free", "a model without attention"),
)
"""Architectures whose memory is not simulated, by their property of ModelConfig."""

_PARALLEL: tuple[str, ...] = ("decode_context_parallel_size", "prefill_context_parallel_size")

_EXECUTORS: tuple[str, ...] = ("ray", "external_launcher")

_LOGIT_PARAMETERS: tuple[str, ...] = ("prompt_logprob_token_ids", "thinking_token_budget")

_DRAFTERS: tuple[str, ...] = (
    *("ngram", "ngram_gpu", "suffix", "eagle", "eagle3", "mtp", "draft_model", "medusa", "mlp_speculator"),
)
"""Methods that differ here only in the number of drafts and their acceptance, since nothing is computed."""


def check_config(vllm_config: VllmConfig) -> None:
    """Raise ConfigError for the first setting that this device cannot honour."""
    for path, why in _SETTINGS:
        if _setting(vllm_config, path):
            raise _refusal(f"{path} cannot be honoured: {why}", f"leave it out, or {_REAL_DEVICE}")
    for name, kind in _MODELS:
        if _setting(vllm_config, f"model_config.{name}"):
            raise _refusal(f"{kind} is not simulated", f"take another model, or {_REAL_DEVICE}")
    mode = _setting(vllm_config, "model_config.logprobs_mode")
    if mode not in (None, "raw_logprobs"):
        raise _refusal(f"logprobs_mode {mode!r} is not simulated", f"take 'raw_logprobs', or {_REAL_DEVICE}")
    if _setting(vllm_config, "model_config.runner_type") == "pooling":
        raise _refusal("pooling models cannot run: there are no hidden states", _REAL_DEVICE)
    parallel = vllm_config.parallel_config
    for name in _PARALLEL:
        if getattr(parallel, name, 1) > 1:
            raise _refusal(f"{name} above 1 is not simulated", f"set it to 1, or {_REAL_DEVICE}")
    backend = parallel.distributed_executor_backend
    if backend in _EXECUTORS:
        raise _refusal(f"executor {backend!r} is not supported", "set distributed_executor_backend to 'mp'")
    method = _setting(vllm_config, "speculative_config.method")
    if method is not None and method not in _DRAFTERS:
        fix = f"take one of {', '.join(_DRAFTERS)}, or {_REAL_DEVICE}"
        raise _refusal(f"speculative method {method!r} is not simulated", fix)
    if _setting(vllm_config, "speculative_config.rejection_sample_method") == "synthetic":
        raise _refusal(
            "rejection_sample_method 'synthetic' changes the tokens, but drafts here never do",
            "leave it out and set the simulated acceptance instead",
        )


def check_virtual(vllm_config: VllmConfig) -> None:
    """Raise ConfigError if time is virtual and the engine would have more than one process."""
    from vllm import envs

    if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        raise _refusal(
            "virtual time works only in a single process, but this engine would run in a separate one",
            "run a workload (vllm-graft simulate --speed virtual --workload FILE), set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 for LLM(), or give a server a number as its speed",
        )
    if vllm_config.parallel_config.data_parallel_size > 1:
        raise _refusal(
            "virtual time works only in a single process, but each data-parallel rank runs in a separate one",
            "simulate one rank with its share of the load, or give a number as the speed",
        )


def check_ending(vllm_config: VllmConfig) -> None:
    """Raise ConfigError if answers have a natural length and vLLM would not know the token that ends them."""
    model = vllm_config.model_config
    if model is not None and model.skip_tokenizer_init and not ending_ids(model):
        raise _refusal(
            "output_tokens would have no effect: there is no tokenizer, and the model names no token that ends a text",
            "add eos_token_id to the model's config.json or generation_config.json, start with a tokenizer, "
            "or set output_tokens to 0",
        )


def check_request(params: SamplingParams | PoolingParams) -> None:
    """Raise vLLM's validation error (HTTP 400) for a request that this device cannot serve."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    if not isinstance(params, SamplingParams):
        raise VLLMValidationError(f"{_WHERE}: pooling needs hidden states, but none are computed")
    for name in _LOGIT_PARAMETERS:
        # Unset is None or empty; 0 is set.
        value = getattr(params, name, None)
        if value is not None and value != [] and value != {}:
            raise VLLMValidationError(
                f"{_WHERE}: no logits are computed, so {name!r} cannot be served. Next: leave it out", parameter=name
            )


def _refusal(what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=_WHERE, fix=fix)


def _setting(config: object, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config
