"""Reports kept between runs: an audit of files and releases that have not changed is not done again.

A report is kept under a key of everything that it depends on: path, size and time of every file that was read, the
releases, and the audit's own code. Files come into the folder whole, by renaming, so several runs may share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vllm_graft.audit.model import Report, Use
from vllm_graft.audit.releases.kept import Kept
from vllm_graft.audit.releases.listed import Listed
from vllm_graft.audit.releases.shape import Release
from vllm_graft.audit.releases.sourced import Sourced
from vllm_graft.audit.uses.locate import Located
from vllm_graft.audit.uses.locks import lock_of
from vllm_graft.files import cache_folder, replace_file

_PACKAGE: Final = Path(__file__).parents[1]
_CODE: Final = ("audit", "patching")
_CLASSES: Final = frozenset({"vllm_graft.audit.model", "vllm_graft.findings"})
"""The modules whose classes a report consists of; a file that names any other is refused."""

_ENTRIES: Final = 64
"""How many reports are kept; the oldest go first."""

_CHECKSUM: Final = 32
_BROKEN: Final = (
    OSError, ValueError, EOFError, AttributeError, TypeError, LookupError, zlib.error, pickle.PickleError,
)  # fmt: skip


class Folder:
    """A folder of packed objects, each behind its checksum; files come in whole or not at all."""

    def __init__(self, path: Path, entries: int) -> None:
        self.path = path
        self._entries = entries

    def load(self, key: str, unpickler: Callable[[io.BytesIO], pickle.Unpickler]) -> object:
        """Return what is kept under a key; None where there is nothing, or nothing that can be read."""
        try:
            data = (self.path / key).read_bytes()
            checksum, body = data[:_CHECKSUM], data[_CHECKSUM:]
            if hashlib.sha256(body).digest() != checksum:
                return None
            return unpickler(io.BytesIO(zlib.decompress(body))).load()
        except _BROKEN:
            return None

    def store(self, key: str, kept: object, pickler: type[pickle.Pickler]) -> None:
        """Keep an object; OSError where the folder cannot be written, ValueError where it cannot be packed."""
        packed = _Packed()
        try:
            pickler(packed, protocol=5).dump(kept)
        except (pickle.PicklingError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        body = packed.finish()
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.path / key, hashlib.sha256(body).digest() + body)
        self._prune()

    def _prune(self) -> None:
        """Remove the oldest files, and what a killed process left; another run may be doing the same."""
        found: list[tuple[float, Path]] = []
        for path in self.path.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path))
        for _, path in sorted(found, reverse=True)[self._entries :]:
            path.unlink(missing_ok=True)


class _Packed:
    """Compresses what is written to it, so that a large object is never packed in memory as a whole."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(1)
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(self._deflate.compress(data))
        return len(data)

    def finish(self) -> bytes:
        return b"".join([*self._parts, self._deflate.flush()])


class ReportCache:
    """The folder of kept reports."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "reports"

    def load(self, key: str) -> Report | None:
        """Return a kept report; None where there is none, or none that can be read."""
        report = Folder(self.folder, _ENTRIES).load(key, _Unpickler)
        return report if isinstance(report, Report) else None

    def store(self, key: str, report: Report) -> None:
        """Keep a report; OSError where the folder cannot be written, ValueError where the report cannot be packed."""
        Folder(self.folder, _ENTRIES).store(key, _without_trees(report), _Pickler)


def key_of(packages: Sequence[Located], base: Release, against: Sequence[Release], *, steps: bool) -> str | None:
    """Return what a report of these is kept under; None where a release may change without a change of its number."""
    releases = [_release(one) for one in (base, *against)]
    if None in releases:
        return None
    parts: list[object] = [sys.version_info[:2], code_digest(), steps, *releases]
    for package in packages:
        parts += [package.package, package.version, package.required, *_files(package)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _release(release: Release) -> str | None:
    if isinstance(release, Listed):
        return f"catalogue {release.version}"
    return f"index {release.version}" if isinstance(release, Sourced) and isinstance(release.source, Kept) else None


def code_digest() -> str:
    """Return a digest of the code that makes a report, and of the catalogue by its size and time."""
    digest = hashlib.sha256()
    for path in sorted(path for name in _CODE for path in (_PACKAGE / name).rglob("*")):
        if path.suffix == ".py":
            digest.update(path.read_bytes())
        elif path.suffix == ".xz":
            digest.update(repr(_stamp(path)).encode())
    return digest.hexdigest()


def _files(package: Located) -> Iterator[tuple[object, ...]]:
    locks: set[Path] = set()
    for file in package.files:
        yield file.shown, file.module, _stamp(file.path)
        locks.add(lock_of(file))
    yield from ((str(path), _stamp(path)) for path in sorted(locks))


def _stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return str(path), state.st_size, state.st_mtime_ns


def _without_trees(report: Report) -> Report:
    """Return the report without syntax trees: they are many times its size, and only judging needs them."""
    bare: dict[int, Use] = {}

    def of(use: Use) -> Use:
        # A row has the very use of its reading, which is packed once.
        known = bare.get(id(use))
        if known is None:
            known = bare[id(use)] = use.without_tree()
        return known

    packages = [replace(reading, uses=tuple(map(of, reading.uses))) for reading in report.packages]
    return replace(report, packages=tuple(packages), rows=tuple(replace(row, use=of(row.use)) for row in report.rows))


class _Pickler(pickle.Pickler):
    """Refuses what the reader would refuse."""

    def reducer_override(self, obj: object) -> Any:
        """Leave the classes of a report to pickle."""
        _check(obj if isinstance(obj, type) else type(obj))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Makes objects of a report's own classes and of no others: the folder may be shared."""

    def find_class(self, module: str, name: str) -> object:
        """Return one of the classes that a report consists of.

        Pickle resolves a dotted name attribute by attribute, and a module also has what it imported: either would lead
        from a permitted module to ``eval``.
        """
        found = None if "." in name or module not in _CLASSES else super().find_class(module, name)
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a report")
        return found


def _check(kind: type) -> None:
    if kind.__module__ not in _CLASSES:
        raise pickle.PicklingError(f"{kind.__module__}.{kind.__name__} is no part of a report")
