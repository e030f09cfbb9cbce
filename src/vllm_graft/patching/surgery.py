"""Make the functions that are set on a target: copies of a patch's functions, layers over them, caches around them.

Only forms that torch.compile traces correctly are made: plain functions, closures and ``functools.partial``, put into a
classmethod, staticmethod or property if upstream has one. A bound ``types.MethodType``, ``function.__get__(self)``
(refused by torch 2.10), a custom descriptor and a proxy object all break or mislead the tracer. ``__wrapped__`` is
never set: tools that follow it would see upstream's code in place of what runs.

A layer counts a hit and hands a patch's function the layer beneath. Packing arguments and unpacking them again costs
more than everything else a layer does, so a layer has the very parameters of its function, and calls a copy of it that
takes them as they are, the tuple of ``*args`` and the dictionary of ``**kwargs`` included. Its code claims the file and
line of that function: tracebacks and ``inspect.getsource`` show what the author wrote, and vLLM, which reads every file
that it has traced through, finds one that exists.

Hooks on a function behind ``functools.cache`` or ``lru_cache`` go beneath the cache, which starts empty again: what the
old one holds was computed without the patch. Callers that rely on getting the same object twice still do, and
``cache_clear`` and ``cache_info`` act on the patched function. Taking the last layer off puts the old object back, with
what it had cached.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import _lru_cache_wrapper, cache, lru_cache, partial
from itertools import islice
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, cast

from vllm_graft.patching.functions import (
    AnyCallable,
    AttributeForm,
    FunctionKind,
    closure_values,
    code_objects,
    functions_in,
    kind_of,
    reachable,
)

if TYPE_CHECKING:
    from vllm_graft.patching.report import HitCounter

Hit = Callable[[], None]
"""A function without arguments that a layer calls at each entry."""


def make_hit(counter: HitCounter, cell: int) -> Hit:
    """Make the function that counts one hit in a counter's cell."""

    def hit() -> None:
        counter.cells[cell] += 1

    return hide_from_tracer(hit)


def no_hit() -> None:
    """Count nothing: a property is read too often, and too cheaply, to be counted."""


def hide_from_tracer(hit: Hit) -> Hit:
    """Let torch.compile run ``hit`` while it traces, and keep it out of the graph.

    Traced like other code, a counter would be a guard that fails at each call, or something the tracer refuses.
    """
    setattr(hit, "_dynamo_marked_constant", True)  # noqa: B010 - functions have no such attribute for a type checker
    return hit


def is_tracing() -> bool:
    """Return whether torch.compile is tracing on this thread."""
    context = getattr(sys.modules.get("torch._guards"), "TracingContext", None)
    return context is not None and context.try_get() is not None


def transplant(function: FunctionType, patch: type, owner: type | None, renames: Mapping[str, str]) -> FunctionType:
    """Copy a patch's function so that it belongs to ``owner``.

    ``super()`` starts from the owner, and every attribute name in ``renames`` is exchanged, so that
    ``self._original_x`` finds the layer beneath this one. Functions in closures, where decorators keep them, are
    copied too if they need it.
    """
    copies: dict[int, FunctionType] = {}

    def needs_copy(one: FunctionType) -> bool:
        return any(_is_affected(each, patch, renames) for each in reachable(one))

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
        copy = FunctionType(_rename(one.__code__, renames), one.__globals__, one.__name__, one.__defaults__, closure)
        copies[id(one)] = copy
        copy.__kwdefaults__ = one.__kwdefaults__
        copy.__annotations__ = dict(one.__annotations__)
        copy.__dict__.update({key: value for key, value in vars(one).items() if key != "__wrapped__"})
        for new, held in fill:
            new.cell_contents = copied(held)
        return copy

    return copied(function)


def _is_affected(function: FunctionType, patch: type, renames: Mapping[str, str]) -> bool:
    if any(held is patch for held in closure_values(function)):
        return True
    return any(not renames.keys().isdisjoint(code.co_names) for code in code_objects(function.__code__))


def _rename(code: CodeType, renames: Mapping[str, str]) -> CodeType:
    """Exchange attribute names in code, down to its inner functions."""
    if not any(not renames.keys().isdisjoint(each.co_names) for each in code_objects(code)):
        return code
    return code.replace(
        co_names=tuple(renames.get(name, name) for name in code.co_names),
        co_consts=tuple(_rename(each, renames) if isinstance(each, CodeType) else each for each in code.co_consts),
    )


FINDER: Final = "_graft_finder"
"""The attribute in which a function of ``delegate_to_bases`` keeps its part that only finds the bound method."""


def delegate_to_bases(owner: type, attribute: str, raw: object) -> object:
    """Make an attribute in the form of ``raw`` that calls what ``super()`` finds under an inherited name.

    It is looked up at each call, so that a base that is patched or reverted later still runs.
    """

    def found(self: Any) -> Any:
        return getattr(super(owner, self), attribute)

    def bound(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, self), attribute)(*args, **kwargs)

    setattr(bound, FINDER, found)

    def free(*args: object, **kwargs: object) -> object:
        return getattr(super(owner, owner), attribute)(*args, **kwargs)

    for function in functions_in(raw):
        copy_attributes(cast(FunctionType, free if isinstance(raw, staticmethod) else bound), function)
    if isinstance(raw, classmethod):
        return classmethod(bound)
    if isinstance(raw, staticmethod):
        return staticmethod(free)
    if isinstance(raw, FunctionType):
        return bound
    return _delegate_property(owner, attribute, raw)


def _delegate_property(owner: type, attribute: str, raw: object) -> property:
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


def copy_identity(function: FunctionType, like: FunctionType | None, owner: object, attribute: str) -> FunctionType:
    """Give a function upstream's name, module and docstring; an addition gets the owner's module."""
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


def copy_attributes(function: FunctionType, like: FunctionType) -> FunctionType:
    """Give a wrap the attributes of what it wraps, such as ``register`` of a singledispatch function; its own count.

    As ``functools.wraps`` does, but for what tells of the one function alone: ``__wrapped__`` (see the top of this
    module), its signature, marks of our own layers, and marks by which torch.compile finds what it is to trace instead.
    """
    for name, held in vars(like).items():
        if name not in ("__wrapped__", "__signature__", FINDER) and not name.startswith(("_torchdynamo", "_dynamo")):
            vars(function).setdefault(name, held)
    return function


def copy_signature(function: FunctionType, like: FunctionType) -> FunctionType:
    """Give a function the signature of another: vLLM inspects which parameters some methods take."""
    if function.__code__ is like.__code__ and not hasattr(like, "__wrapped__"):
        return function
    try:
        signature = inspect.signature(like)
    except (TypeError, ValueError):
        return function
    setattr(function, "__signature__", signature)  # noqa: B010 - as above
    return function


def convert_to_form(form: AttributeForm, function: FunctionType) -> object:
    """Put a function into a classmethod or staticmethod, as the form says."""
    if form == "classmethod":
        return classmethod(function)
    return staticmethod(function) if form == "staticmethod" else function


def only_function(raw: object) -> FunctionType:
    """Return the one plain function in a function, classmethod or staticmethod."""
    (function,) = functions_in(raw)
    return function


def accessors(raw: object) -> tuple[FunctionType | None, ...]:
    """Return getter, setter and deleter of a property or cached property; None for each that is missing."""
    if isinstance(raw, property):
        return tuple(part if isinstance(part, FunctionType) else None for part in (raw.fget, raw.fset, raw.fdel))

    def get(self: object) -> object:
        return cast(Any, raw).__get__(self, type(self))

    return (cast(FunctionType, get), None, None)


_HIT, _FUNCTION, _BENEATH = "_graft_hit", "_graft_function", "_graft_beneath"
_BIND, _FIND = "_graft_bind", "_graft_find"

_ASYNC: frozenset[FunctionKind] = frozenset({"coroutine", "async generator"})


def count_calls(function: FunctionType, hit: Hit) -> FunctionType:
    """Return the function under a layer that counts a hit at each call."""
    if hit is no_hit:
        return function
    return _layer(function, {_HIT: hit, _FUNCTION: function})


def inject_call(function: FunctionType, beneath: FunctionType, position: int, hit: Hit) -> FunctionType:
    """Return the function under a layer that passes what lies beneath as ``call``, and counts a hit at each call."""
    finder = getattr(beneath, FINDER, None)
    if position == 0:
        call = _BENEATH
    elif finder is not None:
        call = f"{_FIND}({{self}})"
    else:
        call = f"{_BIND}({_BENEATH}, {{self}})"
        if kind_of(function) in _ASYNC:
            # Cheaper than a partial; torch.compile refuses it, but traces nothing asynchronous. It cannot bind None.
            call += f" if {{self}} is None else {_BENEATH}.__get__({{self}})"
    held = {_HIT: hit, _FUNCTION: function, _BENEATH: beneath, _BIND: partial, _FIND: finder}
    return _layer(function, held, position, call)


def code_under(made: FunctionType) -> CodeType:
    """Return the code that a layer runs for the author's function; a function without a layer runs its own."""
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
"""Parameters and arguments of a layer over a function that cannot be flattened, by the position of ``call``."""


def _layer(
    function: FunctionType, held: dict[str, object], position: int | None = None, call: str = ""
) -> FunctionType:
    """Make a closure over ``held`` that passes its arguments on, with ``call`` inserted at ``position``."""
    code = function.__code__
    # A decorator may hide the parameter ``call``, and another parameter may have a name that the layer needs.
    hidden = position is not None and position >= code.co_argcount
    as_it_is = hidden or not held.keys().isdisjoint(code.co_varnames)
    if as_it_is:
        parameters, arguments = _ANY[position]
        arguments = arguments.format(call=call.format(self="self"))
    else:
        parameters, arguments = _signature(code, position, call)
        held[_FUNCTION] = _flatten(function)
    made = _compile(kind_of(function), parameters, arguments, held[_HIT] is not no_hit)
    made = made.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
    closure = tuple(CellType(held[name]) for name in made.co_freevars)
    layer = FunctionType(made, function.__globals__, function.__name__, None, closure)
    if not as_it_is:
        layer.__defaults__ = _defaults(function, position)
        layer.__kwdefaults__ = function.__kwdefaults__
    return layer


def _flatten(function: FunctionType) -> FunctionType:
    """Copy a function so that it takes everything by position, in the order of its code's variables."""
    code = function.__code__
    packed = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    count = code.co_argcount + code.co_kwonlyargcount + (code.co_flags & packed).bit_count()
    flat = code.replace(co_argcount=count, co_posonlyargcount=0, co_kwonlyargcount=0, co_flags=code.co_flags & ~packed)
    return FunctionType(flat, function.__globals__, function.__name__, None, function.__closure__)


def _defaults(function: FunctionType, position: int | None) -> tuple[object, ...]:
    """Return the defaults of a function's positional parameters, without that of ``call``."""
    defaults = list(function.__defaults__ or ())
    required = function.__code__.co_argcount - len(defaults)
    if position is not None and position >= required:
        del defaults[position - required]
    return tuple(defaults)


def _signature(code: CodeType, position: int | None, call: str) -> tuple[str, str]:
    """Write the parameters of a layer over a function with this code, and the arguments for its flattened copy."""
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
"""The body of a layer by kind; a layer is of its function's kind, because callers test for coroutine functions."""


@cache
def _compile(kind: FunctionKind, parameters: str, arguments: str, counts: bool) -> CodeType:
    """Compile the code of a layer, all of it on its first line."""
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


Cache = _lru_cache_wrapper
"""The type that ``functools.cache`` and ``lru_cache`` make of a function."""


def strip_cache(raw: object) -> object:
    """Return what is beneath an attribute's cache, in the same form; the attribute itself if there is no cache."""
    if isinstance(raw, Cache):
        beneath: object = raw.__wrapped__
        return beneath if functions_in(beneath) else raw
    if isinstance(raw, classmethod | staticmethod):
        function = strip_cache(raw.__func__)
        return raw if function is raw.__func__ else type(raw)(cast(AnyCallable, function))
    if isinstance(raw, property):
        getter, setter, deleter = (cast(Any, strip_cache(part)) for part in (raw.fget, raw.fset, raw.fdel))
        same = getter is raw.fget and setter is raw.fset and deleter is raw.fdel
        return raw if same else property(getter, setter, deleter, raw.__doc__)
    return raw


def restore_cache(raw: object, value: object) -> object:
    """Put ``value``, in the form of ``strip_cache(raw)``, behind new caches wherever ``raw`` has one."""
    if isinstance(raw, Cache):
        made = lru_cache(**raw.cache_parameters())(cast(AnyCallable, value))
        for name, held in vars(raw).items():
            vars(made).setdefault(name, held)
        return made
    if isinstance(raw, classmethod | staticmethod) and isinstance(value, classmethod | staticmethod):
        return type(raw)(cast(AnyCallable, restore_cache(raw.__func__, value.__func__)))
    if isinstance(raw, property) and isinstance(value, property):
        pairs = ((raw.fget, value.fget), (raw.fset, value.fset), (raw.fdel, value.fdel))
        getter, setter, deleter = (None if new is None else cast(Any, restore_cache(old, new)) for old, new in pairs)
        return property(getter, setter, deleter, value.__doc__)
    return value
