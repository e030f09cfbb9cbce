"""Which code provides for the absence of a name: a ``try`` that catches it, a test for it, a test of the version."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

from vllm_graft.patching.upstream.scopes import dotted

_CAUGHT: Final = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"})

_MISCALLED: Final = frozenset({"TypeError", "Exception", "BaseException"})


def catches(node: ast.Try | ast.TryStar) -> bool:
    """Whether a ``try`` goes on without the name; one that raises again does not."""
    return any(_catches(one.type) and not isinstance(one.body[-1], ast.Raise) for one in node.handlers)


def excuses(node: ast.Try | ast.TryStar) -> bool:
    """Whether a ``try`` goes on after a call with arguments that do not fit."""
    return any(_catches(one.type, _MISCALLED) and not isinstance(one.body[-1], ast.Raise) for one in node.handlers)


def suppresses(node: ast.With | ast.AsyncWith) -> bool:
    """Whether a ``with`` suppresses the absence of a name."""
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(
        dotted(call.func).rpartition(".")[2] == "suppress" and any(_catches(one) for one in call.args) for call in calls
    )


def tests(node: ast.expr) -> bool:
    """Whether a condition asks for a name or for the version."""
    return any(_asks(one) for one in ast.walk(node))


def leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether what follows a branch runs only where the branch did not."""
    return isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def for_type_checkers(test: ast.expr) -> bool:
    """Whether only a type checker reads what is behind a condition."""
    return dotted(test).rpartition(".")[2] == "TYPE_CHECKING"


def _catches(kind: ast.expr | None, caught: frozenset[str] = _CAUGHT) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(dotted(one).rpartition(".")[2] in caught for one in kinds)


def _asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = dotted(node.func).rpartition(".")[2]
        asked = ("hasattr", "find_spec", "signature", "getfullargspec")
        return called in asked or (called == "getattr" and len(node.args) > 2)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return "version" in name.lower()
