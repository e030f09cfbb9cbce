"""Read the fields of vLLM's request that a queue or a policy sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.bindings.scheduling.clock import SteadyClock

if TYPE_CHECKING:
    from vllm.v1.request import Request


def request_fields(request: Request, clock: SteadyClock) -> dict[str, Any]:
    """Return the fields that ``WaitingRequest`` and ``RequestView`` share, the arrival placed on ``clock``."""
    sampling = getattr(request.sampling_params, "extra_args", None)
    # An embedding or a score has no sampling parameters; its `vllm_xargs` arrive here.
    pooling = getattr(getattr(request, "pooling_params", None), "extra_kwargs", None)
    return {
        "request_id": request.request_id,
        # From the body, or from the header X-Vllm-Priority since 0.28. vLLM carries it under FCFS too.
        "priority": request.priority,
        # Stamped by the API server with time.time(), on another host perhaps, whose clock may be off.
        "arrival": clock.from_wall_time(request.arrival_time),
        "prompt_tokens": request.num_prompt_tokens,
        "max_tokens": request.max_tokens,
        "extra": dict(sampling or pooling or {}),
        "cache_salt": request.cache_salt or "",
        "lora": request.lora_request.lora_name if request.lora_request is not None else "",
    }
