"""Classes of the package that derive from vLLM's: whose methods they call, and which of them are instantiated."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from vllm_graft.audit.model import Use
from vllm_graft.audit.uses.ownership import Ownership
from vllm_graft.audit.uses.state import Called, Found, Subclass
from vllm_graft.audit.uses.values import Name, Own, Value, owns_of
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted

_BARE: Final = frozenset({"abc.ABC", "typing.Generic", "typing.Protocol", "builtins.object", "torch.nn.Module"})
"""Bases from elsewhere that have none of the methods vLLM's classes are asked for."""


class Family:
    """The classes of one package, as they derive from each other and from vLLM's."""

    def __init__(self, founds: Sequence[Found]) -> None:
        self._normal: dict[Own, tuple[Name, ...]] = {}
        self._derived: set[Own] = set()
        self._sealed: dict[Own, bool] = {}
        self._made = {above for found in founds for cls in found.made for above in (cls, *_above(cls, ()))}
        for found in founds:
            for one in found.subclasses:
                self._normal[one.cls] = (*self._normal.get(one.cls, ()), one.target)
                self._derived.update(own for base in one.cls.bases for own in owns_of(base))

    def calls(self, found: Found, ownership: Ownership) -> Iterator[Use]:
        """The calls on ``self`` and ``super()`` that go to a method of vLLM's."""
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

    def _owners(self, called: Called) -> Iterator[Name]:
        """The classes of vLLM that may have the method, in the order that Python looks through them."""
        for one in _above(called.cls, ()):
            if isinstance(one, Name) and one.is_vllm:
                yield one
            elif isinstance(one, Own) and one.inside is not None and called.method in one.inside.names:
                return

    def is_sealed(self, cls: Own) -> bool:
        """Whether all bases of a class are known: one from elsewhere may have what vLLM's classes do not."""
        if cls not in self._sealed:
            above = list(_above(cls, ()))
            names = [one for one in above if isinstance(one, Name)]
            known = all(name.is_vllm or name.dotted in _BARE for name in names)
            self._sealed[cls] = known and all(isinstance(one, Name | Own) for one in above)
        return self._sealed[cls]

    def is_made(self, cls: Own) -> bool:
        """Whether the package itself makes objects of a class, so that it says what its constructor is given."""
        return cls in self._made

    def is_concrete(self, cls: Own) -> bool:
        """Whether objects of a class are to be made: it is not abstract, has no subclass, and all bases are known."""
        assert isinstance(cls.node, ast.ClassDef)
        if cls in self._derived or _is_abstract(cls.node):
            return False
        direct = {one.dotted for base in cls.bases for one in base if isinstance(one, Name)}
        return self.is_sealed(cls) and direct.isdisjoint({"abc.ABC", "typing.Protocol"})

    def owners(self, subclass: Subclass) -> tuple[tuple[str, str], ...]:
        """The other classes of vLLM that a class derives from, which may define what one of them leaves open."""
        targets = self._normal.get(subclass.cls, ())
        return tuple((name.module, name.qualname) for name in targets if name != subclass.target)


def _above(cls: Own, below: tuple[Own, ...]) -> Iterator[Value | None]:
    """What a class derives from, the nearest first; None for a base that is not known."""
    for base in cls.bases:
        if len(base) != 1:
            yield None
            continue
        (one,) = base
        yield one
        if isinstance(one, Own) and one not in below:
            yield from _above(one, (*below, cls))


def _is_abstract(node: ast.ClassDef) -> bool:
    """Whether a class leaves methods to others itself, or says by its name or metaclass that it is a base."""
    if any(keyword.arg == "metaclass" for keyword in node.keywords):
        return True
    return any(
        dotted(mark).rpartition(".")[2] in ("abstractmethod", "abstractproperty")
        for one in node.body
        if isinstance(one, Function)
        for mark in one.decorator_list
    )
