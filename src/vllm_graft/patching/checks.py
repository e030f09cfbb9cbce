"""What may be done to a target: the rules that every hook passes before anything is changed.

What Python would let through in silence is refused here: a replacement for a name that is gone, an addition that
upstream has made meanwhile, a plain function in the place of a coroutine, a value in the place of a method.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from types import FunctionType
from typing import Final, Literal

from vllm_graft.errors import TargetError, nearest
from vllm_graft.patching import unsound
from vllm_graft.patching.declare import Declaration
from vllm_graft.patching.functions import (
    ORIGINAL,
    Form,
    form_of,
    functions_in,
    innermost,
    kind_of,
    parameter_at,
)
from vllm_graft.patching.hooks import Hook, Kind, call_position
from vllm_graft.patching.signatures import accessor_mismatch, mismatch
from vllm_graft.patching.surgery import accessors
from vllm_graft.patching.target import Owner


class Absent(enum.Enum):
    """The type of ABSENT."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
"""Where a name has no value, None being one."""

_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE

UpstreamForm = Form | Literal["class", "callable"]


def own(owner: Owner, attribute: str) -> object:
    """The raw attribute in the owner's own dictionary, or ABSENT."""
    return vars(owner).get(attribute, ABSENT)


def inherited(owner: Owner, attribute: str) -> object:
    """The raw attribute the class gets from a base, or ABSENT; what every object has counts as absent."""
    bases = owner.__mro__[1:] if isinstance(owner, type) else ()
    return next((vars(base)[attribute] for base in bases if base is not object and attribute in vars(base)), ABSENT)


def upstream_form(raw: object) -> UpstreamForm:
    """The form of what stands on the target; "callable" is what has no Python code to stand around."""
    if isinstance(raw, functools.cached_property):
        return "property"
    form = form_of(raw)
    if form != "value":
        return form if functions_in(raw) else "callable"
    if isinstance(raw, type):
        return "class"
    return "callable" if callable(raw) or hasattr(type(raw), "__get__") else "value"


def check_owner(declaration: Declaration, owner: Owner) -> None:
    """Raise TargetError where nothing can be set on the target at all."""
    unsound.check_owner(declaration, owner)
    if isinstance(owner, type) and owner.__flags__ & _IMMUTABLE_TYPE:
        raise TargetError(
            f"{owner.__qualname__} is a type made in C, and its attributes cannot be set",
            where=declaration.where,
            fix="patch the Python code that uses it, or give vLLM a subclass where it takes a class",
        )


def check_hook(declaration: Declaration, hook: Hook, owner: Owner, present: object) -> Kind:
    """What the hook does to ``present``, the attribute as it stands; TargetError where that cannot work."""
    kind = _kind(declaration, hook, owner, present)
    unsound.check(declaration, hook, owner, present, absent=present is ABSENT)
    if kind == "add":
        _check_addition(declaration, hook)
    elif hook.form == "value":
        _check_value(declaration, hook, present)
    else:
        _check_form(declaration, hook, present)
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
    """The error where a hook adds what is there."""
    return TargetError(
        f"it adds {name!r}, and the target has one already",
        where=declaration.where,
        fix=f"mark it @wrap or @replace if upstream's {name!r} is meant, or choose another name",
    )


def refuse_absent(declaration: Declaration, hook: Hook, near: str) -> TargetError:
    """The error where a hook wraps or replaces what is not there; ``near`` ends the sentence with the nearest name."""
    name = hook.attribute
    return TargetError(
        f"there is no {name!r} to {hook.kind}{near}",
        where=declaration.where,
        fix=f"compare with the installed vLLM, where {name!r} may have been renamed or moved, or mark it @add",
    )


def names_like(names: Sequence[str], name: str) -> list[str]:
    """Those of some names that a misspelt one may have been meant for."""
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


def _check_value(declaration: Declaration, hook: Hook, present: object) -> None:
    form = upstream_form(present)
    if form != "value":
        raise refuse_form(declaration, hook, form)


def _check_form(declaration: Declaration, hook: Hook, present: object) -> None:
    form = upstream_form(present)
    if form == hook.form:
        return
    if form != "callable":
        raise refuse_form(declaration, hook, form)
    raise TargetError(
        f"{hook.attribute!r} is a {type(present).__name__} on the target, without Python code of its own",
        where=declaration.where,
        fix="patch the Python function that calls it",
    )


def refuse_form(declaration: Declaration, hook: Hook, form: UpstreamForm) -> TargetError:
    """The error where a hook is another kind of thing than what stands there."""
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
    """The error where a plain function stands for a coroutine, or the like."""
    return TargetError(
        f"{hook.attribute!r} is a {theirs} function on the target and a {mine} function in the patch",
        where=declaration.where,
        fix=f"write the hook as a {theirs} function",
    )


def _check_signature(declaration: Declaration, hook: Hook, present: object) -> None:
    """A hook that cannot take upstream's arguments would end the first call, and with it the engine."""
    if isinstance(hook.value, property):
        if problem := accessor_mismatch(hook.attribute, hook.value, wraps=hook.kind == "wrap"):
            raise refuse_signature(declaration, problem)
        return
    (ours,), (theirs,) = functions_in(hook.value), functions_in(present)
    position = call_position(hook.form, declaration.target.is_class)
    call = position if hook.kind == "wrap" and parameter_at(ours, position) == "call" else None
    bound = declaration.target.is_class and hook.form != "staticmethod"
    problem = mismatch(hook.attribute, ours, theirs, call, bound)
    if problem:
        raise refuse_signature(declaration, problem)


def refuse_signature(declaration: Declaration, problem: str) -> TargetError:
    """The error where a hook cannot take upstream's arguments."""
    return TargetError(
        problem, where=declaration.where, fix="give the hook upstream's parameters, or *args and **kwargs"
    )


def _check_accessors(declaration: Declaration, hook: Hook, present: object) -> None:
    """An accessor that takes ``call`` needs one of upstream's beneath it."""
    if hook.form != "property" or hook.kind != "wrap":
        return
    pairs = zip(("getter", "setter", "deleter"), accessors(hook.value), accessors(present), strict=True)
    for role, mine, theirs in pairs:
        if mine is not None and theirs is None and parameter_at(mine, call_position(hook.form, True)) == "call":
            raise TargetError(
                f"the {role} of {hook.attribute!r} takes 'call', and the target's property has no {role}",
                where=declaration.where,
                fix=f"write the {role} without 'call'",
            )


def _kinds_accepted(theirs: FunctionType) -> list[str]:
    """A coroutine beneath a plain decorator is awaited by its callers, so both kinds fit there."""
    kinds: list[str] = [kind_of(theirs)]
    if kind_of(innermost(theirs)) == "coroutine":
        kinds.append("coroutine")
    return kinds
