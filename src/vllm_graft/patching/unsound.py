"""What Python would let be set and what would then have no effect, or a wrong one: refused, with the way that works.

Classes capture some of their attributes when they are made: a dataclass its fields and whether it has a
``__post_init__``, pydantic its validators, msgspec and ``__slots__`` the layout of instances, an Enum its members.
Setting such an attribute later changes what one reads there and nothing else.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping
from typing import Final

from vllm_graft.errors import TargetError
from vllm_graft.patching import caches
from vllm_graft.patching.declare import Declaration
from vllm_graft.patching.hooks import Hook
from vllm_graft.patching.target import Owner

_OPTIONS: Final = "carry it in vLLM's --additional-config under a key of your own, which every process gets"


def check(declaration: Declaration, hook: Hook, owner: Owner, present: object, *, absent: bool) -> None:
    """Raise TargetError where setting the attribute would not do what the patch says."""
    if absent and isinstance(owner, type):
        refusal = _addition(hook, owner)
    else:
        refusal = next((found for rule in _RULES if (found := rule(hook, owner, present))), None)
    if refusal is not None:
        what, fix = refusal
        raise TargetError(what, where=declaration.where, fix=fix)


def check_owner(declaration: Declaration, owner: Owner) -> None:
    """Raise TargetError where the target is a table of compiled operations."""
    if type(owner).__module__ == "torch._ops":
        raise TargetError(
            "its attributes are compiled operations, which Python code cannot stand around",
            where=declaration.where,
            fix="register an implementation with torch.library, or patch the Python function that calls the operation",
        )


Refusal = tuple[str, str]


def _addition(hook: Hook, owner: type) -> Refusal | None:
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


def _member(hook: Hook, owner: Owner, present: object) -> Refusal | None:
    if hook.form == "value" and isinstance(owner, enum.EnumMeta):
        return (
            f"it sets {hook.attribute!r}, and {owner.__qualname__} is an Enum: a value set on it is not a member",
            "patch the code that reads the member; methods of an Enum can be patched",
        )
    return None


def _slot(hook: Hook, owner: Owner, present: object) -> Refusal | None:
    fields = getattr(owner, "__struct_fields__", ()) if isinstance(owner, type) else ()
    if hook.attribute in fields or isinstance(present, types.MemberDescriptorType):
        kind = "msgspec struct" if hook.attribute in fields else "class with __slots__"
        return (
            f"{hook.attribute!r} is a field of the {kind} {_named(owner)}, whose layout is fixed",
            "patch the code that reads or writes it, and keep state of your own in a table by request id",
        )
    return None


def _field(hook: Hook, owner: Owner, present: object) -> Refusal | None:
    if hook.form == "value" and hook.attribute in vars(owner).get("__dataclass_fields__", {}):
        return (
            f"it sets {hook.attribute!r}, a field of the dataclass {_named(owner)}, whose __init__ "
            "keeps the default it was made with",
            "wrap '__init__', or set the value where the instance is made",
        )
    return None


def _validator(hook: Hook, owner: Owner, present: object) -> Refusal | None:
    infos = vars(owner).get("__pydantic_decorators__")
    tables = (getattr(infos, name, None) for name in getattr(infos, "__slots__", None) or vars(type(infos)))
    if infos is None or not any(isinstance(table, Mapping) and hook.attribute in table for table in tables):
        return None
    return (
        f"{hook.attribute!r} is a validator that pydantic captured when {_named(owner)} was made: a new one is never "
        "called",
        "wrap '__post_init__' or '__init__' instead",
    )


def _compiled(hook: Hook, owner: Owner, present: object) -> Refusal | None:
    home = type(present).__module__
    name = hook.attribute
    if home == "torch._ops":
        return (
            f"{name!r} is a compiled operation of torch",
            "register an implementation with torch.library, or patch the Python function that calls it",
        )
    if home.partition(".")[0] == "triton":
        return f"{name!r} is a Triton kernel", "patch the Python function that launches it"
    if caches.uncached(present) is not present:
        return (
            f"{name!r} is behind functools.cache, and {_named(owner)} inherits it: the cache is the base's",
            "patch the class that defines it",
        )
    if isinstance(present, caches.Cache):
        return (
            f"{name!r} is behind functools.cache, and what it stands around is no Python function",
            "patch the function that calls it",
        )
    return None


def _named(owner: Owner) -> str:
    return owner.__qualname__ if isinstance(owner, type) else owner.__name__


def _is_pydantic(owner: type) -> bool:
    return any(name in vars(owner) for name in ("__pydantic_validator__", "__pydantic_fields__"))


_RULES: Final[tuple[Callable[[Hook, Owner, object], Refusal | None], ...]] = (
    _member,
    _slot,
    _field,
    _validator,
    _compiled,
)
