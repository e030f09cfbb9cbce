"""Calls that put something in the place of a name of vLLM: ``setattr`` and its kin, mock, pytest, wrapt, gorilla."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

from vllm_graft.audit.model import Way
from vllm_graft.audit.uses.resolve import dotted_of, entry_of
from vllm_graft.audit.uses.state import State
from vllm_graft.audit.uses.targets import attributes
from vllm_graft.audit.uses.values import TOP, Name, Own, Table, Values, texts_of
from vllm_graft.sources.scopes import dotted

_SETTERS: Final = frozenset({"builtins.setattr", "builtins.type.__setattr__", "builtins.object.__setattr__"})
_DELETERS: Final = frozenset({"builtins.delattr", "builtins.type.__delattr__", "builtins.object.__delattr__"})
_MOCK: Final = ("unittest.mock.patch", "mock.patch", "mocker.patch")
_WRAPPERS: Final = frozenset(
    {"wrap_function_wrapper", "patch_function_wrapper", "transient_function_wrapper", "wrap_object"}
)
_MULTIPLE: Final = frozenset({"spec", "create", "spec_set", "autospec", "new_callable"})
"""Keywords of ``patch.multiple`` that name no attribute."""


def putting(state: State, node: ast.Call, value: Values, own: Own | None = None) -> Sequence[ast.expr] | None:
    """Note what a call puts in the place of names of vLLM, and give back the arguments that are still to be walked.

    None where it is no such call, or what it changes is not vLLM's. ``value`` is what stands before its brackets,
    ``own`` the function that it decorates.
    """
    called = dotted_of(value) or dotted(node.func)
    last = called.rpartition(".")[2]
    if called in _SETTERS or (last == "setattr" and called not in _SETTERS and isinstance(node.func, ast.Attribute)):
        return _set(state, node)
    if called in _DELETERS or (last == "delattr" and isinstance(node.func, ast.Attribute)):
        return _set(state, node, way="delete")
    if last in ("setitem", "delitem"):
        return _item(state, node, way="delete" if last == "delitem" else None)
    if last in _WRAPPERS:
        return _wrapt(state, node, own)
    if called.partition(".")[0] == "gorilla" and last in ("Patch", "patch"):
        return _gorilla(state, node, own)
    return _mock(state, node, called)


def decorating(state: State, decorator: ast.expr, own: Own) -> bool:
    """Note what a decorator puts a function of the package in the place of; False where it puts it nowhere."""
    if not isinstance(decorator, ast.Call):
        return False
    value = state.value(decorator.func)
    called = dotted_of(value)
    if called != "gorilla.patch" and called.rpartition(".")[2] not in _WRAPPERS:
        return False
    return putting(state, decorator, value, own) is not None


def _argument(node: ast.Call, place: int, *names: str) -> ast.expr | None:
    if place < len(node.args):
        return node.args[place]
    return next((keyword.value for keyword in node.keywords if keyword.arg in names), None)


def _rest(node: ast.Call, done: Sequence[ast.expr | None]) -> list[ast.expr]:
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    return [one for one in given if one not in done]


def _set(state: State, node: ast.Call, *, way: Way | None = None) -> Sequence[ast.expr] | None:
    """``setattr(owner, name, value)``, and pytest's ``setattr("dotted.name", value)``."""
    owner, name = _argument(node, 0, "target"), _argument(node, 1, "name")
    paths = list(texts_of(state.value(owner)))
    target: Values
    if paths:
        target, value = _spelled(paths), name
    else:
        names = list(texts_of(state.value(name)))
        target = attributes(state.value(owner), names)
        if not target and owner is not None:
            target = tuple(one for text in names for one in state.copies.get((dotted(owner), text), ()))
        value = _argument(node, 2, "value")
    found = state.put(target, node.lineno, None if way == "delete" else value, way=way)
    return _rest(node, [owner]) if found else None


def _item(state: State, node: ast.Call, *, way: Way | None) -> Sequence[ast.expr] | None:
    """pytest's ``setitem(sys.modules, name, value)``."""
    keys = list(texts_of(state.value(_argument(node, 1, "name"))))
    holders = [one for one in state.value(_argument(node, 0, "dic")) if isinstance(one, Name)]
    target = tuple(entry for one in holders for key in keys if (entry := entry_of(one, key)) is not None)
    found = state.put(target, node.lineno, _argument(node, 2, "value"), way=way)
    return _rest(node, node.args[:1]) if found else None


def _wrapt(state: State, node: ast.Call, own: Own | None) -> Sequence[ast.expr] | None:
    """``wrap_function_wrapper(module, name, wrapper)``; a question mark defers it until the module is imported."""
    module, name = _argument(node, 0, "target", "module"), _argument(node, 1, "name")
    held = state.value(module)
    owners: Values = tuple(Name(text.rstrip("?")) for text in texts_of(held)) or held
    wrapper = _argument(node, 2, "wrapper", "factory")
    found = state.put(
        attributes(owners, list(texts_of(state.value(name)))),
        node.lineno,
        wrapper,
        value=(own,) if own is not None else (),
        by="first",
    )
    return _rest(node, [module]) if found else None


def _gorilla(state: State, node: ast.Call, own: Own | None) -> Sequence[ast.expr] | None:
    """``Patch(destination, name, obj)``, or ``@patch(destination)`` on a function of that name."""
    destination, name = _argument(node, 0, "destination"), _argument(node, 1, "name")
    names = list(texts_of(state.value(name)))
    if not names and own is not None and not isinstance(own.node, ast.Lambda):
        names = [own.node.name]
    found = state.put(
        attributes(state.value(destination), names),
        node.lineno,
        _argument(node, 2, "obj") if own is None else None,
        value=(own,) if own is not None else (),
    )
    return _rest(node, [destination]) if found else None


def _mock(state: State, node: ast.Call, called: str) -> Sequence[ast.expr] | None:
    base = next((one for one in _MOCK if called == one or called.startswith(f"{one}.")), None)
    if base is None:
        return None
    owner = _argument(node, 0, "target")
    held = state.value(owner)
    form = called.removeprefix(base)
    if form == "":
        found = state.put(_spelled(list(texts_of(held))), node.lineno, _argument(node, 1, "new"))
    elif form == ".object":
        names = list(texts_of(state.value(_argument(node, 1, "attribute"))))
        found = state.put(attributes(_owners(held), names), node.lineno, _argument(node, 2, "new"))
    elif form == ".multiple":
        given = [(one.arg, one.value) for one in node.keywords if one.arg and one.arg not in _MULTIPLE]
        put = [state.put(attributes(_owners(held), [name]), node.lineno, value) for name, value in given]
        found = any(put)
    else:
        found = form == ".dict" and _modules(state, node, held)
    return _rest(node, [owner]) if found else None


def _modules(state: State, node: ast.Call, held: Values) -> bool:
    """``patch.dict(sys.modules, {...})``."""
    if Name("sys", "modules") not in held and "sys.modules" not in texts_of(held):
        return False
    tables = [one for one in state.value(_argument(node, 1, "values")) if isinstance(one, Table)]
    pairs = [(text, value) for table in tables for key, value in table.pairs for text in texts_of(key)]
    put = [state.put((Name(text),), node.lineno, value=value) for text, value in pairs]
    return any(put)


def _owners(held: Values) -> Values:
    """What a class or module given to mock stands for: the thing itself, or its dotted name."""
    return _spelled(list(texts_of(held)), whole=True) or held


def _spelled(paths: Sequence[str], *, whole: bool = False) -> tuple[Name, ...]:
    """Names of vLLM spelled with dots alone; classes are told from modules by their capitals.

    Without a capital the last part is a name in a module, or with ``whole`` it is the module.
    """
    found = []
    for path in paths:
        parts = path.split(".")
        if len(parts) > 1 and parts[0] == TOP:
            capital = (place for place, part in enumerate(parts) if part.lstrip("_")[:1].isupper())
            first = next(capital, len(parts) if whole else len(parts) - 1)
            found.append(Name(".".join(parts[:first]), ".".join(parts[first:])))
    return tuple(found)
