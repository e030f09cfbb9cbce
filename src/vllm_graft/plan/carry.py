"""The plan on its way to the processes vLLM starts: two environment variables.

``GRAFT_PLAN`` holds the plan, ``GRAFT_RUN`` which run of which server it belongs to. Both are inherited by forked and
spawned children; Ray carries them because boot registers the names with vLLM.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Final

from vllm_graft.errors import ConfigError
from vllm_graft.plan.plan import Plan

PLAN_VARIABLE: Final = "GRAFT_PLAN"
RUN_VARIABLE: Final = "GRAFT_RUN"

_LIMIT: Final = 100_000  # Linux refuses an environment string of 128 KiB or more


@dataclass(frozen=True, slots=True)
class Run:
    """One start of one server: its id, the process that resolved the plan, what the children must know besides it.

    runner:    the model runner, ``V1`` or ``V2``; empty until the engine's configuration exists
    extension: the user's own worker extension class that ours is composed with; empty where there is none
    speculative: whether the engine verifies drafts
    left_out:  planned items that this engine cannot have, each with the reason
    headless:  whether the front end is on another node, which made a plan of its own
    processors: the user's own logits processors, as ``module:Class``
    """

    id: str
    pid: int
    runner: str = ""
    extension: str = ""
    speculative: bool = False
    left_out: dict[str, str] = field(default_factory=dict)
    headless: bool = False
    processors: list[str] = field(default_factory=list)


def carry(plan: Plan, run: Run) -> None:
    """Put plan and run where every child of this process finds them."""
    text = plan.to_json()
    if len(text) > _LIMIT:
        raise ConfigError(
            f"the plan takes {len(text)} characters and at most {_LIMIT} can be carried",
            fix="shorten the options, or put long values into a file that the item reads",
        )
    os.environ[PLAN_VARIABLE] = text
    os.environ[RUN_VARIABLE] = json.dumps(asdict(run))


def carried() -> Plan | None:
    """The plan a parent process carried here, or None."""
    text = os.environ.get(PLAN_VARIABLE)
    if not text:
        return None
    try:
        return Plan.from_json(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"does not hold a plan: {error!r}",
            where=PLAN_VARIABLE,
            fix=f"unset {PLAN_VARIABLE}; it is set by vllm-graft",
        ) from error


def carried_run() -> Run | None:
    """The run a parent process carried here, or None."""
    text = os.environ.get(RUN_VARIABLE)
    if not text:
        return None
    try:
        return Run(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"does not hold a run: {error!r}", where=RUN_VARIABLE, fix=f"unset {RUN_VARIABLE}; it is set by vllm-graft"
        ) from error


def drop() -> None:
    """Forget what is carried, so that later children of this process start without a plan."""
    os.environ.pop(PLAN_VARIABLE, None)
    os.environ.pop(RUN_VARIABLE, None)
