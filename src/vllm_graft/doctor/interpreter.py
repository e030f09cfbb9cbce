"""A small interpreter of a plugin's function: does it raise when it is called a second time? Nothing is run.

It follows names of the module, attributes and entries of dictionaries as long as they hold constants or collections.
Everything else is unknown, and if a branch depends on that, it gives no answer.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Final, Literal

from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import Namespace

InterpretedValue = object
Variables = dict[str, InterpretedValue]

_UNKNOWN: Final = object()
_THING: Final = object()  # some object that is not None: the result of a call or constructor

_CALLS: Final = "calls of functions"  # the entry of the state that counts the functions entered
_DEEP: Final = 4

_ADDING: Final = frozenset({"append", "add", "insert"})
_ORDERS: Final = {ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le}

Ending = Literal["end", "stop", "unknown"] | ast.stmt
"""The end of a body: at its last statement, by a return, in a way that is unknown, or by the statement that raises."""


def raises_when_called_again(module: ast.Module, function: ast.FunctionDef) -> ast.stmt | None:
    """Return the statement that raises at the second call of a function; None if none does for certain."""
    if function.decorator_list:
        return None
    # A variable that the function sets is taken to be unset before.
    state: Variables = {name: None for name in _bound(function.body) if name.startswith("os.environ[")}
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


def _define(state: Variables, node: ast.stmt, within: str = "") -> None:
    """Record the values that a statement of the module, or of a class in it, assigns."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef) and not within:
        state[node.name] = node
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


def _run(body: Sequence[ast.stmt], state: Variables) -> Ending:
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
        elif isinstance(node, ast.Try) and not node.handlers:
            ending = _run([*node.body, *node.finalbody], state)
        elif isinstance(node, ast.Expr):
            ending = _call(state, node)
        elif any(isinstance(each, ast.Raise | ast.Return) for each in ast.walk(node)) and not isinstance(
            node, Function | ast.ClassDef
        ):
            return "unknown"
        else:
            state.update(dict.fromkeys(_bound([node]), _UNKNOWN))
        if ending != "end":
            return ending
    return "end"


def _value(state: Variables, node: ast.expr) -> InterpretedValue:
    """Evaluate an expression; _UNKNOWN if that needs more than constants."""
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
        op, left, right = node.ops[0], node.left, ast.unparse(node.comparators[0])
        if right == "os.environ" and isinstance(op, ast.In | ast.NotIn) and isinstance(left, ast.Constant):
            set_to = state.get(f"os.environ[{left.value!r}]", _UNKNOWN)
            return _UNKNOWN if set_to is _UNKNOWN else (set_to is not None) == isinstance(op, ast.In)
        return _compare(node.ops[0], _value(state, node.left), _value(state, node.comparators[0]))
    if isinstance(node, ast.Call):
        return _called(state, node)
    return _UNKNOWN


def _called(state: Variables, node: ast.Call) -> InterpretedValue:
    name, given = ast.unparse(node.func), node.args
    if name in ("set", "list", "dict") and not given and not node.keywords:
        return ()
    if name in ("hasattr", "getattr") and len(given) >= 2 and isinstance(given[1], ast.Constant):
        key = f"{ast.unparse(given[0])}." + str(given[1].value)
        holder = state.get(ast.unparse(given[0]))
        lacks = isinstance(holder, ast.AST) and _lacks(holder, str(given[1].value))
        if name == "hasattr":
            return key in state or (False if lacks else _UNKNOWN)
        # A flag on an object from elsewhere is taken to be unset before.
        default = len(given) == 3 and (lacks or not isinstance(holder, ast.AST))
        return state.get(key, _value(state, given[2]) if default else _UNKNOWN)
    if name in ("os.environ.get", "os.getenv") and given and isinstance(given[0], ast.Constant):
        held = state.get(f"os.environ[{given[0].value!r}]", _UNKNOWN)
        return held if held is not None or len(given) == 1 else _value(state, given[1])
    if name == "len" and len(given) == 1 and isinstance(held := _value(state, given[0]), tuple):
        return len(held)
    return _THING if name[:1].isupper() or name == "object" else _UNKNOWN


def _lacks(holder: ast.AST, name: str) -> bool:
    """Return whether a function or class of the module has only what the module gives it, and not this attribute."""
    if isinstance(holder, ast.FunctionDef):
        return not holder.decorator_list and not hasattr(FunctionType, name)
    if not isinstance(holder, ast.ClassDef) or holder.bases or holder.keywords or holder.decorator_list:
        return False
    held = Namespace(holder)
    return held.is_closed and name not in held.bound and not hasattr(type, name)


def _compare(op: ast.cmpop, left: InterpretedValue, right: InterpretedValue) -> InterpretedValue:
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


def _call(state: Variables, node: ast.Expr) -> Ending:
    """Carry out a call: of a function of the module, of ``sys.exit``, or one that adds to a collection.

    Any other call on a collection makes it unknown.
    """
    call = node.value
    if not isinstance(call, ast.Call):
        return "end"
    function = state.get(ast.unparse(call.func))
    if isinstance(function, ast.FunctionDef):
        return _call_function(state, function, call)
    if ast.unparse(call.func) in ("sys.exit", "exit", "quit"):
        return node
    name = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    held = state.get(name)
    if isinstance(held, tuple) and isinstance(call.func, ast.Attribute):
        last = _value(state, call.args[-1]) if call.args else _UNKNOWN
        added = _THING if last is _UNKNOWN else last
        state[name] = (*held, added) if call.func.attr in _ADDING else _UNKNOWN
    return "end"


def _call_function(state: Variables, function: ast.FunctionDef, call: ast.Call) -> Ending:
    """Run a function of the module with plain arguments; its own variables are gone afterwards."""
    names = [one.arg for one in function.args.args]
    plain = not call.keywords and len(call.args) == len(names) and not function.decorator_list
    deep = state.get(_CALLS, 0)
    if not plain or function.args.vararg or not isinstance(deep, int) or deep >= _DEEP:
        return "unknown" if any(isinstance(each, ast.Raise) for each in ast.walk(function)) else "end"
    shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    own = {*names, *(name for name in _bound(function.body) if name.isidentifier())} - shared
    before = {name: state.get(name, _UNKNOWN) for name in own}
    # The arguments are the caller's: its variables may have the names of the function's own.
    given = [_value(state, one) for one in call.args]
    state.update(dict.fromkeys(own, _UNKNOWN))
    state.update(zip(names, given, strict=True))
    state[_CALLS] = deep + 1
    ending = _run(function.body, state)
    state.update(before)
    state[_CALLS] = deep
    return "end" if ending == "stop" else ending


def _assign(state: Variables, target: ast.expr, value: InterpretedValue) -> None:
    if isinstance(target, ast.Name | ast.Attribute | ast.Subscript):
        state[ast.unparse(target)] = value
    if isinstance(target, ast.Subscript) and isinstance(held := state.get(ast.unparse(target.value)), tuple):
        known = _value(state, target.slice)
        key = _THING if known is _UNKNOWN else known
        state[ast.unparse(target.value)] = (*held, key)


def _truth(value: InterpretedValue) -> bool | None:
    if value is _UNKNOWN:
        return None
    return True if value is _THING or isinstance(value, ast.AST) else bool(value)


def _bound(body: Iterable[ast.AST]) -> set[str]:
    """Return the names, entries and attributes that statements assign."""
    nodes = [each for node in body for each in ast.walk(node)]
    places = (ast.Name, ast.Attribute, ast.Subscript)
    return {ast.unparse(each) for each in nodes if isinstance(each, places) and isinstance(each.ctx, ast.Store)}
