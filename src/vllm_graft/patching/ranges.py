"""The releases a patch is written for, as a PEP 440 range compared with the installed vLLM."""

from __future__ import annotations

import re

from vllm_graft import versions
from vllm_graft.errors import DeclarationError, VersionError

_NUMBER = r"\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)*"
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


def must_include_installed(text: str, where: str) -> None:
    """Raise VersionError unless the installed vLLM lies in the range.

    Only the release number counts: "0.32.0+cpu" and "0.32.0rc1" are taken as 0.32.0. A development build has a
    number that says nothing of its code ("0.1.dev1+g..."), so it lies in no range.
    """
    if not text:
        return
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    installed = versions.vllm_version()
    if installed is None:
        raise VersionError(f"it is written for vLLM {text}, and none is installed", where=where, fix="install vLLM")
    try:
        found = Version(installed)
    except InvalidVersion:
        found = Version("0.dev0")
    if found.is_devrelease:
        raise VersionError(
            f"it is written for vLLM {text}, and {installed} is a development build, which lies in no range",
            where=where,
            fix="install a release, or declare the patch without vllm= once its target is known to fit this build",
        )
    if not SpecifierSet(text).contains(Version(found.base_version)):
        raise VersionError(
            f"it is written for vLLM {text}, and {installed} is installed",
            where=where,
            fix=f"install vLLM {text}, leave the patch out, or widen vllm= once its target is known to fit {installed}",
        )
