"""Where upstream's modules are read from: the running environment, a folder, or a wheel. Nothing is imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

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
        """The release of vLLM in this source; empty where it does not state one."""
        ...

    def read(self, module: str) -> File | None:
        """A module by its dotted name, or None where there is none with a source."""
        ...

    def modules(self) -> Iterable[str]:
        """The dotted names of all modules of ``vllm`` that have a source, sorted."""
        ...


def module_of(path: str) -> str | None:
    """The dotted name of a file, by its path below the folder of packages; None where it cannot be imported."""
    place = PurePosixPath(path)
    if place.suffix != ".py":
        return None
    parts = place.parts[:-1] if place.name == "__init__.py" else (*place.parts[:-1], place.stem)
    return ".".join(parts) if parts and all(part.isidentifier() for part in parts) else None


def text_of(data: bytes) -> str:
    """The bytes of a source as text, with the line ends that reading it from a folder gives."""
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def _modules_below(folder: Path, package: str) -> set[str]:
    found = (module_of(f"{package}/{file.relative_to(folder).as_posix()}") for file in folder.rglob("*.py"))
    return {name for name in found if name is not None}


class Installed:
    """The modules that this interpreter would import."""

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

    def modules(self) -> list[str]:
        """Those in the folders of the package, which is not imported."""
        spec = _spec("vllm")
        folders = (spec.submodule_search_locations or ()) if spec is not None else ()
        return sorted(set().union(*(_modules_below(Path(folder), "vllm") for folder in folders)))


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
        except KeyError:
            # A folder without __init__.py: Python wants the package above it imported before it says more.
            spec, path = None, [str(Path(folder) / parts[done - 1]) for folder in path or ()]
            continue
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

    def modules(self) -> list[str]:
        """Those below ``vllm/``."""
        return sorted(_modules_below(self.folder / "vllm", "vllm"))


DAMAGE: Final = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, struct.error)
"""The exceptions that reading a member of a damaged archive may raise."""


class Wheel:
    """A wheel file, read without unpacking it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_char_device() or path.is_fifo():
            # zipfile would read it to its end, which may never come.
            raise ConfigError("it is not a regular file", where=str(path), fix="name a file that ends in .whl")
        try:
            self._archive = zipfile.ZipFile(path)
        except FileNotFoundError as error:
            raise ConfigError("there is no such file", where=str(path), fix="name a file that ends in .whl") from error
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise self._unusable(error) from error

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

    def modules(self) -> list[str]:
        """Those below ``vllm/`` in the archive."""
        found = (module_of(name) for name in self._names if name.startswith("vllm/"))
        return sorted({name for name in found if name is not None})

    def _text(self, name: str) -> str:
        try:
            return text_of(self._archive.read(name))
        except DAMAGE as error:
            raise ConfigError(
                f"the wheel is damaged at {name}: {error}", where=str(self.path), fix="download it again"
            ) from error

    def _unusable(self, error: Exception) -> ConfigError:
        where = str(self.path)
        if isinstance(error, OSError):
            return ConfigError(f"it cannot be read: {error.strerror or error}", where=where, fix="name a readable file")
        with self.path.open("rb") as file:
            begins_as_one = file.read(4) == b"PK\x03\x04"
        if begins_as_one:
            return ConfigError(f"the wheel is cut short or damaged: {error}", where=where, fix="download it again")
        return ConfigError("it is not a wheel", where=where, fix="name a file that ends in .whl")
