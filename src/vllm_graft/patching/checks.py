"""The rules that every hook passes before its target is changed.

They refuse what Python would silently accept: a replacement for a name that is gone, an addition that upstream
has made meanwhile, a plain function in place of a coroutine, a value in place of a method.

They also refuse ineffective changes, with the way that works. Classes capture some of their attributes when they are
made: a dataclass its fields and whether it has a ``__post_init__``, pydantic its validators, msgspec and ``__slots__``
the layout of instances, an Enum its members. Setting such an attribute later changes only what is read there.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Final, Literal

from vllm_graft.errors import TargetError, nearest
from vllm_graft.patching import surgery
from vllm_graft.patching.declaration import Declaration
from vllm_graft.patching.functions import (
    ORIGINAL,
    AttributeForm,
    accessor_mismatch,
    attribute_form,
    functions_in,
    innermost,
    kind_of,
    parameter_at,
    parameter_mismatch,
    parameters_of,
)
from vllm_graft.patching.hooks import Hook, HookKind, call_position
from vllm_graft.patching.target import Owner


class Absent(enum.Enum):
    """The type of ABSENT."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
"""The value of a name that is not there; None would be a value."""

_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE

UpstreamForm = AttributeForm | Literal["class", "callable"]


def own(owner: Owner, attribute: str) -> object:
    """Return the raw attribute in the owner's own dictionary, or ABSENT."""
    return vars(owner).get(attribute, ABSENT)


def inherited(owner: Owner, attribute: str) -> object:
    """Return the raw attribute that a class inherits, or ABSENT; the attributes of ``object`` count as absent."""
    bases = owner.__mro__[1:] if isinstance(owner, type) else ()
    return next((vars(base)[attribute] for base in bases if base is not object and attribute in vars(base)), ABSENT)


def upstream_form(raw: object) -> UpstreamForm:
    """Return the form of an attribute on the target; "callable" has no Python code that could be wrapped."""
    if isinstance(raw, functools.cached_property):
        return "property"
    form = attribute_form(raw)
    if form != "value":
        return form if functions_in(raw) else "callable"
    if isinstance(raw, type):
        return "class"
    return "callable" if callable(raw) or hasattr(type(raw), "__get__") else "value"


RefusalText = tuple[str, str]
"""The fault of a hook, and the next step."""

_INSPECT_VLLM: Final = "compare with the installed vLLM"


def refused(declaration: Declaration, refusal: RefusalText) -> TargetError:
    """Return the error for a patch that is refused."""
    return TargetError(refusal[0], where=declaration.where, fix=refusal[1])


def check_owner(declaration: Declaration, owner: Owner) -> None:
    """Raise TargetError if no attribute of the target can be patched."""
    if type(owner).__module__ == "torch._ops":
        what = "its attributes are compiled operations, which Python code cannot wrap"
        fix = "register an implementation with torch.library, or patch the Python function that calls the operation"
        raise refused(declaration, (what, fix))
    if isinstance(owner, type) and owner.__flags__ & _IMMUTABLE_TYPE:
        what = f"{owner.__qualname__} is a type made in C, and its attributes cannot be set"
        fix = "patch the Python code that uses it, or give vLLM a subclass where it takes a class"
        raise refused(declaration, (what, fix))


def check_hook(declaration: Declaration, hook: Hook, owner: Owner, present: object) -> HookKind:
    """Return what a hook does to ``present``, the attribute as it is, or raise TargetError if that cannot work."""
    kind: HookKind = ("add" if present is ABSENT else "replace") if hook.kind == "auto" else hook.kind
    refusal: RefusalText | None = None
    if hook.kind != "auto" and (hook.kind == "add") != (present is ABSENT):
        name = hook.attribute
        if hook.kind == "add":
            refusal = refuse_addition(name)
        elif hasattr(object, name) and isinstance(owner, type):
            what = f"{owner.__qualname__} has no {name!r} of its own to {hook.kind}, only the one that every object has"
            refusal = what, "mark it @add, and call super() for what every object does"
        elif isinstance(owner, type) and any(name in vars(one).get("__annotations__", ()) for one in owner.__mro__):
            what = f"there is no {name!r} to {hook.kind}: {owner.__qualname__} declares it as a field of its objects"
            refusal = what, "wrap what makes the objects, or patch the code that reads the field"
        else:
            refusal = refuse_absent(hook, dir(owner))
    refusal = refusal or _refuse_ineffective(hook, owner, present)
    users = [other.attribute for other in declaration.hooks if hook.attribute in other.originals]
    if kind == "add" and hook.attribute == "__new__":
        what, fix = "it adds '__new__', which Python cannot remove from a class again", "wrap '__init__' instead"
        refusal = refusal or (what, fix)
    elif kind == "add" and users:
        what = f"{users[0]!r} mentions {ORIGINAL}{hook.attribute}, but the target has no {hook.attribute!r}"
        refusal = refusal or (what, f"{_INSPECT_VLLM}: it may have been renamed or moved")
    elif kind != "add":
        refusal = refusal or _refuse_present(hook, declaration.target.is_class, present)
    if refusal is not None:
        raise refused(declaration, refusal)
    return kind


def refuse_addition(name: str) -> RefusalText:
    """Refuse a hook that adds a name which the target has."""
    fix = f"mark it @wrap or @replace if upstream's {name!r} is meant, or choose another name"
    return f"it adds {name!r}, but the target already has one", fix


ENUMS: Final = frozenset({"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"})
"""The bases by which a class statement shows that it makes an Enum."""


def refuse_enum_value(name: str, title: str) -> RefusalText:
    """Refuse a value set on a name of an Enum."""
    what = f"it sets {name!r}, but {title} is an Enum: a value set on it is not a member"
    return what, "patch the code that reads the member; methods of an Enum can be patched"


def refuse_absent(hook: Hook, names: Sequence[str]) -> RefusalText:
    """Refuse a hook on a name that is not there; ``names`` are those that are."""
    name = hook.attribute
    # Special names for a special one, and none of ours.
    alike = [one for one in names if one.startswith("__") == name.startswith("__") and not one.startswith("_graft")]
    fix = f"{_INSPECT_VLLM}, where {name!r} may have been renamed or moved, or mark it @add"
    return f"there is no {name!r} to {hook.kind}{nearest(name, alike)}", fix


def _refuse_present(hook: Hook, in_class: bool, present: object) -> RefusalText | None:
    """Refuse a hook of another form or kind than the attribute, or one that cannot take its arguments."""
    form = upstream_form(present)
    if form == "callable" and hook.form != "value":
        what = f"{hook.attribute!r} is a {type(present).__name__} on the target, without Python code of its own"
        return what, "patch the Python function that calls it"
    if form != hook.form:
        return refuse_form(hook, form)
    if isinstance(hook.value, property):
        problem = accessor_mismatch(hook.attribute, hook.value, wraps=hook.kind == "wrap")
        if problem:
            return problem, _TAKE_ARGUMENTS
        pairs = zip(_ACCESSORS, surgery.accessors(hook.value), surgery.accessors(present), strict=True)
        for part, mine, beneath in pairs if hook.kind == "wrap" else ():
            if mine is not None and beneath is None and parameter_at(mine, call_position(hook.form, True)) == "call":
                what = f"the {part} of {hook.attribute!r} takes 'call', but the target's property has no {part}"
                return what, f"write the {part} without 'call'"
    if form in ("property", "value"):
        return None
    (theirs,) = functions_in(present)
    kinds: list[str] = [kind_of(theirs)]
    if kind_of(innermost(theirs)) == "coroutine":
        # Callers await a coroutine beneath a plain decorator too.
        kinds.append("coroutine")
    # A decorator without functools.wraps shows the parameters of its wrapper, and not what callers pass.
    made = theirs.__name__ != hook.attribute
    return refuse_function_kind(hook, kinds) or refuse_signature(hook, in_class, parameters_of(theirs), made=made)


def refuse_form(hook: Hook, form: UpstreamForm) -> RefusalText:
    """Refuse a hook whose form differs from that of the attribute."""
    fix = "patch the class itself" if form == "class" else f"write the hook as a {form}"
    if form == "value":
        fix = "give a plain value, or patch the code that reads it"
    return f"{hook.attribute!r} is a {form} on the target but a {hook.form} in the patch", fix


def refuse_function_kind(hook: Hook, kinds: Sequence[str]) -> RefusalText | None:
    """Refuse a hook of a kind of function that callers cannot use, such as a plain one for a coroutine."""
    (ours,) = functions_in(hook.value)
    if (mine := kind_of(ours)) in kinds:
        return None
    what = f"{hook.attribute!r} is a {kinds[0]} function on the target but a {mine} function in the patch"
    return what, f"write the hook as a {kinds[0]} function"


_ACCESSORS: Final = ("getter", "setter", "deleter")
_TAKE_ARGUMENTS: Final = "give the hook upstream's parameters, or *args and **kwargs"


def refuse_signature(
    hook: Hook, in_class: bool, theirs: Sequence[Parameter] | None, *, made: bool = False
) -> RefusalText | None:
    """Refuse a hook that cannot take upstream's arguments: its first call would end the engine."""
    (function,) = functions_in(hook.value)
    ours = parameters_of(function)
    if ours is None or theirs is None:
        return None
    position = call_position(hook.form, in_class)
    call = position if hook.kind == "wrap" and parameter_at(function, position) == "call" else None
    bound = in_class and hook.form != "staticmethod"
    problem = parameter_mismatch(hook.attribute, ours, theirs, call, bound, made=made)
    return (problem, _TAKE_ARGUMENTS) if problem else None


def _refuse_ineffective(hook: Hook, owner: Owner, present: object) -> RefusalText | None:
    """Refuse an attribute that a class captured when it was made, and one without Python code to wrap."""
    name, title = hook.attribute, getattr(owner, "__qualname__", "")
    if present is ABSENT and isinstance(owner, type):
        if name == "__post_init__" and "__dataclass_fields__" in vars(owner):
            what = (
                f"it adds '__post_init__', but the dataclass {title} was made without one: its __init__ never calls it"
            )
            return what, "wrap '__init__' instead"
        is_pydantic = not {"__pydantic_validator__", "__pydantic_fields__"}.isdisjoint(vars(owner))
        if hook.form == "value" and is_pydantic:
            what = f"it adds {name!r}, but {title} is a pydantic class: what is set on it later is not a field"
            return what, "carry it in vLLM's --additional-config under a key of your own, which every process gets"
        return None
    if hook.form == "value" and isinstance(owner, enum.EnumMeta):
        return refuse_enum_value(name, title)
    fields = getattr(owner, "__struct_fields__", ()) if isinstance(owner, type) else ()
    if name in fields or isinstance(present, types.MemberDescriptorType):
        kind = "msgspec struct" if name in fields else "class with __slots__"
        what = f"{name!r} is a field of the {kind} {title}, whose layout is fixed"
        return what, "patch the code that reads or writes it, and keep state of your own in a table by request id"
    if hook.form == "value" and name in vars(owner).get("__dataclass_fields__", {}):
        what = f"it sets {name!r}, a field of the dataclass {title}, whose __init__ keeps the default it was made with"
        return what, "wrap '__init__', or set the value where the instance is made"
    # vLLM's configuration classes are pydantic dataclasses; pydantic has a table for each kind of validator.
    infos = vars(owner).get("__pydantic_decorators__")
    tables = (getattr(infos, kind, None) for kind in getattr(infos, "__slots__", None) or vars(type(infos)))
    if infos is not None and any(isinstance(table, Mapping) and name in table for table in tables):
        what = f"{name!r} is a validator that pydantic captured when {title} was made: a new one is never called"
        return what, "wrap '__post_init__' or '__init__' instead"
    home = type(present).__module__
    if home == "torch._ops":
        fix = "register an implementation with torch.library, or patch the Python function that calls it"
        return f"{name!r} is a compiled operation of torch", fix
    if home.partition(".")[0] == "triton":
        return f"{name!r} is a Triton kernel", "patch the Python function that launches it"
    if surgery.strip_cache(present) is not present:
        what = f"{name!r} is behind functools.cache, but {title} inherits it: the cache is the base's"
        return what, "patch the class that defines it"
    if isinstance(present, surgery.Cache):
        what = f"{name!r} is behind functools.cache, but what it wraps is not a Python function"
        return what, "patch the function that calls it"
    return None
