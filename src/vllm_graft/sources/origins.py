"""Sources of modules: this interpreter, a search path, a folder, or a wheel. None is imported."""

from __future__ import annotations

import ast
import importlib.util
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

from vllm_graft import versions
from vllm_graft.errors import ConfigError
from vllm_graft.sources.locate import find_spec, source_of

# The most bytes of one source file: the largest of vLLM 0.32 has 0.3 MB.
MAX_FILE_BYTES: Final = 64 << 20


def read_text(path: Path) -> str | None:
    """Return the text of a regular file; None for a pipe, a device, and what is too large or cannot be read."""
    try:
        # A pipe or /dev/zero would be read for ever.
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        return decode(path.read_bytes())
    except OSError:
        return None


def decode(data: bytes) -> str:
    """Return source text in the encoding that it declares, with ``\\n`` as line end; bad bytes are replaced."""
    try:
        return importlib.util.decode_source(data)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def parse(text: str) -> ast.Module:
    """Parse source text without the compiler's warnings; SyntaxError or ValueError if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            # Invalid escape sequences in a plugin are its author's affair.
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return ast.parse(text)
    except (RecursionError, MemoryError) as error:
        # The parser's stack is limited: a sum of ten thousand terms is valid Python and still too deep.
        raise SyntaxError("it is nested too deeply") from error


@dataclass(frozen=True, slots=True)
class ModuleText:
    """The text of one module, its file's path, and whether it is a package."""

    path: str
    text: str
    is_package: bool

    @classmethod
    def of(cls, spec: ModuleSpec | None) -> ModuleText | None:
        """Read the module that a spec locates; None if it has no source."""
        text = source_of(spec) if spec is not None else None
        if spec is None or text is None:
            return None
        return cls(spec.origin or spec.name, text, spec.submodule_search_locations is not None)


class Source(Protocol):
    """A set of modules that can be read."""

    @property
    def version(self) -> str:
        """The release of vLLM in this source; empty if it does not state one."""

    def read(self, module: str) -> ModuleText | None:
        """Read a module by its dotted name; None if there is none with a source."""

    def modules(self) -> Iterable[str]:
        """Return the dotted names of all modules of ``vllm`` that have a source, sorted."""


def module_of(path: str) -> str | None:
    """Return the dotted name of a file by its path below the folder of packages; None if it cannot be imported."""
    place = PurePosixPath(path)
    if place.suffix != ".py":
        return None
    parts = place.parts[:-1] if place.name == "__init__.py" else (*place.parts[:-1], place.stem)
    return ".".join(parts) if parts and all(part.isidentifier() for part in parts) else None


def package_files(package: str) -> list[tuple[str, Path]]:
    """List the modules of an installed package with their files; the package is not imported."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return [pair for folder in folders for pair in _files_below(Path(folder), package)]


def _files_below(folder: Path, package: str) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*.py")):
        if name := module_of(f"{package}/{file.relative_to(folder).as_posix()}"):
            yield name, file


class Installed:
    """The modules that this interpreter would import."""

    @property
    def version(self) -> str:
        """The version that the installed vLLM states."""
        return versions.vllm_version() or ""

    def read(self, module: str) -> ModuleText | None:
        """Read a module's file."""
        return ModuleText.of(find_spec(module))

    def modules(self) -> list[str]:
        """List the modules in the folders of ``vllm``."""
        return sorted({name for name, _ in package_files("vllm")})


class SearchPath:
    """The modules on a search path; vLLM's from the folder that it is known to lie in.

    root:  the folder of the ``vllm`` package, which may lie elsewhere than on the path
    """

    version = ""

    def __init__(self, path: Sequence[str], root: Path | None = None) -> None:
        self._path = path
        self._root = root

    def read(self, module: str) -> ModuleText | None:
        """Read a module's file."""
        if self._root is not None and module.partition(".")[0] == "vllm":
            return ModuleText.of(find_spec(module, [str(self._root.parent)]))
        return ModuleText.of(find_spec(module, self._path))

    def modules(self) -> list[str]:
        """List nothing: only the modules that entry points name are read."""
        return []


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
        return self._version or versions.stated_version(read_text(file) or "") or ""

    def read(self, module: str) -> ModuleText | None:
        """Read a module's file below the folder."""
        place = self.folder.joinpath(*module.split("."))
        for path, is_package in ((place / "__init__.py", True), (place.with_name(f"{place.name}.py"), False)):
            if (text := read_text(path)) is not None:
                return ModuleText(str(path), text, is_package)
        return None

    def modules(self) -> list[str]:
        """List the modules below ``vllm/``."""
        return sorted({name for name, _ in _files_below(self.folder / "vllm", "vllm")})


# The exceptions that reading a member of a damaged archive may raise.
DAMAGE: Final = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, struct.error)


class Wheel:
    """A wheel file, read without unpacking it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        where = str(path)
        if path.is_char_device() or path.is_fifo():
            # zipfile would read it to its end, which may never come.
            raise ConfigError("it is not a regular file", where=where, fix="name a file that ends in .whl")
        try:
            self._archive = zipfile.ZipFile(path)
        except FileNotFoundError as error:
            raise ConfigError("there is no such file", where=where, fix="name a file that ends in .whl") from error
        except OSError as error:
            what = f"it cannot be read: {error.strerror or error}"
            raise ConfigError(what, where=where, fix="name a readable file") from error
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            with path.open("rb") as file:
                is_archive = file.read(4) == b"PK\x03\x04"
            what, fix = "it is not a wheel", "name a file that ends in .whl"
            if is_archive:
                what, fix = f"the wheel is cut short or damaged: {error}", "download it again"
            raise ConfigError(what, where=where, fix=fix) from error

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

    def read(self, module: str) -> ModuleText | None:
        """Read a module's member of the archive."""
        place = module.replace(".", "/")
        for name, is_package in ((f"{place}/__init__.py", True), (f"{place}.py", False)):
            if name in self._names:
                return ModuleText(f"{self.path}/{name}", self._text(name), is_package)
        return None

    def modules(self) -> list[str]:
        """List the modules below ``vllm/`` in the archive."""
        found = (module_of(name) for name in self._names if name.startswith("vllm/"))
        return sorted({name for name in found if name is not None})

    def _text(self, name: str) -> str:
        try:
            return decode(self._archive.read(name))
        except DAMAGE as error:
            raise ConfigError(
                f"the wheel is damaged at {name}: {error}", where=str(self.path), fix="download it again"
            ) from error
