"""Where upstream's modules are read from: the running environment, a folder, or a wheel. Nothing is imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from vllm_graft import versions
from vllm_graft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class File:
    """One module as it is written."""

    path: str
    text: str
    is_package: bool


class Source(Protocol):
    """A set of modules that can be read."""

    @property
    def version(self) -> str:
        """The release of vLLM that this is, or an empty string where nobody says."""
        ...

    def read(self, module: str) -> File | None:
        """A module by its dotted name, or None where there is none with a source."""
        ...


class Installed:
    """What this interpreter would import."""

    @property
    def version(self) -> str:
        """The version that the package states."""
        return versions.vllm_version() or ""

    def read(self, module: str) -> File | None:
        """The module's file, found without importing a package on the way."""
        spec = _spec(module)
        if spec is None or spec.loader is None:
            return None
        try:
            text = getattr(spec.loader, "get_source", lambda name: None)(module)
        except (ImportError, OSError, SyntaxError, UnicodeDecodeError):
            return None
        if text is None:
            return None
        return File(spec.origin or module, text, spec.submodule_search_locations is not None)


def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    path: Sequence[str] | None = None
    spec = None
    parts = module.split(".")
    for done in range(1, len(parts) + 1):
        name = ".".join(parts[:done])
        try:
            # importlib.util would import the packages above a module to find it.
            top = path is None
            spec = importlib.util.find_spec(name) if top else importlib.machinery.PathFinder.find_spec(name, path)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


class Tree:
    """A folder that holds packages: an unpacked wheel, a checkout, ``site-packages``."""

    def __init__(self, folder: Path, version: str = "") -> None:
        if not (folder / "vllm").is_dir():
            raise ConfigError("there is no folder 'vllm' in it", where=str(folder), fix="name the folder above vllm/")
        self.folder = folder
        self._version = version

    @property
    def version(self) -> str:
        """The version given, or the one that ``vllm/_version.py`` states; a checkout has none."""
        file = self.folder / "vllm" / "_version.py"
        stated = versions.stated_version(file.read_text(encoding="utf-8")) if file.is_file() else None
        return self._version or stated or ""

    def read(self, module: str) -> File | None:
        """The module's file below the folder."""
        place = self.folder.joinpath(*module.split("."))
        for path, is_package in ((place / "__init__.py", True), (place.with_name(f"{place.name}.py"), False)):
            if path.is_file():
                return File(str(path), path.read_text(encoding="utf-8", errors="replace"), is_package)
        return None


class Wheel:
    """A wheel file, read without unpacking it."""

    def __init__(self, path: Path) -> None:
        if not zipfile.is_zipfile(path):
            raise ConfigError("it is not a wheel", where=str(path), fix="name a file that ends in .whl")
        self.path = path

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._archive.namelist())

    @property
    def version(self) -> str:
        """The version in ``vllm/_version.py``, or the one in the file's name."""
        name = "vllm/_version.py"
        stated = versions.stated_version(self._text(name)) if name in self._names else None
        parts = self.path.name.split("-")
        return stated or (parts[1] if len(parts) > 1 else "")

    def read(self, module: str) -> File | None:
        """The module's member in the archive."""
        place = module.replace(".", "/")
        for name, is_package in ((f"{place}/__init__.py", True), (f"{place}.py", False)):
            if name in self._names:
                return File(f"{self.path}/{name}", self._text(name), is_package)
        return None

    def _text(self, name: str) -> str:
        return self._archive.read(name).decode("utf-8", errors="replace")
