"""Request keys of the planned policy in the front end: a value that it refuses becomes a 400."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from vllm_graft.contracts import KVPolicy, OptionValue
from vllm_graft.errors import GraftError
from vllm_graft.ledger.guard import raised_by_signal
from vllm_graft.plan import Plan, carried_plan
from vllm_graft.plan.carry import PLAN_VARIABLE
from vllm_graft.plan.catalogue import load


def check(params: Any) -> None:
    """Refuse a request whose keys the policy cannot work with: a ValueError, which becomes a 400."""
    extra: dict[str, object] = getattr(params, "extra_args", None) or {}
    planned = _planned_policy(os.environ.get(PLAN_VARIABLE, "")) if extra else None
    if planned is None:
        return
    kind, options = planned
    said = [name for name in kind.keys if name in extra]
    if not said:
        return
    try:
        kind.check_request(extra, options)
    except ValueError:
        raise
    except BaseException as error:
        if raised_by_signal(error):
            raise
        # An author's mistake: vLLM would answer the request with a 500, and end the server for a SystemExit.
        raise ValueError(f"{', '.join(said)}: {type(error).__name__}: {error}") from error


def refuse_beams(xargs: Mapping[str, object] | None) -> None:
    """Refuse a request for beam search that has keys of the policy: vLLM drops them without a word."""
    planned = _planned_policy(os.environ.get(PLAN_VARIABLE, "")) if xargs else None
    if planned is not None and (said := [name for name in planned[0].keys if name in (xargs or {})]):
        raise ValueError(f"{', '.join(said)}: vLLM hands no vllm_xargs on to beam search; leave out one of the two")


def policy_keys(plan: Plan) -> tuple[str, ...]:
    """Return the names of the keys that the planned policy takes."""
    planned = _find_policy(plan)
    return tuple(planned[0].keys) if planned is not None else ()


@functools.lru_cache(maxsize=2)
def _planned_policy(plan_text: str) -> tuple[type[KVPolicy], Mapping[str, OptionValue]] | None:
    """Return the policy of the plan that this process carries, kept as long as the plan stays the same."""
    plan = carried_plan()
    return _find_policy(plan) if plan is not None else None


def _find_policy(plan: Plan) -> tuple[type[KVPolicy], Mapping[str, OptionValue]] | None:
    for item in plan.of("attention"):
        try:
            kind = load(item.target, item.name, item.package)
        except GraftError:
            # The process that makes the item says what is wrong with it.
            return None
        if issubclass(kind, KVPolicy):
            return kind, {**kind.options, **item.options}
    return None
