"""Reads a package for its uses of vLLM: what it patches, overrides, subclasses and imports. Nothing of it is run.

::

    reading = read("my_plugin")          # an installed distribution, an import name, a file or a folder
    for use in reading.uses:
        print(use.where, use.way, use.name)
    relies(use).attributes               # what the body reads from self, beyond what the package puts there

From the outside in:

locate.py       what is to be read: its files and its version
requirements.py the releases of vLLM that a package says it is for
files.py        one file: its text and syntax tree, and what its module is called
package.py      all files together: the order they are walked in, names followed between them, the uses
walk.py         statements, with scopes, branches and guards
expressions.py  expressions: what is mentioned
targets.py      assignments to names of vLLM
calls.py        calls that put something there: setattr, mock, pytest, wrapt, gorilla
helpers.py      functions of the package that change what they are given
sweeps.py       copies of a name, changed wherever they are
classes.py      class statements: subclasses and overrides
family.py       classes of the package among each other: whose methods they call, which of them are instantiated
patches.py      patch classes and what they declare
bodies.py       what stands in the place of a name, and whether it calls what was there
guards.py       which code provides for the absence of a name
conditions.py   whether a test holds in a release
locks.py        what patches.lock says of a hook
ownership.py    what the package itself puts on the objects it is given
resolve.py      what an expression stands for
values.py       the things it may stand for, and scopes
locals.py       which names belong to a function
state.py        where a walk stands, and what it has found
relies.py       what a body leans on
outlines.py     functions without their bodies, which are parsed again when they are asked for
relevance.py    which functions may have to do with vLLM, and are walked
plugins.py      which installed distributions are plugins
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_graft.audit.model import Reading
from vllm_graft.audit.uses.locate import Located, locate
from vllm_graft.audit.uses.package import Package, Progress
from vllm_graft.audit.uses.plugins import installed_plugins
from vllm_graft.audit.uses.relies import Relied, contents, relies
from vllm_graft.findings import Finding

__all__ = [
    "Located",
    "Relied",
    "collector_paused",
    "contents",
    "installed_plugins",
    "locate",
    "read",
    "read_files",
    "relies",
]


@contextmanager
def collector_paused(*, ending: bool = False) -> Iterator[None]:
    """Keep the garbage collector out: it would go over millions of objects that all stay alive, for half of the time.

    ``ending``: the process is about to end, so that it need not go over them afterwards either.
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


def read(what: str | Path, *, tests: bool = False) -> Reading:
    """Every use that a package makes of vLLM, by its source alone; ConfigError where there is no such package.

    Its own tests are left out, unless ``tests`` asks for them.
    """
    return read_files(locate(what, tests=tests))


def read_files(located: Located, progress: Progress | None = None) -> Reading:
    """Every use in files that have been located; ``progress`` is called with how much is done, and of how much."""
    required = located.required
    with collector_paused():
        package = Package(located.package, located.files, progress)
        uses = tuple(package.uses())
    broken = [
        Finding("P220", "error", located.package, f"the lock is left out of account: {one.what}", one.where, one.fix)
        for one in package.locks.broken
    ]
    return Reading(
        package=located.package,
        uses=uses,
        unread=(*package.unread, *broken),
        files=len(located.files),
        tests=located.tests,
        version=located.version,
        base=required.exact if required is not None else "",
        allowed=required.specifier if required is not None and not required.by_number else "",
        stated_in=required.file if required is not None else "",
    )
