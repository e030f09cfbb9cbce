"""Conflicts between patches, and the order of their layers: ``conflicts=`` and ``after=``.

Both keywords name patches by name, by a glob, or by "package:name", where the package is the top-level one that the
patch is defined in. "package:*" conflicts with the package as such, whether or not it uses vllm-graft: it is refused
as soon as the process has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, TypeVar

from vllm_graft.errors import ConflictError
from vllm_graft.patching.declaration import Declaration
from vllm_graft.patching.hooks import HookKind

T = TypeVar("T")

_VERB: Final[Mapping[HookKind, str]] = {"wrap": "wraps", "replace": "replaces", "add": "adds"}


def check_conflicts(mine: Declaration, others: Iterable[Declaration]) -> None:
    """Raise ConflictError if a patch cannot run beside one of the others."""
    for theirs in others:
        if theirs.name == mine.name:
            what = f"another patch has the same name: {theirs.defined_in}"
            raise ConflictError(what, where=mine.where, fix="give one of them another name=")
        for one, other in ((mine, theirs), (theirs, mine)):
            if any(_matches(pattern, other) for pattern in one.conflicts):
                what = f"patch {one.name!r} ({one.defined_in}) declares a conflict with patch {other.name!r} "
                fix = f"leave out {mine.name!r} or {theirs.name!r}"
                raise ConflictError(f"{what}({other.defined_in})", where=mine.where, fix=fix)
    for pattern in mine.conflicts:
        package, colon, rest = pattern.partition(":")
        if colon and rest == "*" and package in sys.modules:
            what = f"it declares a conflict with the package {package!r}, which this process has imported"
            fix = f"leave out {mine.name!r}, or switch off or uninstall {package}"
            raise ConflictError(what, where=mine.where, fix=fix)


def refuse_second_definition(
    attribute: str, mine: Declaration, kind: HookKind, theirs: Declaration, other: HookKind
) -> ConflictError:
    """Build the error for a patch that replaces or adds a name which another patch replaces or adds."""
    what = (
        f"it {_VERB[kind]} {attribute!r}, which patch {theirs.name!r} ({theirs.defined_in}) {_VERB[other]} already: "
        f"only one of them could run"
    )
    fix = f"leave out {mine.name!r} or {theirs.name!r}, or let one of them wrap instead"
    return ConflictError(what, where=mine.where, fix=fix)


def sort_by_after(items: Sequence[T], declaration_of: Callable[[T], Declaration]) -> list[T]:
    """Sort items so that each comes behind those its patch's ``after=`` names, and otherwise keep their order."""

    def waits(one: T) -> bool:
        patterns = declaration_of(one).after
        return any(other is not one and _matches(each, declaration_of(other)) for other in left for each in patterns)

    left, done = list(items), list[T]()
    while left:
        free = next((one for one in left if not waits(one)), None)
        if free is None:
            circle = " and ".join(repr(declaration_of(one).name) for one in left)
            what = f"patches {circle} each want to be applied over the other"
            raise ConflictError(what, where=declaration_of(left[0]).where, fix="remove after= from one of them")
        left.remove(free)
        done.append(free)
    return done


def _matches(pattern: str, declaration: Declaration) -> bool:
    return any(fnmatchcase(name, pattern) for name in (declaration.name, f"{declaration.package}:{declaration.name}"))
