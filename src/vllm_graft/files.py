"""Files of our own: the cache folder, and replacing a file as a whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$GRAFT_CACHE_DIR``, else ``vllm-graft`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; it may not exist yet."""
    if chosen := os.environ.get("GRAFT_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-graft"


def replace_file(path: Path, data: bytes, *, scratch: Path | None = None) -> None:
    """Write a file as a whole or not at all; OSError leaves the old one as it was.

    A link stays one, and its target is replaced. The permissions stay those of the old file. ``scratch`` is a folder
    on the same disk for the unfinished file; without it, the file's own folder is used.
    """
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=scratch or path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        Path(name).write_bytes(data)
        if path.exists():
            shutil.copymode(path, name)
        else:
            # mkstemp makes files for their owner alone; a new file gets what the process's umask leaves.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
