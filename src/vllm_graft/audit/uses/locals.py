"""Which names belong to a function: its parameters, and whatever its body binds anywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from vllm_graft.sources.fingerprint import Function

_SIMPLE: Final = frozenset(
    {
        ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Raise, ast.Assert, ast.Delete, ast.Import,
        ast.ImportFrom, ast.Pass, ast.Break, ast.Continue, ast.Global, ast.Nonlocal,
    }
)  # fmt: skip
"""Statements that no other stands in."""


def parameters(args: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    """Every parameter in order, with its default."""
    positional = [*args.posonlyargs, *args.args]
    without = len(positional) - len(args.defaults)
    yield from zip((one.arg for one in positional), [None] * without + list(args.defaults), strict=True)
    yield from zip((one.arg for one in args.kwonlyargs), args.kw_defaults, strict=True)
    yield from ((one.arg, None) for one in (args.vararg, args.kwarg) if one is not None)


def first_parameter(node: Function | ast.Lambda) -> str:
    """The parameter that is the object: the first, or wrapt's ``instance``."""
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    if names[:2] == ["wrapped", "instance"]:
        return "instance"
    return names[0] if names else ""


def statements(body: Sequence[ast.stmt], *, scopes: bool = False) -> Iterator[ast.stmt]:
    """The statements of a body with those inside them; of functions and classes only if ``scopes`` says so."""
    left = list(body)
    while left:
        node = left.pop()
        yield node
        if type(node) not in _SIMPLE and (scopes or not isinstance(node, Function | ast.ClassDef)):
            for block in blocks(node):
                left += block


def nodes(root: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it in the order of ``ast.walk``, but for those that only say how a name is used."""
    left = [root]
    for node in left:
        yield node
        left += children(node)


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes directly below another as ``ast.iter_child_nodes`` has them, but for those that say how it is used."""
    found: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            found.append(value)
    return found


def blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of statements that stand directly in a statement."""
    found: list[list[ast.stmt]] = [
        block for name in ("body", "orelse", "finalbody") if (block := getattr(node, name, None))
    ]
    return found + [part.body for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]


def local_names(node: Function | ast.Lambda | ast.If) -> set[str]:
    """The names that the statements of a body bind, whether or not that has happened yet when they are read."""
    if isinstance(node, ast.Lambda):
        return set()
    known: frozenset[str] | None = node.__dict__.get("locals")
    if known is not None:
        return set(known)
    bound: set[str] = set()
    sent: set[str] = set()
    for one in statements(node.body):
        if isinstance(one, ast.Global | ast.Nonlocal):
            sent.update(one.names)
        elif type(one) not in _UNBINDING:
            bound.update(_bound(one))
    return bound - sent


_UNBINDING: Final = frozenset(
    {ast.Expr, ast.Return, ast.If, ast.Raise, ast.Assert, ast.While, ast.Pass, ast.Break, ast.Continue, ast.Delete}
)
"""Statements that bind no name themselves, and are most of all."""


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Try | ast.TryStar):
        yield from (handler.name for handler in node.handlers if handler.name)
    for target in _targets(node):
        if isinstance(target, ast.Name):
            yield target.id
            continue
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            continue
        for one in nodes(target):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                yield one.id
            elif isinstance(one, ast.MatchAs | ast.MatchStar) and one.name:
                yield one.name


def _targets(node: ast.stmt) -> Sequence[ast.AST]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        return [node.target]
    if isinstance(node, ast.With | ast.AsyncWith):
        return [item.optional_vars for item in node.items if item.optional_vars is not None]
    return [case.pattern for case in node.cases] if isinstance(node, ast.Match) else []
