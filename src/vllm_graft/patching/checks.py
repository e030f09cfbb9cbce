"""The rules that every hook passes before its target is changed.

Refused is what Python would let through in silence: a replacement for a name that is gone, an addition that upstream
has made meanwhile, a plain function in the place of a coroutine, a value in the place of a method.

Refused too, with the way that works, is an ineffective change. Classes capture some of their attributes when they are
made: a dataclass its fields and whether it has a ``__post_init__``, pydantic its validators, msgspec and ``__slots__``
the layout of instances, an Enum its members. Setting such an attribute later changes what one reads there and nothing
else.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Final, Literal

from vllm_graft.errors import TargetError, nearest
from vllm_graft.patching import surgery
from vllm_graft.patching.declaration import Declaration
from vllm_graft.patching.functions import (
    ORIGINAL,
    Form,
    accessor_mismatch,
    form_of,
    functions_in,
    innermost,
    kind_of,
    parameter_at,
    signature_mismatch,
)
from vllm_graft.patching.hooks import Hook, Kind, call_position
from vllm_graft.patching.target import Owner


class Absent(enum.Enum):
    """The type of ABSENT."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
"""The value of a name that is not there; None would be a value."""

_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE

UpstreamForm = Form | Literal["class", "callable"]


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
    form = form_of(raw)
    if form != "value":
        return form if functions_in(raw) else "callable"
    if isinstance(raw, type):
        return "class"
    return "callable" if callable(raw) or hasattr(type(raw), "__get__") else "value"


def check_owner(declaration: Declaration, owner: Owner) -> None:
    """Raise TargetError where no attribute of the target can be patched."""
    if type(owner).__module__ == "torch._ops":
        raise TargetError(
            "its attributes are compiled operations, which Python code cannot stand around",
            where=declaration.where,
            fix="register an implementation with torch.library, or patch the Python function that calls the operation",
        )
    if isinstance(owner, type) and owner.__flags__ & _IMMUTABLE_TYPE:
        raise TargetError(
            f"{owner.__qualname__} is a type made in C, and its attributes cannot be set",
            where=declaration.where,
            fix="patch the Python code that uses it, or give vLLM a subclass where it takes a class",
        )


def check_hook(declaration: Declaration, hook: Hook, owner: Owner, present: object) -> Kind:
    """Return what a hook does to ``present``, the attribute as it is, or raise TargetError where that cannot work."""
    kind = _kind(declaration, hook, owner, present)
    _check_effect(declaration, hook, owner, present)
    if kind == "add":
        _check_addition(declaration, hook)
        return kind
    _check_form(declaration, hook, present)
    if hook.form != "value":
        _check_function_kind(declaration, hook, present)
        _check_signature(declaration, hook, present)
        _check_accessors(declaration, hook, present)
    return kind


def _kind(declaration: Declaration, hook: Hook, owner: Owner, present: object) -> Kind:
    name = hook.attribute
    if hook.kind == "auto":
        return "add" if present is ABSENT else "replace"
    if hook.kind == "add" and present is not ABSENT:
        raise refuse_addition(declaration, name)
    if hook.kind != "add" and present is ABSENT and hasattr(object, name) and isinstance(owner, type):
        raise TargetError(
            f"{owner.__qualname__} has no {name!r} of its own to {hook.kind}, only the one that every object has",
            where=declaration.where,
            fix="mark it @add, and call super() for what every object does",
        )
    if hook.kind != "add" and present is ABSENT:
        raise refuse_absent(declaration, hook, nearest(name, names_like(dir(owner), name)))
    return hook.kind


def refuse_addition(declaration: Declaration, name: str) -> TargetError:
    """Build the error for a hook that adds a name which the target has."""
    return TargetError(
        f"it adds {name!r}, and the target has one already",
        where=declaration.where,
        fix=f"mark it @wrap or @replace if upstream's {name!r} is meant, or choose another name",
    )


def refuse_absent(declaration: Declaration, hook: Hook, near: str) -> TargetError:
    """Build the error for a hook on a name that is not there; ``near`` ends the sentence with the nearest name."""
    name = hook.attribute
    return TargetError(
        f"there is no {name!r} to {hook.kind}{near}",
        where=declaration.where,
        fix=f"compare with the installed vLLM, where {name!r} may have been renamed or moved, or mark it @add",
    )


def names_like(names: Sequence[str], name: str) -> list[str]:
    """Return the names that a misspelt one could have meant: special names for special ones, none of ours."""
    return [one for one in names if one.startswith("__") == name.startswith("__") and not one.startswith("_graft")]


def _check_addition(declaration: Declaration, hook: Hook) -> None:
    if hook.attribute == "__new__":
        raise TargetError(
            "it adds '__new__', which Python cannot take off a class again",
            where=declaration.where,
            fix="wrap '__init__' instead",
        )
    users = [other.attribute for other in declaration.hooks if hook.attribute in other.originals]
    if users:
        raise TargetError(
            f"{users[0]!r} mentions {ORIGINAL}{hook.attribute}, and the target has no {hook.attribute!r}",
            where=declaration.where,
            fix="compare with the installed vLLM: it may have been renamed or moved",
        )


def _check_form(declaration: Declaration, hook: Hook, present: object) -> None:
    form = upstream_form(present)
    if form == hook.form:
        return
    if form != "callable" or hook.form == "value":
        raise refuse_form(declaration, hook, form)
    raise TargetError(
        f"{hook.attribute!r} is a {type(present).__name__} on the target, without Python code of its own",
        where=declaration.where,
        fix="patch the Python function that calls it",
    )


def refuse_form(declaration: Declaration, hook: Hook, form: UpstreamForm) -> TargetError:
    """Build the error for a hook whose form differs from that of the attribute."""
    fix = "patch the class itself" if form == "class" else f"write the hook as a {form}"
    if form == "value":
        fix = "give a plain value, or patch the code that reads it"
    return TargetError(
        f"{hook.attribute!r} is a {form} on the target and a {hook.form} in the patch", where=declaration.where, fix=fix
    )


def _check_function_kind(declaration: Declaration, hook: Hook, present: object) -> None:
    if hook.form == "property":
        return
    (ours,), (theirs,) = functions_in(hook.value), functions_in(present)
    mine, kinds = kind_of(ours), _kinds_accepted(theirs)
    if mine in kinds:
        return
    raise refuse_function_kind(declaration, hook, kinds[0], mine)


def refuse_function_kind(declaration: Declaration, hook: Hook, theirs: str, mine: str) -> TargetError:
    """Build the error for a hook whose kind of function differs, such as a plain one for a coroutine."""
    return TargetError(
        f"{hook.attribute!r} is a {theirs} function on the target and a {mine} function in the patch",
        where=declaration.where,
        fix=f"write the hook as a {theirs} function",
    )


def _check_signature(declaration: Declaration, hook: Hook, present: object) -> None:
    """Refuse a hook that cannot take upstream's arguments: its first call would end the engine."""
    if isinstance(hook.value, property):
        if problem := accessor_mismatch(hook.attribute, hook.value, wraps=hook.kind == "wrap"):
            raise refuse_signature(declaration, problem)
        return
    (ours,), (theirs,) = functions_in(hook.value), functions_in(present)
    position = call_position(hook.form, declaration.target.is_class)
    call = position if hook.kind == "wrap" and parameter_at(ours, position) == "call" else None
    bound = declaration.target.is_class and hook.form != "staticmethod"
    problem = signature_mismatch(hook.attribute, ours, theirs, call, bound)
    if problem:
        raise refuse_signature(declaration, problem)


def refuse_signature(declaration: Declaration, problem: str) -> TargetError:
    """Build the error for a hook that cannot take upstream's arguments."""
    return TargetError(
        problem, where=declaration.where, fix="give the hook upstream's parameters, or *args and **kwargs"
    )


def _check_accessors(declaration: Declaration, hook: Hook, present: object) -> None:
    """Refuse an accessor that takes ``call`` where upstream's property has no such accessor."""
    if hook.form != "property" or hook.kind != "wrap":
        return
    pairs = zip(("getter", "setter", "deleter"), surgery.accessors(hook.value), surgery.accessors(present), strict=True)
    for part, mine, theirs in pairs:
        if mine is not None and theirs is None and parameter_at(mine, call_position(hook.form, True)) == "call":
            raise TargetError(
                f"the {part} of {hook.attribute!r} takes 'call', and the target's property has no {part}",
                where=declaration.where,
                fix=f"write the {part} without 'call'",
            )


def _kinds_accepted(theirs: FunctionType) -> list[str]:
    """Return the kinds that fit: callers await a coroutine beneath a plain decorator, so both do there."""
    kinds: list[str] = [kind_of(theirs)]
    if kind_of(innermost(theirs)) == "coroutine":
        kinds.append("coroutine")
    return kinds


_OPTIONS: Final = "carry it in vLLM's --additional-config under a key of your own, which every process gets"


def _check_effect(declaration: Declaration, hook: Hook, owner: Owner, present: object) -> None:
    """Raise TargetError where setting the attribute would not do what the patch says."""
    if present is ABSENT and isinstance(owner, type):
        refusal = _refuse_addition_to_class(hook, owner)
    else:
        refusal = next((found for rule in _RULES if (found := rule(hook, owner, present))), None)
    if refusal is not None:
        what, fix = refusal
        raise TargetError(what, where=declaration.where, fix=fix)


Refusal = tuple[str, str]
"""What is wrong, and the next step."""


def _refuse_addition_to_class(hook: Hook, owner: type) -> Refusal | None:
    name = hook.attribute
    if name == "__post_init__" and "__dataclass_fields__" in vars(owner):
        return (
            f"it adds '__post_init__', and the dataclass {owner.__qualname__} was made without one: its __init__ never "
            "calls it",
            "wrap '__init__' instead",
        )
    if hook.form == "value" and _is_pydantic(owner):
        return (
            f"it adds {name!r}, and {owner.__qualname__} is a pydantic class: what is set on it later is no field",
            _OPTIONS,
        )
    return None


def _refuse_enum_member(hook: Hook, owner: Owner, present: object) -> Refusal | None:
    if hook.form == "value" and isinstance(owner, enum.EnumMeta):
        return (
            f"it sets {hook.attribute!r}, and {owner.__qualname__} is an Enum: a value set on it is not a member",
            "patch the code that reads the member; methods of an Enum can be patched",
        )
    return None


def _refuse_slot(hook: Hook, owner: Owner, present: object) -> Refusal | None:
    fields = getattr(owner, "__struct_fields__", ()) if isinstance(owner, type) else ()
    if hook.attribute in fields or isinstance(present, types.MemberDescriptorType):
        kind = "msgspec struct" if hook.attribute in fields else "class with __slots__"
        return (
            f"{hook.attribute!r} is a field of the {kind} {_name_of(owner)}, whose layout is fixed",
            "patch the code that reads or writes it, and keep state of your own in a table by request id",
        )
    return None


def _refuse_dataclass_field(hook: Hook, owner: Owner, present: object) -> Refusal | None:
    if hook.form == "value" and hook.attribute in vars(owner).get("__dataclass_fields__", {}):
        return (
            f"it sets {hook.attribute!r}, a field of the dataclass {_name_of(owner)}, whose __init__ "
            "keeps the default it was made with",
            "wrap '__init__', or set the value where the instance is made",
        )
    return None


def _refuse_validator(hook: Hook, owner: Owner, present: object) -> Refusal | None:
    infos = vars(owner).get("__pydantic_decorators__")
    tables = (getattr(infos, name, None) for name in getattr(infos, "__slots__", None) or vars(type(infos)))
    if infos is None or not any(isinstance(table, Mapping) and hook.attribute in table for table in tables):
        return None
    return (
        f"{hook.attribute!r} is a validator that pydantic captured when {_name_of(owner)} was made: a new one is never "
        "called",
        "wrap '__post_init__' or '__init__' instead",
    )


def _refuse_compiled(hook: Hook, owner: Owner, present: object) -> Refusal | None:
    home = type(present).__module__
    name = hook.attribute
    if home == "torch._ops":
        return (
            f"{name!r} is a compiled operation of torch",
            "register an implementation with torch.library, or patch the Python function that calls it",
        )
    if home.partition(".")[0] == "triton":
        return f"{name!r} is a Triton kernel", "patch the Python function that launches it"
    if surgery.strip_cache(present) is not present:
        return (
            f"{name!r} is behind functools.cache, and {_name_of(owner)} inherits it: the cache is the base's",
            "patch the class that defines it",
        )
    if isinstance(present, surgery.Cache):
        return (
            f"{name!r} is behind functools.cache, and what it stands around is no Python function",
            "patch the function that calls it",
        )
    return None


def _name_of(owner: Owner) -> str:
    return owner.__qualname__ if isinstance(owner, type) else owner.__name__


def _is_pydantic(owner: type) -> bool:
    return any(name in vars(owner) for name in ("__pydantic_validator__", "__pydantic_fields__"))


_RULES: Final[tuple[Callable[[Hook, Owner, object], Refusal | None], ...]] = (
    _refuse_enum_member,
    _refuse_slot,
    _refuse_dataclass_field,
    _refuse_validator,
    _refuse_compiled,
)
