"""Where records live: a folder that only its owner can read, on any machine and in read-only containers.

``GRAFT_STATE_DIR`` names where it is made. Without it the first of these that can be written is taken: the user's
runtime folder, the temporary folder, shared memory. There each user has a folder of his own, and in it every run of a
server; a folder that we did not make keeps its rights.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vllm_graft.errors import LedgerError

VARIABLE: Final = "GRAFT_STATE_DIR"

KEPT_S: Final = 24 * 3600
"""How long the records of a run that did not end in order stay visible."""


ROOM: Final = 128 * 1024
"""The bytes that the files of one more process may need."""


def state_folder(create: bool = False) -> Path | None:
    """The folder of records. None where nothing can be written: records then live in memory only.

    A folder that ``GRAFT_STATE_DIR`` names must be usable, else LedgerError; so must one that already exists and
    belongs to somebody else, because records of another user prove nothing.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        return _usable(home_in(Path(named).expanduser().absolute()), create, named=True)
    for candidate in _candidates():
        found = _usable(candidate, create, named=False)
        if found is not None:
            return found
    return None


def home_in(place: Path) -> Path:
    """This user's folder of records in a place that others may use too."""
    return place / f"vllm-graft-{os.getuid()}"


def run_folder(state: Path, run: str) -> Path:
    """The folder of one run's records."""
    return state / "runs" / run


def make_run_folder(state: Path, run: str) -> Path:
    """The folder of one run's records, made where it is not there."""
    folder = run_folder(state, run)
    for home in (folder.parent, folder):
        home.mkdir(mode=0o700, exist_ok=True)
    return folder


def run_folders(state: Path) -> list[Path]:
    """Every run's folder, oldest first; LedgerError where they cannot be listed."""
    try:
        found = [entry for entry in (state / "runs").iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LedgerError(
            f"the folder {state / 'runs'} cannot be read: {error.strerror}",
            where=VARIABLE if os.environ.get(VARIABLE) else "",
            fix="give this user access to it, or remove it",
        ) from error
    return sorted(found, key=_written)


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most so many bytes; OSError or ValueError for anything else.

    Nothing here waits: a FIFO in the place of a record would otherwise hold the reader up until somebody writes to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is not a regular file")
        if facts.st_size > limit:
            raise ValueError(f"it has {facts.st_size} bytes, and at most {limit} are read")
        return file.read(limit)


def shortage(place: Path) -> str:
    """Say that the disk of a folder is full; empty where it has room for another record."""
    try:
        facts = os.statvfs(place)
    except OSError:
        return ""
    if facts.f_bavail * facts.f_frsize < ROOM or (facts.f_files and not facts.f_favail):
        return f"the disk of {place} is full"
    return ""


def _written(folder: Path) -> float:
    # Another start may be removing it this moment.
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def too_old(folder: Path) -> bool:
    """Whether a run that has ended was last written longer ago than records are kept."""
    try:
        newest = max((entry.lstat().st_mtime for entry in folder.iterdir()), default=folder.stat().st_mtime)
    except OSError:
        return False
    return time.time() - newest > KEPT_S


def remove(folder: Path) -> None:
    """Remove a run's records; another process may be doing the same."""
    shutil.rmtree(folder, ignore_errors=True)


def _candidates() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "").strip()
    if runtime:
        yield home_in(Path(runtime))
    yield home_in(Path(tempfile.gettempdir()))
    yield home_in(Path("/dev/shm"))


def _usable(folder: Path, create: bool, named: bool) -> Path | None:
    if create:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if named:
                raise LedgerError(
                    f"the folder {folder} cannot be made: {error}",
                    where=VARIABLE,
                    fix=f"point {VARIABLE} at a folder this user may write",
                ) from error
            return None
    try:
        facts = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise LedgerError(
            f"{folder} is not a folder of this user",
            where=VARIABLE if named else "",
            fix=f"remove it, or point {VARIABLE} at a folder of your own",
        )
    if create and facts.st_mode & 0o077:
        folder.chmod(0o700)
    if create and not os.access(folder, os.W_OK | os.X_OK):
        if named:
            raise LedgerError(
                f"the folder {folder} cannot be written",
                where=VARIABLE,
                fix=f"point {VARIABLE} at a folder this user may write",
            )
        return None
    return folder
