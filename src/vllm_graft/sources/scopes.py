"""The names that a module or class body binds, and the statements that bind them.

``bindings`` has what a name stands for once the body has run: the last binding counts, overloads do not, a property's
setter belongs to its getter, and the branches of an ``if`` or ``try`` stand side by side, because only a run decides
between them. ``Namespace`` has every statement that may bind a name, for judging that a name does not exist.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from vllm_graft.sources.fingerprint import Function

Bindings = dict[str, list[ast.AST]]
"""The nodes that bind each name, in the order they stand."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The module, or the name in a module, that an import statement binds a name to."""

    module: str
    name: str = ""


def bindings(body: Sequence[ast.stmt], *, declared: bool = False) -> Bindings:
    """Return the names that a body binds; with ``declared`` also those that only a type checker sees."""
    scope: Bindings = {}
    for node, branch in _statements(body, branch=False, declared=declared):
        marks = [dotted(one) for one in getattr(node, "decorator_list", ())]
        if any(mark.rpartition(".")[2] == "overload" for mark in marks):
            continue
        for name in _names(node):
            is_accessor = any(mark in (f"{name}.setter", f"{name}.getter", f"{name}.deleter") for mark in marks)
            if name in scope and (branch or is_accessor):
                scope[name].append(node)
            else:
                scope[name] = [node]
    return scope


def _statements(body: Sequence[ast.stmt], *, branch: bool, declared: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statements that run, and whether each is in a branch; what only a type checker reads is left out."""
    for node in body:
        if isinstance(node, ast.If):
            checked = dotted(node.test).rpartition(".")[2] == "TYPE_CHECKING"
            if declared or not checked:
                yield from _statements(node.body, branch=True, declared=declared)
            yield from _statements(node.orelse, branch=branch or not checked, declared=declared)
        elif isinstance(node, ast.Try):
            for part in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                yield from _statements(part, branch=True, declared=declared)
        elif isinstance(node, ast.With):
            yield from _statements(node.body, branch=branch, declared=declared)
        else:
            yield node, branch


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names if alias.name != "*")


def dotted(node: ast.expr) -> str:
    """Return a name with its attributes as text, ``Base`` for ``Base[T]``; empty for any other expression."""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def decorators(node: ast.AST) -> set[str]:
    """Return the last parts of the names of a definition's decorators: ``no_grad`` for ``@torch.no_grad()``."""
    marks: list[ast.expr] = getattr(node, "decorator_list", [])
    return {dotted(one.func if isinstance(one, ast.Call) else one).rpartition(".")[2] for one in marks}


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body without those of functions and classes inside, in no order."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            left += ast.iter_child_nodes(node)


def imported(node: ast.AST, name: str, module: str, is_package: bool) -> Imported | None:
    """Return what an import statement in ``module`` binds ``name`` to; None for any other node."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname == name:
                return Imported(alias.name)
            if alias.asname is None and alias.name.partition(".")[0] == name:
                return Imported(name)
    if isinstance(node, ast.ImportFrom):
        origin = absolute(node, module, is_package)
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return Imported(origin, alias.name)
    return None


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Return the module that a ``from`` statement names, its leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    up = node.level - 1 if is_package else node.level
    base = parts[: len(parts) - up] if up else parts
    return ".".join([*base, *(node.module.split(".") if node.module else ())])


# Names whose use means that statements do not show all names of a module.
_COMPUTED: Final = frozenset({"globals", "vars", "locals", "exec", "eval", "setattr", "modules"})


class Namespace:
    """Every name that a module or class may have, by whatever statement."""

    def __init__(self, tree: ast.Module | ast.ClassDef) -> None:
        self.tree = tree

    @cached_property
    def bound(self) -> Bindings:
        """The names that the body may bind, each with the statements that may do it."""
        found: Bindings = {}
        for name, node in _all_bindings(self.tree):
            found.setdefault(name, []).append(node)
        return found

    @cached_property
    def is_closed(self) -> bool:
        """True if ``bound`` has all names: there is no star import, nothing computed, no ``__getattr__``."""
        return "*" not in self.bound and "__getattr__" not in self.bound and not self.uses(_COMPUTED)

    def uses(self, names: Collection[str]) -> bool:
        """Return whether any of these names stands anywhere in the code."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name | ast.Attribute))
        return any((node.id if isinstance(node, ast.Name) else node.attr) in names for node in nodes)

    def only(self, name: str) -> ast.AST | None:
        """Return the one statement that binds a name; None if there are more, or it is in an ``if`` or ``try``."""
        nodes = self.bound.get(name, [])
        return nodes[0] if len(nodes) == 1 and self.is_closed and nodes[0] in self.tree.body else None


def _all_bindings(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a scope may bind, each with the outermost statement that does it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield child.name, child
            # What a function declares global, it may bind.
            for inner in ast.walk(child):
                if isinstance(inner, ast.Global):
                    yield from ((name, inner) for name in inner.names)
        elif isinstance(child, ast.Import):
            yield from ((alias.asname or alias.name.partition(".")[0], child) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((alias.asname or alias.name, child) for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id, child
        elif isinstance(child, ast.AnnAssign) and child.value is None:
            continue
        elif isinstance(child, ast.Assign) and len(child.targets) == 1 and isinstance(child.targets[0], ast.Name):
            yield child.targets[0].id, child
            yield from _all_bindings(child.value)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield child.target.id, child
        else:
            if isinstance(child, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and child.name:
                yield child.name, child
            yield from _all_bindings(child)
