"""Which names a module or a class body binds, as far as reading can tell.

The last binding counts, as it does when Python runs the body. Overloads are no bindings; a property's setter belongs to
its getter; what stands in several branches of an ``if`` or ``try`` is kept side by side, because which of them runs
is known at run time only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_graft.patching.upstream.fingerprint import Function

Scope = dict[str, list[ast.AST]]
"""The nodes that bind each name, in the order they stand."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The module, or the name in a module, that an import statement binds a name to."""

    module: str
    name: str = ""


def bindings(body: Sequence[ast.stmt], *, declared: bool = False) -> Scope:
    """The names that a body binds; ``declared``: those too that only a type checker sees."""
    scope: Scope = {}
    for node, branch in _statements(body, branch=False, declared=declared):
        for name in _names(node):
            _bind(scope, name, node, branch=branch)
    return scope


def _bind(scope: Scope, name: str, node: ast.AST, *, branch: bool) -> None:
    known = scope.get(name)
    if isinstance(node, Function) and _is_overload(node):
        return
    if known is None or not (branch or (isinstance(node, Function) and _is_accessor(node, name))):
        scope[name] = [node]
    else:
        known.append(node)


def _statements(body: Sequence[ast.stmt], *, branch: bool, declared: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """The statements that run, those of branches included; what only a type checker reads is left out."""
    for node in body:
        if isinstance(node, ast.If):
            checked = _for_type_checkers(node.test)
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


def _for_type_checkers(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _is_overload(node: Function) -> bool:
    return any(dotted(one).rpartition(".")[2] == "overload" for one in node.decorator_list)


def _is_accessor(node: Function, name: str) -> bool:
    return any(dotted(one) in (f"{name}.setter", f"{name}.getter", f"{name}.deleter") for one in node.decorator_list)


def dotted(node: ast.expr) -> str:
    """A name with its attributes as text, of ``Base[T]`` the ``Base``; empty where it is something else."""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def imported(node: ast.AST, name: str, module: str, is_package: bool) -> Imported | None:
    """Return what an import statement in ``module`` binds ``name`` to; None where the node is no such statement."""
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
    """The module that a ``from`` statement names, its dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    up = node.level - 1 if is_package else node.level
    base = parts[: len(parts) - up] if up else parts
    return ".".join([*base, *(node.module.split(".") if node.module else ())])
