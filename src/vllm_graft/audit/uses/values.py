"""The values of an expression, as far as reading tells: a name of a module, a definition of the package, a string.

A value is a tuple of alternatives, because an import in a ``try`` or behind a test of the version binds one name to
several things. The empty tuple is a value that reading does not show.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from vllm_graft.sources.fingerprint import Function

if TYPE_CHECKING:
    from collections import Counter

    from vllm_graft.audit.model import UseGuard
    from vllm_graft.audit.uses.source_file import SourceFile

# The package whose uses are looked for.
TOP: Final = "vllm"
DefinitionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Name:
    """A name that an import statement shows: the module, and the qualified name in it; empty for the module."""

    module: str
    qualname: str = ""

    @property
    def is_vllm(self) -> bool:
        """True if it is vLLM's; ``vllm_ascend`` is another package."""
        return self.module.partition(".")[0] == TOP

    @property
    def dotted(self) -> str:
        """The whole name with dots."""
        return f"{self.module}.{self.qualname}" if self.qualname else self.module

    @property
    def owner(self) -> Name:
        """The class or module around it."""
        return Name(self.module, self.qualname.rpartition(".")[0])

    def inside(self, attribute: str) -> Name:
        """Return the name of an attribute."""
        return Name(self.module, f"{self.qualname}.{attribute}" if self.qualname else attribute)


@dataclass(frozen=True, slots=True)
class PartialName(Name):
    """The name of a function with some arguments applied, by ``functools.partial`` or a bound method."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance of a class of vLLM, or an attribute reached from one.

    guessed:  whether only the name of a variable or an attribute says so
    declared: whether an annotation or ``isinstance`` says so somewhere else than in the function that uses it: what is
              there may be of a subclass
    """

    cls: Name
    path: tuple[str, ...] = ()
    guessed: bool = False
    declared: bool = False


@dataclass(frozen=True, slots=True)
class Receiver:
    """The object that a method of a class of the package is called on."""

    cls: LocalDef


@dataclass(frozen=True, slots=True)
class ReceiverClass:
    """The class that a ``classmethod`` of a class of the package is called on."""

    cls: LocalDef


@dataclass(frozen=True, slots=True)
class ParentMethods:
    """The result of ``super()`` in a method of a class of the package."""

    cls: LocalDef


@dataclass(frozen=True, slots=True)
class TextValue:
    """A string that the source spells out."""

    text: str


@dataclass(frozen=True, slots=True)
class SequenceValue:
    """A tuple, list or set that the source spells out."""

    items: tuple[Values, ...]


@dataclass(frozen=True, slots=True)
class MappingValue:
    """A dictionary that the source spells out."""

    pairs: tuple[tuple[Values, Values], ...]


@dataclass(eq=False, slots=True)
class LocalDef:
    """A function or class of the package.

    scope:     the names around it
    defaults:  what its parameters have if the caller gives nothing
    result:    of a function: the instance of a class of vLLM that its annotation says it returns
    inside:    the names in its body, once that has been walked
    bases:     of a class: what it derives from
    unwalked:  walks through its body, if that has been put off because it has nothing to do with vLLM
    """

    file: SourceFile
    node: DefinitionNode
    scope: Scope
    defaults: Mapping[str, Values] = field(default_factory=dict)
    result: Values = ()
    inside: Scope | None = None
    bases: tuple[Values, ...] = ()
    unwalked: Callable[[], None] | None = field(default=None, repr=False)
    own_bases: tuple[LocalDef, ...] = field(init=False, repr=False)
    """Those of the bases that are the package's own."""

    def __post_init__(self) -> None:
        self.own_bases = tuple(own for base in self.bases for own in local_defs(base))

    def complete(self) -> None:
        """Walk through the body if that was deferred: its names matter once it replaces a name of vLLM."""
        if self.unwalked is not None:
            walk, self.unwalked = self.unwalked, None
            walk()

    @property
    def function(self) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
        """The node, if it is not a class."""
        return self.node if isinstance(self.node, Function | ast.Lambda) else None


@dataclass(frozen=True, slots=True)
class ConditionValue:
    """The outcome of a test for a version or a name, stored in a variable: ``OLD = vllm_version_is("0.28.0")``."""

    node: ast.expr
    scope: Scope = field(repr=False)


@dataclass(frozen=True, slots=True)
class FlagValue:
    """A constant that is set behind ``guard``: ``HAS_X = True`` after an import in a ``try``."""

    value: bool | None
    guard: UseGuard


OfClass = Receiver | ReceiverClass | ParentMethods
"""The values of ``self``, ``cls`` and ``super()`` in a class of the package."""

Value = Name | Instance | OfClass | TextValue | SequenceValue | MappingValue | LocalDef | ConditionValue | FlagValue
Values = tuple[Value, ...]

ScopeKind = Literal["module", "class", "function"]


class Scope:
    """The names of one module, class body or function, inside those of the scope around it."""

    __slots__ = (
        "assigned", "declared", "elsewhere", "foreign_star", "instances", "kind", "method_of", "names", "parent",
        "stars", "tests",
    )  # fmt: skip

    def __init__(self, kind: ScopeKind, parent: Scope | None = None) -> None:
        self.kind: ScopeKind = kind
        self.parent = parent
        self.names: dict[str, Values] = {}
        self.elsewhere: dict[str, Scope] = {}
        """Names that ``global`` and ``nonlocal`` send to another scope."""
        self.declared: dict[str, Values] = {}
        """Names that are imported for type checkers alone, and stand in annotations."""
        self.tests: dict[str, Values] = {}
        """Of a class body: the outcomes of tests that methods keep on their object."""
        self.instances: dict[str, Values] = {}
        """Of a class body: the attributes of its objects that hold an instance of a class of vLLM."""
        self.assigned: Counter[str] | None = None
        """Of a class body: how many statements set each attribute of its objects, once they are counted."""
        self.method_of: LocalDef | None = None
        """Of a method's body: the class."""
        self.stars: list[str] = []
        """Of a module: the modules of vLLM whose names ``from module import *`` binds."""
        self.foreign_star = False
        """Of a module: whether a star import binds names that are not known, of a package that is not read."""

    def find(self, name: str) -> Values | None:
        """Return what a name stands for here; None if no scope binds it, so that it is a builtin."""
        if name in self.names:
            return self.names[name]
        above = self.parent
        while above is not None:
            # Functions do not see the names of a class body around them.
            if above.kind != "class" and name in above.names:
                return above.names[name]
            above = above.parent
        return None

    def annotated(self, name: str) -> Values:
        """Return what a name stands for in an annotation."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.declared:
                return scope.declared[name]
            scope = scope.parent
        found = self.find(name)
        return self.module().starred(name) if found is None else found

    def starred(self, name: str) -> Values:
        """Return what the star imports of a module may bind a name to, which only a release can tell."""
        if not self.stars or self.foreign_star or name.startswith("_") or hasattr(builtins, name):
            return ()
        return tuple(Name(module, name) for module in self.stars)

    def bind(self, name: str, value: Values) -> None:
        """Let a name stand for a value from here on."""
        other = self.elsewhere.get(name)
        if other is None:
            self.names[name] = value
        else:
            other.names[name] = union(other.names.get(name, ()), value)

    def method(self) -> LocalDef | None:
        """Return the class whose method this is the body of, or stands in the body of."""
        scope: Scope | None = self
        while scope is not None and scope.kind == "function":
            if scope.method_of is not None:
                return scope.method_of
            scope = scope.parent
        return None

    def module(self) -> Scope:
        """Return the scope of the module."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


def union(*values: Values) -> Values:
    """Return all alternatives, each once."""
    if len(values) == 1:
        return values[0]
    return tuple(dict.fromkeys(one for value in values for one in value))


def vllm_names(value: Values) -> Iterator[Name]:
    """Return the alternatives that are names of vLLM."""
    return (one for one in value if isinstance(one, Name) and one.is_vllm)


def texts_in(value: Values) -> Iterator[str]:
    """Return the alternatives that are strings."""
    return (one.text for one in value if isinstance(one, TextValue))


def local_defs(value: Values) -> Iterator[LocalDef]:
    """Return the alternatives that are functions or classes of the package."""
    return (one for one in value if isinstance(one, LocalDef))


def upstream(cls: LocalDef, seen: tuple[LocalDef, ...] = ()) -> Iterator[tuple[Name, Values]]:
    """Yield the classes of vLLM that a class derives from, each with all that its base can be."""
    for base in cls.bases:
        yield from ((name, base) for name in vllm_names(base))
        for own in local_defs(base):
            if own not in seen:
                yield from upstream(own, (*seen, cls))
