"""The patches that a command line names, and the sources of vLLM: shared by ``lock``, ``diff`` and ``rebase``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

from vllm_graft.errors import ConfigError, nearest
from vllm_graft.patching import VLLMPatch, lock
from vllm_graft.patching.declaration import Patch
from vllm_graft.plan.catalogue import catalogue
from vllm_graft.sources import Definition, Installed, Source, Tree, Wheel
from vllm_graft.sources.finder import Finder

INSTALLED: Final = "installed"
OWN_PACKAGE: Final = "vllm-graft"

SOURCE_HELP: Final = "a folder that holds vllm/, a wheel, a release, or 'installed'"


def patches(names: Sequence[str]) -> list[Patch]:
    """Return the registered patches of these names; without names, all that other packages offer."""
    known = catalogue()
    for name in names:
        if name not in known:
            what = f"there is no item {name!r}{nearest(name, known)}"
            raise ConfigError(what, fix="correct the name, or install the package that offers it")
    found: list[Patch] = []
    for each in [known[name] for name in names] or [each for each in known.values() if each.package != OWN_PACKAGE]:
        kind = each.load()
        if issubclass(kind, VLLMPatch):
            found.append(kind)
        elif names:
            raise ConfigError(f"{each.name!r} is not a patch but a {kind.__qualname__}", fix="name a patch")
    if not found:
        raise ConfigError("no installed package offers a patch", fix="install yours, or name one of the shipped ones")
    return found


def source(text: str, release: str = "", *, offline: bool = False) -> Source:
    """Return the source that a command-line word names; ``release`` is that of a folder, which states none."""
    if text == INSTALLED:
        return Installed()
    path = Path(text)
    if path.is_dir():
        return Tree(path, release)
    if path.is_file():
        return Wheel(path)
    if is_version(text):
        from vllm_graft.audit.releases.wheels import open_release as fetched

        return fetched(text, offline=offline)
    fix = "name a wheel, a folder that holds vllm/, or a release such as 0.32.0"
    raise ConfigError(f"{text!r} is not a file, a folder or a release", where="source of vLLM", fix=fix)


def is_version(text: str) -> bool:
    """Return whether a word is the number of a release, and not a file, a folder or "installed"."""
    try:
        return bool(Version(text).release)
    except InvalidVersion:
        return False


@dataclass(frozen=True, slots=True)
class UpstreamAttribute:
    """One upstream attribute that a patch changes, and its definition in a source."""

    patch: Patch
    attribute: str
    name: str
    definition: Definition | None


def upstream_attributes(patch: Patch, finder: Finder) -> Iterator[UpstreamAttribute]:
    """Yield the attributes that a patch changes; an added one counts only if upstream has gained its name."""
    target = patch.declaration.target
    for attribute in dict.fromkeys(hook.attribute for hook in patch.declaration.hooks if hook.kind != "add"):
        found = finder.find(target.module, target.inside(attribute))
        optional = all(hook.kind == "auto" for hook in patch.declaration.hooks if hook.attribute == attribute)
        if found is not None or not optional:
            yield UpstreamAttribute(patch, attribute, lock.hook_name(patch.declaration, attribute), found)


def lock_file(patch: Patch) -> Path:
    """Return the path of a patch's lock, which may not exist yet."""
    path = lock.file_of(patch)
    if path is None:
        what = "its module has no file, so there is no place for a lock"
        raise ConfigError(what, where=patch.declaration.where, fix="put it in one")
    return path
