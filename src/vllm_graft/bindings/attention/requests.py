"""Request keys of the planned policy in the front end: read at both places where clients write them, and checked.

A ValueError here becomes a 400. As with samplers, a key counts in ``vllm_xargs`` and at the top level of a request's
body, and a name that is probably a key misspelt is refused: vLLM would drop it, and the request would hold more memory
than it asked for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from vllm_graft.contracts import KVPolicy, OptionValue
from vllm_graft.contracts.request_keys import is_similar
from vllm_graft.contracts.sampling import OptInSampler
from vllm_graft.errors import GraftError, describe_error
from vllm_graft.ledger.guard import raised_by_signal
from vllm_graft.plan import Plan, PlanItem, inherited_plan
from vllm_graft.plan.catalogue import load
from vllm_graft.plan.export import PLAN_VARIABLE

# The most unknown names of one request that are compared with the policy's keys.
_COMPARED: Final = 100


@dataclass(frozen=True, slots=True)
class PolicyKeys:
    """The keys of the planned policy.

    kind:    the policy's class
    options: its options, each with a value
    others:  names that pass, however similar they are: keys of planned samplers, and ``other_keys`` of the plan
    strict:  whether a name that resembles a key is refused
    """

    kind: type[KVPolicy]
    options: Mapping[str, OptionValue]
    others: frozenset[str] = frozenset()
    strict: bool = True

    def check(self, extra: Mapping[str, object]) -> None:
        """Refuse keys that the policy cannot work with, and names that are probably one misspelt."""
        said = [name for name in self.kind.keys if name in extra]
        if said:
            try:
                # Read only: what an author changed there would reach samplers, or the next request.
                self.kind.check_request(MappingProxyType(extra), MappingProxyType(self.options))
            except ValueError:
                raise
            except BaseException as error:
                if raised_by_signal(error):
                    raise
                # An author's mistake: vLLM would answer the request with a 500, and end the server for a SystemExit.
                raise ValueError(f"{', '.join(said)}: {describe_error(error)}") from error
        if meant := self.misspelt(extra):
            name, near = meant
            raise ValueError(
                f"{name} is not a key of this server's KV policy (did you mean {near!r}?); "
                "if it is meant for something else, name it under `other_keys` in graft.toml"
            )

    def misspelt(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Return the first name that is probably a key misspelt, and that key."""
        if not self.strict:
            return None
        for name in islice((name for name in names if name not in self.kind.keys), _COMPARED):
            for known in self.kind.keys:
                if name not in self.others and is_similar(name, known):
                    return name, known
        return None


def prepare(request: Any, params: Any) -> None:
    """Add a request's top-level keys for the policy to its parameters, and check all before anything is answered.

    A key in ``vllm_xargs`` takes precedence over one at the top level.
    """
    known, top_level = _planned_keys(), request.model_extra
    if known is not None and top_level:
        meant = known.misspelt(top_level)
        names = (*known.kind.keys, meant[0]) if meant else known.kind.keys
        found = {name: top_level[name] for name in names if top_level.get(name) is not None}
        if found:
            params.extra_args = {**found, **(params.extra_args or {})}
    check(params)


def check(params: Any) -> None:
    """Refuse a request whose keys the policy cannot work with."""
    extra: dict[str, object] = getattr(params, "extra_args", None) or {}
    known = _planned_keys() if extra else None
    if known is not None:
        known.check(extra)


def check_early(client: Any) -> None:
    """Make an engine client check keys when ``generate`` is called, for requests that bring whole sampling parameters.

    vLLM's ``generate`` is a generator: it would raise when its caller has begun to answer.
    """
    generate = client.generate

    def generate_checked(*args: Any, **kwargs: Any) -> Any:
        check(kwargs.get("sampling_params", args[1] if len(args) > 1 else None))
        return generate(*args, **kwargs)

    # On the instance: other engine clients of this process keep vLLM's own method.
    client.generate = generate_checked


def refuse_beams(top_level: Mapping[str, object] | None, xargs: Mapping[str, object] | None) -> None:
    """Refuse a request for beam search that has keys of the policy: vLLM drops them silently."""
    extra = {**(top_level or {}), **(xargs or {})}
    known = _planned_keys() if extra else None
    if known is not None and (said := [name for name in known.kind.keys if extra.get(name) is not None]):
        raise ValueError(f"{', '.join(said)}: cannot be combined with use_beam_search; leave out one of the two")


def policy_keys(plan: Plan) -> tuple[str, ...]:
    """Return the names of the keys that the planned policy takes."""
    known = _find_keys(plan)
    return tuple(known.kind.keys) if known is not None else ()


def _planned_keys() -> PolicyKeys | None:
    """Return the keys of the plan that this process carries."""
    return _cached_keys(os.environ.get(PLAN_VARIABLE, ""))


@functools.lru_cache(maxsize=2)
def _cached_keys(plan_text: str) -> PolicyKeys | None:
    plan = inherited_plan()
    return _find_keys(plan) if plan is not None else None


def _find_keys(plan: Plan) -> PolicyKeys | None:
    for item in plan.of("attention"):
        kind = _load(item)
        if kind is not None and issubclass(kind, KVPolicy):
            samplers = [sampler for sampler in map(_load, plan.of("sampler")) if sampler is not None]
            of_samplers = {
                name
                for sampler in samplers
                if issubclass(sampler, OptInSampler)
                for key in sampler.request_keys()
                for name in (key.name, *key.aliases)
            }
            others = frozenset({*of_samplers, *plan.other_keys})
            return PolicyKeys(kind, {**kind.options, **item.options}, others, plan.unknown_keys != "pass")
    return None


def _load(item: PlanItem) -> type | None:
    try:
        return load(item.target, item.name, item.package)
    except GraftError:
        # The process that makes the item says what is wrong with it.
        return None
