"""Copies of a name, wherever they are: ``if module.Request is Request: module.Request = Mine``, module after module."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_graft.audit.uses.locals import nodes
from vllm_graft.audit.uses.values import Values, names_of
from vllm_graft.sources.scopes import dotted

if TYPE_CHECKING:
    from vllm_graft.audit.uses.state import State

Place = tuple[str, str]
"""An attribute as it is spelled: of what, and its name."""


def compared(state: State, test: ast.expr) -> dict[Place, Values]:
    """The attributes that a condition compares with a name of vLLM, and that name."""
    found: dict[Place, Values] = {}
    for one in nodes(test):
        if isinstance(one, ast.Compare) and len(one.ops) == 1 and isinstance(one.ops[0], ast.Is | ast.Eq):
            for place, other in ((one.left, one.comparators[0]), (one.comparators[0], one.left)):
                spelled = _spelled(place)
                # ``request.status == RequestStatus.WAITING`` compares a value; a copy has the name of what it copies.
                last = spelled[1] if spelled is not None else ""
                names = tuple(one for one in names_of(state.value(other)) if one.qualname.rpartition(".")[2] == last)
                if spelled is not None and names:
                    found[spelled] = names
    return found


def _spelled(node: ast.expr) -> Place | None:
    """``owner.name``, or ``getattr(owner, "name", ...)``."""
    if isinstance(node, ast.Attribute):
        return dotted(node.value), node.attr
    if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) > 1:
        key = node.args[1]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            return dotted(node.args[0]), key.value
    return None
