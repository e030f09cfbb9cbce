"""The outcome of a workload: a result per request; counts, rates and distributions for all and for each group."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from vllm_graft.findings import Finding

_ASIDE: Final = ("S005", "S011")
"""Findings that are warnings on a server, which goes on without the item, but falsify a run's figures."""

TIMES: Final = ("ttft_s", "tpot_s", "e2e_s", "queue_s")
"""The times of a request whose distribution a report shows."""

ResultState = Literal["done", "rejected", "aborted"]
"""Served to its end; rejected by vLLM; or aborted, by the scheduler or because the run ended."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one request. Moments are modelled seconds after the start; None if never reached."""

    id: str
    group: str
    priority: int
    at: float
    state: ResultState
    reason: str = ""
    """vLLM's finish reason, or why the request was rejected or aborted."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def queue_s(self) -> float | None:
        """From the arrival to the request's first step."""
        return _between(self.at, self.scheduled_at)

    @property
    def ttft_s(self) -> float | None:
        """From the arrival to the first token."""
        return _between(self.at, self.first_token_at)

    @property
    def e2e_s(self) -> float | None:
        """From the arrival to the last token."""
        return _between(self.at, self.finished_at)

    @property
    def tpot_s(self) -> float | None:
        """The mean time from one token to the next; None with fewer than two."""
        took = _between(self.first_token_at, self.finished_at)
        return took / (self.output_tokens - 1) if took is not None and self.output_tokens > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Return the row of the per-request file, with the tokens as a hash."""
        values = {name: getattr(self, name) for name in _ROW}
        row = {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
        row["tokens"] = _hash_tokens(self.token_ids)[:16]
        return row


_ROW = (
    *("id", "group", "priority", "at", "state", "reason", "prompt_tokens", "output_tokens", "cached_tokens"),
    *("scheduled_at", "first_token_at", "finished_at", "queue_s", "ttft_s", "tpot_s", "e2e_s"),
)


def digest(results: Iterable[Result]) -> str:
    """Hash what two equal runs have in common: states, counts, moments and tokens."""
    made = hashlib.sha256()
    for result in results:
        # vLLM words its rejections differently from release to release.
        reason = result.reason if result.state == "done" else ""
        counts = (result.prompt_tokens, result.output_tokens, result.cached_tokens)
        moments = (result.at, result.scheduled_at, result.first_token_at, result.finished_at)
        microseconds = (None if moment is None else round(moment * 1e6) for moment in moments)
        row = [result.id, result.state, reason, *counts, *microseconds, _hash_tokens(result.token_ids)]
        made.update(json.dumps(row).encode())
    return made.hexdigest()


def _hash_tokens(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of some values."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the distribution of the values that are not None; None if there are none."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        mean = sum(known) / len(known)
        return cls(mean, quantile(known, 0.5), quantile(known, 0.9), quantile(known, 0.99), known[-1])

    def as_dict(self) -> dict[str, float]:
        """Return plain data, rounded to microseconds."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a share of the ordered values lies, by linear interpolation."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class ResultSummary:
    """The results of a run, or of one group of it, summed up."""

    results: tuple[Result, ...]

    def spread(self, name: str) -> Spread | None:
        """Return the distribution of a time over the requests that were served."""
        return Spread.of(getattr(result, name) for result in self.results if result.state == "done")

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        row: dict[str, Any] = {"requests": len(self.results)}
        for state in ("done", "rejected", "aborted"):
            row[state] = sum(result.state == state for result in self.results)
        for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
            row[name] = sum(getattr(result, name) for result in self.results)
        for name in TIMES:
            spread = self.spread(name)
            row[name] = spread.as_dict() if spread is not None else None
        return row


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """One run of a workload. Times are modelled seconds unless they are called wall."""

    results: tuple[Result, ...]
    """In the order of arrival."""
    workload: str = ""
    model: str = ""
    device: str = ""
    speed: float = 1.0
    """Infinite in virtual time."""
    vllm: str = ""
    async_scheduling: bool = False
    engines: int = 1
    """Data parallel engines; of several, ``steps`` and ``device_busy_s`` are the first one's."""
    kv_tokens: int = 0
    """Tokens in the KV cache, of all engines together."""
    steps: int = 0
    device_busy_s: float = 0.0
    """The time that a device which never idles would need for the steps."""
    preemptions: int = 0
    modelled_s: float = 0.0
    """From the start to the end of the run."""
    wall_s: float = 0.0
    """From the start to the end of the run, by the wall clock."""
    cpu_s: float = 0.0
    """CPU time of a run in virtual time: its wall time on an idle machine."""
    start_s: float = 0.0
    """The engine's start, by the wall clock."""
    interrupted: bool = False
    plan: str = ""
    """The hash of the plan; empty if nothing is planned."""
    scheduler: str = ""
    """The planned scheduler's name, or vLLM's own."""
    attention: str = ""
    """The planned KV policy's name; empty if none is planned."""
    findings: tuple[Finding, ...] = ()
    """Planned items that were not active, or were quarantined during the run."""

    @property
    def sound(self) -> bool:
        """True if every planned item was active until the end, so that the figures are the plan's."""
        return not any(finding.level == "error" or finding.code in _ASIDE for finding in self.findings)

    @property
    def all(self) -> ResultSummary:
        """All requests."""
        return ResultSummary(self.results)

    @property
    def groups(self) -> dict[str, ResultSummary]:
        """The requests by group, if there are several."""
        groups: dict[str, list[Result]] = {}
        for result in self.results:
            groups.setdefault(result.group, []).append(result)
        return {name: ResultSummary(tuple(groups[name])) for name in sorted(groups)} if len(groups) > 1 else {}

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token."""
        ends = [result.finished_at for result in self.results if result.finished_at is not None]
        return max(ends) - min(result.at for result in self.results) if ends else 0.0

    @property
    def ttft(self) -> Spread | None:
        """The time to the first token."""
        return self.all.spread("ttft_s")

    @property
    def digest(self) -> str:
        """A hash of all results: equal runs have equal ones."""
        return digest(self.results)

    @property
    def reasons(self) -> dict[str, int]:
        """The reasons of rejected and aborted requests, with their counts."""
        return dict(Counter(result.reason for result in self.results if result.state != "done").most_common())

    def per_second(self, tokens: int) -> float:
        """Return a number of tokens per second of the makespan."""
        return tokens / self.makespan_s if self.makespan_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data with stable keys."""
        counts = self.all.as_dict()
        names = ("workload", "model", "device", "vllm", "plan", "scheduler", "attention", "async_scheduling", "engines")
        return {
            **{name: getattr(self, name) for name in (*names, "kv_tokens", "interrupted", "sound")},
            "findings": [finding.as_dict() for finding in self.findings],
            "speed": "virtual" if self.speed == float("inf") else self.speed,
            **counts,
            "reasons": self.reasons,
            "makespan_s": round(self.makespan_s, 6),
            "prompt_tokens_per_s": round(self.per_second(counts["prompt_tokens"]), 3),
            "output_tokens_per_s": round(self.per_second(counts["output_tokens"]), 3),
            "preemptions": self.preemptions,
            "steps": self.steps,
            "device_busy_s": round(self.device_busy_s, 6),
            "device_busy_share": round(self.device_busy_s / self.makespan_s, 4) if self.makespan_s else 0.0,
            "modelled_s": round(self.modelled_s, 6),
            "wall_s": round(self.wall_s, 3),
            "cpu_s": round(self.cpu_s, 3),
            "start_s": round(self.start_s, 3),
            "modelled_per_wall": round(self.modelled_s / self.wall_s, 2) if self.wall_s else 0.0,
            "groups": {name: group.as_dict() for name, group in self.groups.items()},
            "digest": self.digest,
        }
