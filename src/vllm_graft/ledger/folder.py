"""The folder of records: private to its user, on any machine and in read-only containers.

``GRAFT_STATE_DIR`` names its parent. Without it, the parent is the first of these that can be written: the user's
runtime folder, the temporary folder, shared memory. Each user has a folder there, with one folder in it for every run
of a server. A folder that we did not make keeps its permissions.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from vllm_graft.errors import LedgerError

VARIABLE: Final = "GRAFT_STATE_DIR"

RETENTION_S: Final = 24 * 3600  # the seconds for which the records of a run that did not end cleanly are shown
ROOM: Final = 128 * 1024  # the bytes that the files of one more process may need

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a full disk, or of a quota or limit that is used up."""

_PAGE: Final = 4096  # the bytes in whose multiples a file is padded


def state_folder(create: bool = False) -> Path | None:
    """Return the folder of records; None if nothing can be written, and records stay in memory.

    A folder that ``GRAFT_STATE_DIR`` names must be usable, else LedgerError; so must one that already exists and
    belongs to another user, because another user's records prove nothing.
    """
    named = named_home(os.environ)
    if named is not None:
        return _usable(named, create, named=True)
    found = (_usable(candidate, create, named=False) for candidate in _candidates())
    return next((usable for usable in found if usable is not None), None)


def named_home(environ: Mapping[str, str]) -> Path | None:
    """Return this user's folder of records in the place that an environment names; None if it names none."""
    named = environ.get(VARIABLE, "").strip()
    return home_in(Path(named).expanduser().absolute()) if named else None


def home_in(place: Path) -> Path:
    """Return this user's folder of records below a parent that users may share."""
    return place / f"vllm-graft-{os.getuid()}"


def run_folder(state: Path, run: str) -> Path:
    """Return the folder of one run's records."""
    return state / "runs" / run


def make_run_folder(state: Path, run: str) -> Path:
    """Return the folder of one run's records, and make it if it does not exist."""
    folder = run_folder(state, run)
    for home in (folder.parent, folder):
        home.mkdir(mode=0o700, exist_ok=True)
    return folder


def run_folders(state: Path) -> list[Path]:
    """Return every run's folder, oldest first; raise LedgerError if they cannot be listed."""
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
    """Read a regular file of at most ``limit`` bytes; raise OSError or ValueError for anything else.

    It never waits: a FIFO in place of a record would otherwise hold the reader up until something writes to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is not a regular file")
        if facts.st_size > limit:
            raise ValueError(f"it has {facts.st_size} bytes, but at most {limit} are read")
        return file.read(limit)


def write_file(text: str, path: Path) -> None:
    """Replace a file as a whole, readable by its owner alone.

    The file is padded with blanks, so that it can be written in place on a full disk. A reader may meet half of it
    then for a moment, which is better than a record that no longer changes.
    """
    data = text.encode()
    size = _PAGE * (2 + len(data) // _PAGE)
    temporary = path.with_suffix(f".{os.getpid()}.new")
    try:
        try:
            _fill(temporary, os.O_CREAT | os.O_TRUNC, data.ljust(size))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        temporary.replace(path)
    except OSError as error:
        if error.errno not in FULL or not path.exists() or path.stat().st_size < len(data):
            raise
        _fill(path, 0, data.ljust(path.stat().st_size))


def _fill(path: Path, flags: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def disk_full_reason(place: Path) -> str:
    """Return a sentence that the disk of a folder is full; empty if it has room for another record."""
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
    """Return whether a run was last written longer ago than records are kept."""
    try:
        newest = max((entry.lstat().st_mtime for entry in folder.iterdir()), default=folder.stat().st_mtime)
    except OSError:
        return False
    return time.time() - newest > RETENTION_S


def _candidates() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "").strip()
    if runtime:
        yield home_in(Path(runtime))
    yield home_in(Path(tempfile.gettempdir()))
    yield home_in(Path("/dev/shm"))


def _usable(folder: Path, create: bool, named: bool) -> Path | None:
    """Return a folder that can be used; None if not, or LedgerError if the user named it or it is another user's."""
    fix = f"point {VARIABLE} at a folder this user may write"
    try:
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        # One that is not there holds no records; anything else in its place is a mistake.
        if named and (create or not isinstance(error, FileNotFoundError)):
            verb = "made" if create else "used"
            raise LedgerError(f"the folder {folder} cannot be {verb}: {error}", where=VARIABLE, fix=fix) from error
        return None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        # In a shared folder such as /tmp anyone may have made it first.
        raise LedgerError(
            f"{folder} is not a directory owned by this user",
            where=VARIABLE if named else "",
            fix=f"remove it, or point {VARIABLE} at a folder of your own",
        )
    if not create:
        return folder
    if facts.st_mode & 0o077:
        folder.chmod(0o700)
    if os.access(folder, os.W_OK | os.X_OK):
        return folder
    if named:
        raise LedgerError(f"the folder {folder} cannot be written", where=VARIABLE, fix=fix)
    return None
