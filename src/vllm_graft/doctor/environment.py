"""The environment that the rules examine: distributions, entry points, variables, arguments and the vLLM in it.

It is gathered once; neither vLLM nor a plugin is imported.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from vllm_graft.switches import allowed_plugins
from vllm_graft.versions import vllm_root, vllm_version
from vllm_graft.vllm_arguments import VllmArguments

if TYPE_CHECKING:
    from vllm_graft.doctor.classes import ClassReader
    from vllm_graft.sources.modules import Missing, SourceModule

GROUPS: Final = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
    "vllm.endpoint_plugins",
    "vllm.logits_processors",
)
"""Every entry-point group that vLLM 0.26 to 0.32 reads."""


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """One entry point: its group, name and value, the package that registers it, and where its metadata lie."""

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
        """The object in the module; extras in brackets, which are obsolete, are cut off."""
        return self.value.partition(":")[2].partition("[")[0].strip()

    @property
    def top_level(self) -> str:
        """The top-level package of its module; that of the package's own plugins is ``vllm``."""
        return self.module.partition(".")[0]

    @property
    def subject(self) -> str:
        """The plugin and its package, as the subject of a finding."""
        return f"plugin {self.name!r} of {self.package}"

    @property
    def origin(self) -> str:
        """The package and the object, as the place of a finding."""
        return f"{self.package}: {self.value}"


@dataclass(frozen=True, slots=True)
class PackageMetadata:
    """One distribution: normalised name, version, the folder or file of its metadata, its entry points.

    hidden:    whether another of this name comes before it on the path, so that importlib shows only that one
    requires:  its requirements, if it registers an entry point
    """

    name: str
    version: str
    where: Path
    entries: tuple[EntryPoint, ...]
    hidden: bool = False
    requires: tuple[str, ...] = ()


def _packages(path: Sequence[str]) -> Iterator[PackageMetadata]:
    """Yield every distribution on the path, in the order of the path."""
    seen: set[str] = set()
    for distribution in metadata.distributions(path=list(path)):
        name = (distribution.metadata["Name"] or "").replace("_", "-").replace(".", "-").lower()
        if not name:
            continue
        where = Path(str(getattr(distribution, "_path", "")))
        entries = tuple(
            EntryPoint(entry.group, entry.name, entry.value, name, str(where))
            for entry in distribution.entry_points
            if entry.group.lower().startswith("vllm")
        )
        # Parsing the requirements of every distribution would take longer than all rules.
        requires = tuple(distribution.requires or ()) if entries else ()
        yield PackageMetadata(name, distribution.version or "", where, entries, name in seen, requires)
        seen.add(name)


@dataclass(frozen=True)
class Environment:
    """An environment as vLLM would find it.

    path:       where modules and distributions are searched
    arguments:  the command line of vLLM
    packages:   every distribution, hidden ones included
    vllm:       the version of the vLLM that would be imported, or None
    root:       its folder
    by_graft:   whether ``vllm-graft serve`` starts it instead of the ``vllm`` command
    """

    path: tuple[str, ...]
    variables: Mapping[str, str]
    arguments: VllmArguments
    packages: tuple[PackageMetadata, ...]
    vllm: str | None
    root: Path | None
    by_graft: bool = False

    @classmethod
    def gather(
        cls,
        arguments: Sequence[str] = (),
        *,
        path: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        by_graft: bool = False,
    ) -> Environment:
        """Gather the environment of this interpreter, or of another path and other variables."""
        places = tuple(sys.path if path is None else path)
        environ = dict(os.environ if variables is None else variables)
        told, packages = VllmArguments(tuple(arguments)), tuple(_packages(places))
        return cls(places, environ, told, packages, vllm_version(), vllm_root(), by_graft)

    @cached_property
    def entries(self) -> tuple[EntryPoint, ...]:
        """The entry points that importlib shows, in its order; hidden distributions have none."""
        return tuple(entry for package in self.packages if not package.hidden for entry in package.entries)

    def in_group(self, *groups: str) -> list[EntryPoint]:
        """Return the entry points of some groups."""
        return [entry for entry in self.entries if entry.group in groups]

    @cached_property
    def plugins(self) -> list[EntryPoint]:
        """The entry points that vLLM itself would find."""
        return self.in_group(*GROUPS)

    @cached_property
    def allowed(self) -> tuple[str, ...] | None:
        """The names in ``VLLM_PLUGINS`` as vLLM splits them, blanks included; None if it is not set."""
        return allowed_plugins(self.variables)

    def uses(self, entry: EntryPoint) -> bool:
        """Return whether a server with these arguments loads a plugin: an IO processor only if it is named."""
        named = self.arguments.value("--io-processor-plugin")
        return self.loads(entry) and (entry.group != "vllm.io_processor_plugins" or named == entry.name)

    def loads(self, entry: EntryPoint) -> bool:
        """Return whether vLLM loads an entry point, by its group and the allow-list."""
        if entry.group == "vllm.logits_processors":
            # Its loader reads the group itself and never looks at the list.
            return True
        if self.allowed is None:
            # load_endpoint_plugins returns at once if VLLM_PLUGINS is not set: its plugins add routes.
            return entry.group != "vllm.endpoint_plugins"
        return entry.name in self.allowed

    @cached_property
    def release(self) -> tuple[int, ...]:
        """The installed vLLM's number, for comparisons; empty if it is unknown."""
        parts = (self.vllm or "").partition("+")[0].split(".")
        return tuple(int(part) for part in parts[:3] if part.isdigit())

    @cached_property
    def classes(self) -> ClassReader:
        """The class hierarchies of this environment, read without importing."""
        from vllm_graft.doctor.classes import ClassReader

        return ClassReader(self.path, self.root)

    @cached_property
    def module(self) -> Callable[[str], SourceModule | Missing | None]:
        """Read a module on the path, once; None if it may exist and its source cannot be read."""
        from vllm_graft.sources.modules import read_module

        return cache(lambda name: read_module(name, self.path))

    def definition(self, entry: EntryPoint) -> tuple[SourceModule, ast.AST] | None:
        """Return the statement that makes an entry point's object, and its module; None if it is not certain."""
        from vllm_graft.sources.finder import find_certain
        from vllm_graft.sources.modules import SourceModule

        module = self.module(entry.module)
        return find_certain(module, entry.attribute, self.path) if isinstance(module, SourceModule) else None

    def functions(self, *groups: str) -> Iterator[tuple[EntryPoint, SourceModule, ast.FunctionDef]]:
        """Yield the entry points of some groups whose object is a function for certain, with its module."""
        for entry in self.in_group(*groups):
            found = self.definition(entry)
            if found is not None and isinstance(found[1], ast.FunctionDef):
                yield entry, found[0], found[1]


def describe_entries(entries: Iterable[EntryPoint]) -> str:
    """Return entry points for a sentence: name and package."""
    return ", ".join(f"{entry.name} ({entry.package})" for entry in entries)


def parse_version(text: str) -> Version | None:
    """Return a version for comparisons; None for a string that is not a version, as source trees may have."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


def requirements(texts: Iterable[str]) -> Iterator[Requirement]:
    """Yield the requirements that apply here: without an extra, and without those whose marker does not hold."""
    for text in texts:
        try:
            found = Requirement(text)
        except InvalidRequirement:
            continue
        if found.marker is None or found.marker.evaluate({"extra": ""}):
            yield found
