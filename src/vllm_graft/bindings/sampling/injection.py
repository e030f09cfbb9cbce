"""What planned samplers need of the engine's arguments, and when an engine cannot have them."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.errors import ConfigError
from vllm_graft.plan import Plan, Run

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

QUALNAME: Final = "vllm_graft.bindings.sampling.processor:PlannedProcessor"
"""What vLLM is given among its logits processors; it resolves the name in front end and workers."""

RUNNER_VARIABLE: Final = "VLLM_USE_V2_MODEL_RUNNER"
_V2: Final = "vllm.v1.worker.gpu.sample.logits_processor"

_POOLING: Final = "a pooling model picks no tokens"
_SPECULATIVE: Final = (
    "the V1 model runner takes no logits processors with speculative decoding; the V2 runner does, from vLLM 0.31 on"
)


def arguments(args: EngineArgs, plan: Plan) -> dict[str, Any]:
    """The engine arguments that planned samplers need, beside the user's own logits processors."""
    planned = plan.of("sampler")
    if not planned:
        return {}
    if os.environ.get(RUNNER_VARIABLE) == "1" and not v2_takes_samplers():
        raise ConfigError(
            f"the sampler {planned[0].name!r} ({planned[0].origin}) cannot run on the V2 model runner of this vLLM, "
            "which takes custom logits processors from 0.31 on",
            where=f"{RUNNER_VARIABLE}=1",
            fix=f"unset {RUNNER_VARIABLE}, install vLLM 0.31 or newer, or take the sampler out of the plan",
        )
    theirs = [processor for processor in args.logits_processors or [] if processor != QUALNAME]
    return {"logits_processors": [*theirs, QUALNAME]}


def left_out(config: VllmConfig, plan: Plan) -> dict[str, str]:
    """The planned samplers that this engine cannot have, each with the reason; one that is required stops the start."""
    planned = plan.of("sampler")
    if not planned:
        return {}
    reason = _reason(config)
    by_default = any(item.options.get("defaults") or item.options.get("every_request") for item in planned)
    if by_default and config.speculative_config is not None and not reason:
        _refuse_defaults_without_drafts(plan)
    for item in planned:
        if reason and item.options.get("required"):
            raise ConfigError(
                f"the sampler {item.name!r} is required and cannot be used: {reason}",
                where=item.origin,
                fix=f"start the engine without it, or drop `required` from [options.{item.name}]",
            )
    return {item.name: reason for item in planned} if reason else {}


def _refuse_defaults_without_drafts(plan: Plan) -> None:
    """Refuse a sampler for every request that works token by token, where the engine verifies several at a time."""
    from vllm_graft.bindings.sampling.requests import offered

    for each in offered(plan, Run("", 0, speculative=True)):
        if each.planned and each.refused and each.by_default:
            raise ConfigError(
                f"the sampler {each.name!r} is to work on every request and cannot be used: {each.refused}",
                where=next(item.origin for item in plan if item.name == each.name),
                fix=f"take `defaults` out of [options.{each.name}], or start the engine without speculative decoding",
            )


def users_own(config: VllmConfig) -> list[str]:
    """The logits processors of an engine's arguments that are not ours, as ``module:Class``."""
    found = getattr(config.model_config, "logits_processors", None) or []
    names = [f"{each.__module__}:{each.__qualname__}" if isinstance(each, type) else str(each) for each in found]
    return [name for name in names if name != QUALNAME]


def _reason(config: VllmConfig) -> str:
    if getattr(config.model_config, "runner_type", "") == "pooling":
        return _POOLING
    if config.speculative_config is not None and not getattr(config, "use_v2_model_runner", False):
        return _SPECULATIVE
    return ""


def v2_takes_samplers() -> bool:
    """Whether the V2 model runner of the installed vLLM takes custom logits processors."""
    try:
        return importlib.util.find_spec(_V2) is not None
    except ModuleNotFoundError:
        return False
