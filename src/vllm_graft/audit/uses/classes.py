"""Subclasses of vLLM's classes: their bases, their own attributes, and their calls of inherited methods."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from typing import Final

from vllm_graft.audit.model import Use
from vllm_graft.audit.uses.bodies import body_contents
from vllm_graft.audit.uses.values import LocalDef, Name, Value, Values, local_defs, vllm_names
from vllm_graft.audit.uses.walk_state import FileUses, MethodCall, Subclass
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
                names = self._targets.setdefault(_class_around(one.target), set())
                names.add(one.target.qualname.rpartition(".")[2])
                for own in local_defs(one.value):
                    names.update(_stored(own))

    def of_target(self, target: Name) -> frozenset[str]:
        """Return the names that patches set on the class around a target and on its instances."""
        return frozenset(self._targets.get(_class_around(target), ()))

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


def _class_around(target: Name) -> Name:
    return Name(target.module, target.qualname.rpartition(".")[0])


def _defined(cls: LocalDef, seen: tuple[LocalDef, ...]) -> Iterator[str]:
    if cls in seen or cls.inside is None:
        return
    yield from cls.inside.names
    for value in cls.inside.names.values():
        for own in local_defs(value):
            yield from _stored(own)
    for base in cls.bases:
        for own in local_defs(base):
            yield from _defined(own, (*seen, cls))


def _stored(own: LocalDef) -> frozenset[str]:
    """Return the attributes that a function sets on its first parameter."""
    return body_contents(own.function).set if own.function is not None else frozenset()


# Bases from elsewhere that have none of the methods vLLM's classes are asked for.
_BARE: Final = frozenset({"abc.ABC", "typing.Generic", "typing.Protocol", "builtins.object", "torch.nn.Module"})


class ClassHierarchy:
    """The classes of one package, deriving from each other and from vLLM's."""

    def __init__(self, founds: Sequence[FileUses]) -> None:
        self._normal: dict[LocalDef, tuple[Name, ...]] = {}
        self._derived: set[LocalDef] = set()
        self._sealed: dict[tuple[LocalDef, bool], bool] = {}
        self._made = {above for found in founds for cls in found.made for above in (cls, *_above(cls, ()))}
        for found in founds:
            for one in found.subclasses:
                self._normal[one.cls] = (*self._normal.get(one.cls, ()), one.target)
                self._derived.update(own for base in one.cls.bases for own in local_defs(base))

    def calls(self, found: FileUses, ownership: OwnAttributes) -> Iterator[Use]:
        """Yield the calls on ``self`` and ``super()`` that go to a method of vLLM's."""
        for called in found.methods:
            if not self.is_sealed(called.cls):
                continue
            owners = list(self._owners(called))
            if owners and (called.above or called.method not in ownership.of_class(called.cls)):
                first, *rest = ((name.module, f"{name.qualname}.{called.method}") for name in owners)
                yield Use(
                    "call",
                    *first,
                    found.file.shown,
                    called.line,
                    owner=called.owner,
                    guard=called.guard,
                    arguments=called.arguments,
                    bound=True,
                    owners=tuple(rest),
                    above=called.above,
                )

    def constructions(self, found: FileUses) -> Iterator[Use]:
        """Yield the calls of the package's own classes that reach the constructor of a class of vLLM as they are."""
        for called in found.constructions:
            target = self._constructor(called.cls) if not (called.method and called.cls in self._derived) else None
            if target is not None:
                yield Use(
                    "call",
                    target.module,
                    target.qualname,
                    found.file.shown,
                    called.line,
                    owner=called.owner,
                    guard=called.guard,
                    arguments=called.arguments,
                )

    def _constructor(self, cls: LocalDef) -> Name | None:
        """Return the class of vLLM whose constructor gets the arguments of a class of the package unchanged."""
        if not self.is_sealed(cls):
            return None
        above = list(_above(cls, ()))
        names = [one for one in above if isinstance(one, Name) and one.is_vllm]
        own = [cls, *(one for one in above if isinstance(one, LocalDef))]
        return names[0] if len(set(names)) == 1 and all(map(_passes_arguments, own)) else None

    def _owners(self, called: MethodCall) -> Iterator[Name]:
        """Yield the classes of vLLM that may have the method, in the order that Python looks through them."""
        for one in _above(called.cls, ()):
            if isinstance(one, Name) and one.is_vllm:
                yield one
            elif isinstance(one, LocalDef) and one.inside is not None and called.method in one.inside.names:
                return

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
        family = [cls, *(one for one in self._normal if cls in _above(one, ()))]
        return all(self.is_sealed(one) and not _has_metaclass(one) for one in family)

    def is_made(self, cls: LocalDef) -> bool:
        """Return whether the package itself instantiates a class, and so decides on the arguments."""
        return cls in self._made

    def is_concrete(self, cls: LocalDef) -> bool:
        """Return whether a class is meant to be instantiated: not abstract, without subclasses, all bases known."""
        assert isinstance(cls.node, ast.ClassDef)
        if cls in self._derived or _is_abstract(cls.node):
            return False
        direct = {one.dotted for base in cls.bases for one in base if isinstance(one, Name)}
        return self.is_sealed(cls) and direct.isdisjoint({"abc.ABC", "typing.Protocol"})

    def owners(self, subclass: Subclass) -> tuple[tuple[str, str], ...]:
        """Return the other classes of vLLM that a class derives from, which may define abstract methods."""
        targets = self._normal.get(subclass.cls, ())
        return tuple((name.module, name.qualname) for name in targets if name != subclass.target)


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
    """Return whether a class leaves the arguments of its constructor to its bases: no field, no own constructor."""
    node = cls.node
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords or cls.inside is None:
        return False
    if "__new__" in cls.inside.names or any(isinstance(one, ast.AnnAssign) for one in node.body):
        return False
    if "__init__" not in cls.inside.names:
        return True
    own = [one.function for one in local_defs(cls.inside.names["__init__"])]
    return len(own) == 1 and isinstance(own[0], Function) and _is_passing(own[0])


def _is_passing(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether ``__init__(self, *args, **kwargs)`` calls ``super().__init__(*args, **kwargs)``, and only that."""
    args = node.args
    if args.vararg is None or args.kwarg is None or args.kwonlyargs or len([*args.posonlyargs, *args.args]) != 1:
        return False
    names = {args.vararg.arg, args.kwarg.arg}
    body = [part for statement in node.body for part in ast.walk(statement)]
    if sum(isinstance(part, ast.Name) and part.id in names for part in body) != 2:
        return False
    calls = [part for part in body if isinstance(part, ast.Call) and ast.unparse(part.func) == "super().__init__"]
    given = f"super().__init__(*{args.vararg.arg}, **{args.kwarg.arg})"
    return len(calls) == 1 and ast.unparse(calls[0]) == given


def _has_metaclass(cls: LocalDef) -> bool:
    return isinstance(cls.node, ast.ClassDef) and any(one.arg == "metaclass" for one in cls.node.keywords)


def _is_abstract(node: ast.ClassDef) -> bool:
    """Return whether a class has abstract methods of its own, or a metaclass."""
    if any(keyword.arg == "metaclass" for keyword in node.keywords):
        return True
    return any(
        dotted(mark).rpartition(".")[2] in ("abstractmethod", "abstractproperty")
        for one in node.body
        if isinstance(one, Function)
        for mark in one.decorator_list
    )


def upstream(cls: LocalDef, seen: tuple[LocalDef, ...] = ()) -> Iterator[tuple[Name, Values]]:
    """Yield the classes of vLLM that a class derives from, each with all that its base can be."""
    for base in cls.bases:
        yield from ((name, base) for name in vllm_names(base))
        for own in local_defs(base):
            if own not in seen:
                yield from upstream(own, (*seen, cls))
