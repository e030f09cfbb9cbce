"""A workload: requests in the order of their arrival, made in Python, read line by line, or generated."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vllm_graft.errors import ConfigError
from vllm_graft.fields import MAX_COUNT as MAX_TOKENS
from vllm_graft.fields import Fields, parse_toml
from vllm_graft.plan.toml_lines import TomlLines
from vllm_graft.splitmix import GAMMA, finalize_array

if TYPE_CHECKING:
    import os

PROMPTS: Final = ("prompt_tokens", "prompt", "prompt_token_ids")
"""The ways to give a prompt; a request has exactly one."""

KEYS: Final = ("at", *PROMPTS, "max_tokens", "id", "group", "priority", "prefix", "extra", "ignore_eos")
"""The keys of a line in a workload's file."""

_MAX_FILE_CHARS: Final = 256 * 1024 * 1024
"""The most characters of a workload's file."""

_LAST_TOKEN: Final = 2**31 - 1
"""vLLM keeps token ids in 32 bits."""

ARRIVALS: Final = ("poisson", "even", "at-once")
"""Arrivals: at random, at equal intervals, or all at the start."""

MAX_REQUESTS: Final = 1_000_000
"""The most requests; more are taken for a typo."""

_TABLES: Final = ("workload", "phase", "prompt", "output", "group", "prefix")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning that prompts with this prefix share."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request. Exactly one of ``prompt_tokens``, ``prompt`` and ``prompt_token_ids`` is set."""

    at: float
    """Seconds after the start."""
    max_tokens: int
    """The most tokens of its output."""
    prompt_tokens: int | None = None
    """The length of an invented prompt, its prefix included."""
    prompt: str | None = None
    """A prompt as text."""
    prompt_token_ids: tuple[int, ...] | None = None
    """A prompt as token ids."""
    id: str = ""
    """Its name; without one, its number in the workload."""
    group: str = ""
    """The class or tenant under which the report counts it."""
    priority: int = 0
    """vLLM's priority: the lowest goes first, if the scheduling policy uses it."""
    prefix: Prefix | None = None
    """The shared beginning of an invented prompt."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's ``extra_args`` for plugins, ``vllm_xargs`` over HTTP."""
    ignore_eos: bool | None = None
    """True if it goes on to ``max_tokens``; None for yes, unless answers have a natural length."""

    def as_dict(self) -> dict[str, Any]:
        """Return the request as a line of a workload's file."""
        row: dict[str, Any] = {"at": self.at}
        row.update({name: getattr(self, name) for name in PROMPTS if getattr(self, name) is not None})
        row["max_tokens"] = self.max_tokens
        row.update({name: value for name in ("id", "group", "priority") if (value := getattr(self, name))})
        if self.prefix is not None:
            row["prefix"] = {"name": self.prefix.name, "tokens": self.prefix.tokens}
        if self.extra:
            row["extra"] = dict(self.extra)
        if self.ignore_eos is not None:
            row["ignore_eos"] = self.ignore_eos
        return row


class Workload:
    """Requests in the order of their arrival, those of one moment in the given order, each with a name of its own."""

    def __init__(self, requests: Iterable[WorkloadRequest], name: str = "workload") -> None:
        self.name = name
        named = [
            request if request.id else replace(request, id=f"{index:06d}") for index, request in enumerate(requests)
        ]
        seen: set[str] = set()
        for request in named:
            if request.id in seen:
                raise ConfigError(f"two requests have the id {request.id!r}", where=name, fix="rename one of them")
            seen.add(request.id)
        if not named:
            raise ConfigError("the workload has no requests", where=name, fix="add some")
        self.requests = tuple(sorted(named, key=lambda request: request.at))

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def has_text(self) -> bool:
        """True if a prompt is text, which needs a tokenizer."""
        return any(request.prompt is not None for request in self.requests)

    def lines(self) -> Iterator[str]:
        """Return the lines of a file that ``read`` reads."""
        return (json.dumps(request.as_dict(), ensure_ascii=False) for request in self.requests)


def read(path: str | os.PathLike[str]) -> Workload:
    """Read a workload from a file: JSON Lines, or a description if the name ends in ``.toml``."""
    file = Path(path)
    try:
        with file.open(encoding="utf-8", newline=None) as stream:
            # A pipe shows its end only when it comes, and /dev/zero has none.
            text = stream.read(_MAX_FILE_CHARS + 1)
        if len(text) > _MAX_FILE_CHARS:
            raise ConfigError(
                f"the workload has more than {_MAX_FILE_CHARS} characters",
                where=str(file),
                fix="describe it in a TOML file",
            )
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"the workload cannot be read: {reason}", where=str(file), fix="name a JSON Lines or TOML file"
        ) from error
    if file.suffix.lower() == ".toml":
        return generate(text, str(file))
    requests: dict[str, WorkloadRequest] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            values = json.loads(line, object_pairs_hook=partial(_table, where))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"is not JSON: {error}", where=where, fix="put one JSON object on each line, or name the file .toml"
            ) from error
        request = read_request(values, where)
        key = request.id or f"{len(requests):06d}"
        if key in requests:
            raise ConfigError(f"the id {key!r} is taken by a line above", where=where, fix="rename one of them")
        requests[key] = replace(request, id=key)
    return Workload(requests.values(), str(file))


def _table(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build the object of a line; a key may be given once."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ConfigError(f"the key {key!r} is given twice", where=where, fix="keep one of them")
        table[key] = value
    return table


def read_request(values: object, where: str) -> WorkloadRequest:
    """Read the request of a line; a ConfigError says what is wrong with it."""
    fields = Fields(values, "a request", lambda key: where)
    fields.only(KEYS)
    given = [name for name in PROMPTS if name in fields]
    if len(given) != 1:
        found = f"has {' and '.join(given)}" if given else "has no prompt"
        raise fields.wrong(None, f"a request {found}", f"give one of {', '.join(PROMPTS)}")
    tokens = fields.count("prompt_tokens") if "prompt_tokens" in fields else None
    prefix = None
    if "prefix" in fields:
        inner = Fields(fields.raw("prefix"), "a prefix", lambda key: where)
        inner.only(("name", "tokens"))
        prefix = Prefix(inner.text("name"), inner.count("tokens"))
        if tokens is None:
            fix = "give prompt_tokens, or leave prefix out"
            raise fields.wrong("prefix", "a prefix is for an invented prompt", fix)
        if prefix.tokens > tokens:
            what = f"the prefix has {prefix.tokens} tokens and the whole prompt {tokens}"
            raise fields.wrong("prefix", what, "raise prompt_tokens, which counts the prefix too")
    ids = fields.raw("prompt_token_ids")
    if ids is not None:
        whole = isinstance(ids, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in ids)
        if not whole or not ids or min(ids) < 0 or max(ids) > _LAST_TOKEN:
            what = f"prompt_token_ids must be a list of whole numbers from 0 to {_LAST_TOKEN}"
            raise fields.wrong("prompt_token_ids", what, "correct the list")
    return WorkloadRequest(
        at=fields.number("at"),
        max_tokens=fields.count("max_tokens"),
        prompt_tokens=tokens,
        prompt=fields.text("prompt") if "prompt" in fields else None,
        prompt_token_ids=tuple(ids) if ids is not None else None,
        id=fields.text("id") if "id" in fields else "",
        group=fields.text("group") if "group" in fields else "",
        priority=fields.count("priority", 0, least=None),
        prefix=prefix,
        extra=fields.table("extra"),
        ignore_eos=fields.flag("ignore_eos"),
    )


def build_prompt(request: WorkloadRequest, vocabulary: int) -> dict[str, Any]:
    """Build a request's prompt in vLLM's form; an invented one has token ids below ``vocabulary``."""
    if request.prompt is not None:
        return {"prompt": request.prompt}
    if request.prompt_token_ids is not None:
        return {"prompt_token_ids": list(request.prompt_token_ids)}
    prefix = request.prefix
    shared = [] if prefix is None else invent_tokens(f"prefix/{prefix.name}", prefix.tokens, vocabulary)
    own = invent_tokens(f"request/{request.id}", (request.prompt_tokens or 0) - len(shared), vocabulary)
    return {"prompt_token_ids": shared + own}


def invent_tokens(name: str, count: int, vocabulary: int) -> list[int]:
    """Return token ids that follow from a name; a longer list begins like a shorter one."""
    import numpy as np

    key = np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        words = finalize_array(key + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA))
    ids: list[int] = (words % np.uint64(vocabulary)).tolist()
    return ids


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths around a mean, clamped to bounds; constant with sigma 0."""

    mean: float
    sigma: float = 0.0
    least: int = 1
    most: int | None = None

    def draw(self, draws: Draws) -> int:
        """Draw one length."""
        value = self.mean * math.exp(self.sigma * draws.normal() - self.sigma * self.sigma / 2)
        return min(max(self.least, round(value)), MAX_TOKENS if self.most is None else self.most)


@dataclass(frozen=True, slots=True)
class _RequestGroup:
    name: str
    share: float
    prompt: Lengths
    output: Lengths
    priority: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _PrefixShare:
    prefix: Prefix
    share: float
    group: str


def generate(text: str, name: str = "workload.toml") -> Workload:
    """Generate the workload of a description."""
    return _Description(text, name).workload()


class _Description:
    """A workload's description: a TOML file that generates the same requests for the same seed. ::

    [workload]                # all keys of this table
    seed = 1                  # 0 without it
    arrivals = "poisson"      # or "even", or "at-once"
    rate = 12.0               # requests per second, if there are no phases
    seconds = 600             # the end: a time, a number of requests, or whichever comes first
    requests = 5000

    [[phase]]                 # instead of one rate: phases, again from the first after the last
    seconds = 45
    rate = 21.5

    [prompt]                  # lengths: lognormal, or tokens = 320, or at the top prompt = 320
    mean = 320
    sigma = 0.9
    min = 8
    max = 1500

    [output]                  # max_tokens, in the same way
    tokens = 128

    [[group]]                 # classes or tenants
    name = "interactive"
    share = 3                 # of the sum of all shares
    priority = 0
    extra = { tenant = "a" }
    output = 64               # its own lengths, if they differ

    [[prefix]]                # put before the prompt of a share of the requests, of all or of one group
    name = "system"
    tokens = 512
    share = 0.5
    group = "interactive"
    """

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines = TomlLines(text)
        data = parse_toml(text, name)
        top = Fields(data, "a workload", self._where())
        top.only(_TABLES)
        self._head = Fields(data.get("workload", {}), "[workload]", self._where("workload"))
        self._head.only(("seed", "arrivals", "rate", "seconds", "requests"))
        self._seed = self._head.count("seed", 0, least=None)
        self._phases: list[tuple[float, float]] = []
        for row, index in self._rows(data, "phase"):
            phase = Fields(row, "[[phase]]", self._where("phase", index))
            phase.only(("seconds", "rate"))
            self._phases.append((phase.number("seconds", least=1e-6), phase.number("rate")))
        self._prompt = read_lengths(data.get("prompt"), "[prompt]", self._where("prompt")) if "prompt" in data else None
        self._output = read_lengths(data.get("output"), "[output]", self._where("output")) if "output" in data else None
        self._groups = [self._group(*each) for each in self._rows(data, "group")] or [self._group({}, -1)]
        self._prefixes: list[_PrefixShare] = []
        for row, index in self._rows(data, "prefix"):
            fields = Fields(row, "[[prefix]]", self._where("prefix", index))
            fields.only(("name", "tokens", "share", "group"))
            group = fields.text("group") if "group" in fields else ""
            if group and group not in [each.name for each in self._groups]:
                raise fields.wrong("group", f"there is no group {group!r}", "name a [[group]] of this file")
            prefix = Prefix(fields.text("name"), fields.count("tokens"))
            share = fields.number("share", 1.0, least=1e-9, most=1.0)
            self._prefixes.append(_PrefixShare(prefix, share, group))
        self._check_names()

    def workload(self) -> Workload:
        """Draw the requests."""
        kinds, prefixes = Draws(self._seed, "groups"), Draws(self._seed, "prefixes")
        prompts, outputs = Draws(self._seed, "prompts"), Draws(self._seed, "outputs")
        total = sum(group.share for group in self._groups)
        requests = []
        for at in self._moments():
            groups = ((each, each.share) for each in self._groups)
            group = _choose(groups, kinds.share() * total) or self._groups[-1]
            own = ((each.prefix, each.share) for each in self._prefixes if each.group in ("", group.name))
            prefix = _choose(own, prefixes.share())
            requests.append(
                WorkloadRequest(
                    at=round(at, 6),
                    max_tokens=group.output.draw(outputs),
                    prompt_tokens=group.prompt.draw(prompts) + (prefix.tokens if prefix is not None else 0),
                    group=group.name,
                    priority=group.priority,
                    prefix=prefix,
                    extra=group.extra,
                )
            )
            if len(requests) > MAX_REQUESTS:
                raise self._head.wrong(
                    None, f"that makes more than {MAX_REQUESTS} requests", "lower the rate or the time, or set requests"
                )
        return Workload(requests, self._name)

    def _moments(self) -> Iterator[float]:
        arrivals = self._head.text("arrivals", "poisson")
        if arrivals not in ARRIVALS:
            raise self._head.wrong(
                "arrivals", f"arrivals must be one of {', '.join(ARRIVALS)}, but is {arrivals!r}", "name one of them"
            )
        count = self._head.count("requests") if "requests" in self._head else None
        seconds = self._head.number("seconds", least=1e-6) if "seconds" in self._head else None
        if arrivals == "at-once":
            for key in ("rate", "seconds"):
                if key in self._head:
                    raise self._head.wrong(key, f"{key} has no meaning if all arrive at once", "remove it")
            if self._phases:
                raise self._head.wrong(None, "phases have no meaning if all arrive at once", "remove them")
            if count is None:
                raise self._head.wrong(
                    None, "the number of requests that arrive at once is not given", "add requests to [workload]"
                )
            return repeat(0.0, count)
        if count is None and seconds is None:
            raise self._head.wrong(None, "the workload has no end", "add seconds or requests to [workload]")
        draws = Draws(self._seed, "arrivals")
        gaps = draws.gap if arrivals == "poisson" else lambda: 1.0
        return self._spaced(gaps, count, seconds)

    def _spaced(self, gap: Callable[[], float], count: int | None, seconds: float | None) -> Iterator[float]:
        """Yield arrivals: events of rate 1, stretched to the rate of the phase that they fall into."""
        if self._phases and "rate" in self._head:
            raise self._head.wrong("rate", "there are phases, which have rates of their own", "remove this rate")
        phases = self._phases or [(float("inf"), self._head.number("rate", least=1e-9))]
        if not any(rate for _, rate in phases):
            raise self._head.wrong(None, "no phase has a rate above 0", "give one of them a rate")
        number, now, index, left = 0, 0.0, 0, phases[0][0]
        need = gap()
        while count is None or number < count:
            rate = phases[index][1]
            if need > left * rate:
                need, now = need - left * rate, now + left
                index = (index + 1) % len(phases)
                left = phases[index][0]
                if seconds is not None and now > seconds:
                    return
                continue
            now, left = now + need / rate, left - need / rate
            if seconds is not None and now > seconds:
                return
            yield now
            number += 1
            need = gap()

    def _group(self, row: object, index: int) -> _RequestGroup:
        where = self._where("group", index) if index >= 0 else self._where()
        fields = Fields(row, "[[group]]", where)
        fields.only(("name", "share", "priority", "extra", "prompt", "output"))
        names = [key for key in ("prompt", "output") if key in fields]
        own = {key: read_lengths(fields.raw(key), f"{key} of a group", where) for key in names}
        prompt, output = own.get("prompt", self._prompt), own.get("output", self._output)
        if prompt is None or output is None:
            lacking = "prompt" if prompt is None else "output"
            raise fields.wrong(None, f"the workload lacks {lacking}, the lengths", f"add a table [{lacking}]")
        return _RequestGroup(
            name=fields.text("name") if index >= 0 else "",
            share=fields.number("share", 1.0, least=1e-9),
            prompt=prompt,
            output=output,
            priority=fields.count("priority", 0, least=None),
            extra=fields.table("extra"),
        )

    def _check_names(self) -> None:
        for word, names in (
            ("group", [group.name for group in self._groups]),
            ("prefix", [each.prefix.name for each in self._prefixes]),
        ):
            for index, name in enumerate(names):
                if name in names[:index]:
                    place = self._where(word, index)("name")
                    raise ConfigError(f"two of [[{word}]] are named {name!r}", where=place, fix="rename one")
        for group in self._groups:
            total = sum(each.share for each in self._prefixes if each.group in ("", group.name))
            if total > 1 + 1e-9:
                raise ConfigError(
                    f"the shares of the prefixes{f' of group {group.name!r}' if group.name else ''} sum to {total:g}",
                    where=self._where("prefix", 0)(None),
                    fix="a prompt has one prefix at most: keep the sum at 1 or below",
                )

    def _rows(self, data: dict[str, Any], key: str) -> list[tuple[object, int]]:
        rows = data.get(key, [])
        if not isinstance(rows, list):
            raise ConfigError(
                f"{key} is an array of tables", where=self._where(key)(None), fix=f"write [[{key}]], not [{key}]"
            )
        return [(row, index) for index, row in enumerate(rows)]

    def _where(self, *path: str | int) -> Callable[[str | None], str]:
        return lambda key: f"{self._name}:{self._lines.of((*path, key) if key is not None else path)}"


def _choose(among: Iterable[tuple[T, float]], place: float) -> T | None:
    """Return the choice into whose share a place falls, from the first on; None past the last."""
    for choice, share in among:
        place -= share
        if place < 0:
            return choice
    return None


def read_lengths(value: object, what: str, where: Callable[[str | None], str]) -> Lengths:
    """Read the lengths that a number or a table describes."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"tokens": value}
    fields = Fields(value, what, where)
    if "tokens" in fields:
        fields.only(("tokens",))
        return Lengths(fields.count("tokens"))
    fields.only(("tokens", "mean", "sigma", "min", "max"))
    least = fields.count("min", 1)
    most = fields.count("max") if "max" in fields else None
    if most is not None and most < least:
        raise fields.wrong("max", f"max is {most}, below min, {least}", "swap or correct them")
    mean, sigma = fields.number("mean", least=1.0, most=MAX_TOKENS), fields.number("sigma", 0.0, most=10.0)
    if mean < least:
        raise fields.wrong("mean", f"mean is {mean:.15g}, below min, {least}", "correct one of them")
    if most is not None and mean > most:
        raise fields.wrong("mean", f"mean is {mean:.15g}, above max, {most}", "correct one of them")
    return Lengths(mean, sigma, least, most)


class Draws:
    """A sequence of random numbers, equal for an equal seed in every process and on every Python.

    Each purpose has a sequence of its own, so that a change to the lengths leaves the arrivals as they were. Only
    ``random()`` of Python's generator is used, whose sequence Python promises to keep.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
        self._source = random.Random(int.from_bytes(digest, "little"))

    def share(self) -> float:
        """Draw a number above 0 and below 1."""
        return max(self._source.random(), 2.0**-53)

    def gap(self) -> float:
        """Draw the time to the next event, with one per second on average."""
        return -math.log(self.share())

    def normal(self) -> float:
        """Draw from the standard normal distribution."""
        return NormalDist().inv_cdf(self.share())
