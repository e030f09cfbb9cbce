"""Facts about functions, read from their code objects and signatures; nothing is called and nothing is changed.

The second half compares signatures: whether a hook accepts every call that upstream's function accepts.
"""

from __future__ import annotations

import ast
import inspect
import opcode
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from types import CodeType, FunctionType
from typing import Any, Final, Literal

from vllm_graft.sources.scopes import decorators, own_nodes

FunctionKind = Literal["plain", "coroutine", "generator", "async generator"]
AttributeForm = Literal["function", "classmethod", "staticmethod", "property", "value"]

AnyCallable = Callable[..., Any]
"""A plain function, as the type checker sees it."""

ORIGINAL = "_original_"
"""The prefix by which an author calls the layer beneath: ``self._original_record(...)``."""

# inspect's CO_COROUTINE, CO_ITERABLE_COROUTINE, CO_GENERATOR and CO_ASYNC_GENERATOR.
_FLAGS: dict[int, FunctionKind] = {0x80: "coroutine", 0x100: "coroutine", 0x20: "generator", 0x200: "async generator"}


def kind_of(function: FunctionType) -> FunctionKind:
    """Return the kind of a function: plain, coroutine, generator or async generator."""
    flags = function.__code__.co_flags
    return next((kind for flag, kind in _FLAGS.items() if flags & flag), "plain")


KEEPING: Final = frozenset(
    {"property", "cached_property", "classmethod", "staticmethod", "abstractmethod", "override", "final", "setter",
     "getter", "deleter", "inference_mode", "no_grad"}
)  # fmt: skip
"""Decorators that leave the kind of a function as its statement shows it."""

MANAGERS: Final = frozenset({"contextmanager", "asynccontextmanager"})


def kind_in_source(
    node: ast.FunctionDef | ast.AsyncFunctionDef, besides: frozenset[str] = frozenset()
) -> FunctionKind | None:
    """Return the kind of the function that a definition makes; None if a decorator may make another of it.

    ``besides`` are more decorators that leave the kind as it is.
    """
    marks = decorators(node) - besides
    if not marks <= KEEPING | MANAGERS:
        return None
    if marks & MANAGERS:
        # What contextlib makes of a generator is a plain function, which returns the context manager.
        return "plain"
    yields = any(isinstance(one, ast.Yield | ast.YieldFrom) for one in own_nodes(node))
    if isinstance(node, ast.AsyncFunctionDef):
        return "async generator" if yields else "coroutine"
    return "generator" if yields else "plain"


def innermost(function: FunctionType) -> FunctionType:
    """Return the function inside decorators made with ``functools.wraps``, or the function itself."""
    seen = set()
    while id(function) not in seen:
        seen.add(id(function))
        beneath = getattr(function, "__wrapped__", None)
        if not isinstance(beneath, FunctionType):
            break
        function = beneath
    return function


def parameter_at(function: FunctionType, position: int) -> str:
    """Return the name of the positional parameter at ``position`` as the author wrote it, or an empty string."""
    code = innermost(function).__code__
    return code.co_varnames[position] if position < code.co_argcount else ""


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield the code object and every one nested in it: inner functions, lambdas, comprehensions, classes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def reachable(function: FunctionType) -> list[FunctionType]:
    """Return the function and those its closures hold: a decorated function is in its decorator's closure."""
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
    """Yield the contents of the closure's cells, without cells that are still empty."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def names_mentioned(function: FunctionType) -> set[str]:
    """Return every global and attribute name in the function and in those reachable from it."""
    return {name for one in reachable(function) for code in code_objects(one.__code__) for name in code.co_names}


def originals_misused(function: FunctionType) -> str:
    """Return an ``_original_x`` that is used other than by reading an attribute, or an empty string."""
    for one in reachable(function):
        for code in code_objects(one.__code__):
            # Far quicker than disassembling: code that only reads attributes cannot misuse one.
            only_reads = _OTHERWISE.isdisjoint(code.co_code[::2])
            if only_reads or not any(name.startswith(ORIGINAL) for name in code.co_names):
                continue
            import dis

            for step in dis.get_instructions(code):
                name = step.argval if isinstance(step.argval, str) else ""
                if name in code.co_names and name.startswith(ORIGINAL) and step.opname not in _READS:
                    return name
    return ""


_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
"""The instructions that read an attribute; up to Python 3.11 a method has one of its own."""

_OTHERWISE = frozenset(number for number in opcode.hasname if opcode.opname[number] not in _READS)


def never_reads(function: FunctionType, parameter: str) -> bool:
    """Return whether the function certainly never reads a parameter of its own.

    Not certain: a decorator may read it, an inner function may, and ``locals()`` or a frame may give it away.
    """
    code = function.__code__
    if innermost(function) is not function or parameter in code.co_cellvars or not _SPIES.isdisjoint(code.co_names):
        return False
    import dis

    # From Python 3.13 on one instruction may load two variables; its value is then a tuple of names.
    loads = (step.argval for step in dis.get_instructions(code) if "LOAD" in step.opname)
    return not any(parameter == value or (isinstance(value, tuple) and parameter in value) for value in loads)


_SPIES: Final = frozenset({"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe", "stack"})
"""Names by which code gets at its own variables without naming them."""


def strings_mentioned(function: FunctionType) -> set[str]:
    """Return every string constant of the function and of those reachable from it."""
    codes = [code for one in reachable(function) for code in code_objects(one.__code__)]
    return {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}


def uses_class_cell(function: FunctionType) -> bool:
    """Return whether the function uses ``super()`` without arguments, or ``__class__``."""
    return any("__class__" in one.__code__.co_freevars for one in reachable(function))


def attribute_form(value: object) -> AttributeForm:
    """Return which of the five forms a class attribute has, judged by its type."""
    if isinstance(value, FunctionType):
        return "function"
    if isinstance(value, classmethod):
        return "classmethod"
    if isinstance(value, staticmethod):
        return "staticmethod"
    return "property" if isinstance(value, property) else "value"


def functions_in(value: object) -> tuple[FunctionType, ...]:
    """Return the plain functions in a function, classmethod, staticmethod or property."""
    if isinstance(value, property):
        parts: tuple[object, ...] = (value.fget, value.fset, value.fdel)
    elif isinstance(value, classmethod | staticmethod):
        parts = (value.__func__,)
    else:
        parts = (value,)
    return tuple(part for part in parts if isinstance(part, FunctionType))


def describe_origin(value: object) -> str:
    """Describe where a value comes from: module, qualified name and line, or its type.

    The line gives away a wrapper that carries the name of what it wraps.
    """
    functions = functions_in(value)
    for part in (*functions, value):
        module, name = getattr(part, "__module__", None), getattr(part, "__qualname__", None)
        if isinstance(module, str) and isinstance(name, str):
            line = f" ({functions[0].__code__.co_filename}:{functions[0].__code__.co_firstlineno})" if functions else ""
            return f"{module}.{name}{line}"
    return f"a value of type {type(value).__name__}"


_POSITIONAL: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED: Final = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_CALLED_BY_NAME: Final = ("__init__", "__new__", "__call__")
_PREFIXES: Final[dict[str, inspect._ParameterKind]] = {
    "**": Parameter.VAR_KEYWORD,
    "*": Parameter.VAR_POSITIONAL,
    "/": Parameter.POSITIONAL_ONLY,
    "kw ": Parameter.KEYWORD_ONLY,
}
_LONGEST_DEFAULT: Final = 24


def parameter_mismatch(
    attribute: str,
    ours: Sequence[Parameter],
    upstreams: Sequence[Parameter],
    call: int | None,
    bound: bool,
    *,
    made: bool = False,
) -> str:
    """Say why the parameters ``ours`` cannot take what ``upstreams`` can, with both signatures; empty if they can.

    call:   the position of the parameter ``call`` in ``ours``, which has no counterpart upstream; None without one
    bound:  whether the first parameter is self or cls
    made:   whether upstream's are those of a decorator's wrapper, whose ``*`` and ``**`` are not what callers pass
    """
    hook = _Arguments([parameter for at, parameter in enumerate(ours) if at != call], bound)
    by_name = not (attribute.startswith("__") and attribute.endswith("__")) or attribute in _CALLED_BY_NAME
    problem = next(hook.problems(_Arguments(upstreams, bound), by_name=by_name, made=made), "")
    if not problem:
        return ""
    return (
        f"{attribute!r} cannot take what vLLM passes: {problem}. The hook is {attribute}{_write_out(ours)}, "
        f"upstream's is {attribute}{_write_out(upstreams)}"
    )


def accessor_mismatch(attribute: str, accessors: property, *, wraps: bool) -> str:
    """Say why an accessor of a property cannot take the object and, to set it, a value; empty if all can."""
    owner, value = (Parameter(name, Parameter.POSITIONAL_ONLY) for name in ("self", "value"))
    parts = ((accessors.fget, [owner]), (accessors.fset, [owner, value]), (accessors.fdel, [owner]))
    for function, upstreams in parts:
        ours = parameters_of(function) if isinstance(function, FunctionType) else None
        if ours is None:
            continue
        call = 1 if wraps and len(ours) > 1 and ours[1].name == "call" else None
        if problem := parameter_mismatch(attribute, ours, upstreams, call, bound=True):
            return problem
    return ""


def parameters_in_source(taken: ast.arguments) -> list[Parameter]:
    """Return the parameters of a function from its source."""
    from vllm_graft.sources.fingerprint import each_parameter

    found = []
    for prefix, name, held in each_parameter(taken):
        default = Parameter.empty if held is None else _SourceText(ast.unparse(held))
        found.append(Parameter(name, _PREFIXES.get(prefix, Parameter.POSITIONAL_OR_KEYWORD), default=default))
    return found


def parameters_from_tokens(tokens: Sequence[str]) -> list[Parameter]:
    """Return the parameters that the tokens of ``sources.fingerprint.signature`` stand for."""
    from vllm_graft.sources.fingerprint import parse_parameter

    found = []
    for token in map(parse_parameter, tokens):
        default = _SourceText("...") if token.has_default else Parameter.empty
        kind = _PREFIXES.get(token.prefix, Parameter.POSITIONAL_OR_KEYWORD)
        found.append(Parameter(token.name, kind, default=default))
    return found


class _SourceText(str):
    """A default value whose ``repr`` is its source text."""

    __repr__ = str.__str__


def parameters_of(function: FunctionType) -> list[Parameter] | None:
    """Return the parameters of a function; None if it has no signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


class _Arguments:
    """The parameters of a function after self or cls, sorted by how they can be passed."""

    def __init__(self, parameters: Sequence[Parameter], bound: bool) -> None:
        if bound and parameters and parameters[0].kind in _POSITIONAL:
            parameters = parameters[1:]
        self.positional = [each for each in parameters if each.kind in _POSITIONAL]
        self.named = {each.name: each for each in parameters if each.kind in _NAMED}
        self.keyword_only = [each for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
        self.any_positional = _name_of(Parameter.VAR_POSITIONAL, parameters)
        self.any_named = _name_of(Parameter.VAR_KEYWORD, parameters)

    def problems(self, upstream: _Arguments, *, by_name: bool, made: bool) -> Iterator[str]:
        """Yield every argument that only upstream takes, and every one that only this function requires."""
        for position, theirs in enumerate(upstream.positional):
            if position >= len(self.positional) and not self.any_positional:
                yield f"it has no place for {theirs.name!r}"
            elif by_name and theirs.name in upstream.named:
                places = [each.name for each in self.positional]
                # A parameter of that name at another position would get two values, or another argument's.
                fits = theirs.name not in places or places.index(theirs.name) == position
                if theirs.name not in self.named:
                    fits = bool(self.any_named) and position >= len(self.positional)
                if not fits:
                    yield f"it cannot take {theirs.name!r} by name"
        for theirs in upstream.keyword_only:
            if theirs.name not in self.named and not self.any_named:
                yield f"it has no place for {theirs.name!r}"
        if upstream.any_positional and not self.any_positional and not made:
            yield f"it has no place for '*{upstream.any_positional}'"
        if upstream.any_named and not self.any_named and not made:
            yield f"it has no place for '**{upstream.any_named}'"
        if not upstream.any_positional:
            needed = [each for each in self.positional[len(upstream.positional) :] if each.default is Parameter.empty]
            by_keyword = {each.name for each in upstream.keyword_only}
            unknown = [each for each in needed if each.name not in by_keyword or each.name not in self.named]
            yield from (f"it needs {each.name!r}, which vLLM does not pass" for each in unknown)
        if not upstream.any_named:
            needed = [each for each in self.keyword_only if each.default is Parameter.empty]
            unnamed = [each for each in needed if each.name not in upstream.named]
            yield from (f"it needs {each.name!r}, which vLLM does not pass" for each in unnamed)
        optional = {each.name for each in upstream.named.values() if each.default is not Parameter.empty}
        needed = [each for each in self.named.values() if each.default is Parameter.empty and each.name in optional]
        yield from (f"it needs {each.name!r}, which upstream's callers may leave out" for each in needed)


def _name_of(kind: inspect._ParameterKind, parameters: Sequence[Parameter]) -> str:
    """Return the name of the parameter that takes all further arguments; empty if there is none."""
    return next((each.name for each in parameters if each.kind is kind), "")


def _write_out(parameters: Sequence[Parameter]) -> str:
    """Write the parameters out, without annotations and with long defaults cut."""

    def short(default: object) -> object:
        return default if default is Parameter.empty or len(repr(default)) <= _LONGEST_DEFAULT else _SourceText("...")

    plain = [each.replace(annotation=Parameter.empty, default=short(each.default)) for each in parameters]
    return str(inspect.Signature(plain))
