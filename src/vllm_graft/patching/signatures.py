"""Whether a hook can take the arguments that upstream's function takes, and how to say that it cannot."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from inspect import Parameter
from types import FunctionType
from typing import Final

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


def mismatch(attribute: str, mine: FunctionType, theirs: FunctionType, call: int | None, bound: bool) -> str:
    """Say why ``mine`` cannot take the arguments of ``theirs``, with both signatures; empty where it can.

    call:   the position of the parameter ``call`` in ``mine``, which upstream has no counterpart of; None without one
    bound:  whether the first parameter is self or cls
    """
    ours, upstreams = parameters(mine), parameters(theirs)
    if ours is None or upstreams is None:
        return ""
    # A decorator without functools.wraps shows the parameters of its wrapper, and not what callers pass.
    made = theirs.__name__ != attribute
    return compare(attribute, ours, upstreams, call, bound, made=made)


def compare(
    attribute: str,
    ours: Sequence[Parameter],
    upstreams: Sequence[Parameter],
    call: int | None,
    bound: bool,
    *,
    made: bool = False,
) -> str:
    """The same of parameters, wherever they were read; ``made``: ``*`` and ``**`` stand for arguments nobody knows."""
    hook = _Accepts([parameter for at, parameter in enumerate(ours) if at != call], bound)
    by_name = not (attribute.startswith("__") and attribute.endswith("__")) or attribute in _CALLED_BY_NAME
    problem = next(hook.problems(_Accepts(upstreams, bound), by_name=by_name, made=made), "")
    if not problem:
        return ""
    return (
        f"{attribute!r} cannot take what vLLM passes: {problem}. The hook is {attribute}{_shown(ours)}, "
        f"upstream's is {attribute}{_shown(upstreams)}"
    )


def accessor_mismatch(attribute: str, accessors: property, *, wraps: bool) -> str:
    """The same of a property's accessors, which Python passes the object and, to set it, a value."""
    owner, value = (Parameter(name, Parameter.POSITIONAL_ONLY) for name in ("self", "value"))
    for function, upstreams in (
        (accessors.fget, [owner]),
        (accessors.fset, [owner, value]),
        (accessors.fdel, [owner]),
    ):
        ours = parameters(function) if isinstance(function, FunctionType) else None
        if ours is None:
            continue
        call = 1 if wraps and len(ours) > 1 and ours[1].name == "call" else None
        if problem := compare(attribute, ours, upstreams, call, bound=True):
            return problem
    return ""


def written(taken: ast.arguments) -> list[Parameter]:
    """The parameters of a function as its source has them."""
    positional = [*taken.posonlyargs, *taken.args]
    without = len(positional) - len(taken.defaults)
    defaults = [Parameter.empty] * without + [_Text(ast.unparse(one)) for one in taken.defaults]
    found = [
        Parameter(one.arg, _POSITIONAL[place >= len(taken.posonlyargs)], default=default)
        for place, (one, default) in enumerate(zip(positional, defaults, strict=True))
    ]
    if taken.vararg is not None:
        found.append(Parameter(taken.vararg.arg, Parameter.VAR_POSITIONAL))
    for one, held in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
        default = Parameter.empty if held is None else _Text(ast.unparse(held))
        found.append(Parameter(one.arg, Parameter.KEYWORD_ONLY, default=default))
    if taken.kwarg is not None:
        found.append(Parameter(taken.kwarg.arg, Parameter.VAR_KEYWORD))
    return found


def listed(tokens: Sequence[str]) -> list[Parameter]:
    """The parameters that the tokens of ``upstream.fingerprint.signature`` stand for."""
    found = []
    for token in tokens:
        name = token.removeprefix("kw ").lstrip("/*").removesuffix("=")
        default = _Text("...") if token.endswith("=") else Parameter.empty
        kinds = (kind for prefix, kind in _PREFIXES.items() if token.startswith(prefix))
        kind = next(kinds, Parameter.POSITIONAL_OR_KEYWORD)
        found.append(Parameter(name, kind, default=default))
    return found


class _Text:
    """A default as it is written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def parameters(function: FunctionType) -> list[Parameter] | None:
    """The parameters of a function; None where it has no signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


class _Accepts:
    """The parameters of a function after self or cls, sorted by how they can be given."""

    def __init__(self, parameters: Sequence[Parameter], bound: bool) -> None:
        if bound and parameters and parameters[0].kind in _POSITIONAL:
            parameters = parameters[1:]
        self.positional = [each for each in parameters if each.kind in _POSITIONAL]
        self.named = {each.name: each for each in parameters if each.kind in _NAMED}
        self.keyword_only = [each for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
        self.any_positional = _name_of(Parameter.VAR_POSITIONAL, parameters)
        self.any_named = _name_of(Parameter.VAR_KEYWORD, parameters)

    def problems(self, upstream: _Accepts, *, by_name: bool, made: bool) -> Iterator[str]:
        """Every argument that upstream takes and this does not, and every one that this needs and nobody passes."""
        for position, theirs in enumerate(upstream.positional):
            if position >= len(self.positional) and not self.any_positional:
                yield f"it has no place for {theirs.name!r}"
            elif by_name and theirs.name in upstream.named and not self._takes_named(theirs.name, position):
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
            yield from (f"it needs {each.name!r}, which nobody passes" for each in needed)
        if not upstream.any_named:
            needed = [each for each in self.keyword_only if each.default is Parameter.empty]
            yield from (f"it needs {each.name!r}, which nobody passes" for each in needed if each not in upstream)

    def _takes_named(self, name: str, position: int) -> bool:
        if name not in self.named:
            return bool(self.any_named) and position >= len(self.positional)
        places = [each.name for each in self.positional]
        # A parameter of that name at another place would get two values, or somebody else's.
        return name not in places or places.index(name) == position

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter.name in self.named


def _name_of(kind: inspect._ParameterKind, parameters: Sequence[Parameter]) -> str:
    """The name of the parameter that takes all further arguments; empty where there is none."""
    return next((each.name for each in parameters if each.kind is kind), "")


def _shown(parameters: Sequence[Parameter]) -> str:
    """The parameters as they are written, without annotations and with long defaults cut."""
    plain = [each.replace(annotation=Parameter.empty, default=_short(each.default)) for each in parameters]
    return str(inspect.Signature(plain))


class _Dots:
    def __repr__(self) -> str:
        return "..."


def _short(default: object) -> object:
    return default if default is Parameter.empty or len(repr(default)) <= _LONGEST_DEFAULT else _Dots()
