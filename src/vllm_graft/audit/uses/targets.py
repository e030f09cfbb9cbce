"""Assigning to and deleting what is vLLM's: attributes, entries of a namespace, modules."""

from __future__ import annotations

import ast
from typing import Final

from vllm_graft.audit.model import Way
from vllm_graft.audit.uses.resolve import entry_of
from vllm_graft.audit.uses.state import State
from vllm_graft.audit.uses.values import Name, Values, names_of, texts_of
from vllm_graft.sources.scopes import dotted

_PARTS: Final = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__func__"})
"""Attributes of a function that are part of what it does."""


def put_on(state: State, target: ast.expr, expr: ast.expr | None, value: Values, *, way: Way | None = None) -> bool:
    """Note an assignment to an attribute or entry; False where that is none of vLLM's."""
    if isinstance(target, ast.Attribute):
        state.found.stored.add(target.attr)
        keep(state, target.attr, value)
        names = attributes(state.value(target.value), [target.attr])
        names = names or state.copies.get((dotted(target.value), target.attr), ())
    elif isinstance(target, ast.Subscript):
        keys = list(texts_of(state.value(target.slice)))
        for key in keys:
            keep(state, key, value)
        holders = [one for one in state.value(target.value) if isinstance(one, Name)]
        names = tuple(entry for one in holders for key in keys if (entry := entry_of(one, key)) is not None)
    else:
        return False
    return state.put(names, target.lineno, expr, way=way, value=value)


def attributes(owner: Values, names: list[str]) -> Values:
    """The attributes of vLLM's that are meant, a function's code being the function."""
    return tuple(
        one if attribute in _PARTS else one.inside(attribute) for one in names_of(owner) for attribute in names
    )


def keep(state: State, key: str, value: Values) -> None:
    """Remember that something of vLLM's can be reached under another name from now on."""
    for one in names_of(value):
        state.found.saved.setdefault(key, set()).add(state.normal(one))
