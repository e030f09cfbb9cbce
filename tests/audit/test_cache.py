"""Reports kept between runs: when they serve, when they do not, and what a damaged or foreign file does."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest

from vllm_graft.audit.cache import ReportCache, _Unpickler, report_key
from vllm_graft.audit.releases.catalogue import Catalogue
from vllm_graft.audit.releases.source_release import SourceRelease
from vllm_graft.audit.report import audit
from vllm_graft.audit.uses import locate, read_files
from vllm_graft.sources.origins import Tree

PATCH = (
    "from vllm.v1.core.sched.scheduler import Scheduler\n"
    "try:\n    import vllm.nowhere\nexcept ImportError:\n    pass\n"
    "if Scheduler.__init__ is None:\n    import vllm.sometimes\n"
    "class Mine(Scheduler):\n    def schedule(self):\n        return self.waiting\n"
    "Scheduler.schedule = lambda self: None\n"
)


@pytest.fixture
def releases():
    catalogue = Catalogue.shipped()
    return catalogue.release("0.31.0"), [catalogue.release("0.32.0")]


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "plug"
    package.mkdir()
    (package / "__init__.py").write_text(PATCH)
    return package


def key(folder, releases, steps=False):
    return report_key([locate(folder)], *releases, steps=steps)


@pytest.fixture
def report(folder, releases):
    return audit([read_files(locate(folder))], *releases)


def test_a_report_comes_back_as_it_was(tmp_path, report):
    """All that is shown of it; only the syntax trees are left out."""
    cache = ReportCache(tmp_path / "kept")
    assert cache.load("a") is None
    cache.store("a", report)
    again = cache.load("a")
    assert again is not None
    assert again.findings == report.findings
    assert [(row.use, row.use.source, row.use.guarded, row.cells) for row in again.rows] == [
        (row.use, row.use.source, row.use.guarded, row.cells) for row in report.rows
    ]
    assert any(row.use.body for row in report.rows)
    assert not any(row.use.body for row in again.rows)


def test_the_key_follows_what_the_report_depends_on(folder, releases):
    """Files, their content, the lock beside them, the releases, and whether they are taken step by step."""
    first = key(folder, releases)
    assert key(folder, releases) == first
    keys = {first, key(folder, releases, steps=True), key(folder, (releases[0], [releases[0]]))}
    (folder / "__init__.py").write_text(PATCH + "\n")
    keys.add(key(folder, releases))
    (folder / "more.py").write_text("")
    keys.add(key(folder, releases))
    os.utime(folder / "more.py", (1, 1))
    keys.add(key(folder, releases))
    (folder / "patches.lock").write_text("")
    keys.add(key(folder, releases))
    assert len(keys) == 7


def test_a_report_on_a_folder_of_vllm_is_not_kept(folder, releases, tmp_path):
    """Its content may change under one number."""
    (tmp_path / "tree" / "vllm").mkdir(parents=True)
    (tmp_path / "tree" / "vllm" / "__init__.py").write_text("")
    tree = SourceRelease(Tree(tmp_path / "tree", "9.9"), "9.9")
    assert key(folder, (releases[0], [tree])) is None


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 400])
def test_a_damaged_file_counts_for_nothing(tmp_path, report, damage):
    cache = ReportCache(tmp_path)
    cache.store("a", report)
    (tmp_path / "a").write_bytes(damage)
    assert cache.load("a") is None


DEEP = b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b"."
"""A list in a list, and so on; pickle builds it, and whatever walks it ends in a RecursionError."""


def test_a_file_that_is_nested_too_deeply_counts_for_nothing(tmp_path):
    """And so does one that is no report below."""
    for nested in (DEEP, DEEP[:-2] + b"\x85.", b"\x80\x04" + b"(" * 1_000_000 + b"."):
        body = zlib.compress(nested)
        (tmp_path / "a").write_bytes(sha256(body).digest() + body)
        assert ReportCache(tmp_path).load("a") is None


def test_a_file_that_would_run_code_is_refused(tmp_path):
    """The folder may be one that others can write to."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    body = zlib.compress(pickle.dumps(Trap()))
    (tmp_path / "a").write_bytes(sha256(body).digest() + body)
    assert ReportCache(tmp_path).load("a") is None
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm_graft.audit.model", "dataclass.__builtins__.get"),
        ("vllm_graft.audit.model", "Use.__init__"),
        ("vllm_graft.audit.model", "field"),
        ("vllm_graft.audit.model", "Mapping"),
        ("builtins", "eval"),
    ],
)
def test_a_file_reaches_nothing_beyond_the_classes_of_a_report(module, name):
    """A dotted name, and what a permitted module imported, would lead to any code there is."""
    with pytest.raises(pickle.UnpicklingError, match="is not part of a report"):
        _Unpickler(io.BytesIO()).find_class(module, name)


def test_a_dotted_name_runs_nothing(tmp_path):
    def text(said):
        return b"\x8c" + bytes([len(said)]) + said.encode()

    code = f"__import__('os').mkdir({str(tmp_path / 'sprung')!r})"
    found = text("vllm_graft.audit.model") + text("dataclass.__builtins__.get") + b"\x93"
    body = zlib.compress(b"\x80\x04" + found + text("eval") + b"\x85R" + text(code) + b"\x85R.")
    (tmp_path / "a").write_bytes(sha256(body).digest() + body)
    assert ReportCache(tmp_path).load("a") is None
    assert not (tmp_path / "sprung").exists()


def test_many_runs_may_keep_at_once(tmp_path, report):
    kept = tmp_path / "kept"
    cache = ReportCache(kept)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: cache.store(f"key{number % 3}", report), range(24)))
    assert sorted(path.name for path in kept.iterdir()) == ["key0", "key1", "key2"]
    assert cache.load("key1") is not None


def test_old_reports_go(tmp_path, report, monkeypatch):
    monkeypatch.setattr("vllm_graft.audit.cache._REPORTS", 2)
    kept = tmp_path / "kept"
    cache = ReportCache(kept)
    for number in range(4):
        cache.store(f"key{number}", report)
        os.utime(kept / f"key{number}", (number, number))
    cache.store("last", report)
    assert sorted(path.name for path in kept.iterdir()) == ["key3", "last"]
