"""A small interpreter of a plugin's function: does it raise when it is called a second time? Nothing is run.

It follows names of the module, attributes and entries of dictionaries as long as they hold constants or collections.
Everything else is unknown, and where a branch depends on that, it gives no answer.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from vllm_graft.sources.fingerprint import Function

Value = object
State = dict[str, Value]

_UNKNOWN: Final = object()
_THING: Final = object()  # some object that is not None: the result of a call or constructor

_ADDING: Final = frozenset({"append", "add", "insert"})
_ORDERS: Final = {ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le}

Ending = Literal["end", "stop", "unknown"] | ast.stmt
"""The end of a body: at its last statement, by a return, in a way that is unknown, or by the statement that raises."""


def raises_when_called_again(module: ast.Module, function: ast.FunctionDef) -> ast.stmt | None:
    """Return the statement that raises at the second call of a function; None where none does for certain."""
    if function.decorator_list:
        return None
    state: State = {}
    for node in module.body:
        _define(state, node)
    shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    local = {name for name in _bound(function.body) if name.isidentifier() and name not in shared}
    for time in ("first", "second"):
        state.update(dict.fromkeys(local, _UNKNOWN))
        ending = _run(function.body, state)
        if isinstance(ending, ast.stmt):
            return ending if time == "second" else None
        if ending == "unknown":
            return None
    return None


def _define(state: State, node: ast.stmt, within: str = "") -> None:
    """Record the values that a statement of the module, or of a class in it, assigns."""
    if isinstance(node, ast.ClassDef) and not within:
        for each in node.body:
            _define(state, each, f"{node.name}.")
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        name = within + ast.unparse(target)
        state[name] = _value(state, node.value)
        if isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant):
                    state[f"{name}[{key.value!r}]"] = _value(state, value)


def _run(body: Sequence[ast.stmt], state: State) -> Ending:
    for node in body:
        ending: Ending = "end"
        if isinstance(node, ast.Raise):
            return node
        if isinstance(node, ast.Return):
            return "stop"
        if isinstance(node, ast.Assert):
            # One that cannot be judged is taken to hold: it has nothing to do with a second call.
            ending = node if _truth(_value(state, node.test)) is False else "end"
        elif isinstance(node, ast.If) and (held := _truth(_value(state, node.test))) is not None:
            ending = _run(node.body if held else node.orelse, state)
        elif isinstance(node, ast.With):
            ending = _run(node.body, state)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                _assign(state, target, _value(state, node.value))
        elif isinstance(node, ast.AugAssign):
            one, two = state.get(ast.unparse(node.target), _UNKNOWN), _value(state, node.value)
            adds = isinstance(node.op, ast.Add) and isinstance(one, int) and isinstance(two, int)
            _assign(state, node.target, one + two if adds else _UNKNOWN)  # type: ignore[operator]
        elif isinstance(node, ast.Expr):
            _call(state, node.value)
        elif any(isinstance(each, ast.Raise | ast.Return) for each in ast.walk(node)) and not isinstance(
            node, Function | ast.ClassDef
        ):
            return "unknown"
        else:
            state.update(dict.fromkeys(_bound([node]), _UNKNOWN))
        if ending != "end":
            return ending
    return "end"


def _value(state: State, node: ast.expr) -> Value:
    """Evaluate an expression; _UNKNOWN where that needs more than constants."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Set | ast.Tuple | ast.Dict):
        held = node.keys if isinstance(node, ast.Dict) else node.elts
        return tuple(each.value if isinstance(each, ast.Constant) else _THING for each in held)
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        return state.get(ast.unparse(node), _UNKNOWN)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        held_true = _truth(_value(state, node.operand))
        return _UNKNOWN if held_true is None else not held_true
    if isinstance(node, ast.BoolOp):
        truths = [_truth(_value(state, each)) for each in node.values]
        decisive = isinstance(node.op, ast.Or)
        return decisive if decisive in truths else _UNKNOWN if None in truths else not decisive
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(node.ops[0], _value(state, node.left), _value(state, node.comparators[0]))
    if isinstance(node, ast.Call):
        return _called(state, node)
    return _UNKNOWN


def _called(state: State, node: ast.Call) -> Value:
    name, given = ast.unparse(node.func), node.args
    if name in ("set", "list", "dict") and not given and not node.keywords:
        return ()
    if name in ("hasattr", "getattr") and len(given) >= 2 and isinstance(given[1], ast.Constant):
        key = f"{ast.unparse(given[0])}." + str(given[1].value)
        if name == "hasattr":
            return key in state or _UNKNOWN
        return state.get(key, _value(state, given[2]) if len(given) == 3 else _UNKNOWN)
    if name == "len" and len(given) == 1 and isinstance(held := _value(state, given[0]), tuple):
        return len(held)
    return _THING if name[:1].isupper() or name == "object" else _UNKNOWN


def _compare(op: ast.cmpop, left: Value, right: Value) -> Value:
    if _UNKNOWN in (left, right):
        return _UNKNOWN
    if isinstance(op, ast.Is | ast.IsNot) and (left is None or right is None or isinstance(left, bool)):
        return (left is right) == isinstance(op, ast.Is)
    if isinstance(op, ast.In | ast.NotIn) and isinstance(right, tuple):
        if _THING in (left, *right) and left not in right:
            return _UNKNOWN
        return (left in right) == isinstance(op, ast.In)
    if _THING in (left, right):
        return _UNKNOWN
    if isinstance(op, ast.Eq | ast.NotEq):
        return (left == right) == isinstance(op, ast.Eq)
    order = _ORDERS.get(type(op))
    return order(left, right) if order is not None and isinstance(left, int) and isinstance(right, int) else _UNKNOWN


def _call(state: State, node: ast.expr) -> None:
    """Carry out a call that adds to a collection; any other call on one makes it unknown."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    name = ast.unparse(node.func.value)
    held = state.get(name)
    if isinstance(held, tuple):
        last = _value(state, node.args[-1]) if node.args else _UNKNOWN
        added = _THING if last is _UNKNOWN else last
        state[name] = (*held, added) if node.func.attr in _ADDING else _UNKNOWN


def _assign(state: State, target: ast.expr, value: Value) -> None:
    if isinstance(target, ast.Name | ast.Attribute | ast.Subscript):
        state[ast.unparse(target)] = value
    if isinstance(target, ast.Subscript) and isinstance(held := state.get(ast.unparse(target.value)), tuple):
        key = target.slice.value if isinstance(target.slice, ast.Constant) else _THING
        state[ast.unparse(target.value)] = (*held, key)


def _truth(value: Value) -> bool | None:
    if value is _UNKNOWN:
        return None
    return True if value is _THING else bool(value)


def _bound(body: Iterable[ast.AST]) -> set[str]:
    """Return the names, entries and attributes that statements assign."""
    nodes = [each for node in body for each in ast.walk(node)]
    places = (ast.Name, ast.Attribute, ast.Subscript)
    return {ast.unparse(each) for each in nodes if isinstance(each, places) and isinstance(each.ctx, ast.Store)}
