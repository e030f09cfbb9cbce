"""The engine arguments that planned samplers need, and the engines that cannot have samplers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.errors import ConfigError, TargetError
from vllm_graft.patching.target import Target, check_exists
from vllm_graft.plan import Plan, Run

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

QUALNAME: Final = "vllm_graft.bindings.sampling.processor:PlannedProcessor"
"""Our entry among the engine's logits processors; vLLM resolves the name in the front end and in workers."""

RUNNER_VARIABLE: Final = "VLLM_USE_V2_MODEL_RUNNER"
_V2: Final = "vllm.v1.worker.gpu.sample.logits_processor"


def arguments(args: EngineArgs, plan: Plan) -> dict[str, Any]:
    """Return the engine arguments that planned samplers need: our processor, after the user's own."""
    planned = plan.of("sampler")
    if not planned:
        return {}
    if os.environ.get(RUNNER_VARIABLE) == "1" and not v2_takes_samplers():
        raise ConfigError(
            f"the sampler {planned[0].name!r} ({planned[0].origin}) cannot run on the V2 model runner of this vLLM, "
            "which takes custom logits processors from 0.31 on",
            where=f"{RUNNER_VARIABLE}=1",
            fix=f"unset {RUNNER_VARIABLE}, install vLLM 0.31 or newer, or remove the sampler from the plan",
        )
    # After theirs: vLLM applies custom processors in the order of this list, and ours should see their logits.
    theirs = [processor for processor in args.logits_processors or [] if processor != QUALNAME]
    return {"logits_processors": [*theirs, QUALNAME]}


def unusable_samplers(config: VllmConfig, plan: Plan) -> dict[str, str]:
    """Return the planned samplers that this engine cannot have, each with the reason; refuse one that is required."""
    planned = plan.of("sampler")
    if not planned:
        return {}
    reason = ""
    # With these two vLLM raises for --logits-processors, but silently drops processors of entry points.
    if getattr(config.model_config, "runner_type", "") == "pooling":
        reason = "a pooling model picks no tokens"
    elif config.speculative_config is not None and not getattr(config, "use_v2_model_runner", False):
        without = "the V1 model runner takes no logits processors with speculative decoding"
        reason = f"{without}; the V2 runner does, from vLLM 0.31 on"
    by_default = any(item.options.get("defaults") or item.options.get("every_request") for item in planned)
    if by_default and config.speculative_config is not None and not reason:
        from vllm_graft.bindings.sampling.requests import list_samplers

        # A sampler for every request that works token by token, if the engine verifies several at a time.
        for each in list_samplers(plan, Run("", 0, speculative=True)):
            if each.planned and each.refused and each.by_default:
                raise ConfigError(
                    f"the sampler {each.name!r} is configured for every request but cannot be used: {each.refused}",
                    where=next(item.origin for item in plan if item.name == each.name),
                    fix=f"remove `defaults` from [options.{each.name}], or start the engine without speculative "
                    "decoding",
                )
    for item in planned:
        if reason and item.options.get("required"):
            raise ConfigError(
                f"the sampler {item.name!r} is required but cannot be used: {reason}",
                where=item.origin,
                fix=f"start the engine without it, or drop `required` from [options.{item.name}]",
            )
    return {item.name: reason for item in planned} if reason else {}


def user_processors(config: VllmConfig) -> list[str]:
    """Return the logits processors of an engine's arguments that are not ours, as ``module:Class``."""
    found = getattr(config.model_config, "logits_processors", None) or []
    names = [f"{each.__module__}:{each.__qualname__}" if isinstance(each, type) else str(each) for each in found]
    return [name for name in names if name != QUALNAME]


def v2_takes_samplers() -> bool:
    """Return whether the V2 model runner of the installed vLLM takes custom logits processors."""
    try:
        # Looks on disk: to import the package early could meet vLLM in the middle of its own import.
        check_exists(Target(_V2), "", {})
    except TargetError:
        return False
    return True
