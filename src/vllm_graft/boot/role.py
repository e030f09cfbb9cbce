"""Which part this process plays, told from its name and from who called us."""

from __future__ import annotations

import multiprocessing
import sys
from types import FrameType
from typing import Final

from vllm_graft.points import Role

REGISTRY_MODULE: Final = "vllm.model_executor.models.registry"
"""The module vLLM runs as a program to inspect a model class."""

_BY_NAME: Final[tuple[tuple[str, Role], ...]] = (
    ("EngineCore", "engine"),
    ("VllmWorker", "worker"),
    ("ApiServer", "frontend"),
)

_BY_FILE: Final[tuple[tuple[str, Role], ...]] = (
    ("/vllm/v1/worker/worker_base.py", "worker"),
    ("/vllm/v1/engine/core.py", "engine"),
)


def named_role() -> Role | None:
    """The role that vLLM's name for this process tells, or None for a process that is no child of vLLM's."""
    name = multiprocessing.current_process().name
    return next((role for prefix, role in _BY_NAME if name.startswith(prefix)), None)


def child_role() -> Role | None:
    """The role of a process that vLLM started as part of a server; None in a program of its own.

    Ray actors carry no telling name, so the frames that led to our entry point decide there.
    """
    named = named_role()
    if named is not None:
        return named
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if getattr(spec, "name", None) == REGISTRY_MODULE:
        return "registry"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for ending, role in _BY_FILE:
            if frame.f_code.co_filename.endswith(ending):
                return role
        frame = frame.f_back
    return None


def local_above(name: str) -> object:
    """The value of a local variable of that name in the nearest frame above that has it, else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("/vllm/v1/engine/core.py") and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None


def calls_below(function: str) -> bool:
    """Say whether a function of that name is on the stack of the caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False
