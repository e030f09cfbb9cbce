"""The simulated accelerator as vLLM sees it: a platform without a device, without kernels and without weights.

vLLM loads this class when the platform entry point names it. It chooses the worker, switches compilation and graphs
off, and refuses what cannot be simulated; everything else stays as in vLLM.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_graft.errors import ConfigError
from vllm_graft.simulator import refusals
from vllm_graft.simulator.memory import INSTANT_KV_BYTES, remaining_bytes
from vllm_graft.simulator.settings import carried_settings, resolve_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.inputs import EngineInput
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

_BLOCK_SIZE = 16
"""vLLM's own default."""


class SimulatedPlatform(Platform):
    """A device that accepts any model and any dtype, since it computes with neither."""

    # Out of tree: a platform from an entry point, not one of vLLM's own.
    _enum = PlatformEnum.OOT
    device_name = "simulated"
    # vLLM creates tensors of its own on this device.
    device_type = "cpu"
    dispatch_key = "CPU"
    # torch's backend for CPUs; several nodes exchange steps and outputs over it.
    dist_backend = "gloo"
    # vLLM decorates functions of its sampler with torch.compile on import; "eager" compiles nothing.
    simple_compile_backend = "eager"
    # To this platform what CUDA_VISIBLE_DEVICES is to CUDA; vLLM sets it.
    device_control_env_var = "GRAFT_SIMULATED_DEVICES"

    computes_attention = False
    """Tells a planned attention kernel that it would never be called."""

    worker_cls = "vllm_graft.simulator.worker.SimulatedWorker"
    """The worker that vLLM starts; a platform that extends this one names its own."""

    executor_cls = "vllm_graft.simulator.executor.SimulatedExecutor"
    """The executor of virtual time, which has one process."""

    def __init__(self) -> None:
        """Prepare torch; vLLM creates one instance in each of its processes, before it uses the platform."""
        tolerate_missing_accelerator()

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Every dtype that a model may have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Accept every dtype."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Return the name that logs and metrics show."""
        return f"simulated {resolve_settings().name}"

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """Return a name for one device among several."""
        return f"simulated-{device_id}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return the modelled memory; of the instant device, the size of the KV cache."""
        settings = resolve_settings()
        if settings.device is None:
            return settings.kv_bytes or INSTANT_KV_BYTES
        return settings.device.memory_bytes

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Return 0: nothing is ever allocated."""
        return 0.0

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what cannot be simulated, choose the worker, and switch off what only a real device needs."""
        from vllm.config import CompilationMode, CUDAGraphMode

        refusals.check_config(vllm_config)
        # Put into additional_config now, in the front end: engine and workers must not read the environment again.
        settings = carried_settings(vllm_config)
        # Refused before anything is started: a model that does not fit. A VllmConfig may be without a model.
        sized = vllm_config.cache_config.kv_cache_memory_bytes or settings.kv_bytes
        if vllm_config.model_config is not None and settings.device is not None and not sized:
            remaining_bytes(vllm_config, settings)
        if settings.output_tokens:
            refusals.check_ending(vllm_config)
        if settings.virtual:
            refusals.check_virtual(vllm_config)
            # Set here because otherwise vLLM starts one process per device, each with a clock of its own.
            vllm_config.parallel_config.distributed_executor_backend = cls.executor_cls
        # "auto" means that the user has named no worker.
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = cls.worker_cls
        if not vllm_config.cache_config.user_specified_block_size:
            vllm_config.cache_config.block_size = _BLOCK_SIZE
        # There is no model to compile and no kernel to capture.
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE

    @classmethod
    def validate_request(cls, processed_inputs: EngineInput, params: SamplingParams | PoolingParams) -> None:
        """Reject a request that would otherwise fail in the engine."""
        refusals.check_request(params)

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Keep the block size. vLLM's own method asks the model's attention layers, and here no model is built."""

    @classmethod
    def get_attn_backend_cls(cls, *args: object, **kwargs: object) -> str:
        """Refuse: an attention layer calls this when it is built, and none is ever built."""
        raise ConfigError(
            "attention is never computed, so there is no backend for it",
            where="simulated accelerator",
            fix="run the model on a real device (unset GRAFT_SIMULATE)",
        )

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing: there are no kernels."""

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Do nothing: there is no device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Do nothing: tokens follow from the engine's or the request's seed, never from torch's generators."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Return False: nothing is copied to a device."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Return True: layers with a sliding window get a cache group of their own, as on a real device."""
        return True

    def is_sleep_mode_available(self) -> bool:
        """Return True: the worker models the time that sleeping and waking take."""
        return True


def tolerate_missing_accelerator() -> None:
    """Make torch's cache functions do nothing if no accelerator exists.

    At the end of an engine vLLM calls these two functions on every platform but its own CPU one, and torch raises
    if no accelerator exists. If one exists they work as before.
    """
    for name in ("empty_cache", "empty_host_cache"):
        original = getattr(torch.accelerator, name, None)
        # torch before 2.9 has no empty_host_cache; a platform made twice finds its own wrapper.
        if original is None or hasattr(original, "__wrapped__"):
            continue

        @functools.wraps(original)
        def guarded(original: object = original) -> None:
            if torch.accelerator.is_available():
                original()  # type: ignore[operator]

        setattr(torch.accelerator, name, guarded)
