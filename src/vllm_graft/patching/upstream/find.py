"""Finding where a name is defined, by reading: through re-exports, star imports and base classes."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

from vllm_graft.patching.upstream.fingerprint import Fingerprint, Function
from vllm_graft.patching.upstream.scopes import Scope, absolute, bindings, dotted, imported
from vllm_graft.patching.upstream.sources import File, Source

Kind = Literal["function", "classmethod", "staticmethod", "property", "class", "value"]

_DEEP: Final = 24
"""How many re-exports and bases are followed before it is taken for a circle."""


@dataclass(frozen=True)
class Definition:
    """One definition of upstream's.

    module, qualname:  where it is defined, which may be another place than was asked for
    kind:              function, classmethod, staticmethod, property, class or value
    path, line:        its file, and the line it begins at
    text:              its source, decorators included
    inherited:         whether a base class defines it, and not the class that was asked for
    """

    module: str
    qualname: str
    kind: Kind
    path: str
    line: int
    text: str = field(repr=False)
    inherited: bool
    nodes: tuple[ast.AST, ...] = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """Module and qualified name."""
        return f"{self.module}:{self.qualname}"

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What the code looks like."""
        return Fingerprint.of(self.nodes)


def find(source: Source, module: str, qualname: str) -> Definition | None:
    """The definition of ``qualname`` in ``module``, or None where reading does not find one."""
    return Finder(source).find(module, qualname)


class Finder:
    """Finds names in one source, each file of which is read once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._modules: dict[str, _Module | None] = {}

    def find(self, module: str, qualname: str) -> Definition | None:
        """The definition of ``qualname``, such as "function" or "Class.method", in ``module``."""
        first, *rest = qualname.split(".")
        place = self._in_module(module, first, _DEEP)
        inherited = False
        for part in rest:
            if place is None:
                return None
            inside = self._in_class(place, part, _DEEP)
            inherited = inherited or (inside is not None and inside.qualname != f"{place.qualname}.{part}")
            place = inside
        return place.definition(inherited) if place is not None else None

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            file = self.source.read(name)
            try:
                self._modules[name] = _Module(name, file) if file is not None else None
            except (SyntaxError, ValueError):
                self._modules[name] = None
        return self._modules[name]

    def _in_module(self, name: str, attribute: str, deep: int) -> _Place | None:
        module = self._module(name)
        if module is None or not deep:
            return None
        nodes = module.scope.get(attribute, [])
        own = [node for node in nodes if not isinstance(node, ast.Import | ast.ImportFrom)]
        if own:
            return _Place(module, attribute, own)
        for node in nodes:
            found = imported(node, attribute, name, module.file.is_package)
            if found is not None and found.name:
                return self._in_module(found.module, found.name, deep - 1)
        for origin in module.stars:
            if (place := self._in_module(origin, attribute, deep - 1)) is not None:
                return place
        return None

    def _in_class(self, place: _Place, attribute: str, deep: int) -> _Place | None:
        """An attribute of a class: its own, or that of the first base that has one."""
        cls = place.cls
        if cls is None or not deep:
            return None
        nodes = place.module.class_scope(cls).get(attribute)
        if nodes:
            return _Place(place.module, f"{place.qualname}.{attribute}", nodes)
        for base in cls.bases:
            above = self._base(place.module, dotted(base), deep - 1)
            if above is not None and (found := self._in_class(above, attribute, deep - 1)) is not None:
                return found
        return None

    def _base(self, module: _Module, name: str, deep: int) -> _Place | None:
        """The class that a base's expression names, by a plain name or by that of a module and a class in it."""
        first, *rest = name.split(".") if name else [""]
        for node in module.scope.get(first, []):
            found = imported(node, first, module.name, module.file.is_package)
            if found is None or not rest:
                continue
            inner = f"{found.module}.{found.name}" if found.name else found.module
            return self._in_module(".".join([inner, *rest[:-1]]), rest[-1], deep)
        place = self._in_module(module.name, first, deep) if first else None
        for part in rest:
            place = self._in_class(place, part, deep) if place is not None else None
        return place


class _Module:
    """One module that was read and parsed."""

    def __init__(self, name: str, file: File) -> None:
        self.name = name
        self.file = file
        body = ast.parse(file.text).body
        self.scope = bindings(body)
        self.stars = [
            absolute(node, name, file.is_package)
            for node in body
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
        ]
        self._classes: dict[int, Scope] = {}

    def class_scope(self, cls: ast.ClassDef) -> Scope:
        return self._classes.setdefault(id(cls), bindings(cls.body))

    @cached_property
    def lines(self) -> list[str]:
        return self.file.text.splitlines(keepends=True)


@dataclass(frozen=True, slots=True)
class _Place:
    """A name in a module or class, and the nodes that bind it."""

    module: _Module
    qualname: str
    nodes: list[ast.AST]

    @property
    def cls(self) -> ast.ClassDef | None:
        return next((node for node in reversed(self.nodes) if isinstance(node, ast.ClassDef)), None)

    def definition(self, inherited: bool) -> Definition:
        first = self.nodes[0]
        return Definition(
            module=self.module.name,
            qualname=self.qualname,
            kind=_kind(self.nodes[-1] if self.cls is None else self.cls, in_class="." in self.qualname),
            path=self.module.file.path,
            line=_first_line(first),
            text="".join(self._lines(node) for node in self.nodes),
            inherited=inherited,
            nodes=tuple(self.nodes),
        )

    def _lines(self, node: ast.AST) -> str:
        end = getattr(node, "end_lineno", None) or _first_line(node)
        text = "".join(self.module.lines[_first_line(node) - 1 : end])
        return text if text.endswith("\n") else f"{text}\n"


def _first_line(node: ast.AST) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    line: int = getattr(node, "lineno", 1)
    return min([line, *(one.lineno for one in decorators)])


def _kind(node: ast.AST, *, in_class: bool) -> Kind:
    if isinstance(node, ast.ClassDef):
        return "class"
    if not isinstance(node, Function):
        return "value"
    marks = {dotted(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list}
    last = {mark.rpartition(".")[2] for mark in marks}
    if last & {"property", "cached_property", "setter", "getter", "deleter"}:
        return "property"
    if not in_class:
        return "function"
    if "classmethod" in last or node.name in ("__init_subclass__", "__class_getitem__"):
        return "classmethod"
    return "staticmethod" if "staticmethod" in last or node.name == "__new__" else "function"
