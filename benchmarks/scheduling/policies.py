"""The policies: how a run is told who decides which waiting request goes next."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

KNOWN: Final = ("fcfs", "priority", "priority-fairness", "tenant-fairness")
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

    def write(self, folder: Path) -> dict[str, str]:
        """Write its plan, and a package that offers its class; the environment for the run."""
        rows = [f"{key} = {json.dumps(value)}" for key, value in self.options.items()]
        text = (
            f'[defaults]\nscheduler = "{self.item}"\n\n[options.{self.item}]\n' + "\n".join(rows) if self.item else ""
        )
        file = folder / "graft.toml"
        file.write_text(text + "\n", encoding="utf-8")
        if self.target:
            offered = folder / "benchmarked-1.0.dist-info"
            offered.mkdir()
            (offered / "METADATA").write_text("Metadata-Version: 2.1\nName: benchmarked\nVersion: 1.0\n")
            (offered / "entry_points.txt").write_text(f"[vllm_graft.plugins]\n{self.item} = {self.target}\n")
        return {"GRAFT_CONFIG": str(file)}


def policy_of(text: str) -> Policy:
    """``fcfs``, ``priority-fairness``, ``module:Class``, each with options after it: ``NAME,urgent_share=0.3``."""
    name, *rest = text.split(",")
    options = {key: _value(value) for key, _, value in (each.partition("=") for each in rest)}
    if name in ("fcfs", "priority"):
        return Policy(name)
    if ":" in name:
        return Policy(text, "benchmarked", name, options)
    return Policy(text, name, "", options)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
