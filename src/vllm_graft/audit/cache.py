"""Caches between runs: reports, and the uses that were read from packages.

A report is stored under everything that it depends on: path, size and time of each file, the releases, and the audit's
own code. The uses of a package are stored under the content of its files, so that a fresh checkout finds them, too, and
another release can be judged without reading the package again. They hold no scopes: the outcome of each test in the
package is computed beforehand for every release in the catalogue, and other releases need a fresh read.

The key contains a digest of the code, so that what another version of it stored is never loaded.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import hashlib
import io
import pickle
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vllm_graft.audit.model import (
    Branch,
    Condition,
    PackageUses,
    PrecomputedCondition,
    Report,
    Use,
    UseGuard,
    line_at,
)
from vllm_graft.audit.releases.catalogue import CatalogueRelease
from vllm_graft.audit.releases.release import Release
from vllm_graft.audit.releases.source_release import SourceRelease
from vllm_graft.audit.releases.wheels import CachedWheel
from vllm_graft.audit.uses import PackageFiles, body_contents
from vllm_graft.audit.uses.patches import locks_of
from vllm_graft.audit.uses.syntax import Outline
from vllm_graft.audit.verdicts import ReleaseFacts
from vllm_graft.files import cache_folder, replace_file

_PACKAGE: Final = Path(__file__).parents[1]
_CODE: Final = ("audit", "patching", "sources")
# The modules whose classes may be stored; a file that names any other is refused.
_CLASSES: Final = frozenset(
    {
        "ast",
        "vllm_graft.audit.model",
        "vllm_graft.audit.uses.bodies",
        "vllm_graft.audit.uses.syntax",
        "vllm_graft.findings",
    }
)

# The most files that each cache holds; the oldest are removed first.
_REPORTS: Final = 64
_USES: Final = 24
_CHECKSUM: Final = 32
_BROKEN: Final = (
    OSError, ValueError, EOFError, AttributeError, TypeError, LookupError, zlib.error, pickle.PickleError,
)  # fmt: skip


class ReportCache:
    """The folder of stored reports."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "reports"

    def load(self, key: str) -> Report | None:
        """Return a stored report; None if there is none that can be read."""
        report = _load(self.folder / key)
        return report if isinstance(report, Report) else None

    def store(self, key: str, report: Report) -> None:
        """Store a report; OSError if the folder cannot be written, ValueError if it cannot be pickled."""
        # Syntax trees are many times the size of a report, and only judging needs them.
        bare: dict[int, Use] = {}

        def without_tree(use: Use) -> Use:
            # A row refers to the same use as its package, which is pickled once.
            known = bare.get(id(use))
            if known is None:
                known = bare[id(use)] = use.without_tree()
            return known

        packages = [replace(package, uses=tuple(map(without_tree, package.uses))) for package in report.packages]
        rows = [row.but(use=without_tree(row.use)) for row in report.rows]
        _store(self.folder / key, replace(report, packages=tuple(packages), rows=tuple(rows)), _REPORTS)


class UsesCache:
    """The folder of packages' uses, for audits against releases of a catalogue."""

    def __init__(self, releases: Sequence[Release], folder: Path | None = None) -> None:
        self._releases = releases
        self._folder = folder or cache_folder() / "readings"

    def load(self, package: PackageFiles, releases: Iterable[Release]) -> PackageUses | None:
        """Return the uses of a package; None if they are not stored, or not for one of the releases."""
        known = {release.version for release in self._releases}
        if not all(isinstance(release, CatalogueRelease) and release.version in known for release in releases):
            return None
        found = _load(self._folder / self._key(package))
        if not isinstance(found, PackageUses):
            return None
        # Each outline gets the file of the package that it is cut from.
        files = {file.shown: file for file in package.files}
        for use in found.uses:
            if use.body is not None and isinstance(shown := use.body.__dict__.get("file"), str):
                if shown not in files:
                    return None
                use.body.__dict__["file"] = files[shown]
        return found

    def store(self, package: PackageFiles, uses: PackageUses) -> None:
        """Store the uses; OSError if the folder cannot be written, ValueError if they cannot be pickled."""
        computed = _Precomputation(self._releases)
        _store(self._folder / self._key(package), replace(uses, uses=tuple(map(computed.use, uses.uses))), _USES)

    def _key(self, package: PackageFiles) -> str:
        parts: list[object] = [sys.version_info[:2], code_digest(), [release.version for release in self._releases]]
        parts += [package.package, package.version, package.required, package.tests]
        for file in package.files:
            parts += [file.shown, file.name, file.module, _content_digest(file.path)]
        parts += [(path.name, _content_digest(path)) for path in locks_of(package.files)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def report_key(
    packages: Sequence[PackageFiles], base: Release, against: Sequence[Release], *, steps: bool
) -> str | None:
    """Return the key of a report; None if a release may change without a change of its number."""
    parts: list[object] = [sys.version_info[:2], code_digest(), steps]
    for release in (base, *against):
        if isinstance(release, CatalogueRelease):
            parts.append(f"catalogue {release.version}")
        elif isinstance(release, SourceRelease) and isinstance(release.source, CachedWheel):
            parts.append(f"index {release.version}")
        else:
            return None
    for package in packages:
        parts += [package.package, package.version, package.required]
        parts += [(file.shown, file.module, _stamp(file.path)) for file in package.files]
        parts += [(str(path), _stamp(path)) for path in locks_of(package.files)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def code_digest() -> str:
    """Return a digest of the code that makes a report, and of the catalogue by its size and time."""
    digest = hashlib.sha256()
    for path in sorted(path for name in _CODE for path in (_PACKAGE / name).rglob("*")):
        if path.suffix == ".py":
            digest.update(path.read_bytes())
        elif path.suffix == ".xz":
            digest.update(repr(_stamp(path)).encode())
    return digest.hexdigest()


def _stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return str(path), state.st_size, state.st_mtime_ns


def _content_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


class _Precomputation:
    """Replaces the conditions of uses by their outcomes in some releases."""

    def __init__(self, releases: Sequence[Release]) -> None:
        self._facts = [ReleaseFacts(release) for release in releases]
        self._conditions: dict[Condition, PrecomputedCondition] = {}
        self._guards: dict[UseGuard, UseGuard] = {}

    def use(self, use: Use) -> Use:
        body = use.body
        branches: list[Branch] = []
        if body is not None:
            # Stored with the body: the verdicts ask for it, and the file may be gone by then.
            body_contents(body)
            for condition, first, last in use.branches:
                # Only branches that a line of the body may be in.
                if line_at(first) <= (body.end_lineno or body.lineno) and line_at(last) >= body.lineno:
                    branches.append((self._condition(condition), first, last))
        if use.guard not in self._guards:
            conditions = tuple(map(self._condition, use.guard.conditions))
            self._guards[use.guard] = use.guard.but(conditions=conditions)
        return use.but(guard=self._guards[use.guard], branches=tuple(branches))

    def _condition(self, condition: Condition) -> PrecomputedCondition:
        if condition not in self._conditions:
            outcomes = tuple((facts.version, condition.outcome(facts)) for facts in self._facts)
            self._conditions[condition] = PrecomputedCondition(outcomes, condition.alternative)
        return self._conditions[condition]


def _load(path: Path) -> object:
    """Return the object in a file; None if there is none that can be read."""
    try:
        data = path.read_bytes()
        checksum, body = data[:_CHECKSUM], data[_CHECKSUM:]
        if hashlib.sha256(body).digest() != checksum:
            return None
        return _Unpickler(io.BytesIO(gzip.decompress(body))).load()
    except _BROKEN:
        return None


def _store(path: Path, content: object, entries: int) -> None:
    """Write an object behind its checksum by renaming, because several runs may share the folder."""
    compressed = io.BytesIO()
    try:
        # Compressed as it is written, so that a large object is never pickled in memory as a whole.
        with gzip.GzipFile(fileobj=compressed, mode="wb", compresslevel=1, mtime=0) as file:
            _Pickler(file, protocol=5).dump(content)
    except (pickle.PicklingError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    body = compressed.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, hashlib.sha256(body).digest() + body)
    found: list[tuple[float, Path]] = []
    for other in path.parent.iterdir():
        # Another run may be removing old files, too.
        with contextlib.suppress(FileNotFoundError):
            found.append((other.stat().st_mtime, other))
    for _, other in sorted(found, reverse=True)[entries:]:
        other.unlink(missing_ok=True)


class _Pickler(pickle.Pickler):
    """Refuses what ``_Unpickler`` would refuse; an outline has the path of its file in the package for the file."""

    def reducer_override(self, obj: object) -> Any:
        """Leave permitted classes to pickle, and the ``...`` of an annotation."""
        if obj is ...:
            return NotImplemented
        kind = obj if isinstance(obj, type) else type(obj)
        if not _is_permitted(kind):
            raise pickle.PicklingError(_refusal(kind.__module__, kind.__name__))
        if isinstance(obj, Outline):
            return kind, (), {**obj.__dict__, "file": obj.file.shown}
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Instantiates the permitted classes only, because others may be able to write to the folder."""

    def find_class(self, module: str, name: str) -> object:
        """Return a permitted class, or ``...``.

        Pickle resolves a dotted name attribute by attribute, and a module also has what it imported: either would lead
        from a permitted module to ``eval``.
        """
        if (module, name) == ("builtins", "Ellipsis"):
            return ...
        found = None if "." in name or module not in _CLASSES else super().find_class(module, name)
        if not isinstance(found, type) or found.__module__ != module or not _is_permitted(found):
            raise pickle.UnpicklingError(_refusal(module, name))
        return found


def _is_permitted(kind: type) -> bool:
    # Of Python's own module for syntax trees only the nodes: it also has ``literal_eval`` and visitors.
    return kind.__module__ in _CLASSES and (kind.__module__ != "ast" or issubclass(kind, ast.AST))


def _refusal(module: str, name: str) -> str:
    return f"{module}.{name} is not part of a report or of a package's uses"
