"""Requests in the front end: which sampler their keys are for, and a clear refusal of what no sampler takes.

A ValueError here becomes a 400. A key counts in ``vllm_xargs`` and at the top level of a request's body, where vLLM
drops what it does not know without a word: keys of ours, and names close to one, are lifted from there.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm_graft.contracts import Key, Sampler, SamplingStrategy, Truncation
from vllm_graft.contracts.request_keys import KeyValue, read_keys
from vllm_graft.contracts.sampling import Chosen
from vllm_graft.plan import Plan, Run, carried, carried_run
from vllm_graft.plan.carry import PLAN_VARIABLE, RUN_VARIABLE
from vllm_graft.plan.catalogue import SHIPPED, load

_CLOSE: Final = 0.8
_LOOKED_AT: Final = 500
"""How many names that are none of ours are compared with ours, in one request: no client sends so many."""
_CONTRACTS: Final = (Sampler, Truncation, SamplingStrategy)
_OF_OTHERS: Final = frozenset({"ngram_size", "window_size", "whitelist_token_ids"})
"""Names by which vLLM's own processor for OCR models is asked for: nobody's business where ours is not loaded."""
_STRANGERS: Final = frozenset({"encoder_no_repeat_ngram_size", "max_ngram_size", "penalty_last_n"})
"""Names that other servers have, which are close to one of ours and mean something else."""
_HOME: Final = "vllm_graft.plugins.samplers."


@dataclass(frozen=True)
class Offered:
    """One sampler as requests see it: planned, or shipped and not planned."""

    name: str
    package: str
    kind: type[Chosen]
    keys: tuple[Key, ...]
    refused: str = ""
    """Why no request may ask for it; empty where one may."""

    def read(self, extra: Mapping[str, object]) -> dict[str, KeyValue]:
        """This sampler's keys that a request carries; a ValueError for bad values, or where it cannot be asked for."""
        found = read_keys(self.keys, extra)
        if not found:
            return found
        if self.refused and self.kind.asked(found):
            said = [name for key in self.keys for name in (key.name, *key.aliases) if name in extra]
            raise ValueError(f"{', '.join(said)}: the sampler {self.name!r} cannot be used: {self.refused}")
        if not self.refused:
            self._check(found)
        return found

    def as_dict(self) -> dict[str, object]:
        """The sampler with stable lower-case keys, for ``GET /graft/samplers``."""
        doc = inspect.cleandoc(self.kind.__doc__ or "").split("\n\n")
        return {
            "name": self.name,
            "package": self.package,
            "contract": next(each.__name__ for each in _CONTRACTS if issubclass(self.kind, each)),
            "stage": getattr(self.kind, "stage", "select"),
            "about": " ".join(doc[0].split()),
            "refused": self.refused,
            "keys": [key.as_dict() for key in self.keys],
        }

    def _check(self, found: Mapping[str, KeyValue]) -> None:
        try:
            self.kind.check(found)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{', '.join(found)}: {type(error).__name__}: {error}") from error


class Catalogue:
    """All samplers of this server, and every name a request may use for their keys."""

    def __init__(self, offered: Iterable[Offered]) -> None:
        self.offered = tuple(offered)
        self.names = frozenset(name for each in self.offered for key in each.keys for name in (key.name, *key.aliases))
        # With a longer name not enough would be alike.
        self._longest = max(map(len, self.names), default=0) * (2 / _CLOSE - 1)

    def check(self, extra: Mapping[str, object]) -> None:
        """Refuse a request whose keys cannot be right."""
        if not extra:
            return
        for each in self.offered:
            each.read(extra)
        for name in self._unknown(extra):
            if near := self.close(name):
                raise ValueError(f"{name} is no key of this server's samplers (did you mean {near!r}?)")

    def close(self, name: str) -> str:
        """The key of ours that a name which is none was probably meant for; empty where there is none."""
        if name in self.names or name in _STRANGERS or len(name) > self._longest:
            return ""
        found = difflib.get_close_matches(name, self.names, n=1, cutoff=_CLOSE)
        return found[0] if found else ""

    def lifted(self, top_level: Mapping[str, object]) -> dict[str, object]:
        """What of a request's unknown top-level keys is ours, or was meant to be; null and an empty list where no name
        of ours stands say nothing."""
        ours = {name: value for name, value in top_level.items() if name in self.names and value is not None}
        meant = (name for name in self._unknown(top_level) if top_level[name] not in (None, [], ""))
        return ours | {name: top_level[name] for name in meant if self.close(name)}

    def refuse(self, extra: Mapping[str, object], why: str) -> None:
        """Refuse a request that asks for any sampler, where none can work."""
        self.check(extra)
        for each in self.offered:
            found = each.read(extra)
            if found and each.kind.asked(found):
                raise ValueError(f"{', '.join(found)}: the sampler {each.name!r} cannot be used: {why}")

    def _unknown(self, names: Iterable[object]) -> Iterable[str]:
        found = (name for name in names if isinstance(name, str) and name not in self.names)
        return itertools.islice(found, _LOOKED_AT)


def catalogue() -> Catalogue:
    """The samplers of the plan that this process carries; kept for as long as it stays the same."""
    return _catalogue(os.environ.get(PLAN_VARIABLE, ""), os.environ.get(RUN_VARIABLE, ""))


@functools.lru_cache(maxsize=2)
def _catalogue(plan_text: str, run_text: str) -> Catalogue:
    plan, run = carried(), carried_run()
    return Catalogue(offered(plan, run) if plan is not None and plan.of("sampler") else ())


def offered(plan: Plan, run: Run | None) -> list[Offered]:
    """The planned samplers, then those that ship and are not planned."""
    made = []
    for item in plan.of("sampler"):
        kind = _loaded(item.target, item.name, item.package)
        refused = (run.left_out.get(item.name, "") if run is not None else "") or _draftless(kind, run)
        made.append(Offered(item.name, item.package, kind, kind.request_keys(), refused))
    loaded = ", ".join(each.name for each in made)
    for name, target in SHIPPED.items():
        if target.startswith(_HOME) and all(each.name != name for each in made):
            kind = _loaded(target, name, "vllm-graft")
            refused = f"this server does not load it (it has: {loaded}); add it to `samplers` in graft.toml"
            keys = tuple(replace(key, aliases=_without_others(key.aliases)) for key in kind.request_keys())
            made.append(Offered(name, "vllm-graft", kind, keys, refused))
    return made


def _without_others(aliases: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(alias for alias in aliases if alias not in _OF_OTHERS)


def _loaded(target: str, name: str, package: str) -> type[Chosen]:
    kind = load(target, name, package)
    assert issubclass(kind, Chosen), f"{target} is no sampler"
    return kind


def _draftless(kind: type[Chosen], run: Run | None) -> str:
    if run is None or not run.speculative:
        return ""
    if issubclass(kind, Sampler):
        return "it picks tokens one at a time, and this server verifies several (speculative decoding)"
    if issubclass(kind, SamplingStrategy) and kind.sampled is not SamplingStrategy.sampled:
        return "it must be told each token that is picked, and this server verifies several (speculative decoding)"
    return ""


def check(params: Any) -> None:
    """Refuse a request with bad values for a planned sampler: a ValueError, which becomes a 400."""
    extra = getattr(params, "extra_args", None)
    if extra:
        catalogue().check(extra)


def lift(top_level: Mapping[str, object] | None, params: Any) -> None:
    """Take over what of a request's top-level keys is ours; what ``vllm_xargs`` says counts more."""
    if not top_level:
        return
    found = catalogue().lifted(top_level)
    if found:
        params.extra_args = {**found, **(getattr(params, "extra_args", None) or {})}


def refuse_beams(top_level: Mapping[str, object] | None, xargs: Mapping[str, object] | None) -> None:
    """Refuse a request for beam search that asks for a sampler: vLLM hands none of its keys on, and says nothing."""
    known = catalogue()
    known.refuse({**known.lifted(top_level or {}), **(xargs or {})}, "beam search picks the tokens (use_beam_search)")


def listing(plan: Plan, run: Run | None) -> dict[str, Sequence[dict[str, object]]]:
    """The document of ``GET /graft/samplers``: what is loaded, and what ships besides."""
    rows = offered(plan, run) if plan.of("sampler") else []
    planned = {item.name for item in plan.of("sampler")}
    return {
        "samplers": [each.as_dict() for each in rows if each.name in planned],
        "not_loaded": [each.as_dict() for each in rows if each.name not in planned],
    }
