"""The policies: how a run is told who decides which waiting request goes next."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from vllm_graft.contracts import AdmissionQueue
from vllm_graft.errors import ConfigError, nearest
from vllm_graft.plan.catalogue import SHIPPED, load
from vllm_graft.testing.packages import lay_out

STOCK: Final = ("fcfs", "priority")
"""vLLM's own."""

ADMISSION: Final = "priority-fairness+admission"
"""The name of priority-fairness where it may turn requests away, so that nobody waits longer than is promised."""

KNOWN: Final = (*STOCK, "priority-fairness", ADMISSION, "tenant-fairness")
"""Those that have a name; any other is a module:Class."""


@dataclass(frozen=True)
class Policy:
    """Who decides. ``options`` are those of a planned scheduler; more than one set of them can be compared so."""

    name: str
    item: str = ""
    target: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def engine(self) -> dict[str, Any]:
        """What vLLM is given for it."""
        return {"scheduling_policy": "priority"} if self.name == "priority" else {}

    def write(self, folder: Path, more: str = "") -> dict[str, str]:
        """Write its plan, with other tables after it, and a package that offers its class; the run's environment."""
        rows = [f"{key} = {json.dumps(value)}" for key, value in self.options.items()]
        plan = [f'[defaults]\nscheduler = "{self.item}"\n', f"[options.{self.item}]", *rows] if self.item else []
        file = folder / "graft.toml"
        file.write_text("\n".join([*plan, more, ""]), encoding="utf-8")
        if self.target:
            lay_out(folder, self.item, {"vllm_graft.plugins": {self.item: self.target}})
        return {"GRAFT_CONFIG": str(file)}

    def waiting_at_most(self, seconds: float) -> Policy:
        """The same with another ``max_wait_sec``, where it has one."""
        if not self.item.startswith("priority-fairness") or "max_wait_sec" in self.options:
            return self
        return replace(self, options={**self.options, "max_wait_sec": seconds})


def policy_of(text: str) -> Policy:
    """``fcfs``, ``priority-fairness``, ``module:Class``, each with options after it: ``NAME,urgent_share=0.3``.

    What cannot run is a ConfigError here, and not the end of a process an hour later.
    """
    name, *rest = text.split(",")
    options = dict(_option(each) for each in rest)
    if name in STOCK:
        if options:
            raise ConfigError(f"{name} is vLLM's own and has no options", where=text, fix=f"write {name}")
        return Policy(name)
    if ":" in name:
        policy = Policy(text, "benchmarked", name, options)
    elif name == ADMISSION:
        policy = Policy(text, "priority-fairness", "", {"admission": True, **options})
    elif name in KNOWN:
        policy = Policy(text, name, "", options)
    else:
        raise ConfigError(
            f"there is no policy {name!r}{nearest(name, KNOWN)}", where="--policy", fix="name one, or a module:Class"
        )
    _check(policy)
    return policy


def _check(policy: Policy) -> None:
    """The class can be imported, is a queue, and takes the options."""
    kind = _loaded(policy)
    if not issubclass(kind, AdmissionQueue):
        raise ConfigError(
            f"{policy.target} is no admission queue", where="--policy", fix="derive it from vllm_graft.AdmissionQueue"
        )
    for name in policy.options:
        if name not in kind.options:
            raise ConfigError(
                f"has no option {name!r}{nearest(name, kind.options)}", where=policy.name, fix="correct it"
            )
    kind(policy.options)


def _loaded(policy: Policy) -> type:
    try:
        return load(policy.target or SHIPPED[policy.item], policy.name, "the benchmark")
    except ConfigError as error:
        cause = error.__cause__
        if not policy.target or cause is None:
            raise
        told = f"{policy.target} cannot be imported: {type(cause).__name__}: {cause}"
        raise ConfigError(told, where="--policy", fix="put the module's folder on PYTHONPATH, or fix it") from cause


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is no option", where="--policy", fix="write NAME,option=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
