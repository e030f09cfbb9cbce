"""The plan itself: a value that says what is to be active where, and that travels as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from vllm_graft.contracts.item import OptionValue
from vllm_graft.findings import Finding
from vllm_graft.points import Role

OnFailure = Literal["stop", "warn"]
UnknownKeys = Literal["refuse-similar", "refuse", "pass"]


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One thing that is to be active.

    point:   the extension point, a name of ``points.py``
    name:    the registered name, as the configuration says it
    target:  the class behind the name, as ``module:Class``
    package: the distribution that offers it
    roles:   the processes that need it
    options: every declared option with its value
    origin:  where the configuration asked for it: file and line, variable or argument
    """

    point: str
    name: str
    target: str
    package: str
    roles: tuple[Role, ...]
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be active for one model.

    items:      in the order in which they are applied
    on_failure: ``stop``: a process that lacks an item stops the start; ``warn``: it shows as a finding
    endpoint:   whether the routes under ``/graft`` are served
    model:      the model the profiles were matched with
    origins:    where the single values came from
    left_out:   what was named and is not for this model, each with the reason
    callers:    the file that says who may ask; empty where there is none
    findings:   what the resolution noticed and does not decide
    unknown_keys: what becomes of a request's key that is no planned sampler's: ``refuse-similar`` refuses a name that
                could be one misspelt, ``refuse`` every name, ``pass`` none
    other_keys: names of requests' keys that are somebody else's, and pass in any case
    """

    items: tuple[PlanItem, ...] = ()
    on_failure: OnFailure = "stop"
    endpoint: bool = True
    model: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    callers: str = ""
    findings: tuple[Finding, ...] = ()
    unknown_keys: UnknownKeys = "refuse-similar"
    other_keys: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.items or self.callers)

    def __iter__(self) -> Iterator[PlanItem]:
        return iter(self.items)

    @property
    def strict(self) -> bool:
        """Whether a missing item stops the start."""
        return self.on_failure == "stop"

    @property
    def hash(self) -> str:
        """A short hash of everything that changes behaviour; the model and the origins do not count."""
        facts = [[i.point, i.name, i.target, list(i.roles), dict(i.options)] for i in self.items]
        keys = {"unknown_keys": self.unknown_keys, "other_keys": self.other_keys}
        usual = self.unknown_keys == "refuse-similar" and not self.other_keys
        more = [each for each in (self.callers, {} if usual else keys) if each]
        text = json.dumps([facts, self.on_failure, self.endpoint, *more], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def of(self, point: str) -> tuple[PlanItem, ...]:
        """The items of one extension point."""
        return tuple(item for item in self.items if item.point == point)

    def needed_by(self, roles: set[Role]) -> tuple[PlanItem, ...]:
        """The items that a process with these roles must have."""
        return tuple(item for item in self.items if roles.intersection(item.roles))

    def as_dict(self) -> dict[str, object]:
        """The plan with stable lower-case keys, for ``--json`` and for carrying."""
        return {
            "hash": self.hash,
            "model": self.model,
            "on_failure": self.on_failure,
            "endpoint": self.endpoint,
            "callers": self.callers,
            "unknown_keys": self.unknown_keys,
            "other_keys": list(self.other_keys),
            "origins": dict(self.origins),
            "left_out": dict(self.left_out),
            "findings": [finding.as_dict() for finding in self.findings],
            "items": [{**asdict(item), "roles": list(item.roles), "options": dict(item.options)} for item in self],
        }

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        return json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that ``to_json`` wrote."""
        data = json.loads(text)
        items = tuple(PlanItem(**{**row, "roles": tuple(row["roles"])}) for row in data["items"])
        return cls(
            items,
            data["on_failure"],
            data["endpoint"],
            data["model"],
            data["origins"],
            data.get("left_out", {}),
            data.get("callers", ""),
            tuple(Finding.from_dict(row) for row in data.get("findings", ())),
            data.get("unknown_keys", "refuse-similar"),
            tuple(data.get("other_keys", ())),
        )
