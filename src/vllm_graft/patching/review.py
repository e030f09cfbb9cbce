"""Review patches against the installed vLLM: choose the body for its release, and notice where upstream has changed.

A release is judged by its number. The number of a development build ("0.1.dev1+g...") says nothing about its code, so
the build is judged by fingerprint: it counts as each release whose reviewed code is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

from vllm_graft.errors import ConfigError, DriftError, TargetError, VersionError
from vllm_graft.patching import lock
from vllm_graft.patching.conflicts import check_conflicts, refuse_second_definition, sort_by_after
from vllm_graft.patching.declaration import Declaration, OnDrift, Patch
from vllm_graft.patching.hooks import Hook, HookKind
from vllm_graft.patching.target import check_exists
from vllm_graft.versions import InstalledVersion, includes

if TYPE_CHECKING:
    from vllm_graft.sources import Definition, Finder, Fingerprint

ReviewState = Literal["reviewed", "drifted", "unlocked", ""]
"""reviewed: upstream's code is as it was read; drifted: it is not; unlocked: no lock file lists the patch; empty: there
is nothing upstream to review."""

ON_DRIFT: Final = "GRAFT_ON_DRIFT"
"""The environment variable that makes every patch at least as strict: ``warn`` or ``refuse``."""

_STRICTER: Final[tuple[OnDrift, ...]] = ("ignore", "warn", "refuse")


@dataclass(frozen=True, slots=True)
class HookReview:
    """One hook's body for the installed vLLM, and the verdict on the upstream code beneath it.

    note:  the warning for the author; empty if there is none
    """

    hook: Hook
    standing: ReviewState
    note: str = ""


class Reviewer:
    """Compares patches with the installed vLLM, each of whose files is read once, and only when it is needed.

    Without ``locks`` a patch is reviewed whatever its lock says, as before its upstream code is locked.
    """

    def __init__(
        self, installed: InstalledVersion | None = None, finder: Finder | None = None, *, locks: bool = True
    ) -> None:
        self._installed = InstalledVersion.now() if installed is None else installed
        self._own_finder = finder
        self._locks = locks

    def examine(self, patch: Patch, beneath: Sequence[Patch] = ()) -> tuple[list[str], bool]:
        """Review a patch and its target by reading alone, or raise the PatchError that a start would raise.

        ``beneath`` are patches that are applied wherever this one is, and may add what it wraps. Returns what a start
        would warn of, and whether reading could decide everything.
        """
        from vllm_graft.patching.dry_run import check_by_reading

        declaration = patch.declaration
        found = self.review(patch)
        if self._own_finder is None:
            check_exists(declaration.target, declaration.where, {})
        elif self._own_finder.module(declaration.target.module) is None:
            what = f"there is no module {declaration.target.module!r} in vLLM {self._installed.version}"
            fix = "name the module that took its place, or limit the patch to the releases that have it with vllm="
            raise TargetError(what, where=declaration.where, fix=fix)
        same = [other for other in beneath if self._owner(other.declaration) == self._owner(declaration)]
        added = {each.hook.attribute for other in same for each in self.review(other) if each.hook.kind == "add"}
        hooks = [each.hook for each in found]
        bodies = [hook for hook in hooks if not (hook.kind == "wrap" and hook.attribute in added)]
        sure = check_by_reading(declaration, bodies, self._finder)
        return [each.note for each in found if each.note], sure

    def check_beside(self, patch: Patch, others: Sequence[Patch]) -> None:
        """Raise the ConflictError that a start would raise for a patch beside others that are applied already."""
        mine = patch.declaration
        check_conflicts(mine, [other.declaration for other in others])
        wraps: dict[str, list[Declaration]] = {}
        definers: dict[str, tuple[Declaration, HookKind]] = {}
        for each in (*others, patch):
            # A class is one target, whichever module it is imported from.
            if self._owner(each.declaration) != self._owner(mine):
                continue
            for hook in (one.hook for one in self.review(each)):
                kind: HookKind = "replace" if hook.kind == "auto" else hook.kind
                known = definers.get(hook.attribute)
                if kind == "wrap":
                    wraps.setdefault(hook.attribute, []).append(each.declaration)
                elif known is None:
                    definers[hook.attribute] = each.declaration, kind
                elif each is patch:
                    raise refuse_second_definition(hook.attribute, mine, kind, *known)
        for declarations in wraps.values():
            sort_by_after(declarations, lambda declaration: declaration)

    def _owner(self, declaration: Declaration) -> tuple[str, str]:
        """Return where the patched class is defined, as far as reading finds it; a module is itself."""
        target = declaration.target
        found = self._finder.find(target.module, target.qualname) if target.is_class else None
        return (target.module, target.qualname) if found is None else (found.module, found.qualname)

    def review(self, patch: Patch) -> list[HookReview]:
        """Review each attribute's body for the installed vLLM, or raise PatchError if the patch is refused."""
        one = _Review(patch, self._installed, lambda: self._finder)
        return [one.judge(hook) if self._locks else HookReview(hook, "") for hook in one.bodies()]

    @cached_property
    def _finder(self) -> Finder:
        from vllm_graft.sources import Finder, Installed

        return Finder(Installed()) if self._own_finder is None else self._own_finder


class _Review:
    """One patch compared with the installed vLLM."""

    def __init__(self, patch: Patch, installed: InstalledVersion, finder: Callable[[], Finder]) -> None:
        self._patch = patch
        self._declaration = patch.declaration
        self._installed = installed
        self._finder = finder
        self._seen = lock.fingerprints_of(patch)

    def bodies(self) -> tuple[Hook, ...]:
        """Choose the hooks for the installed vLLM, one per attribute, or raise VersionError."""
        self._installed.check_in_range(self._declaration.vllm, self._declaration.where, by_code=self._equal_releases)
        groups: dict[str, list[Hook]] = {}
        for hook in self._declaration.hooks:
            groups.setdefault(hook.attribute, []).append(hook)
        return tuple(self._choose(attribute, hooks) for attribute, hooks in groups.items())

    def _choose(self, attribute: str, hooks: Sequence[Hook]) -> Hook:
        if len(hooks) == 1 and not hooks[0].vllm:
            return hooks[0]
        releases = self._installed.releases or self._releases_like(attribute)
        fitting = [hook for hook in hooks if not hook.vllm or any(includes(hook.vllm, each) for each in releases)]
        if len(fitting) == 1:
            return fitting[0]
        ranges = " and ".join(hook.vllm for hook in (fitting or hooks))
        of = f"of {attribute!r} ({ranges})"
        what = f"{len(fitting)} bodies {of} are" if fitting else f"no body {of} is"
        what += f" for vLLM {self._installed.version}, but exactly one must be"
        fix = "make their ranges exclude one another" if fitting else "make their ranges cover this release once"
        raise VersionError(what, where=self._declaration.where, fix=fix)

    def _equal_releases(self) -> list[str]:
        """Return the releases whose reviewed code is the installed one, for every hook on upstream's code."""
        common: set[str] | None = None
        for attribute in {hook.attribute for hook in self._declaration.hooks if hook.kind != "add"}:
            if self._find(attribute) is not None:
                like = set(self._releases_like(attribute))
                common = like if common is None else common & like
        return sorted(common or ())

    def _releases_like(self, attribute: str) -> list[str]:
        now = self._find(attribute)
        seen = self._reviewed(attribute)
        return [version for version, each in seen.items() if now is not None and each == now.fingerprint]

    def _reviewed(self, attribute: str) -> dict[str, Fingerprint]:
        return (self._seen or {}).get(lock.hook_name(self._declaration, attribute), {})

    def _find(self, attribute: str) -> Definition | None:
        target = self._declaration.target
        return self._finder().find(target.module, target.inside(attribute))

    def judge(self, hook: Hook) -> HookReview:
        """Judge upstream's code beneath a hook; raise DriftError if it was not reviewed and that is refused."""
        if hook.kind == "add":
            return HookReview(hook, "")
        if self._seen is None and self._declaration.locked:
            what = f"it declares locked=True, but its package's {lock.NAME} has no entry for it"
            file = lock.file_of(self._patch) or lock.NAME
            fix = (
                f"put {file} into the wheel (package data), or write it with `vllm-graft lock {self._declaration.name}`"
            )
            raise DriftError(what, where=self._declaration.where, fix=fix)
        if self._seen is None:
            return HookReview(hook, "unlocked")
        now = self._find(hook.attribute)
        if now is None and hook.kind == "auto":
            return HookReview(hook, "")
        seen = self._reviewed(hook.attribute)
        if now is not None and now.fingerprint in seen.values():
            return HookReview(hook, "reviewed")
        same_signature = now is not None and any(each.signature == now.fingerprint.signature for each in seen.values())
        if now is None:
            note = f"the source of {hook.attribute!r} cannot be found, so it cannot be compared with what was reviewed"
        elif not seen:
            note = f"{hook.attribute!r} is not in {lock.NAME}: what it stands on was never reviewed"
        else:
            known, part = ", ".join(seen), "body" if same_signature else "signature"
            note = f"upstream's {hook.attribute!r} is not what was reviewed ({known}): its {part} has changed"
        default: OnDrift = "warn" if hook.kind == "wrap" and same_signature else "refuse"
        level = stricter(self._declaration.on_drift or default)
        if level == "refuse":
            name = self._declaration.name
            fix = f"see `vllm-graft diff {name}`; then fix the patch, and accept with `vllm-graft lock {name}`"
            raise DriftError(note, where=self._declaration.where, fix=fix)
        return HookReview(hook, "drifted", note if level == "warn" else "")


def stricter(level: OnDrift) -> OnDrift:
    """Return the level, or that of ``GRAFT_ON_DRIFT`` if it is stricter."""
    asked = os.environ.get(ON_DRIFT, "").strip()
    if not asked:
        return level
    for known in _STRICTER[1:]:
        if asked == known:
            return max(level, known, key=_STRICTER.index)
    raise ConfigError(
        f"must be warn or refuse, but is {asked!r}", where=ON_DRIFT, fix="set it to warn or refuse, or unset it"
    )
