"""What was read from packages, kept between runs: another release is held against it without reading them again.

A reading is kept under the content of every file: a fresh checkout of the same files finds it, too. It has no scopes.
Whether a test in the package holds is worked out beforehand, for every release in the catalogue; against other releases
the package is read anew.
"""

from __future__ import annotations

import ast
import hashlib
import io
import pickle
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vllm_graft.audit.cache import Folder, code_digest
from vllm_graft.audit.judging import ReleaseFacts
from vllm_graft.audit.model import Branch, Condition, Facts, Guard, Outcome, Reading, Use
from vllm_graft.audit.releases.listed import Listed
from vllm_graft.audit.releases.shape import Release
from vllm_graft.audit.uses import contents
from vllm_graft.audit.uses.files import SourceFile
from vllm_graft.audit.uses.locate import Located
from vllm_graft.audit.uses.locks import lock_of
from vllm_graft.files import cache_folder

_ENTRIES: Final = 24
"""How many readings are kept; the oldest go first."""

_MODULES: Final = frozenset(
    {
        __name__, "ast", "vllm_graft.audit.model", "vllm_graft.audit.uses.outlines", "vllm_graft.audit.uses.relies",
        "vllm_graft.findings",
    }
)  # fmt: skip
"""The modules whose classes a reading consists of; a file that names any other is refused."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A condition whose outcome in each release of the catalogue has been worked out."""

    outcomes: tuple[tuple[str, Outcome], ...]
    alternative: bool = False

    def outcome(self, facts: Facts) -> Outcome:
        """Whether the code behind it runs in a release of the catalogue."""
        return dict(self.outcomes)[facts.version]


class ReadingCache:
    """The folder of kept readings, for audits against releases of a catalogue."""

    def __init__(self, releases: Sequence[Release], folder: Path | None = None) -> None:
        self._releases = releases
        self._folder = Folder(folder or cache_folder() / "readings", _ENTRIES)

    def load(self, package: Located, releases: Iterable[Release]) -> Reading | None:
        """Return what was read of a package; None where that is not kept, or does not do for one of the releases."""
        known = {release.version for release in self._releases}
        if not all(isinstance(release, Listed) and release.version in known for release in releases):
            return None
        files = {file.shown: file for file in package.files}
        found = self._folder.load(self._key(package), lambda data: _Unpickler(data, files))
        return found if isinstance(found, Reading) else None

    def store(self, package: Located, reading: Reading) -> None:
        """Keep a reading; OSError where the folder cannot be written, ValueError where it cannot be packed."""
        self._folder.store(self._key(package), _settled(reading, self._releases), _Pickler)

    def _key(self, package: Located) -> str:
        parts: list[object] = [sys.version_info[:2], code_digest(), [release.version for release in self._releases]]
        parts += [package.package, package.version, package.required, package.tests]
        locks = {lock_of(file) for file in package.files}
        for file in package.files:
            parts += [file.shown, file.name, file.module, _digest(file.path)]
        parts += [(path.name, _digest(path)) for path in sorted(locks)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _settled(reading: Reading, releases: Sequence[Release]) -> Reading:
    """Return the reading with its conditions worked out, and with what judging asks of the bodies."""
    settle = _Settling(releases)
    return replace(reading, uses=tuple(settle.use(use) for use in reading.uses))


class _Settling:
    def __init__(self, releases: Sequence[Release]) -> None:
        self._facts = [ReleaseFacts(release) for release in releases]
        self._conditions: dict[Condition, Settled] = {}
        self._guards: dict[Guard, Guard] = {}

    def use(self, use: Use) -> Use:
        if use.body is not None:
            contents(use.body)
        return replace(use, guard=self._guard(use.guard), branches=tuple(self._inside(use)))

    def _guard(self, guard: Guard) -> Guard:
        if guard not in self._guards:
            self._guards[guard] = replace(guard, conditions=tuple(map(self._condition, guard.conditions)))
        return self._guards[guard]

    def _inside(self, use: Use) -> Iterable[Branch]:
        """The branches that a line of the body may stand in."""
        body = use.body
        for condition, first, last in use.branches if body is not None else ():
            if body is not None and first <= (body.end_lineno or body.lineno) and last >= body.lineno:
                yield self._condition(condition), first, last

    def _condition(self, condition: Condition) -> Settled:
        if condition not in self._conditions:
            outcomes = tuple((facts.version, condition.outcome(facts)) for facts in self._facts)
            self._conditions[condition] = Settled(outcomes, condition.alternative)
        return self._conditions[condition]


class _Pickler(pickle.Pickler):
    """Refuses what the reader would refuse; a file is named by its path in the package."""

    def persistent_id(self, obj: object) -> str | None:
        return obj.shown if isinstance(obj, SourceFile) else None

    def reducer_override(self, obj: object) -> Any:
        """Leave the classes of a reading to pickle."""
        kind = obj if isinstance(obj, type) else type(obj)
        if not _is_part(kind):
            raise pickle.PicklingError(f"{kind.__module__}.{kind.__name__} is no part of a reading")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Makes objects of a reading's own classes and of no others: the folder may be shared."""

    def __init__(self, data: io.BytesIO, files: dict[str, SourceFile]) -> None:
        super().__init__(data)
        self._files = files

    def persistent_load(self, pid: object) -> SourceFile:
        """Return the file of the package that has a path."""
        return self._files[str(pid)]

    def find_class(self, module: str, name: str) -> object:
        """Return one of the classes that a reading consists of, and nothing that their modules imported."""
        found = None if "." in name or module not in _MODULES else super().find_class(module, name)
        if not isinstance(found, type) or found.__module__ != module or not _is_part(found):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a reading")
        return found


def _is_part(kind: type) -> bool:
    """Whether a class is one that a reading consists of; of Python's own module for syntax trees only the nodes are."""
    return kind.__module__ in _MODULES and (kind.__module__ != "ast" or issubclass(kind, ast.AST))
