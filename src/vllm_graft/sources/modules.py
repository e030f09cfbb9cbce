"""One module, parsed: the names it binds, its imports and classes, and each definition with its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import ModuleSpec
from typing import Final, Literal

from vllm_graft.sources.fingerprint import Fingerprint, Function
from vllm_graft.sources.locate import specs
from vllm_graft.sources.origins import ModuleText, parse
from vllm_graft.sources.scopes import Bindings, Imported, Namespace, absolute, bindings, decorators, dotted, imported

DefinitionKind = Literal["function", "classmethod", "staticmethod", "property", "class", "value"]


@dataclass(frozen=True)
class Definition:
    """One definition with its source.

    module, qualname:  where it is defined, which may be another module than the one searched
    kind:              function, classmethod, staticmethod, property, class or value
    path, line:        its file, and its first line
    text:              its source, decorators included
    inherited:         whether a base class defines it instead of the class that was searched
    """

    module: str
    qualname: str
    kind: DefinitionKind
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


class SourceModule:
    """One module as it is written; SyntaxError or ValueError if it cannot be parsed."""

    def __init__(self, name: str, file: ModuleText) -> None:
        self.name = name
        self.file = file
        self.tree = parse(file.text)
        self.body = self.tree.body
        self.scope = bindings(self.body)
        self.on_demand: frozenset[str] = frozenset()
        """The names that only ``__getattr__`` provides: they are not attributes of the module object."""
        if "__getattr__" in self.scope:
            # Such a module loads names on demand, and declares them under TYPE_CHECKING or in a table.
            loaded: Bindings = {}
            for node in self.body:
                value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
                if isinstance(value, ast.Dict):
                    for key, held in zip(map(_text, value.keys), map(_text, value.values), strict=True):
                        # A table may name the module of each, as that of ``vllm.transformers_utils.configs`` does.
                        inside = held.startswith(f"{name.partition('.')[0]}.") and ":" not in held
                        if key.isidentifier():
                            loaded[key] = [ast.ImportFrom(held, [ast.alias(key)], 0) if inside else node]
                elif isinstance(value, ast.List | ast.Tuple) and "__all__" in map(dotted, getattr(node, "targets", ())):
                    for key in filter(None, map(_text, value.elts)):
                        loaded.setdefault(key, [node])
            loaded |= bindings([node for node in self.body if isinstance(node, ast.If)], declared=True)
            self.on_demand = frozenset(loaded.keys() - self.scope.keys())
            self.scope = {**loaded, **self.scope}
        self.stars = [
            absolute(node, name, file.is_package)
            for node in self.body
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
        ]
        self._classes: dict[int, Bindings] = {}

    def place(self, attribute: str) -> ScopeEntry | None:
        """Return a name that the module itself defines, not one that it imports."""
        own = [node for node in self.scope.get(attribute, []) if not isinstance(node, ast.Import | ast.ImportFrom)]
        return ScopeEntry(self, attribute, own) if own else None

    def imports(self, attribute: str) -> Iterator[Imported]:
        """Return what the module's import statements bind a name to."""
        for node in self.scope.get(attribute, []):
            found = imported(node, attribute, self.name, self.file.is_package)
            if found is not None:
                yield found

    def class_scope(self, cls: ast.ClassDef) -> Bindings:
        """Return the names that a class's body binds."""
        if id(cls) not in self._classes:
            self._classes[id(cls)] = bindings(cls.body)
        return self._classes[id(cls)]

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the module's text as the parser counts them: a form feed ends none."""
        return [f"{line}\n" for line in self.file.text.split("\n")]

    @cached_property
    def namespace(self) -> Namespace:
        """Every name that the module may have, by whatever statement."""
        return Namespace(self.tree)


@dataclass(frozen=True, slots=True)
class ScopeEntry:
    """A name in a module or class, and the nodes that bind it."""

    module: SourceModule
    qualname: str
    nodes: list[ast.AST]

    @property
    def cls(self) -> ast.ClassDef | None:
        """The class statement; None if the name is not a class."""
        return next((node for node in reversed(self.nodes) if isinstance(node, ast.ClassDef)), None)

    @property
    def bases(self) -> list[str]:
        """The expressions by which a class names its bases; empty for what is not a name."""
        return [dotted(base) for base in self.cls.bases] if self.cls is not None else []

    @property
    def kind(self) -> DefinitionKind:
        """The kind of what the name stands for."""
        node = self.nodes[-1] if self.cls is None else self.cls
        if isinstance(node, ast.ClassDef):
            return "class"
        if not isinstance(node, Function):
            return "value"
        marks = decorators(node)
        if marks & {"property", "cached_property", "setter", "getter", "deleter"}:
            return "property"
        if "." not in self.qualname:
            return "function"
        if "classmethod" in marks or node.name in ("__init_subclass__", "__class_getitem__"):
            return "classmethod"
        return "staticmethod" if "staticmethod" in marks or node.name == "__new__" else "function"

    def inside(self, attribute: str) -> ScopeEntry | None:
        """Return a name that the class itself defines, without its bases."""
        nodes = self.module.class_scope(self.cls).get(attribute) if self.cls is not None else None
        return ScopeEntry(self.module, f"{self.qualname}.{attribute}", nodes) if nodes else None

    def definition(self, inherited: bool) -> Definition:
        """Return the definition with its text and fingerprint."""
        spans = [(_first_line(node), getattr(node, "end_lineno", None) or _first_line(node)) for node in self.nodes]
        return Definition(
            module=self.module.name,
            qualname=self.qualname,
            kind=self.kind,
            path=self.module.file.path,
            line=spans[0][0],
            text="".join(line for first, last in spans for line in self.module.lines[first - 1 : last]),
            inherited=inherited,
            nodes=tuple(self.nodes),
        )


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _first_line(node: ast.AST) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    line: int = getattr(node, "lineno", 1)
    return min([line, *(one.lineno for one in decorators)])


@dataclass(frozen=True, slots=True)
class Missing:
    """A module that cannot be imported, and the reason."""

    why: str


# Names by which a package takes finding its modules into its own hands.
_FINDING: Final = frozenset({"__path__", "modules", "meta_path", "path_hooks"})


def read_module(name: str, path: Sequence[str] | None = None) -> SourceModule | Missing | None:
    """Read a module by its dotted name; None if it may exist and its source cannot be read."""
    found = list(specs(name, path))
    if found[-1] is not None:
        return _parse(found[-1])
    package = found[-2] if len(found) > 1 else None
    if package is not None and package.loader is not None:
        above = _parse(package)
        if not isinstance(above, SourceModule) or above.namespace.uses(_FINDING):
            return None
    return Missing(f"there is no module {'.'.join(name.split('.')[: len(found)])!r}")


def _parse(spec: ModuleSpec) -> SourceModule | Missing | None:
    file = ModuleText.of(spec)
    try:
        return SourceModule(spec.name, file) if file is not None else None
    except SyntaxError as error:
        return Missing(f"{spec.origin}:{error.lineno} is not valid Python: {error.msg}")
    except ValueError:
        return None
