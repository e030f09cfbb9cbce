"""Patches beside one another: which cannot be, and which of two lies over the other.

``conflicts=`` and ``after=`` name patches by name, by a glob, or by "package:name", where the package is the top-level
one that the patch is defined in. "package:*" conflicts with that package as such, whether or not it uses vllm-graft:
it is enough that the process has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, TypeVar

from vllm_graft.errors import ConflictError
from vllm_graft.patching.declare import Declaration
from vllm_graft.patching.hooks import Kind

T = TypeVar("T")

_VERB: Final[Mapping[Kind, str]] = {"wrap": "wraps", "replace": "replaces", "add": "adds"}


def names(pattern: str, declaration: Declaration) -> bool:
    """Whether a pattern of ``conflicts=`` or ``after=`` means a patch."""
    return any(fnmatchcase(name, pattern) for name in (declaration.name, f"{declaration.package}:{declaration.name}"))


def check(mine: Declaration, others: Iterable[Declaration]) -> None:
    """Raise ConflictError where a patch cannot stand beside one of the others."""
    for theirs in others:
        if theirs.name == mine.name:
            raise ConflictError(
                f"another patch has the same name: {theirs.defined_in}",
                where=mine.where,
                fix="give one of them another name=",
            )
        for one, other in ((mine, theirs), (theirs, mine)):
            if any(names(pattern, other) for pattern in one.conflicts):
                raise ConflictError(
                    f"patch {one.name!r} ({one.defined_in}) declares a conflict with patch {other.name!r} "
                    f"({other.defined_in})",
                    where=mine.where,
                    fix=f"leave out {mine.name!r} or {theirs.name!r}",
                )
    for pattern in mine.conflicts:
        package, colon, rest = pattern.partition(":")
        if colon and rest == "*" and package in sys.modules:
            raise ConflictError(
                f"it declares a conflict with the package {package!r}, which this process has imported",
                where=mine.where,
                fix=f"leave out {mine.name!r}, or switch off or uninstall {package}",
            )


def second(attribute: str, mine: Declaration, kind: Kind, theirs: Declaration, other: Kind) -> ConflictError:
    """The refusal of a patch that defines a name which another patch defines."""
    return ConflictError(
        f"it {_VERB[kind]} {attribute!r}, which patch {theirs.name!r} ({theirs.defined_in}) {_VERB[other]} already: "
        f"only one of them could run",
        where=mine.where,
        fix=f"leave out {mine.name!r} or {theirs.name!r}, or let one of them wrap instead",
    )


def ordered(items: Sequence[T], declaration_of: Callable[[T], Declaration]) -> list[T]:
    """The items with each behind those that its patch's ``after=`` names, and else in the order given."""
    left, done = list(items), list[T]()
    while left:
        free = next((one for one in left if not _waits(one, left, declaration_of)), None)
        if free is None:
            circle = " and ".join(repr(declaration_of(one).name) for one in left)
            raise ConflictError(
                f"patches {circle} each want to lie over the other",
                where=declaration_of(left[0]).where,
                fix="take after= out of one of them",
            )
        left.remove(free)
        done.append(free)
    return done


def _waits(one: T, left: Sequence[T], declaration_of: Callable[[T], Declaration]) -> bool:
    mine = declaration_of(one)
    return any(other is not one and names(pattern, declaration_of(other)) for other in left for pattern in mine.after)
