"""The description of a workload: a TOML file that generates the same requests for the same seed.

[workload]                # all keys of this table
seed = 1                  # 0 without it
arrivals = "poisson"      # or "even", or "at-once"
rate = 12.0               # requests per second, where there are no phases
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
output = 64               # its own lengths, where they differ

[[prefix]]                # put before the prompt of a share of the requests, of all or of one group
name = "system"
tokens = 512
share = 0.5
group = "interactive"
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from statistics import NormalDist
from typing import Any, Final, TypeVar

from vllm_graft.errors import ConfigError
from vllm_graft.fields import MOST as MOST_TOKENS
from vllm_graft.fields import Fields, parse_toml
from vllm_graft.plan.toml_lines import TomlLines
from vllm_graft.simulator.workload.requests import Prefix, Workload, WorkloadRequest

T = TypeVar("T")

ARRIVALS: Final = ("poisson", "even", "at-once")
"""Arrivals: at random, at equal intervals, or all at the start."""

MOST: Final = 1_000_000
"""The most requests; more are taken for a typing error."""

_TABLES: Final = ("workload", "phase", "prompt", "output", "group", "prefix")


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
        return min(max(self.least, round(value)), MOST_TOKENS if self.most is None else self.most)


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
    """A description, read and checked."""

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
            if len(requests) > MOST:
                raise self._head.wrong(
                    None, f"that makes more than {MOST} requests", "lower the rate or the time, or set requests"
                )
        return Workload(requests, self._name)

    def _moments(self) -> Iterator[float]:
        arrivals = self._head.text("arrivals", "poisson")
        if arrivals not in ARRIVALS:
            raise self._head.wrong(
                "arrivals", f"arrivals must be one of {', '.join(ARRIVALS)}, and is {arrivals!r}", "name one of them"
            )
        count = self._head.count("requests") if "requests" in self._head else None
        seconds = self._head.number("seconds", least=1e-6) if "seconds" in self._head else None
        if arrivals == "at-once":
            for key in ("rate", "seconds"):
                if key in self._head:
                    raise self._head.wrong(key, f"{key} has no meaning where all arrive at once", "take it out")
            if self._phases:
                raise self._head.wrong(None, "phases have no meaning where all arrive at once", "take them out")
            if count is None:
                raise self._head.wrong(None, "how many arrive at once is not said", "add requests to [workload]")
            return repeat(0.0, count)
        if count is None and seconds is None:
            raise self._head.wrong(None, "the workload has no end", "add seconds or requests to [workload]")
        draws = Draws(self._seed, "arrivals")
        gaps = draws.gap if arrivals == "poisson" else lambda: 1.0
        return self._spaced(gaps, count, seconds)

    def _spaced(self, gap: Callable[[], float], count: int | None, seconds: float | None) -> Iterator[float]:
        """Yield arrivals: events of rate 1, stretched to the rate of the phase that they fall into."""
        if self._phases and "rate" in self._head:
            raise self._head.wrong("rate", "there are phases, which have rates of their own", "take this rate out")
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
    mean, sigma = fields.number("mean", least=1.0, most=MOST_TOKENS), fields.number("sigma", 0.0, most=10.0)
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
