"""Facts about functions, read from their code objects: kinds, parameters and the names they mention.

Nothing is called and nothing is changed here; ``surgery.py`` makes new functions from what this module finds.
"""

from __future__ import annotations

import opcode
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, Literal

FunctionKind = Literal["plain", "coroutine", "generator", "async generator"]
Form = Literal["function", "classmethod", "staticmethod", "property", "value"]

Function = Callable[..., Any]
"""A plain function, as the type checker sees it."""

ORIGINAL = "_original_"
"""What the author puts before a name to call the layer beneath: ``self._original_record(...)``."""

_FLAGS: dict[int, FunctionKind] = {0x80: "coroutine", 0x100: "coroutine", 0x20: "generator", 0x200: "async generator"}


def kind_of(function: FunctionType) -> FunctionKind:
    """How a call of the function behaves: plain, coroutine, generator or async generator."""
    flags = function.__code__.co_flags
    return next((kind for flag, kind in _FLAGS.items() if flags & flag), "plain")


def innermost(function: FunctionType) -> FunctionType:
    """The function that decorators made with ``functools.wraps`` stand around, or the function itself."""
    seen = set()
    while id(function) not in seen:
        seen.add(id(function))
        beneath = getattr(function, "__wrapped__", None)
        if not isinstance(beneath, FunctionType):
            break
        function = beneath
    return function


def parameter_at(function: FunctionType, position: int) -> str:
    """The name of the positional parameter at ``position`` as the author wrote it, or an empty string."""
    code = innermost(function).__code__
    return code.co_varnames[position] if position < code.co_argcount else ""


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """The code object and every one nested in it: inner functions, lambdas, comprehensions, classes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def reachable(function: FunctionType) -> list[FunctionType]:
    """The function and those its closures hold, so that a decorated function shows the one beneath."""
    found: dict[int, FunctionType] = {}
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if id(one) in found:
            continue
        found[id(one)] = one
        waiting.extend(value for value in closure_values(one) if isinstance(value, FunctionType))
    return list(found.values())


def closure_values(function: FunctionType) -> Iterator[object]:
    """What the closure's cells hold; a cell that is still empty is left out."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def names_mentioned(function: FunctionType) -> set[str]:
    """Every global and attribute name that the function, or one reachable from it, mentions."""
    return {name for one in reachable(function) for code in code_objects(one.__code__) for name in code.co_names}


def originals_mentioned(function: FunctionType) -> set[str]:
    """The names ``x`` of every ``_original_x`` that the function mentions."""
    return {name.removeprefix(ORIGINAL) for name in names_mentioned(function) if name.startswith(ORIGINAL)}


def originals_misused(function: FunctionType) -> str:
    """An ``_original_x`` that is used otherwise than by reading an attribute, or an empty string."""
    for one in reachable(function):
        for code in code_objects(one.__code__):
            if not any(name.startswith(ORIGINAL) for name in code.co_names) or not _names_otherwise(code):
                continue
            import dis

            for step in dis.get_instructions(code):
                name = step.argval if isinstance(step.argval, str) else ""
                if name in code.co_names and name.startswith(ORIGINAL) and step.opname not in _READS:
                    return name
    return ""


_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_OTHERWISE = frozenset(number for number in opcode.hasname if opcode.opname[number] not in _READS)


def _names_otherwise(code: CodeType) -> bool:
    """Whether the code does anything with names besides reading attributes; far quicker than taking it apart."""
    return not _OTHERWISE.isdisjoint(code.co_code[::2])


def strings_mentioned(function: FunctionType) -> set[str]:
    """Every string constant of the function and of those reachable from it."""
    return {
        constant
        for one in reachable(function)
        for code in code_objects(one.__code__)
        for constant in code.co_consts
        if isinstance(constant, str)
    }


def uses_class_cell(function: FunctionType) -> bool:
    """Whether the function says ``super()`` without arguments, or ``__class__``."""
    return any("__class__" in one.__code__.co_freevars for one in reachable(function))


def form_of(value: object) -> Form:
    """Which of the five forms a class attribute has, as far as its type says."""
    if isinstance(value, FunctionType):
        return "function"
    if isinstance(value, classmethod):
        return "classmethod"
    if isinstance(value, staticmethod):
        return "staticmethod"
    return "property" if isinstance(value, property) else "value"


def functions_in(value: object) -> tuple[FunctionType, ...]:
    """The plain functions that a function, classmethod, staticmethod or property is made of."""
    if isinstance(value, property):
        parts: tuple[object, ...] = (value.fget, value.fset, value.fdel)
    elif isinstance(value, classmethod | staticmethod):
        parts = (value.__func__,)
    else:
        parts = (value,)
    return tuple(part for part in parts if isinstance(part, FunctionType))


def described(value: object) -> str:
    """Where a value comes from, for a message: module, qualified name and line, or its type.

    The line tells a wrapper that goes by the name of what it wraps.
    """
    functions = functions_in(value)
    for part in (*functions, value):
        module, name = getattr(part, "__module__", None), getattr(part, "__qualname__", None)
        if isinstance(module, str) and isinstance(name, str):
            line = f" ({functions[0].__code__.co_filename}:{functions[0].__code__.co_firstlineno})" if functions else ""
            return f"{module}.{name}{line}"
    return f"a value of type {type(value).__name__}"
