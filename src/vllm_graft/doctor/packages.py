"""Distributions as importlib sees them: which are found, where, what they register, and which one hides another."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

GROUPS: Final = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
    "vllm.endpoint_plugins",
    "vllm.logits_processors",
)
"""Every group that vLLM reads."""

OURS: Final = "vllm_graft.plugins"
"""The group that vllm-graft reads."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point."""

    group: str
    name: str
    value: str
    package: str
    where: str

    @property
    def module(self) -> str:
        """The module that it names."""
        return self.value.partition(":")[0].strip()

    @property
    def attribute(self) -> str:
        """The object in it; extras, which nobody uses, are cut off."""
        return self.value.partition(":")[2].partition("[")[0].strip()


@dataclass(frozen=True, slots=True)
class Package:
    """One distribution: name as it normalises, version, the folder or file of its metadata, its entry points.

    ``hidden`` says whether another of the same name comes before it, which is then the one that is seen. ``requires``
    are its requirements, where it registers something.
    """

    name: str
    version: str
    where: Path
    entries: tuple[Entry, ...]
    hidden: bool = False
    requires: tuple[str, ...] = ()


def packages(path: Sequence[str] | None = None) -> tuple[Package, ...]:
    """Every distribution on the path, in the order it is looked through."""
    seen: set[str] = set()
    found = []
    for distribution in metadata.distributions(path=list(sys.path if path is None else path)):
        name = _normal(distribution.metadata["Name"] or "")
        if not name:
            continue
        where = Path(str(getattr(distribution, "_path", "")))
        entries = tuple(_entries(distribution, name, where))
        requires = tuple(distribution.requires or ()) if entries else ()
        found.append(Package(name, distribution.version or "", where, entries, name in seen, requires))
        seen.add(name)
    return tuple(found)


def _entries(distribution: metadata.Distribution, package: str, where: Path) -> Iterator[Entry]:
    for entry in distribution.entry_points:
        if entry.group.lower().startswith("vllm"):
            yield Entry(entry.group, entry.name, entry.value, package, str(where))


def _normal(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()
