"""Finding where a name is defined, by reading: through re-exports, star imports and base classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from vllm_graft.patching.upstream.fingerprint import Fingerprint, Function
from vllm_graft.patching.upstream.scopes import Imported, Scope, absolute, bindings, dotted, imported
from vllm_graft.patching.upstream.sources import File, Source
from vllm_graft.patching.upstream.walk import Walk

Kind = Literal["function", "classmethod", "staticmethod", "property", "class", "value"]


@dataclass(frozen=True)
class Definition:
    """One definition of upstream's.

    module, qualname:  where it is defined, which may be another module than the one searched
    kind:              function, classmethod, staticmethod, property, class or value
    path, line:        its file, and the line it begins at
    text:              its source, decorators included
    inherited:         whether a base class defines it, and not the class that was searched
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
        """The fingerprint of its code."""
        return Fingerprint.of(self.nodes)


def find(source: Source, module: str, qualname: str) -> Definition | None:
    """The definition of ``qualname`` in ``module``, or None where reading does not find one."""
    return Finder(source).find(module, qualname)


class Finder:
    """Finds names in one source, each file of which is read once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._modules: dict[str, ReadModule | None] = {}
        self.walk = Walk(self.module, ReadModule.place, Place.inside, lambda place: place.module)

    def find(self, module: str, qualname: str) -> Definition | None:
        """The definition of ``qualname``, such as "function" or "Class.method", in ``module``."""
        found = self.walk.find(module, qualname)
        return found[0].definition(found[1]) if found is not None else None

    def module(self, name: str) -> ReadModule | None:
        """One module, or None where there is none that can be read."""
        if name not in self._modules:
            file = self.source.read(name)
            try:
                self._modules[name] = ReadModule(name, file) if file is not None else None
            except (SyntaxError, ValueError):
                self._modules[name] = None
        return self._modules[name]


class ReadModule:
    """One module that was read and parsed."""

    def __init__(self, name: str, file: File) -> None:
        self.name = name
        self.file = file
        self.body = ast.parse(file.text).body
        self.scope = bindings(self.body)
        if "__getattr__" in self.scope:
            # What such a module gives on demand it declares for type checkers.
            declared = bindings([node for node in self.body if isinstance(node, ast.If)], declared=True)
            self.scope = {**_served(self.body, name.partition(".")[0]), **declared, **self.scope}
        self.stars = [
            absolute(node, name, file.is_package)
            for node in self.body
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
        ]
        self._classes: dict[int, Scope] = {}

    def place(self, attribute: str) -> Place | None:
        """A name that the module itself defines."""
        own = [node for node in self.scope.get(attribute, []) if not isinstance(node, ast.Import | ast.ImportFrom)]
        return Place(self, attribute, own) if own else None

    def imports(self, attribute: str) -> Iterator[Imported]:
        """Return what the module's import statements bind a name to."""
        for node in self.scope.get(attribute, []):
            found = imported(node, attribute, self.name, self.file.is_package)
            if found is not None:
                yield found

    def class_scope(self, cls: ast.ClassDef) -> Scope:
        """The names that a class's body binds."""
        return self._classes.setdefault(id(cls), bindings(cls.body))

    @cached_property
    def lines(self) -> list[str]:
        """The module's text, line by line."""
        return self.file.text.splitlines(keepends=True)


@dataclass(frozen=True, slots=True)
class Place:
    """A name in a module or class, and the nodes that bind it."""

    module: ReadModule
    qualname: str
    nodes: list[ast.AST]

    @property
    def cls(self) -> ast.ClassDef | None:
        """The class statement, where it is a class."""
        return next((node for node in reversed(self.nodes) if isinstance(node, ast.ClassDef)), None)

    @property
    def bases(self) -> list[str]:
        """How a class names its bases."""
        return [dotted(base) for base in self.cls.bases] if self.cls is not None else []

    @property
    def kind(self) -> Kind:
        """Its kind: class, function, property, value and so on."""
        return _kind(self.nodes[-1] if self.cls is None else self.cls, in_class="." in self.qualname)

    def inside(self, attribute: str) -> Place | None:
        """A name that a class itself defines."""
        nodes = self.module.class_scope(self.cls).get(attribute) if self.cls is not None else None
        return Place(self.module, f"{self.qualname}.{attribute}", nodes) if nodes else None

    def definition(self, inherited: bool) -> Definition:
        """The place with its text and fingerprint."""
        return Definition(
            module=self.module.name,
            qualname=self.qualname,
            kind=self.kind,
            path=self.module.file.path,
            line=_first_line(self.nodes[0]),
            text="".join(self._lines(node) for node in self.nodes),
            inherited=inherited,
            nodes=tuple(self.nodes),
        )

    def _lines(self, node: ast.AST) -> str:
        end = getattr(node, "end_lineno", None) or _first_line(node)
        text = "".join(self.module.lines[_first_line(node) - 1 : end])
        return text if text.endswith("\n") else f"{text}\n"


def _served(body: list[ast.stmt], package: str) -> Scope:
    """The names that a module with a ``__getattr__`` has tables of: what ``__all__`` lists, and keys.

    A table may say which module each comes from, as that of ``vllm.transformers_utils.configs`` does.
    """
    found: Scope = {}
    for node in body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            for key, held in zip(value.keys, value.values, strict=True):
                origin = _text(held)
                if (name := _text(key)).isidentifier():
                    names = [ast.alias(name)]
                    inside = origin.startswith(f"{package}.") and ":" not in origin
                    found[name] = [ast.ImportFrom(origin, names, 0) if inside else node]
        elif isinstance(value, ast.List | ast.Tuple) and "__all__" in _targets(node):
            for name in filter(None, map(_text, value.elts)):
                found.setdefault(name, [node])
    return found


def _targets(node: ast.stmt) -> list[str]:
    return [dotted(one) for one in node.targets] if isinstance(node, ast.Assign) else []


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


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
