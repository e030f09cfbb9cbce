"""Files of our own: the cache folder, and replacing a file as a whole."""

from __future__ import annotations

import os
import shutil
import uuid
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
    part = (scratch or path.parent) / f".{uuid.uuid4().hex}.part"
    existed = path.exists()
    try:
        # Private until it has the old file's permissions; a new file gets what the umask leaves.
        part.touch(mode=0o600 if existed else 0o666, exist_ok=False)
        part.write_bytes(data)
        if existed:
            shutil.copymode(path, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
