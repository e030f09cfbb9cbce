"""Reads a package for its uses of vLLM: what it patches, overrides, subclasses and imports. None of its code is run.

::

    found = read("my_plugin")                # an installed distribution, an import name, a file or a folder
    for use in found.uses:
        print(use.where, use.way, use.name)
    body_dependencies(use).attributes        # what the body reads from self, beyond what the package sets there

From the outside in:

distribution.py  locate(): a package's files, its version, and the releases of vLLM that it requires
source_file.py   one file: its text, its syntax tree and the name of its module
syntax.py        syntax trees: the names that a function binds, and functions whose bodies are parsed on demand
package.py       PackageReader: walks files in the order of their imports, and the functions that may concern vLLM
walker.py        Walker: statements, expressions and class statements, with scopes and branches as Python has them
walk_state.py    where a walk is, and what it has found in a file
values.py        what an expression may stand for, and scopes
resolver.py      Resolver: an expression to its values, through imports, aliases and attributes
guards.py        tests and handlers around code, and whether they let it run in a release
patches.py       assignments, setattr, mock, wrapt, patch classes: everything that replaces a name of vLLM
classes.py       subclasses of vLLM's classes: their bases, own attributes and calls of inherited methods
bodies.py        what the body of a patch or override depends on
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_graft.audit.model import PackageUses
from vllm_graft.audit.uses.bodies import BodyDependencies, body_contents, body_dependencies, is_class_method
from vllm_graft.audit.uses.distribution import PackageFiles, installed_plugins, locate
from vllm_graft.audit.uses.package import PackageReader, ReadingProgress
from vllm_graft.findings import Finding

__all__ = [
    "BodyDependencies",
    "PackageFiles",
    "body_contents",
    "body_dependencies",
    "collector_paused",
    "installed_plugins",
    "is_class_method",
    "locate",
    "read",
    "read_files",
]


@contextmanager
def collector_paused(*, ending: bool = False) -> Iterator[None]:
    """Pause the garbage collector, which would spend half of the time on millions of objects that all stay alive.

    ``ending``: the process is about to end, so the collector never needs to visit them.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ending:
            gc.freeze()
        if was:
            gc.enable()


def read(what: str | Path, *, tests: bool = False) -> PackageUses:
    """Read every use of vLLM in a package from its source; ConfigError if there is no such package.

    Its own tests are left out, unless ``tests`` is set.
    """
    return read_files(locate(what, tests=tests))


def read_files(package: PackageFiles, progress: ReadingProgress | None = None) -> PackageUses:
    """Read every use of vLLM in a package's files; ``progress`` is called with the steps done and their number."""
    required = package.required
    with collector_paused():
        reader = PackageReader(package.package, package.files, progress)
        uses = tuple(reader.uses())
    broken = [
        Finding("P220", "error", package.package, f"the lock is ignored: {one.what}", one.where, one.fix)
        for one in reader.locks.broken
    ]
    return PackageUses(
        package=package.package,
        uses=uses,
        unread=(*reader.unread, *broken),
        files=len(package.files),
        tests=package.tests,
        version=package.version,
        base=required.exact if required is not None else "",
        allowed=required.specifier if required is not None and not required.by_number else "",
        stated_in=required.file if required is not None else "",
    )
