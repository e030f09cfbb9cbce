"""Making the functions that are set on a target; ``layers.py`` makes those that stand over a hook.

Only forms that torch.compile traces rightly are made: plain functions, closures and ``functools.partial``, put into a
classmethod, staticmethod or property where upstream has one. A bound ``types.MethodType``, ``function.__get__(self)``
(refused by torch 2.10), a descriptor of one's own and a proxy object all break or mislead the tracer. ``__wrapped__``
is never set: tools that follow it would see upstream's code in the place of what runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any, Final, cast

from vllm_graft.patching.functions import Form, code_objects, functions_in, reachable
from vllm_graft.patching.tally import Tally

Hit = Callable[[], None]
"""Called once at each entry of a layer."""


def hit_counter(tally: Tally, at: int) -> Hit:
    """A function that counts one hit in ``tally.cells[at]``."""

    def hit() -> None:
        tally.cells[at] += 1

    return once_when_traced(hit)


def uncounted() -> None:
    """Count nothing: properties are read too often, and too cheaply, to be counted."""


def once_when_traced(hit: Hit) -> Hit:
    """Let torch.compile run ``hit`` while it traces, and keep it out of the graph.

    Traced like other code, a counter would be a guard that fails at each call, or something the tracer refuses.
    """
    setattr(hit, "_dynamo_marked_constant", True)  # noqa: B010 - functions have no such attribute for a type checker
    return hit


def being_traced() -> bool:
    """Whether torch.compile is tracing on this thread just now."""
    context = getattr(sys.modules.get("torch._guards"), "TracingContext", None)
    return context is not None and context.try_get() is not None


def transplanted(function: FunctionType, patch: type, owner: type | None, renames: Mapping[str, str]) -> FunctionType:
    """A copy of a patch's function that belongs to ``owner``.

    ``super()`` starts from the owner, and every attribute name in ``renames`` is exchanged, so that
    ``self._original_x`` finds this layer's own neighbour. Functions held in closures, as decorators leave them, are
    copied likewise where they need it.
    """
    copies: dict[int, FunctionType] = {}

    def needs_copy(one: FunctionType) -> bool:
        return any(_touched(each, patch, renames) for each in reachable(one))

    def cell(old: CellType, fill: list[tuple[CellType, FunctionType]]) -> CellType:
        try:
            held = old.cell_contents
        except ValueError:
            return old
        if held is patch:
            return CellType(owner)
        if not (isinstance(held, FunctionType) and needs_copy(held)):
            return old
        new = CellType()
        fill.append((new, held))
        return new

    def copied(one: FunctionType) -> FunctionType:
        if id(one) in copies:
            return copies[id(one)]
        fill: list[tuple[CellType, FunctionType]] = []
        closure = tuple(cell(old, fill) for old in one.__closure__ or ())
        copy = FunctionType(_renamed(one.__code__, renames), one.__globals__, one.__name__, one.__defaults__, closure)
        copies[id(one)] = copy
        copy.__kwdefaults__ = one.__kwdefaults__
        copy.__annotations__ = dict(one.__annotations__)
        copy.__dict__.update({key: value for key, value in vars(one).items() if key != "__wrapped__"})
        for new, held in fill:
            new.cell_contents = copied(held)
        return copy

    return copied(function)


def _touched(function: FunctionType, patch: type, renames: Mapping[str, str]) -> bool:
    for held in function.__closure__ or ():
        try:
            if held.cell_contents is patch:
                return True
        except ValueError:
            continue
    return any(not renames.keys().isdisjoint(code.co_names) for code in code_objects(function.__code__))


def _renamed(code: CodeType, renames: Mapping[str, str]) -> CodeType:
    """The code with attribute names exchanged, down to its inner functions."""
    if not any(not renames.keys().isdisjoint(each.co_names) for each in code_objects(code)):
        return code
    return code.replace(
        co_names=tuple(renames.get(name, name) for name in code.co_names),
        co_consts=tuple(_renamed(each, renames) if isinstance(each, CodeType) else each for each in code.co_consts),
    )


FINDER: Final = "_graft_finder"
"""Where a function from ``from_bases`` keeps the part of it that only finds the bound method."""


def from_bases(owner: type, attribute: str, raw: object) -> object:
    """What ``super()`` finds under a name that the class inherits, in the form of ``raw``.

    It is looked up at each call, so that a base patched or reverted later is still what runs.
    """

    def found(self: Any) -> Any:
        return getattr(super(owner, self), attribute)

    def bound(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, self), attribute)(*args, **kwargs)

    setattr(bound, FINDER, found)

    def free(*args: object, **kwargs: object) -> object:
        return getattr(super(owner, owner), attribute)(*args, **kwargs)

    if isinstance(raw, classmethod):
        return classmethod(bound)
    if isinstance(raw, staticmethod):
        return staticmethod(free)
    if isinstance(raw, FunctionType):
        return bound
    return _property_from_bases(owner, attribute, raw)


def _property_from_bases(owner: type, attribute: str, raw: object) -> property:
    def get(self: object) -> object:
        return getattr(super(owner, cast(Any, self)), attribute)

    def accessor(self: object) -> property:
        mro = type(self).__mro__
        beyond = mro[mro.index(owner) + 1 :]
        return next(cast(property, vars(base)[attribute]) for base in beyond if attribute in vars(base))

    def put(self: object, value: object) -> None:
        accessor(self).__set__(self, value)

    def delete(self: object) -> None:
        accessor(self).__delete__(self)

    settable = isinstance(raw, property) and raw.fset is not None
    deletable = isinstance(raw, property) and raw.fdel is not None
    return property(get, put if settable else None, delete if deletable else None)


def dressed(function: FunctionType, like: FunctionType | None, owner: object, attribute: str) -> FunctionType:
    """The function under upstream's name, module and docstring; an addition gets the owner's."""
    function.__name__ = attribute
    if like is None:
        function.__module__ = getattr(owner, "__module__", None) or cast(str, getattr(owner, "__name__", ""))
        function.__qualname__ = f"{owner.__qualname__}.{attribute}" if isinstance(owner, type) else attribute
        return function
    function.__name__ = like.__name__
    function.__module__ = like.__module__
    function.__qualname__ = like.__qualname__
    function.__doc__ = like.__doc__
    return function


def signed_like(function: FunctionType, like: FunctionType) -> FunctionType:
    """The function with the signature of another: a layer takes any arguments, and vLLM asks what a method takes."""
    if function.__code__ is like.__code__ and not hasattr(like, "__wrapped__"):
        return function
    import inspect

    try:
        signature = inspect.signature(like)
    except (TypeError, ValueError):
        return function
    setattr(function, "__signature__", signature)  # noqa: B010 - as above
    return function


def reformed(form: Form, function: FunctionType) -> object:
    """The function in the form that the target has."""
    if form == "classmethod":
        return classmethod(function)
    return staticmethod(function) if form == "staticmethod" else function


def single(raw: object) -> FunctionType:
    """The one plain function in a function, classmethod or staticmethod."""
    (function,) = functions_in(raw)
    return function


def accessors(raw: object) -> tuple[FunctionType | None, ...]:
    """Getter, setter and deleter of a property or cached property, None where there is none."""
    if isinstance(raw, property):
        return tuple(part if isinstance(part, FunctionType) else None for part in (raw.fget, raw.fset, raw.fdel))

    def get(self: object) -> object:
        return cast(Any, raw).__get__(self, type(self))

    return (cast(FunctionType, get), None, None)
