"""What was read from packages, kept between runs: it is judged as it was, and serves for releases of the catalogue."""

from __future__ import annotations

import ast
import io
import os
import pickle
import shutil
import zlib
from hashlib import sha256

import pytest

from vllm_graft.audit.cache import UsesCache, _Unpickler
from vllm_graft.audit.releases.catalogue import Catalogue
from vllm_graft.audit.releases.source_release import SourceRelease
from vllm_graft.audit.report import audit
from vllm_graft.audit.uses import locate, read_files
from vllm_graft.sources.origins import Tree

TEXT = """
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
import vllm
try:
    import vllm.nowhere
except ImportError:
    pass
if vllm.__version__ < "0.30":
    from vllm.v1.core import old
class Mine(Scheduler):
    def schedule(self, more):
        if hasattr(self, "gone"):
            return self.gone
        return self.waiting, self.never, super().schedule(extra=1)
def add(self, request):
    return self.other
Scheduler.add_request = add
Scheduler.finish_requests = lambda self, *args: self.running
"""


@pytest.fixture
def catalogue():
    return Catalogue.shipped()


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "plug"
    package.mkdir()
    (package / "__init__.py").write_text(TEXT)
    return package


@pytest.fixture
def cache(catalogue, tmp_path):
    return UsesCache([catalogue.release(version) for version in catalogue.releases], tmp_path / "kept")


@pytest.fixture
def kept(cache, folder):
    cache.store(locate(folder), read_files(locate(folder)))
    return cache


def test_a_reading_is_judged_as_it_was(kept, catalogue, folder):
    """In every release, by a reading that has been kept before any of them was asked for."""
    base, *later = (catalogue.release(version) for version in catalogue.releases)
    again = kept.load(locate(folder), [base, *later])
    fresh = read_files(locate(folder))
    for release in later:
        ours, theirs = (audit([reading], base, [release]) for reading in (again, fresh))
        assert ours.findings == theirs.findings
        assert [(row.use, row.cells, row.use.source, row.use.guarded) for row in ours.rows] == [
            (row.use, row.cells, row.use.source, row.use.guarded) for row in theirs.rows
        ]
    assert {use.way for use in again.uses} >= {"override", "replace", "import", "call"}
    assert any(use.guard.conditions for use in again.uses)


def test_bodies_are_at_hand(kept, catalogue, folder):
    """Parsed from the package's files when they are asked for."""
    again = kept.load(locate(folder), [catalogue.release("0.32.0")])
    assert {use.body.lineno for use in again.uses if use.body is not None} == {12, 16, 19}
    assert [len(use.body.body) for use in again.uses if use.way == "override"] == [2]


def test_the_dots_of_an_annotation(cache, catalogue, folder):
    """A class inside a function is parsed with it, annotations included."""
    (folder / "__init__.py").write_text(
        "from vllm.v1.core.sched.scheduler import Scheduler\ndef make():\n    class Inner(Scheduler):\n"
        "        def schedule(self) -> tuple[int, ...]:\n            return ()\n    return Inner\n"
    )
    cache.store(locate(folder), read_files(locate(folder)))
    again = cache.load(locate(folder), [catalogue.release("0.32.0")])
    (override,) = [use for use in again.uses if use.way == "override"]
    assert ast.unparse(override.body.returns) == "tuple[int, ...]"


def test_files_are_told_by_their_content(kept, catalogue, folder, tmp_path):
    """Not by their time or place, which are others in a fresh checkout; a lock that has come counts, too."""
    releases = [catalogue.release("0.32.0")]
    os.utime(folder / "__init__.py", (1, 1))
    assert kept.load(locate(folder), releases) is not None
    shutil.copytree(folder, tmp_path / "elsewhere" / "plug")
    assert kept.load(locate(tmp_path / "elsewhere" / "plug"), releases) is not None
    (folder / "patches.lock").write_text("")
    assert kept.load(locate(folder), releases) is None
    (folder / "patches.lock").unlink()
    (folder / "__init__.py").write_text(TEXT + "#")
    assert kept.load(locate(folder), releases) is None


def test_a_release_from_elsewhere_is_read_for(kept, catalogue, folder, tmp_path):
    """What tests in the package come to there has not been worked out."""
    (tmp_path / "tree" / "vllm").mkdir(parents=True)
    (tmp_path / "tree" / "vllm" / "__init__.py").write_text("")
    tree = SourceRelease(Tree(tmp_path / "tree", "0.32.0"), "0.32.0")
    assert kept.load(locate(folder), [catalogue.release("0.31.0"), tree]) is None


def test_a_file_that_is_nested_too_deeply_counts_for_nothing(kept, catalogue, folder, tmp_path):
    """It is read anew."""
    (path,) = (tmp_path / "kept").iterdir()
    body = zlib.compress(b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".")
    path.write_bytes(sha256(body).digest() + body)
    assert kept.load(locate(folder), [catalogue.release("0.32.0")]) is None


def test_a_file_that_would_run_code_is_refused(kept, catalogue, folder, tmp_path):
    """The folder may be one that others can write to."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    (path,) = (tmp_path / "kept").iterdir()
    body = zlib.compress(pickle.dumps(Trap()))
    path.write_bytes(sha256(body).digest() + body)
    assert kept.load(locate(folder), [catalogue.release("0.32.0")]) is None
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ast", "literal_eval"),
        ("ast", "NodeVisitor"),
        ("ast", "sys"),
        ("vllm_graft.audit.cache", "UsesCache.load"),
        ("vllm_graft.audit.cache", "Path"),
        ("vllm_graft.audit.uses.syntax", "parse"),
        ("builtins", "eval"),
    ],
)
def test_a_file_reaches_nothing_beyond_the_classes_of_the_uses(module, name):
    with pytest.raises(pickle.UnpicklingError, match="is not part of a report or of a package's uses"):
        _Unpickler(io.BytesIO()).find_class(module, name)
