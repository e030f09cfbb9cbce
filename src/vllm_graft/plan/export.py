"""The plan carried to the processes that vLLM starts, in two environment variables.

``GRAFT_PLAN`` holds the plan, ``GRAFT_RUN`` the run of the server that it belongs to. Both are inherited by forked and
spawned children; Ray carries them because boot registers the names with vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Final, TypeVar

from vllm_graft.errors import ConfigError
from vllm_graft.fields import parse_dataclass
from vllm_graft.plan.plan import Plan

T = TypeVar("T")

PLAN_VARIABLE: Final = "GRAFT_PLAN"
RUN_VARIABLE: Final = "GRAFT_RUN"

_LIMIT: Final = 100_000  # Linux refuses an environment string of 128 KiB or more (MAX_ARG_STRLEN)


@dataclass(frozen=True, slots=True)
class Run:
    """One start of one server: its id, the process that resolved the plan, and facts for the children.

    runner:    the model runner, ``V1`` or ``V2``; empty until the engine's configuration exists
    extension: the user's own worker extension class that ours is composed with; empty if there is none
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


def export_plan(plan: Plan, run: Run) -> None:
    """Put plan and run where every child of this process finds them."""
    text = plan.to_json()
    if len(text) > _LIMIT:
        raise ConfigError(
            f"the plan takes {len(text)} characters, but at most {_LIMIT} can be carried",
            fix="shorten the options, or put long values into a file that the item reads",
        )
    os.environ[PLAN_VARIABLE] = text
    os.environ[RUN_VARIABLE] = json.dumps(asdict(run))


def inherited_plan() -> Plan | None:
    """Return the plan that a parent process carried here, or None."""
    return _parse(PLAN_VARIABLE, "a plan", Plan.from_json)


def inherited_run() -> Run | None:
    """Return the run that a parent process carried here, or None."""
    return _parse(RUN_VARIABLE, "a run", lambda text: parse_dataclass(Run, json.loads(text), "the run"))


def _parse(variable: str, what: str, parse: Callable[[str], T]) -> T | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        fix = f"unset {variable}; it is set by vllm-graft"
        raise ConfigError(f"does not hold {what}: {error!r}", where=variable, fix=fix) from error


def clear_exported_plan() -> None:
    """Drop plan and run, so that later children of this process start without a plan."""
    os.environ.pop(PLAN_VARIABLE, None)
    os.environ.pop(RUN_VARIABLE, None)
