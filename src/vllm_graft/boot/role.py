"""The role of this process, derived from its name and from the frames that led to our code."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
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
"""The beginnings of vLLM's names for the processes that it starts (0.26 to 0.32)."""

_BY_FILE: Final[tuple[tuple[str, Role], ...]] = (
    ("/vllm/v1/worker/worker_base.py", "worker"),
    ("/vllm/v1/engine/core.py", "engine"),
)
"""vLLM's files that load plugins in a Ray actor, whose process name does not reveal the role."""


def named_role() -> Role | None:
    """Return the role that vLLM's name for this process implies; None in a process that vLLM did not name."""
    name = multiprocessing.current_process().name
    return next((role for prefix, role in _BY_NAME if name.startswith(prefix)), None)


def child_role() -> Role | None:
    """Return the role of a process that vLLM started as part of a server; None in a program of its own."""
    named = named_role()
    if named is not None:
        return named
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if getattr(spec, "name", None) == REGISTRY_MODULE:
        return "registry"
    files = (frame.f_code.co_filename for frame in frames_above())
    return next((role for file in files for ending, role in _BY_FILE if file.endswith(ending)), None)


def engine_config_above() -> object:
    """Return the ``vllm_config`` of the engine core that is being made, from vLLM's frame that has it."""
    for frame in frames_above():
        if frame.f_code.co_filename.endswith("/vllm/v1/engine/core.py") and "vllm_config" in frame.f_locals:
            return frame.f_locals["vllm_config"]
    return None


def frames_above() -> Iterator[FrameType]:
    """Yield the frames of the stack, from the caller outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
