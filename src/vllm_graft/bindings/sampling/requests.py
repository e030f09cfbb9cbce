"""Requests in the front end: which sampler their keys are for, and a clear refusal of what no sampler takes.

A ValueError here becomes a 400. A key counts in ``vllm_xargs`` and at the top level of a request's body, where vLLM
drops what it does not know without a word: keys of ours, and names that could be one misspelt, are lifted from there.
A request is checked once, before anything of it is streamed, however many prompts it has.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, Final

from vllm_graft.bindings.sampling.spelling import is_similar
from vllm_graft.contracts import Key, Sampler, SamplingStrategy, Truncation
from vllm_graft.contracts.request_keys import KeyValue, find_unsendable, read_keys, refuse_unsendable
from vllm_graft.contracts.sampling import Chosen, read_defaults
from vllm_graft.contracts.validation import RESERVED
from vllm_graft.ledger import current
from vllm_graft.ledger.asides import Asides
from vllm_graft.plan import Plan, Run, carried, carried_run
from vllm_graft.plan.carry import PLAN_VARIABLE, RUN_VARIABLE
from vllm_graft.plan.catalogue import SHIPPED, load
from vllm_graft.plan.plan import UnknownKeys

_COMPARED: Final = 100
"""How many names that are none of ours are compared with ours, in one request: no client sends so many."""
_REMEMBERED: Final = 4096
"""How many names that were compared are remembered with the outcome: clients send the same ones again and again."""
_CONTRACTS: Final = (Sampler, Truncation, SamplingStrategy)
_OF_OTHERS: Final = frozenset({"ngram_size", "window_size", "whitelist_token_ids"})
"""Names by which vLLM's own processor for OCR models is asked for: nobody's business where ours is not loaded."""
_HOME: Final = "vllm_graft.plugins.samplers."
_GROUP: Final = "vllm.logits_processors"
_CHECKED: Final = "graft_checked"
"""The attribute by which sampling parameters are known to have been checked with the request they were made of."""


class PutAsideError(ValueError):
    """A request asks for a sampler that has failed since the server was started: an API server answers with a 503."""


@dataclass(frozen=True)
class Offered:
    """One sampler as requests see it: planned, or shipped and not planned.

    refused:  why no request may ask for it; empty where one may
    planned:  whether it is loaded, so that a name like one of its keys may be a misspelling
    defaults: the keys of requests that do not carry them, by the plan
    always:   whether every request is its own, by the plan
    """

    name: str
    package: str
    kind: type[Chosen]
    keys: tuple[Key, ...]
    refused: str = ""
    planned: bool = True
    defaults: Mapping[str, KeyValue] = field(default_factory=dict)
    always: bool = False

    def read(self, extra: Mapping[str, object]) -> dict[str, KeyValue]:
        """This sampler's keys that a request carries; a ValueError for bad values, or where it cannot be asked for."""
        found = read_keys(self.keys, extra)
        if not found:
            return found
        if self.refused:
            if self.asks(found):
                said = ", ".join(self.names_in(extra))
                raise ValueError(f"{said}: the sampler {self.name!r} cannot be used: {self.refused}")
        else:
            self._check({**self.defaults, **found})
        return found

    @property
    def by_default(self) -> bool:
        """Whether requests that say nothing of it are its own."""
        return self.always or (bool(self.defaults) and self.kind.asked(self.defaults))

    def asks(self, found: Mapping[str, KeyValue]) -> bool:
        """Whether a request that carries these keys asks for this sampler."""
        return bool(found) and self.kind.asked({**self.defaults, **found})

    def names_in(self, extra: Mapping[str, object]) -> list[str]:
        """The names in a request that are this sampler's keys, as the client said them."""
        return [name for key in self.keys for name in (key.name, *key.aliases) if name in extra]

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
            "defaults": dict(self.defaults),
            "every_request": self.by_default,
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
    """All samplers of this server, and every name a request may use for their keys.

    unknown:     what becomes of a name that is no key, see ``Plan``
    others:      names that are somebody else's, and pass
    mentions:    whether a logits processor of the user's own mentions a name, which is then its key
    put_aside:   the samplers that have failed since the start, with the reason
    """

    def __init__(
        self,
        offered: Iterable[Offered],
        *,
        unknown: UnknownKeys = "refuse-similar",
        others: Collection[str] = (),
        mentions: Callable[[str], bool] = lambda name: False,
        put_aside: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.offered = tuple(offered)
        self._owners = {
            name: each for each in reversed(self.offered) for key in each.keys for name in (key.name, *key.aliases)
        }
        self.names = frozenset(self._owners)
        self._planned = [name for name, each in self._owners.items() if each.planned]
        self._longest = max(map(len, self._planned), default=0) * 2
        self._unknown = unknown
        self._others = frozenset(others)
        self._mentions = mentions
        self._put_aside = put_aside
        self._complaints: dict[str, str] = {}

    def check(self, extra: Mapping[str, object]) -> None:
        """Refuse a request whose keys cannot be right."""
        if not extra:
            return
        refuse_unsendable(extra)
        for each in self._concerned(extra):
            found = each.read(extra)
            if each.planned and each.asks(found) and (reason := self._put_aside().get(each.name)):
                raise PutAsideError(
                    f"{', '.join(each.names_in(extra))}: the sampler {each.name!r} cannot be used: it was put aside "
                    f"after a failure ({reason}); send the request without it, or restart the server"
                )
        for name in self._strange(extra):
            if complaint := self.complaint(name):
                raise ValueError(complaint)

    def complaint(self, name: str) -> str:
        """What is wrong with a name that is no key of ours; empty where it passes."""
        if self._unknown == "pass":
            return ""
        if len(name) > self._longest:
            # Too long to be compared or remembered.
            return self._complain(name) if self._unknown == "refuse" else ""
        found = self._complaints.get(name)
        if found is None:
            found = self._complain(name)
            if len(self._complaints) >= _REMEMBERED:
                self._complaints.clear()
            self._complaints[name] = found
        return found

    def lifted(self, top_level: Mapping[str, object]) -> dict[str, object]:
        """What of a request's unknown top-level keys is ours, or was meant to be; null and an empty list where no name
        of ours stands say nothing."""
        ours = {name: value for name, value in top_level.items() if name in self.names and value is not None}
        meant = (name for name in self._strange(top_level) if top_level[name] not in (None, [], ""))
        return ours | {name: top_level[name] for name in meant if self.complaint(name)}

    def refuse(self, extra: Mapping[str, object], why: str) -> None:
        """Refuse a request that asks for any sampler, where none can work."""
        self.check(extra)
        for each in self._concerned(extra):
            found = each.read(extra)
            if each.asks(found):
                raise ValueError(f"{', '.join(found)}: the sampler {each.name!r} cannot be used: {why}")

    def _concerned(self, extra: Mapping[str, object]) -> Iterator[Offered]:
        """The samplers whose keys a request carries; names that may be somebody else's do not count."""
        seen: dict[str, Offered] = {}
        for name in extra:
            owner = self._owners.get(name)
            if owner is not None and owner.name not in seen and (owner.planned or not self._passes(name)):
                seen[owner.name] = owner
        return iter(seen.values())

    def _strange(self, names: Iterable[object]) -> Iterator[str]:
        found = (name for name in names if isinstance(name, str) and name not in self.names)
        return islice(found, _COMPARED)

    def _passes(self, name: str) -> bool:
        return self._unknown == "pass" or name in self._others or self._mentions(name)

    def _complain(self, name: str) -> str:
        # vLLM itself puts what it needs into the extra arguments, such as kv_transfer_params.
        if name in self._others or name in RESERVED:
            return ""
        compared = self._planned if len(name) <= self._longest else ()
        near = next((known for known in compared if is_similar(name, known)), "")
        if (not near and self._unknown != "refuse") or self._mentions(name):
            return ""
        hint = f" (did you mean {near!r}?)" if near else ""
        return (
            f"{name[:60]} is no key of this server's samplers{hint}; "
            "if it is meant for something else, name it under `other_keys` in graft.toml"
        )


def catalogue() -> Catalogue:
    """The samplers of the plan that this process carries; kept for as long as it stays the same."""
    return _catalogue(os.environ.get(PLAN_VARIABLE, ""), os.environ.get(RUN_VARIABLE, ""))


@functools.lru_cache(maxsize=2)
def _catalogue(plan_text: str, run_text: str) -> Catalogue:
    plan, run = carried(), carried_run()
    if plan is None or not plan.of("sampler"):
        return Catalogue(())
    return Catalogue(
        offered(plan, run),
        unknown=plan.unknown_keys,
        others=plan.other_keys,
        mentions=Mentions(run.processors if run is not None else ()),
        put_aside=Asides(current()).reasons,
    )


def offered(plan: Plan, run: Run | None) -> list[Offered]:
    """The planned samplers, then those that ship and are not planned."""
    made = []
    for item in plan.of("sampler"):
        kind = _loaded(item.target, item.name, item.package)
        refused = (run.left_out.get(item.name, "") if run is not None else "") or _draftless(kind, run)
        defaults = read_defaults(kind, item.options)
        always = bool(item.options.get("every_request"))
        keys = kind.request_keys()
        made.append(Offered(item.name, item.package, kind, keys, refused, defaults=defaults, always=always))
    loaded = ", ".join(each.name for each in made)
    for name, target in SHIPPED.items():
        if target.startswith(_HOME) and all(each.name != name for each in made):
            kind = _loaded(target, name, "vllm-graft")
            refused = f"this server does not load it (it has: {loaded}); add it to `samplers` in graft.toml"
            keys = tuple(replace(key, aliases=_without_others(key.aliases)) for key in kind.request_keys())
            made.append(Offered(name, "vllm-graft", kind, keys, refused, planned=False))
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


class Mentions:
    """Whether the source of a logits processor that is not ours has a name as a text, by which it reads its keys.

    processors: those of the engine's arguments, as ``module:Class``; those under vLLM's entry points are added
    """

    def __init__(self, processors: Iterable[str]) -> None:
        self._processors = tuple(processors)
        self._text: str | None = None

    def __call__(self, name: str) -> bool:
        """Whether one of them mentions the name; the files are read with the first question."""
        if self._text is None:
            targets = [*self._processors, *(entry.value for entry in metadata.entry_points(group=_GROUP))]
            modules = dict.fromkeys(target.partition(":")[0].strip() for target in targets)
            self._text = "\n".join(map(_source, modules))
        return f'"{name}"' in self._text or f"'{name}'" in self._text


def _source(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
        return Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
    except (ImportError, ValueError, OSError):
        return ""  # compiled, or not a module: it mentions nothing that could be read


def check(params: Any) -> None:
    """Refuse a request with bad values for a planned sampler: a ValueError, which becomes a 400."""
    extra = getattr(params, "extra_args", None)
    if extra and not getattr(params, _CHECKED, False):
        catalogue().check(extra)


def prepare(request: Any, params: Any) -> None:
    """Take over a request's top-level keys that are ours, and check all of them before anything is answered.

    vLLM makes parameters for each prompt of a request, which differ in their length at most; they are looked at with
    the first. What ``vllm_xargs`` says counts more.
    """
    extra: dict[str, object] = getattr(params, "extra_args", None) or {}
    found = _memory.get(request)
    if found is None:
        found = {}
        if request.model_extra or extra:
            known = catalogue()
            found = known.lifted(request.model_extra or {})
            known.check({**found, **extra})
        _refuse_unsendable_fields(params)
        _memory.put(request, found)
    if found:
        params.extra_args = {**found, **extra}
    setattr(params, _CHECKED, True)


class _Memory:
    """What was found in requests that are being served, by their identity: they are no keys of a dictionary."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[object], dict[str, object]]] = {}

    def get(self, request: object) -> dict[str, object] | None:
        known = self._found.get(id(request))
        return known[1] if known is not None and known[0]() is request else None

    def put(self, request: object, found: dict[str, object]) -> None:
        number = id(request)
        self._found[number] = (weakref.ref(request, lambda gone: self._forget(number, gone)), found)

    def _forget(self, number: int, gone: weakref.ref[object]) -> None:
        # Another request may have the number by now.
        if number in self._found and self._found[number][0] is gone:
            del self._found[number]


_memory: Final = _Memory()


def _refuse_unsendable_fields(params: Any) -> None:
    """Refuse what stands in vLLM's own fields and cannot be sent to an engine: vLLM 0.32 fails with a 500 there."""
    for name in getattr(params, "__struct_fields__", ()):
        # The catalogue has looked at the extra arguments.
        if name != "extra_args" and (reason := find_unsendable(getattr(params, name))):
            raise ValueError(f"{name} {reason}, and cannot be sent to the engine")


def check_early(client: Any) -> None:
    """Have an engine client check parameters when it is asked to generate, and not when the first answer is wanted.

    ``generate`` is an asynchronous generator, whose first line runs when its caller has begun to stream. Most requests
    are checked before (``prepare``); those that bring whole sampling parameters, and uploads, come this way.
    """
    generate = client.generate

    def generate_checked(*args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        if not getattr(params, _CHECKED, False):
            with_status(check, params)
            _refuse_unsendable_fields(params)
        return generate(*args, **kwargs)

    client.generate = generate_checked


def with_status(call: Callable[..., None], *args: Any) -> None:
    """Make a check in an API server, where a sampler that was put aside is a 503 and not the request's fault."""
    try:
        call(*args)
    except PutAsideError as error:
        raise _unavailable(str(error)) from error


def _unavailable(message: str) -> Exception:
    """What vLLM answers with a 503."""
    try:
        from vllm.exceptions import GracefulHTTPError
    except ImportError:
        # Before vLLM had an error of its own for it; /v1/messages makes a 500 of this one.
        from fastapi import HTTPException

        return HTTPException(503, message)
    found: Exception = GracefulHTTPError(message, HTTPStatus.SERVICE_UNAVAILABLE)
    return found


def refuse_beams(top_level: Mapping[str, object] | None, xargs: Mapping[str, object] | None) -> None:
    """Refuse a request for beam search that asks for a sampler: vLLM hands none of its keys on, and says nothing."""
    if top_level or xargs:
        known = catalogue()
        extra = {**known.lifted(top_level or {}), **(xargs or {})}
        known.refuse(extra, "beam search picks the tokens (use_beam_search)")


def listing(
    plan: Plan, run: Run | None, put_aside: Mapping[str, str] | None = None
) -> dict[str, Sequence[dict[str, object]]]:
    """The document of ``GET /graft/samplers``: what is loaded, and what ships besides."""
    rows = offered(plan, run) if plan.of("sampler") else []
    failed = put_aside or {}
    rows = [
        replace(row, refused=f"it was put aside: {failed[row.name]}") if row.name in failed else row for row in rows
    ]
    return {
        "samplers": [each.as_dict() for each in rows if each.planned],
        "not_loaded": [each.as_dict() for each in rows if not each.planned],
    }
