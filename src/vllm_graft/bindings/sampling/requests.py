"""Request keys in the front end: which sampler each is for, and a clear refusal of what no sampler takes.

A ValueError here becomes a 400. Keys count in ``vllm_xargs`` and at the top level of a request's body, where vLLM
silently drops names that it does not know: keys of ours, and names that could be one misspelt, are lifted from
there. A request is read and checked once, before anything of it is streamed, however many prompts it has.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from vllm_graft.bindings.attention.requests import policy_keys
from vllm_graft.contracts import Key, Sampler, SamplingStrategy, Truncation
from vllm_graft.contracts.item import summary_of
from vllm_graft.contracts.request_keys import KeyValue, find_unsendable, is_similar, read_keys, refuse_unsendable
from vllm_graft.contracts.sampling import OptInSampler, read_defaults
from vllm_graft.contracts.validation import RESERVED
from vllm_graft.errors import describe_error
from vllm_graft.ledger import current
from vllm_graft.ledger.guard import end_copy, fork_count, raised_by_signal
from vllm_graft.ledger.quarantine import QuarantineReader
from vllm_graft.plan import Plan, Run, inherited_plan, inherited_run
from vllm_graft.plan.catalogue import SHIPPED, load
from vllm_graft.plan.export import PLAN_VARIABLE, RUN_VARIABLE
from vllm_graft.plan.plan import UnknownKeys
from vllm_graft.text import printable

T = TypeVar("T")

_COMPARED: Final = 100
"""The most unknown names of one request that are compared with our keys."""
_REMEMBERED: Final = 4096
"""The number of unknown names for which the outcome is cached: clients send the same ones again and again."""
_LONGEST_COMPLAINT: Final = 1000
"""The most characters of an author's own complaint about a request's keys that are sent."""
_SLOW_CHECK_S: Final = 0.1
"""A plugin's check slower than this is logged as an error: it runs on the API server's event loop."""
_slow: Final[set[str]] = set()
"""Samplers already reported as slow; each is reported once."""
_CONTRACTS: Final = (Sampler, Truncation, SamplingStrategy)
_FOREIGN_KEYS: Final = frozenset({"ngram_size", "window_size", "whitelist_token_ids"})
"""Keys of vLLM's own processor for OCR models (``NGramPerReqLogitsProcessor``), which ours accepts as aliases."""
_SHIPPED_MODULES: Final = "vllm_graft.plugins.samplers."
_PROCESSOR_GROUP: Final = "vllm.logits_processors"
_CHECKED: Final = "graft_checked"
"""The attribute that marks sampling parameters as checked with the request they were made of."""


class PutAsideError(ValueError):
    """A request asks for a sampler that was put aside: an API server answers with a 503, not a 400."""


@dataclass(frozen=True)
class SamplerInfo:
    """One sampler as requests see it: planned, or shipped and not planned.

    refused:  why no request may ask for it; empty if one may
    planned:  whether it is loaded, so that a name like one of its keys may be a misspelling
    defaults: values that the plan gives to requests without these keys
    always:   whether the plan gives it every request
    """

    name: str
    package: str
    kind: type[OptInSampler]
    keys: tuple[Key, ...]
    refused: str = ""
    planned: bool = True
    defaults: Mapping[str, KeyValue] = field(default_factory=dict)
    always: bool = False

    def read(self, extra: Mapping[str, object]) -> dict[str, KeyValue]:
        """Return the keys of this sampler that a request carries; raise a ValueError if one cannot be used."""
        found = read_keys(self.keys, extra)
        if not found:
            return found
        if self.refused:
            if self.is_requested(found):
                said = ", ".join(self.names_in(extra))
                raise ValueError(f"{said}: the sampler {self.name!r} cannot be used: {self.refused}")
            return found
        self._call(self.kind.check, found)
        return found

    @property
    def by_default(self) -> bool:
        """True if requests without its keys are its own."""
        return self.always or (bool(self.defaults) and self.kind.is_requested(self.defaults))

    def is_requested(self, found: Mapping[str, KeyValue]) -> bool:
        """Return whether a request that carries these keys asks for this sampler."""

        def is_requested(params: Mapping[str, KeyValue]) -> bool:
            return bool(self.kind.is_requested(params))

        return bool(found) and self._call(is_requested, found)

    def _call(self, method: Callable[[Mapping[str, KeyValue]], T], found: Mapping[str, KeyValue]) -> T:
        """Call a method of the author's class with a request's keys; raise a ValueError whatever it raises.

        vLLM would turn any other exception into a 500, and ``SystemExit`` would end the API server.
        """
        started, forks = time.perf_counter(), fork_count()
        try:
            answer = method({**self.defaults, **found})
            end_copy(forks)
            return answer
        except BaseException as error:
            end_copy(forks, error)
            if raised_by_signal(error):
                raise
            said = describe_error(error)
            if isinstance(error, ValueError):
                said = said.removeprefix(f"{type(error).__name__}: ")
            else:
                said = f"{', '.join(found)}: {said}"
            # The message is sent, so it must be short and without unpaired surrogates.
            raise ValueError(printable(said)[:_LONGEST_COMPLAINT]) from error
        finally:
            took = time.perf_counter() - started
            if took > _SLOW_CHECK_S and self.name not in _slow:
                _slow.add(self.name)
                name = getattr(method, "__name__", "its check")
                current().note_error(self.name, f"{name} took {took:.1f} s, blocking this API server's event loop")

    def names_in(self, extra: Mapping[str, object]) -> list[str]:
        """Return the names of this sampler's keys that a request carries, as the client spelt them."""
        return [name for key in self.keys for name in (key.name, *key.aliases) if name in extra]

    def as_dict(self) -> dict[str, object]:
        """Return the sampler with stable lower-case keys, for ``GET /graft/samplers``."""
        return {
            "name": self.name,
            "package": self.package,
            "contract": next(each.__name__ for each in _CONTRACTS if issubclass(self.kind, each)),
            "stage": getattr(self.kind, "stage", "select"),
            "about": summary_of(self.kind),
            "refused": self.refused,
            "defaults": dict(self.defaults),
            "every_request": self.by_default,
            "keys": [key.as_dict() for key in self.keys],
        }


class SamplerKeys:
    """All samplers of this server, and every name that a request may use for one of their keys.

    unknown:     what becomes of a name that is not a key, see ``Plan``
    others:      names that belong to something else and pass
    mentions:    tells whether one of the user's own logits processors mentions a name, which is then its key
    put_aside:   returns the samplers that have failed since the start, each with the reason
    """

    def __init__(
        self,
        samplers: Iterable[SamplerInfo],
        *,
        unknown: UnknownKeys = "refuse-similar",
        others: Collection[str] = (),
        mentions: Callable[[str], bool] = lambda name: False,
        put_aside: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.samplers = tuple(samplers)
        self._owners = {
            name: each for each in reversed(self.samplers) for key in each.keys for name in (key.name, *key.aliases)
        }
        self.names = frozenset(self._owners)
        self._planned = [name for name, each in self._owners.items() if each.planned]
        self._longest = max(map(len, self._planned), default=0) * 2
        self._unknown = unknown
        self._others = frozenset(others)
        self._mentions = mentions
        self._put_aside = put_aside
        self._cached_complaint = functools.lru_cache(_REMEMBERED)(self._complain)

    def check(self, extra: Mapping[str, object], unusable: str = "") -> None:
        """Raise ValueError for invalid keys; with ``unusable``, a reason, for any request that asks for a sampler."""
        if not extra:
            return
        refuse_unsendable(extra)
        # The samplers whose keys the request carries; a name that may belong to something else does not count.
        concerned: dict[str, SamplerInfo] = {}
        for name in extra:
            owner = self._owners.get(name)
            if owner is None or owner.name in concerned:
                continue
            if owner.planned or not (self._unknown == "pass" or name in self._others or self._mentions(name)):
                concerned[owner.name] = owner
        requested: list[tuple[SamplerInfo, Mapping[str, KeyValue]]] = []
        for each in concerned.values():
            found = each.read(extra)
            if not each.is_requested(found):
                continue
            if each.planned and (reason := self._put_aside().get(each.name)):
                raise PutAsideError(
                    f"{', '.join(each.names_in(extra))}: the sampler {each.name!r} cannot be used: it was put aside "
                    f"after a failure ({reason}); send the request without it, or restart the server"
                )
            requested.append((each, found))
        for name in self._unknown_names(extra):
            if complaint := self.complaint(name):
                raise ValueError(complaint)
        if unusable and requested:
            first, keys = requested[0]
            raise ValueError(f"{', '.join(keys)}: the sampler {first.name!r} cannot be used: {unusable}")

    def complaint(self, name: str) -> str:
        """Return what is wrong with a name that is not one of our keys; empty if it passes."""
        if self._unknown == "pass":
            return ""
        if len(name) > self._longest:
            # Too long to be a key misspelt; a client that sends many such names must not fill the cache.
            return self._complain(name) if self._unknown == "refuse" else ""
        return self._cached_complaint(name)

    def pick_top_level(self, top_level: Mapping[str, object]) -> dict[str, object]:
        """Return the top-level keys that are ours, or were probably meant to be.

        Clients send keys that they do not use as null, and those of other servers as an empty list or string.
        """
        ours = {name: value for name, value in top_level.items() if name in self.names and value is not None}
        meant = (name for name in self._unknown_names(top_level) if top_level[name] not in (None, [], ""))
        return ours | {name: top_level[name] for name in meant if self.complaint(name)}

    def _unknown_names(self, names: Iterable[object]) -> Iterator[str]:
        """List the names that are not our keys, up to a limit."""
        found = (name for name in names if isinstance(name, str) and name not in self.names)
        return islice(found, _COMPARED)

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
            f"{name[:60]} is not a key of this server's samplers{hint}; "
            "if it is meant for something else, name it under `other_keys` in graft.toml"
        )


def sampler_keys() -> SamplerKeys:
    """Return the keys of the plan that this process carries, kept as long as the plan stays the same."""
    return _sampler_keys(os.environ.get(PLAN_VARIABLE, ""), os.environ.get(RUN_VARIABLE, ""))


@functools.lru_cache(maxsize=2)
def _sampler_keys(plan_text: str, run_text: str) -> SamplerKeys:
    plan, run = inherited_plan(), inherited_run()
    if plan is None or not plan.of("sampler"):
        return SamplerKeys(())
    return SamplerKeys(
        list_samplers(plan, run),
        unknown=plan.unknown_keys,
        others=(*plan.other_keys, *policy_keys(plan)),
        mentions=ProcessorSources(run.processors if run is not None else ()),
        put_aside=QuarantineReader(current()).reasons,
    )


def list_samplers(plan: Plan, run: Run | None) -> list[SamplerInfo]:
    """List the planned samplers, then those that ship and are not planned."""
    found = []
    for item in plan.of("sampler"):
        kind = _load(item.target, item.name, item.package)
        refused = (run.left_out.get(item.name, "") if run is not None else "") or _refusal_with_drafts(kind, run)
        defaults = read_defaults(kind, item.options)
        always = bool(item.options.get("every_request"))
        keys = kind.request_keys()
        found.append(SamplerInfo(item.name, item.package, kind, keys, refused, defaults=defaults, always=always))
    loaded = ", ".join(each.name for each in found)
    for name, target in SHIPPED.items():
        if target.startswith(_SHIPPED_MODULES) and all(each.name != name for each in found):
            kind = _load(target, name, "vllm-graft")
            refused = f"this server does not load it (it has: {loaded}); add it to `samplers` in graft.toml"
            keys = tuple(
                replace(key, aliases=tuple(alias for alias in key.aliases if alias not in _FOREIGN_KEYS))
                for key in kind.request_keys()
            )
            found.append(SamplerInfo(name, "vllm-graft", kind, keys, refused, planned=False))
    return found


def _load(target: str, name: str, package: str) -> type[OptInSampler]:
    kind = load(target, name, package)
    assert issubclass(kind, OptInSampler), f"{target} is not a sampler"
    return kind


def _refusal_with_drafts(kind: type[OptInSampler], run: Run | None) -> str:
    """Return why a sampler cannot be used if drafts are verified; empty if it can."""
    if run is None or not run.speculative:
        return ""
    if issubclass(kind, Sampler):
        return "it picks tokens one at a time, but this server verifies several (speculative decoding)"
    if issubclass(kind, SamplingStrategy) and kind.sampled is not SamplingStrategy.sampled:
        return "it must be told each token that is picked, but this server verifies several (speculative decoding)"
    return ""


class ProcessorSources:
    """Tells whether the source of a logits processor that is not ours has a name as a string: probably its key.

    processors: those of the engine's arguments, as ``module:Class``; those under vLLM's entry points are added
    """

    def __init__(self, processors: Iterable[str]) -> None:
        self._processors = tuple(processors)
        self._text: str | None = None

    def __call__(self, name: str) -> bool:
        """Return whether one of them mentions the name; the files are read at the first call."""
        if self._text is None:
            targets = [*self._processors, *(entry.value for entry in metadata.entry_points(group=_PROCESSOR_GROUP))]
            sources = []
            for module in dict.fromkeys(target.partition(":")[0].strip() for target in targets):
                # Skipped: what is compiled, or not a module.
                with contextlib.suppress(ImportError, ValueError, OSError):
                    spec = importlib.util.find_spec(module)
                    if spec is not None and spec.origin:
                        sources.append(Path(spec.origin).read_text(encoding="utf-8"))
            self._text = "\n".join(sources)
        return f'"{name}"' in self._text or f"'{name}'" in self._text


def check(params: Any) -> None:
    """Refuse a request with bad values for a planned sampler: a ValueError, which becomes a 400."""
    extra = getattr(params, "extra_args", None)
    if extra and not getattr(params, _CHECKED, False):
        sampler_keys().check(extra)


def prepare(request: Any, params: Any) -> None:
    """Add our keys at the top level of a request to its parameters, and check all keys before anything is answered.

    vLLM makes parameters for each prompt of a request, which differ in ``max_tokens`` at most: the first are checked.
    A key in ``vllm_xargs`` takes precedence over one at the top level.
    """
    extra: dict[str, object] = getattr(params, "extra_args", None) or {}
    found = _FOUND.get(id(request))
    if found is None:
        found = {}
        if request.model_extra or extra:
            known = sampler_keys()
            found = known.pick_top_level(request.model_extra or {})
            known.check({**found, **extra})
        refuse_unsendable_texts(request)
        _refuse_unsendable_fields(params)
        _FOUND[id(request)] = found
        weakref.finalize(request, _FOUND.pop, id(request), None).atexit = False
    if found:
        params.extra_args = {**found, **extra}
    setattr(params, _CHECKED, True)


_FOUND: Final[dict[int, dict[str, object]]] = {}
"""The keys found in requests that are being served, by ``id``: pydantic models are not hashable. An entry goes when its
request does, before another object can have the same id."""


def _refuse_unsendable_fields(params: Any) -> None:
    """Refuse values of vLLM's own fields that cannot be sent to an engine: vLLM 0.32 answers those with a 500."""
    for name in getattr(params, "__struct_fields__", ()):
        # The check of keys has covered the extra arguments.
        if name != "extra_args" and (reason := find_unsendable(getattr(params, name))):
            raise ValueError(f"{name} {reason}, so it cannot be sent to the engine")


_PROMPTS: Final = frozenset({"messages", "prompt", "input"})
"""The fields that only the tokenizer reads: it accepts an unpaired surrogate, or vLLM answers with a 400."""


def refuse_unsendable_texts(request: Any) -> None:
    """Refuse an unpaired surrogate in a field of a request.

    vLLM 0.32 answers such a ``request_id`` with a 500, and ends the connection if it repeats such a string, as the
    stream of a response does with ``user``, ``metadata`` and ``tools``.
    """
    from pydantic_core import PydanticSerializationError, to_json

    names = set(getattr(request, "model_fields_set", ())) - _PROMPTS
    fields = {name: getattr(request, name, None) for name in names}
    try:
        # Faster than the walk below: a request may bring hundreds of tools, each with a schema.
        to_json(fields, serialize_unknown=True)
    except PydanticSerializationError:
        for name, value in fields.items():
            if reason := find_unsendable(value, texts_only=True):
                # An unknown field may have such a name too, and this message is sent.
                said = name if name.isascii() else ascii(name)
                raise ValueError(f"{said} {reason}, so it cannot be sent") from None


def check_early(client: Any) -> None:
    """Make an engine client check a request when ``generate`` is called.

    vLLM's ``generate`` is an asynchronous generator, whose first line runs when its caller has begun to stream. The
    keys and parameters of most requests are checked before (``prepare``); those with complete sampling parameters, and
    uploads, come this way.
    """
    generate = client.generate

    def generate_checked(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(("prompt", "sampling_params", "request_id"), args, strict=False)), **kwargs}
        params, prompt = given.get("sampling_params"), given.get("prompt")
        if not getattr(params, _CHECKED, False):
            with_status(check, params)
            _refuse_unsendable_fields(params)
        sent = {name: given.get(name) for name in ("request_id", "priority", "session_id")}
        sent["cache_salt"] = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        for name, value in sent.items():
            if reason := find_unsendable(value):
                raise ValueError(f"{name} {reason}, so it cannot be sent to the engine")
        return generate(*args, **kwargs)

    # On the instance: other engine clients of this process keep vLLM's own method.
    client.generate = generate_checked


def with_status(call: Callable[..., None], *args: Any) -> None:
    """Run a check in an API server, where a sampler that was put aside is answered with a 503."""
    try:
        call(*args)
    except PutAsideError as error:
        answer: Exception
        try:
            from vllm.exceptions import GracefulHTTPError

            answer = GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
        except ImportError:
            # Older releases have no error of their own for it; their /v1/messages turns this one into a 500.
            from fastapi import HTTPException

            answer = HTTPException(503, str(error))
        raise answer from error


def refuse_beams(top_level: Mapping[str, object] | None, xargs: Mapping[str, object] | None) -> None:
    """Refuse a request for beam search that asks for a sampler: vLLM silently drops all of its keys."""
    if top_level or xargs:
        known = sampler_keys()
        extra = {**known.pick_top_level(top_level or {}), **(xargs or {})}
        known.check(extra, "beam search picks the tokens (use_beam_search)")


def describe_samplers(
    plan: Plan, run: Run | None, put_aside: Mapping[str, str] | None = None
) -> dict[str, Sequence[dict[str, object]]]:
    """Return the document of ``GET /graft/samplers``: the samplers that are loaded, and those that ship besides."""
    rows = list_samplers(plan, run) if plan.of("sampler") else []
    failed = put_aside or {}
    rows = [
        replace(row, refused=f"it was put aside: {failed[row.name]}") if row.name in failed else row for row in rows
    ]
    return {
        "samplers": [each.as_dict() for each in rows if each.planned],
        "not_loaded": [each.as_dict() for each in rows if not each.planned],
    }
