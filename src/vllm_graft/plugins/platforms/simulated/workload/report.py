"""What became of a workload: counts, rates, and how the times spread, for all requests and for each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from vllm_graft.findings import Finding
from vllm_graft.plugins.platforms.simulated.workload.result import Result, State, digest

_ASIDE: Final = ("S005", "S011")
"""Warnings of a server, which goes on without the item; a run's figures without it are not those of its plan."""

TIMES: Final = ("ttft_s", "tpot_s", "e2e_s", "queue_s")
"""The times of a request that a report spreads out."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are spread."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """The spread of the values there are; None where there are none."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        mean = sum(known) / len(known)
        return cls(mean, quantile(known, 0.5), quantile(known, 0.9), quantile(known, 0.99), known[-1])

    def as_dict(self) -> dict[str, float]:
        """The spread as plain data, in microseconds' precision."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of the ordered values lies, by linear interpolation."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Counts:
    """Some requests and their tokens: all of a run, or those of a group."""

    results: tuple[Result, ...]

    def count(self, state: State) -> int:
        """How many ended that way."""
        return sum(result.state == state for result in self.results)

    def total(self, name: str) -> int:
        """The sum of a number of the results."""
        return sum(getattr(result, name) for result in self.results)

    def spread(self, name: str) -> Spread | None:
        """The spread of a time over the requests that were served."""
        return Spread.of(getattr(result, name) for result in self.results if result.state == "done")

    def as_dict(self) -> dict[str, Any]:
        """The counts as plain data."""
        row: dict[str, Any] = {"requests": len(self.results)}
        row.update({state: self.count(state) for state in ("done", "rejected", "aborted")})
        row.update({name: self.total(name) for name in ("prompt_tokens", "output_tokens", "cached_tokens")})
        for name in TIMES:
            spread = self.spread(name)
            row[name] = spread.as_dict() if spread is not None else None
        return row


@dataclass(frozen=True, slots=True)
class Report:
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
    """How many tokens the KV cache holds, those of several engines together."""
    steps: int = 0
    device_busy_s: float = 0.0
    """What a device that never idles would need for the steps."""
    preemptions: int = 0
    modelled_s: float = 0.0
    """From the start to the end of the run."""
    wall_s: float = 0.0
    """The same by the wall clock."""
    cpu_s: float = 0.0
    """The processor's time for a run in virtual time: what the wall clock shows on a machine that does nothing else."""
    start_s: float = 0.0
    """What the engine's start took, by the wall clock."""
    interrupted: bool = False
    plan: str = ""
    """The hash of the plan; empty where nothing is planned."""
    scheduler: str = ""
    """The planned scheduler by its name, or what vLLM runs without one."""
    findings: tuple[Finding, ...] = ()
    """What was planned and was not active, or was put aside during the run."""

    @property
    def sound(self) -> bool:
        """Whether everything that was planned was active until the end, so that the figures are the plan's."""
        return not any(finding.level == "error" or finding.code in _ASIDE for finding in self.findings)

    @property
    def all(self) -> Counts:
        """All requests."""
        return Counts(self.results)

    @property
    def groups(self) -> dict[str, Counts]:
        """The requests by group, where there is more than one."""
        names = list(dict.fromkeys(result.group for result in self.results))
        if len(names) < 2:
            return {}
        return {name: Counts(tuple(each for each in self.results if each.group == name)) for name in sorted(names)}

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
        """A hash of every request's result: equal runs have equal ones."""
        return digest(self.results)

    @property
    def reasons(self) -> dict[str, int]:
        """Why requests were turned away or cut off, and how many of them."""
        return dict(Counter(result.reason for result in self.results if result.state != "done").most_common())

    def per_second(self, tokens: int) -> float:
        """A number of tokens as a rate over the makespan."""
        return tokens / self.makespan_s if self.makespan_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data with stable keys."""
        counts = self.all.as_dict()
        names = ("workload", "model", "device", "vllm", "plan", "scheduler", "async_scheduling", "engines", "kv_tokens")
        return {
            **{name: getattr(self, name) for name in (*names, "interrupted", "sound")},
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
