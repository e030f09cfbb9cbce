"""The functions that stand over a patch's function: they count a hit, and hand it the layer beneath.

To pack arguments and unpack them again costs more than all else that a layer does. So a layer has the very parameters
of the function it stands over, and calls a copy of it that takes them as they are, the tuple of ``*args`` and the
dictionary of ``**kwargs`` included: arguments are sorted out once, as if there were no layer.

Its code claims the place of the other's: tracebacks and ``inspect.getsource`` show what the author wrote, and vLLM,
which reads every file that it has traced through, finds one that is there.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from itertools import islice
from types import CellType, CodeType, FunctionType

from vllm_graft.patching.functions import FunctionKind, code_objects, kind_of
from vllm_graft.patching.surgery import FINDER, Hit, uncounted

_HIT, _FUNCTION, _BENEATH = "_graft_hit", "_graft_function", "_graft_beneath"
_BIND, _FIND = "_graft_bind", "_graft_find"

_ASYNC: frozenset[FunctionKind] = frozenset({"coroutine", "async generator"})


def counted(function: FunctionType, hit: Hit) -> FunctionType:
    """The function with a hit counted at each call."""
    if hit is uncounted:
        return function
    return _layer(function, {_HIT: hit, _FUNCTION: function})


def passing(function: FunctionType, beneath: FunctionType, position: int, hit: Hit) -> FunctionType:
    """The function, given the layer beneath as its parameter ``call``, with a hit counted at each call."""
    finder = getattr(beneath, FINDER, None)
    if position == 0:
        call = _BENEATH
    elif finder is not None:
        call = f"{_FIND}({{self}})"
    else:
        call = f"{_BIND}({_BENEATH}, {{self}})"
        if kind_of(function) in _ASYNC:
            # Cheaper, and torch.compile, which refuses it, traces nothing asynchronous. None cannot be bound so.
            call += f" if {{self}} is None else {_BENEATH}.__get__({{self}})"
    held = {_HIT: hit, _FUNCTION: function, _BENEATH: beneath, _BIND: partial, _FIND: finder}
    return _layer(function, held, position, call)


def code_under(made: FunctionType) -> CodeType:
    """The code that runs under a layer for the author's function; a function without a layer has its own."""
    names = made.__code__.co_freevars
    if _FUNCTION not in names:
        return made.__code__
    function: FunctionType = (made.__closure__ or ())[names.index(_FUNCTION)].cell_contents
    return function.__code__


_ANY = {
    None: ("*args, **kwargs", "*args, **kwargs"),
    0: ("*args, **kwargs", "{call}, *args, **kwargs"),
    1: ("self, /, *args, **kwargs", "self, {call}, *args, **kwargs"),
}
"""By the position of ``call``, parameters and arguments of a layer over a function that has to be called as it is."""


def _layer(
    function: FunctionType, held: dict[str, object], position: int | None = None, call: str = ""
) -> FunctionType:
    """A closure over ``held`` that passes its arguments on, with ``call`` put in at ``position``."""
    code = function.__code__
    # A decorator may hide the parameter ``call``, and another parameter may go by a name that the layer needs.
    hidden = position is not None and position >= code.co_argcount
    as_it_is = hidden or not held.keys().isdisjoint(code.co_varnames)
    if as_it_is:
        parameters, arguments = _ANY[position]
        arguments = arguments.format(call=call.format(self="self"))
    else:
        parameters, arguments = _signature(code, position, call)
        held[_FUNCTION] = _flattened(function)
    made = _compiled(kind_of(function), parameters, arguments, held[_HIT] is not uncounted)
    made = made.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
    closure = tuple(CellType(held[name]) for name in made.co_freevars)
    layer = FunctionType(made, function.__globals__, function.__name__, None, closure)
    if not as_it_is:
        layer.__defaults__ = _defaults(function, position)
        layer.__kwdefaults__ = function.__kwdefaults__
    return layer


def _flattened(function: FunctionType) -> FunctionType:
    """A copy that takes everything by position, in the order in which code keeps its variables."""
    code = function.__code__
    packed = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    count = code.co_argcount + code.co_kwonlyargcount + (code.co_flags & packed).bit_count()
    flat = code.replace(co_argcount=count, co_posonlyargcount=0, co_kwonlyargcount=0, co_flags=code.co_flags & ~packed)
    return FunctionType(flat, function.__globals__, function.__name__, None, function.__closure__)


def _defaults(function: FunctionType, position: int | None) -> tuple[object, ...]:
    """The defaults of a function's positional parameters but for that of ``call``."""
    defaults = list(function.__defaults__ or ())
    required = function.__code__.co_argcount - len(defaults)
    if position is not None and position >= required:
        del defaults[position - required]
    return tuple(defaults)


def _signature(code: CodeType, position: int | None, call: str) -> tuple[str, str]:
    """The parameters of a layer over a function with this code, and the arguments for its flattened copy."""
    names = iter(code.co_varnames)
    given = list(islice(names, code.co_argcount))
    named = list(islice(names, code.co_kwonlyargcount))
    rest = [next(names)] if code.co_flags & inspect.CO_VARARGS else []
    others = [next(names)] if code.co_flags & inspect.CO_VARKEYWORDS else []
    passed = [*given, *named, *rest, *others]
    slash = code.co_posonlyargcount
    if position is not None:
        passed[position] = call.format(self=given[0])
        slash -= position < slash
        del given[position]
    if slash:
        given.insert(slash, "/")
    if rest or named:
        given.append("*" + "".join(rest))
    return ", ".join([*given, *named, *(f"**{name}" for name in others)]), ", ".join(passed)


_BODIES: dict[FunctionKind, str] = {
    "plain": """
        return {}""",
    "coroutine": """
        return await {}""",
    "generator": """
        return (yield from {})""",
    "async generator": """
        inner = {}
        try:
            item = await anext(inner)
            while True:
                try:
                    sent = yield item
                except GeneratorExit:
                    await inner.aclose()
                    raise
                except BaseException as error:
                    item = await inner.athrow(error)
                else:
                    item = await inner.asend(sent)
        except StopAsyncIteration:
            return""",
}
"""How a layer calls its function, being of the same kind: callers ask whether a function is a coroutine function."""


@cache
def _compiled(kind: FunctionKind, parameters: str, arguments: str, counts: bool) -> CodeType:
    """The code of a layer, all of it on its first line."""
    import ast

    head = "async def" if kind in _ASYNC else "def"
    tree = ast.parse(f"""
def over({_HIT}, {_FUNCTION}, {_BENEATH}, {_BIND}, {_FIND}):
    {head} layer({parameters}):
        {f"{_HIT}()" if counts else "pass"}{_BODIES[kind].format(f"{_FUNCTION}({arguments})")}
""")
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.arg | ast.excepthandler | ast.keyword):
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = -1
    return next(code for code in code_objects(compile(tree, "<string>", "exec")) if code.co_name == "layer")
