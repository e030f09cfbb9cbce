"""Finding out whether a function runs at this moment, in which case patching it comes too late for that call."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import CodeType, FrameType

from vllm_graft.patching.target import Owner


def running(codes: Collection[CodeType], owner: Owner) -> str:
    """Say where one of these code objects runs on this thread's stack for ``owner``; empty if nowhere."""
    # By identity: equal code may stand in another file.
    wanted = {id(code) for code in codes}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame.f_code) in wanted and _concerns(frame, owner):
            return (
                f"{frame.f_code.co_qualname} was running when it was patched ({frame.f_code.co_filename}:"
                f"{frame.f_lineno}): that call, and what it had done before, used the code of before"
            )
        frame = frame.f_back
    return ""


def _concerns(frame: FrameType, owner: Owner) -> bool:
    """Whether the call is on the owner: one of a base's methods may run for another of its subclasses."""
    code = frame.f_code
    if not isinstance(owner, type) or not code.co_argcount:
        return True
    first = frame.f_locals.get(code.co_varnames[0])
    return not _from_elsewhere(first, owner)


def _from_elsewhere(first: object, owner: type) -> bool:
    """Whether ``first`` is an instance or subclass of a base of the owner, and not of the owner itself."""
    kind = first if isinstance(first, type) else type(first)
    if issubclass(kind, owner):
        return False
    return any(issubclass(kind, base) for base in owner.__mro__[1:-1])
