"""What stands in the place of a name: its function, its text, and whether it calls what was there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from vllm_graft.audit.model import Use, Way
from vllm_graft.audit.uses.outlines import first_line
from vllm_graft.audit.uses.resolve import Resolver
from vllm_graft.audit.uses.state import Found, Put
from vllm_graft.audit.uses.values import Name, Own, Scope, Values, owns_of
from vllm_graft.patching.functions import ORIGINAL
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted

_BENEATH: Final = frozenset({"call", "wrapped"})
"""Parameters by which a function is given what it stands in the place of."""

_COPIERS: Final = frozenset({"functools.wraps", "functools.update_wrapper"})


def settled(put: Put, found: Found, resolver: Resolver) -> Use:
    """The use that something put there makes."""
    owns = list(owns_of(put.value)) or list(owns_of(resolver.value(put.expr, put.scope)))
    for each in owns:
        each.complete()
    own = owns[0] if owns and put.way != "delete" else None
    return Use(
        way=put.way or _way(put, owns, found, resolver),
        module=put.target.module,
        qualname=put.target.qualname,
        file=found.file.shown,
        line=put.line,
        owner=put.owner,
        guard=put.guard,
        alternatives=tuple((one.module, one.qualname) for one in put.alternatives),
        body=own.function if own is not None else None,
        body_file=own.file.shown if own is not None else "",
        source=source(own) if own is not None else "",
        patch=put.patch,
    )


def source(own: Own) -> str:
    """The text of a function or class, decorators included."""
    if isinstance(own.node, ast.Lambda):
        return ast.get_source_segment(own.file.text, own.node) or ""
    first = first_line(own.node)
    return own.file.cut(first, own.node.end_lineno or first)


def _way(put: Put, owns: list[Own], found: Found, resolver: Resolver) -> Way:
    functions = [own for own in owns if own.function is not None]
    if put.handed or (put.by == "first" and not functions):
        return "wrap"
    if put.by == "call" and any("call" in own.defaults for own in functions):
        return "wrap"
    reader = _Reader(put, found, resolver)
    return "wrap" if any(reader.calls(own) for own in functions) else "replace"


class _Reader:
    """Looks for what was at one place before, in the functions put there."""

    def __init__(self, put: Put, found: Found, resolver: Resolver) -> None:
        self.target = put.target
        self.attribute = put.target.qualname.rpartition(".")[2]
        self.by = put.by
        self.found = found
        self.resolver = resolver

    def calls(self, own: Own) -> bool:
        """Whether a function visibly calls what was there, or hands it on to something that may."""
        node = own.function
        if node is None:
            return False
        beneath = set(_beneath(node, first=self.by == "first"))
        scope = own.inside or own.scope
        for one in ast.walk(node):
            if isinstance(one, ast.Attribute) and one.attr == f"{ORIGINAL}{self.attribute}":
                return True
            if isinstance(one, ast.Call) and self._reaches(one, scope, beneath):
                return True
        return False

    def _reaches(self, call: ast.Call, scope: Scope, beneath: set[str]) -> bool:
        if self.resolver.dotted(call.func, scope) in _COPIERS:
            return False
        given = [call.func, *call.args, *(keyword.value for keyword in call.keywords)]
        return any(self._is_original(one, scope, beneath) for one in given)

    def _is_original(self, node: ast.expr, scope: Scope, beneath: set[str]) -> bool:
        if isinstance(node, ast.Name) and node.id in beneath:
            return True
        if isinstance(node, ast.Attribute) and self.target in self.found.saved.get(node.attr, ()):
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self.target in self.found.saved.get(str(node.slice.value), ())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "__get__":
            return self._is_original(node.func.value, scope, beneath)
        return self._same(self.resolver.value(node, scope))

    def _same(self, value: Values) -> bool:
        """Whether it is what was there, or a method of it such as ``__func__`` or ``__get__``."""
        here = self.target.dotted
        return any(
            isinstance(one, Name) and (one.dotted == here or one.dotted.startswith(f"{here}.__")) for one in value
        )


def _beneath(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, *, first: bool) -> Iterator[str]:
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    yield from (name for name in names if name in _BENEATH)
    if first and names:
        decorators = node.decorator_list if isinstance(node, Function) else []
        bound = names[0] in ("self", "cls") and not any(dotted(one) == "staticmethod" for one in decorators)
        yield from names[1:2] if bound else names[:1]
