"""The marks of hooks: ``wrap``, ``replace`` and ``add``, plain or with the releases that a body is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

from vllm_graft.patching.hooks import Kind, Marked

F = TypeVar("F")


@overload
def wrap(function: F) -> F: ...
@overload
def wrap(*, vllm: str) -> Callable[[F], F]: ...
def wrap(function: F | None = None, *, vllm: str = "") -> F | Callable[[F], F]:
    """Mark a hook that stands around what is there and reaches it by ``call`` or ``self._original_<name>``."""
    return _mark("wrap", function, vllm)


@overload
def replace(value: F) -> F: ...
@overload
def replace(*, vllm: str) -> Callable[[F], F]: ...
def replace(value: F | None = None, *, vllm: str = "") -> F | Callable[[F], F]:
    """Mark a hook that takes the place of what is there; refused where there is nothing."""
    return _mark("replace", value, vllm)


@overload
def add(value: F) -> F: ...
@overload
def add(*, vllm: str) -> Callable[[F], F]: ...
def add(value: F | None = None, *, vllm: str = "") -> F | Callable[[F], F]:
    """Mark a hook that is new; refused where the target has the name already."""
    return _mark("add", value, vllm)


def _mark(kind: Kind, value: F | None, vllm: str) -> F | Callable[[F], F]:
    """``@wrap`` on a function, or with ``vllm=`` the decorator that marks one of several bodies."""
    if vllm and value is None:
        return lambda body: _marked(kind, body, vllm)
    return _marked(kind, cast(F, value), "")


def _marked(kind: Kind, value: F, vllm: str) -> F:
    if isinstance(value, property):
        # The mark goes on the getter, because @x.setter must still find a property.
        return cast(F, property(cast(Any, Marked(kind, value.fget, vllm)), value.fset, value.fdel, value.__doc__))
    return cast(F, Marked(kind, value, vllm))
