"""The plan: the items that are to be active in each process. It travels as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from vllm_graft.contracts.item import OptionValue
from vllm_graft.fields import parse_dataclass
from vllm_graft.findings import Finding
from vllm_graft.points import Role

OnFailure = Literal["stop", "warn"]
UnknownKeys = Literal["refuse-similar", "refuse", "pass"]


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One item that is to be active.

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
    """The items that are to be active for one model.

    items:      in the order in which they are applied
    on_failure: ``stop``: a process that lacks an item stops the start; ``warn``: it shows as a finding
    endpoint:   whether the routes under ``/graft`` are served
    model:      the model the profiles were matched with
    origins:    where the settings and options came from, an option as ``options.ITEM.OPTION``
    left_out:   named items that are not for this model, each with the reason
    callers:    the file of callers; empty if there is none
    findings:   what the resolution noticed and does not decide
    unknown_keys: how a request's key is treated that no planned sampler has: ``refuse-similar`` refuses a name that
                may be a misspelt one, ``refuse`` every name, ``pass`` none
    other_keys: names of requests' keys that belong to other software and always pass
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
        """True if a missing item stops the start."""
        return self.on_failure == "stop"

    @property
    def hash(self) -> str:
        """A short hash of everything that changes behaviour, so not of the model and the origins."""
        facts = [[i.point, i.name, i.target, list(i.roles), dict(i.options)] for i in self.items]
        keys = {"unknown_keys": self.unknown_keys, "other_keys": self.other_keys}
        # Left out while they have their defaults, so that plans keep the hashes they had before these settings existed.
        usual = self.unknown_keys == "refuse-similar" and not self.other_keys
        more = [each for each in (self.callers, {} if usual else keys) if each]
        text = json.dumps([facts, self.on_failure, self.endpoint, *more], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def of(self, point: str) -> tuple[PlanItem, ...]:
        """Return the items of one extension point."""
        return tuple(item for item in self.items if item.point == point)

    def needed_by(self, roles: set[Role]) -> tuple[PlanItem, ...]:
        """Return the items that a process with these roles must have."""
        return tuple(item for item in self.items if roles.intersection(item.roles))

    def as_dict(self) -> dict[str, object]:
        """Return the plan with stable lower-case keys, for ``--json`` and for child processes."""
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
        """Return the plan as one line of JSON."""
        return json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse what ``to_json`` wrote; raise ValueError if a value is missing or of another type."""
        # Those keys that the first version wrote; others have a default that stands for older plans.
        required = ("items", "on_failure", "endpoint", "model", "origins")
        return parse_dataclass(cls, json.loads(text), "the plan", required=required)
