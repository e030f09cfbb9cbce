"""A private socket folder for one vLLM server.

vLLM makes its sockets in the folder for temporary files, three or more for an engine, and leaves them there when it
ends. What we start ourselves gets a folder that is removed with all of them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

VARIABLE: Final = "VLLM_RPC_BASE_PATH"
"""vLLM's name for the folder."""

_MAX_FOLDER_BYTES: Final = 107 - len("/01234567-89ab-cdef-0123-456789abcdef")
"""The longest folder that leaves room for a socket's name in what the kernel takes as an address."""


def make(environment: Mapping[str, object]) -> Path | None:
    """Make a new folder; return None if the environment names one, or the name would be too long."""
    if environment.get(VARIABLE) is not None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="vllm-graft-"))
    if len(str(folder)) > _MAX_FOLDER_BYTES:
        folder.rmdir()
        return None
    return folder


def remove(folder: Path | None) -> None:
    """Remove a folder that ``make`` made, with its content."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def temporary(environment: Mapping[str, object]) -> Iterator[dict[str, str]]:
    """Yield the variable for a new folder, which is removed afterwards; nothing if none is made."""
    folder = make(environment)
    try:
        yield {} if folder is None else {VARIABLE: str(folder)}
    finally:
        remove(folder)
