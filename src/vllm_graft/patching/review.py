"""What a person reviewed, held against what is installed: which body of a hook fits, and whether upstream has moved.

A release is judged by its number. A development build has a number that says nothing of its code ("0.1.dev1+g..."),
so it is judged by fingerprint: it counts as each release whose reviewed code is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

from vllm_graft.errors import ConfigError, DriftError, TargetError, VersionError
from vllm_graft.patching import lock, neighbours
from vllm_graft.patching.declare import Declaration, OnDrift, Patch
from vllm_graft.patching.hooks import Hook, Kind
from vllm_graft.patching.ranges import Installed, includes
from vllm_graft.patching.target import must_exist

if TYPE_CHECKING:
    from vllm_graft.patching.upstream import Definition, Fingerprint
    from vllm_graft.patching.upstream.finder import Finder

Standing = Literal["reviewed", "drifted", "unlocked", ""]
"""reviewed: upstream is as somebody read it; drifted: it is not; unlocked: no lock speaks of the patch; empty: there
is nothing upstream to review."""

ON_DRIFT: Final = "GRAFT_ON_DRIFT"
"""The environment variable that makes every patch at least as strict: ``warn`` or ``refuse``."""

_STRICTER: Final[tuple[OnDrift, ...]] = ("ignore", "warn", "refuse")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a review says of one hook; ``note`` is empty where there is nothing to say."""

    standing: Standing
    note: str = ""


class Reviewer:
    """Holds patches against the installed vLLM, each of whose files is read once, and only if somebody has to know."""

    def __init__(self, installed: Installed | None = None, finder: Finder | None = None) -> None:
        self._installed = Installed.now() if installed is None else installed
        self._given = finder

    def examine(self, patch: Patch, beneath: Sequence[Patch] = ()) -> tuple[list[str], bool]:
        """Review a patch and what it would meet, by reading alone; PatchError where a start would refuse it.

        ``beneath`` are patches that stand wherever it does, and may add what it wraps. Gives back what a start would
        warn of, and whether reading could tell everything.
        """
        from vllm_graft.patching import placement

        declaration = patch.declaration
        found = self.review(patch)
        if self._given is None:
            must_exist(declaration.target, declaration.where, {})
        elif self._given.module(declaration.target.module) is None:
            raise TargetError(
                f"there is no module {declaration.target.module!r} in vLLM {self._installed.version}",
                where=declaration.where,
                fix="name the module that took its place, or limit the patch to the releases that have it with vllm=",
            )
        added = self._added(declaration, beneath)
        bodies = [hook for hook, _ in found.values() if not (hook.kind == "wrap" and hook.attribute in added)]
        sure = placement.check(declaration, bodies, self._held)
        return [verdict.note for _, verdict in found.values() if verdict.note], sure

    def _added(self, mine: Declaration, others: Sequence[Patch]) -> set[str]:
        """The names that patches of the same target add to it."""
        same = [other for other in others if self._owner(other.declaration) == self._owner(mine)]
        return {hook.attribute for other in same for hook, _ in self.review(other).values() if hook.kind == "add"}

    def check_beside(self, patch: Patch, others: Sequence[Patch]) -> None:
        """Raise the ConflictError that a start would raise for a patch beside others that are there already."""
        mine = patch.declaration
        neighbours.check(mine, [other.declaration for other in others])
        wraps: dict[str, list[Declaration]] = {}
        definers: dict[str, tuple[Declaration, Kind]] = {}
        for each in (*others, patch):
            # A class is one target by whichever module's name it is reached.
            if self._owner(each.declaration) != self._owner(mine):
                continue
            for hook, _ in self.review(each).values():
                kind: Kind = "replace" if hook.kind == "auto" else hook.kind
                known = definers.get(hook.attribute)
                if kind == "wrap":
                    wraps.setdefault(hook.attribute, []).append(each.declaration)
                elif known is None:
                    definers[hook.attribute] = each.declaration, kind
                elif each is patch:
                    raise neighbours.second(hook.attribute, mine, kind, *known)
        for declarations in wraps.values():
            neighbours.ordered(declarations, lambda declaration: declaration)

    def _owner(self, declaration: Declaration) -> tuple[str, str]:
        """Where the class that is patched is defined, as far as reading finds it; a module is itself."""
        target = declaration.target
        found = self._held.find(target.module, target.qualname) if target.is_class else None
        return (target.module, target.qualname) if found is None else (found.module, found.qualname)

    def review(self, patch: Patch) -> dict[str, tuple[Hook, Verdict]]:
        """For each attribute the body that fits, and what is to be said of it; PatchError where it is refused."""
        one = _Review(patch, self._installed, self._finder)
        return {hook.attribute: (hook, one.verdict(hook)) for hook in one.bodies()}

    def _finder(self) -> Finder:
        return self._held

    @cached_property
    def _held(self) -> Finder:
        from vllm_graft.patching.upstream import sources
        from vllm_graft.patching.upstream.finder import Finder

        return Finder(sources.Installed()) if self._given is None else self._given


class _Review:
    """One patch beside the installed vLLM."""

    def __init__(self, patch: Patch, installed: Installed, finder: Callable[[], Finder]) -> None:
        self._patch = patch
        self._declaration = patch.declaration
        self._installed = installed
        self._finder = finder
        self._seen = lock.reviewed(patch)

    def bodies(self) -> tuple[Hook, ...]:
        """The hooks that fit the installed vLLM, one for each attribute; VersionError where that cannot be."""
        where = self._declaration.where
        self._installed.must_lie_in(self._declaration.vllm, where, by_code=self._alike)
        groups: dict[str, list[Hook]] = {}
        for hook in self._declaration.hooks:
            groups.setdefault(hook.attribute, []).append(hook)
        return tuple(self._fitting(attribute, hooks) for attribute, hooks in groups.items())

    def _fitting(self, attribute: str, hooks: Sequence[Hook]) -> Hook:
        if len(hooks) == 1 and not hooks[0].vllm:
            return hooks[0]
        releases = self._installed.releases or self._releases_like(attribute)
        fitting = [hook for hook in hooks if not hook.vllm or any(includes(hook.vllm, each) for each in releases)]
        if len(fitting) == 1:
            return fitting[0]
        ranges = " and ".join(hook.vllm for hook in (fitting or hooks))
        raise VersionError(
            f"{'no body' if not fitting else f'{len(fitting)} bodies'} of {attribute!r} ({ranges}) "
            f"{'is' if not fitting else 'are'} for vLLM {self._installed.version}, and exactly one must be",
            where=self._declaration.where,
            fix="make their ranges cover this release once" if not fitting else "make their ranges exclude one another",
        )

    def _alike(self) -> list[str]:
        """The releases whose reviewed code is the installed one, for every hook that stands on upstream's code."""
        common: set[str] | None = None
        for attribute in {hook.attribute for hook in self._declaration.hooks if hook.kind != "add"}:
            if self._now(attribute) is not None:
                like = set(self._releases_like(attribute))
                common = like if common is None else common & like
        return sorted(common or ())

    def _releases_like(self, attribute: str) -> list[str]:
        now = self._now(attribute)
        seen = self._of(attribute)
        return [version for version, each in seen.items() if now is not None and each == now.fingerprint]

    def _of(self, attribute: str) -> dict[str, Fingerprint]:
        return (self._seen or {}).get(lock.hook_name(self._declaration, attribute), {})

    def _now(self, attribute: str) -> Definition | None:
        target = self._declaration.target
        return self._finder().find(target.module, target.inside(attribute))

    def verdict(self, hook: Hook) -> Verdict:
        """Whether upstream's code beneath a hook was reviewed; DriftError where it was not and that is refused."""
        if hook.kind == "add":
            return Verdict("")
        if self._seen is None and self._declaration.locked:
            name = self._declaration.name
            raise DriftError(
                f"it says locked=True, and no {lock.NAME} of its package speaks of it",
                where=self._declaration.where,
                fix=f"put {lock.file_of(self._patch) or lock.NAME} into the wheel (package data), or write it with "
                f"`vllm-graft lock {name}`",
            )
        if self._seen is None:
            return Verdict("unlocked")
        now = self._now(hook.attribute)
        if now is None and hook.kind == "auto":
            return Verdict("")
        seen = self._of(hook.attribute)
        if now is not None and now.fingerprint in seen.values():
            return Verdict("reviewed")
        same_signature = now is not None and any(each.signature == now.fingerprint.signature for each in seen.values())
        note = self._note(hook.attribute, now, seen, same_signature=same_signature)
        level = stricter(self._declaration.on_drift or _default(hook, same_signature=same_signature))
        if level == "refuse":
            name = self._declaration.name
            raise DriftError(
                note,
                where=self._declaration.where,
                fix=f"see `vllm-graft diff {name}`; then mend the patch, and accept with `vllm-graft lock {name}`",
            )
        return Verdict("drifted", note if level == "warn" else "")

    def _note(
        self, attribute: str, now: Definition | None, seen: dict[str, Fingerprint], *, same_signature: bool
    ) -> str:
        if now is None:
            return f"the source of {attribute!r} cannot be found, so nobody can say that it is what was reviewed"
        if not seen:
            return f"{attribute!r} is not in {lock.NAME}: nobody has reviewed what it stands on"
        what = "body" if same_signature else "signature"
        known = ", ".join(seen)
        return f"upstream's {attribute!r} is not what was reviewed ({known}): its {what} has changed"


def _default(hook: Hook, *, same_signature: bool) -> OnDrift:
    return "warn" if hook.kind == "wrap" and same_signature else "refuse"


def stricter(level: OnDrift) -> OnDrift:
    """The level, or that of ``GRAFT_ON_DRIFT`` where it is stricter."""
    asked = os.environ.get(ON_DRIFT, "").strip()
    if not asked:
        return level
    for known in _STRICTER[1:]:
        if asked == known:
            return max(level, known, key=_STRICTER.index)
    raise ConfigError(f"it is {asked!r}", where=ON_DRIFT, fix="set it to warn or refuse, or unset it")
