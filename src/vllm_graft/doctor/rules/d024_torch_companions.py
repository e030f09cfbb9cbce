"""D024: torchvision, torchaudio or torchcodec built for another torch than the one that is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.parser import HeaderParser
from typing import Final

from packaging.requirements import Requirement

from vllm_graft.doctor.environment import Environment, PackageMetadata, parse_version, requirements
from vllm_graft.findings import Finding, Level

CODE = "D024"
TITLE = "A companion of torch that does not fit it"

_COMPANIONS: Final = {
    "torchvision": "importing it fails, which breaks transformers and with it vLLM",
    "torchaudio": "importing it fails, which breaks models that take audio",
    "torchcodec": "importing it fails, which breaks models that take video or audio",
}

_STATED = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)


def check(env: Environment) -> Iterator[Finding]:
    """Find companions that do not fit torch: vLLM runs without all three, but not with a wrong one."""
    seen = {package.name: package for package in env.packages if not package.hidden}
    torch = seen.get("torch")
    for name, then in _COMPANIONS.items():
        companion = seen.get(name)
        if torch is None or companion is None:
            continue
        other_build = misfit = _other_build(companion, torch)
        version = parse_version(torch.version)
        for requirement in _requirements(companion) if version is not None and not other_build else ():
            fits = version is None or requirement.specifier.contains(version.base_version, prereleases=True)
            if requirement.name == "torch" and not fits and not misfit:
                misfit = f"needs torch{requirement.specifier}, but torch is {torch.version}"
        if misfit:
            # A neighbouring release may do; another build never does.
            level: Level = "error" if name == "torchvision" and other_build else "warning"
            fix = f"uninstall {name}, which vLLM runs without, or install the one that belongs to this torch"
            yield Finding(CODE, level, f"package {name}", f"{misfit}: {then}", str(companion.where), fix)


def _other_build(companion: PackageMetadata, torch: PackageMetadata) -> str:
    build, wanted = _build(torch), _build(companion)
    if build == "cpu" and wanted.startswith("cu"):
        return f"is a CUDA build ({_full(companion)}) beside a CPU build of torch ({_full(torch)})"
    if "" not in (_major(build), _major(wanted)) and _major(build) != _major(wanted):
        return f"is built for another major release of CUDA ({_full(companion)}) than torch ({_full(torch)})"
    return ""


def _build(package: PackageMetadata) -> str:
    """Return what a package is built for: cpu, cu130, rocm6.4, …; empty if nothing tells."""
    local = _full(package).partition("+")[2]
    if re.match(r"cpu\b|cu\d+|rocm|xpu", local):
        return local
    names = [requirement.name for requirement in _requirements(package)]
    # torch itself, from the registry, names the libraries of CUDA and not its release.
    return "cuda" if package.name == "torch" and any(name.startswith("nvidia-cu") for name in names) else ""


def _full(package: PackageMetadata) -> str:
    """Return the version with its local part, which only ``version.py`` of a public build has."""
    if "+" in package.version:
        return package.version
    file = package.where.parent / package.name / "version.py"
    try:
        stated = _STATED.search(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return package.version
    # Not the leftover of another release.
    same = stated is not None and stated[1].partition("+")[0] == package.version
    return stated[1] if stated is not None and same else package.version


def _major(build: str) -> str:
    """Return the major release of CUDA in cu130 or cu126; empty without a number."""
    number = re.match(r"cu(\d+)\d$", build)
    return number[1] if number else ""


def _requirements(package: PackageMetadata) -> list[Requirement]:
    """Return what the metadata of a package require here."""
    try:
        text = (package.where / "METADATA").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return list(requirements(HeaderParser().parsestr(text).get_all("Requires-Dist", [])))
