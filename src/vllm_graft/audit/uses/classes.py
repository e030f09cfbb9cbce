"""Subclasses of vLLM's classes: their bases, their own attributes, and their calls of inherited methods."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from vllm_graft.audit.model import Use
from vllm_graft.audit.uses.bodies import body_contents
from vllm_graft.audit.uses.values import LocalDef, Name, Value, local_defs
from vllm_graft.audit.uses.walk_state import FileUses
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted


class OwnAttributes:
    """The attributes that the package itself defines on patched classes of vLLM and on subclasses."""

    def __init__(self, founds: Sequence[FileUses]) -> None:
        self._targets: dict[Name, set[str]] = {}
        self._classes: dict[LocalDef, frozenset[str]] = {}
        self._founds = founds
        for found in founds:
            for one in found.assignments:
                names = self._targets.setdefault(one.target.owner, set())
                names.add(one.target.qualname.rpartition(".")[2])
                for own in local_defs(one.value):
                    names.update(_stored(own))

    def of_target(self, target: Name) -> frozenset[str]:
        """Return the names that patches set on the class around a target and on its instances."""
        return frozenset(self._targets.get(target.owner, ()))

    def of_class(self, cls: LocalDef) -> frozenset[str]:
        """Return the names that a class of the package and its own bases define, and those that their methods set."""
        if cls not in self._classes:
            self._classes[cls] = frozenset(_defined(cls, ()))
        return self._classes[cls]

    @functools.cached_property
    def anywhere(self) -> frozenset[str]:
        """The names that the package gives to any class that derives from vLLM's, or sets on any object."""
        classes = [self.of_class(one.cls) for each in self._founds for one in each.subclasses]
        objects = [each.stored | each.spelled for each in self._founds]
        return frozenset().union(*classes, *self._targets.values(), *objects)


def _defined(cls: LocalDef, seen: tuple[LocalDef, ...]) -> Iterator[str]:
    if cls in seen or cls.inside is None:
        return
    yield from cls.inside.names
    for value in cls.inside.names.values():
        for own in local_defs(value):
            yield from _stored(own)
    for own in cls.own_bases:
        yield from _defined(own, (*seen, cls))


def _stored(own: LocalDef) -> frozenset[str]:
    """Return the attributes that a function sets on its first parameter."""
    return body_contents(own.function).set if own.function is not None else frozenset()


# Bases from elsewhere that have none of the methods vLLM's classes are asked for.
_BARE: Final = frozenset({"abc.ABC", "typing.Generic", "typing.Protocol", "builtins.object", "torch.nn.Module"})


class ClassHierarchy:
    """The classes of one package, deriving from each other and from vLLM's."""

    def __init__(self, founds: Sequence[FileUses]) -> None:
        self.targets: dict[LocalDef, tuple[Name, ...]] = {}
        self._derived: set[LocalDef] = set()
        self._sealed: dict[tuple[LocalDef, bool], bool] = {}
        self.made = {above for found in founds for cls in found.made for above in (cls, *_above(cls, ()))}
        for found in founds:
            for one in found.subclasses:
                self.targets[one.cls] = (*self.targets.get(one.cls, ()), one.target)
                self._derived.update(one.cls.own_bases)

    def calls(self, found: FileUses, ownership: OwnAttributes) -> Iterator[Use]:
        """Yield the calls on ``self`` and ``super()`` that go to one of vLLM's methods."""
        for called in found.methods:
            method = called.method
            if not self.is_sealed(called.cls, choices=True):
                continue
            # The classes of vLLM that may have the method, in the order that Python looks through them.
            owners: list[tuple[str, str]] = []
            for one in _above(called.cls, (), choices=True):
                if isinstance(one, Name) and one.is_vllm:
                    owners.append((one.module, f"{one.qualname}.{method}"))
                elif isinstance(one, LocalDef) and one.inside is not None and method in one.inside.names:
                    break
            # Asked last: the names that a class defines take a search through the bodies of all its methods.
            if owners and (called.via_super or method not in ownership.of_class(called.cls)):
                use = called.use(found.file.shown, *owners[0])
                yield replace(use, bound=True, owners=tuple(owners[1:]), via_super=called.via_super)

    def constructions(self, found: FileUses) -> Iterator[Use]:
        """Yield the calls of the package's own classes that reach the constructor of a class of vLLM as they are."""
        for called in found.constructions:
            if (called.method and called.cls in self._derived) or not self.is_sealed(called.cls):
                continue
            above = list(_above(called.cls, ()))
            names = {one for one in above if isinstance(one, Name) and one.is_vllm}
            own = [called.cls, *(one for one in above if isinstance(one, LocalDef))]
            if len(names) == 1 and all(map(_passes_arguments, own)):
                (target,) = names
                yield called.use(found.file.shown, target.module, target.qualname)

    def is_sealed(self, cls: LocalDef, *, choices: bool = False) -> bool:
        """Return whether all bases of a class are known: one from elsewhere may have what vLLM's classes lack.

        With ``choices`` a base may be one of several classes of vLLM, as an import in a ``try`` makes it.
        """
        if (cls, choices) not in self._sealed:
            above = list(_above(cls, (), choices=choices))
            names = [one for one in above if isinstance(one, Name)]
            known = all(name.is_vllm or name.dotted in _BARE for name in names)
            self._sealed[cls, choices] = known and all(isinstance(one, Name | LocalDef) for one in above)
        return self._sealed[cls, choices]

    def is_sealed_below(self, cls: LocalDef) -> bool:
        """Return whether all bases are known of a class and of those that derive from it, one of which ``cls`` is."""
        family = [cls, *(one for one in self.targets if cls in _above(one, ()))]
        keywords = (one.node.keywords for one in family if isinstance(one.node, ast.ClassDef))
        return all(map(self.is_sealed, family)) and not any(one.arg == "metaclass" for each in keywords for one in each)

    def is_concrete(self, cls: LocalDef) -> bool:
        """Return whether a class is meant to be instantiated: not abstract, without subclasses, all bases known."""
        assert isinstance(cls.node, ast.ClassDef)
        if cls in self._derived or any(keyword.arg == "metaclass" for keyword in cls.node.keywords):
            return False
        methods = [one for one in cls.node.body if isinstance(one, Function)]
        marks = {dotted(mark).rpartition(".")[2] for one in methods for mark in one.decorator_list}
        direct = {one.dotted for base in cls.bases for one in base if isinstance(one, Name)}
        abstract = marks & {"abstractmethod", "abstractproperty"} or direct & {"abc.ABC", "typing.Protocol"}
        return not abstract and self.is_sealed(cls)


def _above(cls: LocalDef, below: tuple[LocalDef, ...], *, choices: bool = False) -> Iterator[Value | None]:
    """Yield what a class derives from, the nearest first; None for a base that is not known.

    Of several classes of vLLM that a base may be, all are yielded with ``choices``, and else None.
    """
    for base in cls.bases:
        if len(base) != 1:
            known = choices and base and all(isinstance(one, Name) and one.is_vllm for one in base)
            yield from base if known else (None,)
            continue
        (one,) = base
        yield one
        if isinstance(one, LocalDef) and one not in below:
            yield from _above(one, (*below, cls), choices=choices)


def _passes_arguments(cls: LocalDef) -> bool:
    """Return whether a class leaves the arguments of its constructor to its bases.

    It has no field and no constructor, or only one that calls ``super().__init__(*args, **kwargs)`` with what it gets.
    """
    node = cls.node
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords or cls.inside is None:
        return False
    if "__new__" in cls.inside.names or any(isinstance(one, ast.AnnAssign) for one in node.body):
        return False
    if "__init__" not in cls.inside.names:
        return True
    own = [one.function for one in local_defs(cls.inside.names["__init__"])]
    if len(own) != 1 or not isinstance(own[0], Function):
        return False
    args = own[0].args
    if args.vararg is None or args.kwarg is None or args.kwonlyargs or len([*args.posonlyargs, *args.args]) != 1:
        return False
    names = {args.vararg.arg, args.kwarg.arg}
    body = [part for statement in own[0].body for part in ast.walk(statement)]
    if sum(isinstance(part, ast.Name) and part.id in names for part in body) != 2:
        return False
    calls = [part for part in body if isinstance(part, ast.Call) and ast.unparse(part.func) == "super().__init__"]
    given = f"super().__init__(*{args.vararg.arg}, **{args.kwarg.arg})"
    return len(calls) == 1 and ast.unparse(calls[0]) == given
