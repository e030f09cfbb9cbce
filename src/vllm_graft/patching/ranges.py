"""The releases a patch is written for, as PEP 440 ranges compared with the installed vLLM."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_graft import versions
from vllm_graft.errors import DeclarationError, VersionError

_NUMBER = r"\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)*"
_SIMPLE = re.compile(r"(<=|>=|<|>)(\d+(?:\.\d+)*)")
_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:rc\d+|\.post\d+)?(?:\+[a-z0-9.]+)?")
_PART = re.compile(rf"(?:(?:<=|>=|<|>)\s*{_NUMBER}|(?:==|!=)\s*{_NUMBER}(?:\.\*)?|~=\s*\d+(?:\.\d+)+)")


def check_range(text: str, where: str) -> str:
    """The range without spaces; DeclarationError where it is not one. Empty means every release."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    for part in parts:
        if not _PART.fullmatch(part):
            raise DeclarationError(
                f"{part!r} is not a part of a version range", where=where, fix='write vllm=">=0.26,<0.33"'
            )
    return ",".join(part.replace(" ", "") for part in parts)


def includes(text: str, release: str) -> bool:
    """Whether a release, a plain number, lies in a range; an empty range has all of them."""
    return all(_fits(part, release) for part in text.split(",")) if text else True


def _fits(part: str, release: str) -> bool:
    match = _SIMPLE.fullmatch(part)
    if match is None:
        # Loading packaging takes longer than all else that fifty patches need.
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(part).contains(release)
    mine, theirs = _numbers(release), _numbers(match[2])
    length = max(len(mine), len(theirs))
    mine, theirs = (each + (0,) * (length - len(each)) for each in (mine, theirs))
    return {"<": mine < theirs, "<=": mine <= theirs, ">": mine > theirs, ">=": mine >= theirs}[match[1]]


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


@dataclass(frozen=True)
class Installed:
    """The vLLM that patches meet: its version as it states it, None where there is none."""

    version: str | None

    @classmethod
    def now(cls) -> Installed:
        """The one this interpreter would import."""
        return cls(versions.vllm_version())

    @cached_property
    def releases(self) -> tuple[str, ...]:
        """The release that it is, and none for a development build.

        Only the release number counts: "0.32.0+cpu" and "0.32.0rc1" are taken as 0.32.0. A development build has a
        number that says nothing of its code ("0.1.dev1+g...").
        """
        if match := _RELEASE.fullmatch(self.version or ""):
            return (match[1],)
        from packaging.version import InvalidVersion, Version

        try:
            found = Version(self.version or "0.dev0")
        except InvalidVersion:
            return ()
        return () if found.is_devrelease else (found.base_version,)

    def must_lie_in(self, text: str, where: str, *, by_code: Callable[[], Sequence[str]]) -> None:
        """Raise VersionError unless this vLLM lies in the range; ``by_code`` gives the releases it is equal to."""
        if not text:
            return
        if self.version is None:
            raise VersionError(f"it is written for vLLM {text}, and none is installed", where=where, fix="install vLLM")
        if not self.releases:
            if not any(includes(text, release) for release in by_code()):
                raise VersionError(
                    f"it is written for vLLM {text}, and {self.version} is a development build, whose code is none "
                    "that was reviewed for it",
                    where=where,
                    fix="install a release, or review this build and accept it with `vllm-graft lock --as RELEASE`",
                )
        elif not includes(text, self.releases[0]):
            raise VersionError(
                f"it is written for vLLM {text}, and {self.version} is installed",
                where=where,
                fix=f"install vLLM {text}, leave the patch out, or widen vllm= once its target is known to fit "
                f"{self.version}",
            )
