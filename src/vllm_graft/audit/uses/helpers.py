"""Functions of the package that change what they are given: ``def put(cls, value): cls.name = value``."""

from __future__ import annotations

import ast

from vllm_graft.audit.uses.locals import nodes
from vllm_graft.audit.uses.state import State
from vllm_graft.audit.uses.values import Own, Values, names_of, owns_of
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted


def helpers(state: State, node: ast.Call, called: Values) -> list[tuple[Own, dict[str, Values]]]:
    """The functions that a call hands something of vLLM's to for a change, and what each parameter is given.

    ``called`` is what stands before its brackets.
    """
    found = []
    for own in owns_of(called):
        if not isinstance(own.node, Function):
            continue
        given = arguments(state, node, own)
        upstream = {name for name, value in given.items() if any(names_of(value))}
        if upstream and not upstream.isdisjoint(_changed(own.node)):
            found.append((own, given))
    return found


def _changed(node: Function) -> set[str]:
    """The names whose attributes a function sets or deletes."""
    found: set[str] = set()
    for one in nodes(node):
        if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load):
            found.add(dotted(one.value).partition(".")[0])
        elif isinstance(one, ast.Call) and one.args and dotted(one.func).rpartition(".")[2] in ("setattr", "delattr"):
            found.add(dotted(one.args[0]).partition(".")[0])
    return found


def arguments(state: State, node: ast.Call, function: Own) -> dict[str, Values]:
    """What a call gives to each parameter, as far as it does so in plain sight."""
    if any(isinstance(one, ast.Starred) for one in node.args):
        return {}
    names = list(function.defaults)
    given = dict(zip(names, map(state.value, node.args), strict=False))
    return given | {one.arg: state.value(one.value) for one in node.keywords if one.arg in names}
