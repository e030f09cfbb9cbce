"""One suite on one release: what counts as passed, and that it ran on the vLLM that was meant."""

import sys
from pathlib import Path

import pytest
from suites import Cell, Release, Suite, environment, judge, probe, run

from vllm_graft.versions import vllm_root, vllm_version

RELEASE = Release("0.26.0", Path(sys.executable), {}, Path("/cache/sources/0.26.0"))
FOUND = {"vllm": "0.26.0", "folder": "/cache/sources/0.26.0/vllm", "failures": []}


def judged(status: int = 0, **found: object) -> Cell:
    counts = {"passed": 3, "failed": 0, "skipped": 0, "deselected": 2}
    return judge(RELEASE, "boot", {**FOUND, **counts, **found}, status, 1.0, "boot.log")


class TestJudgement:
    def test_tests_that_ran_on_the_release_and_passed_are_fine(self):
        cell = judged()
        assert cell.ok
        assert str(cell) == "3 in 1 s"
        assert cell.log == ""

    def test_a_failure_keeps_the_log(self):
        cell = judged(1, failed=1, failures=["t.py::test"])
        assert not cell.ok
        assert (str(cell), cell.log) == ("3 of 4 in 1 s", "boot.log")

    @pytest.mark.parametrize(
        ("found", "status", "trouble"),
        [
            ({"passed": 0}, 5, "no test was run"),
            ({"passed": 0, "skipped": 4}, 0, "no test was run"),
            ({"vllm": "0.32.0"}, 0, "vLLM 0.32.0 was found instead of 0.26.0"),
            ({"vllm": None}, 0, "vLLM None was found instead of 0.26.0"),
            ({"folder": "/venv/vllm"}, 0, "vLLM was found in /venv/vllm instead of /cache/sources/0.26.0"),
            ({}, 3, "pytest ended with status 3"),
        ],
    )
    def test_what_proves_nothing_never_counts(self, found: dict[str, object], status: int, trouble: str):
        cell = judged(status, **found)
        assert not cell.ok
        assert cell.trouble.startswith(trouble)
        assert str(cell) == "no result"

    def test_a_pytest_that_died_proves_nothing(self):
        cell = judge(RELEASE, "boot", None, -9, 1.0, "boot.log")
        assert (cell.ok, cell.trouble, cell.log) == (False, "pytest died with status -9 before its end", "boot.log")

    def test_skipped_tests_are_shown_and_not_counted(self):
        assert str(judged(skipped=2)) == "3, 2 skipped in 1 s"

    def test_a_local_part_of_the_version_is_left_out_of_account(self):
        assert judged(vllm="0.26.0+cpu").ok


TESTS = """
import pytest

def test_passes(): ...
def test_fails():
    assert False
def test_is_skipped():
    pytest.skip("not here")
@pytest.mark.xfail
def test_is_expected_to_fail():
    assert False
@pytest.mark.compiled
def test_needs_the_compiled_code(): ...
@pytest.fixture
def broken():
    yield
    raise RuntimeError
def test_fails_in_its_tear_down(broken): ...
@pytest.fixture
def unmade():
    raise RuntimeError
def test_fails_in_its_set_up(unmade): ...
"""


def this_release(variables: dict[str, str] | None = None) -> Release:
    root, version = vllm_root(), vllm_version()
    assert root is not None
    assert version is not None
    return Release(version.partition("+")[0], Path(sys.executable), variables or environment(), root.parent)


class TestRun:
    def test_each_test_counts_once_with_its_worst_outcome(self, tmp_path: Path):
        """In a real pytest: a tear-down that fails takes the pass away, and what was left out is not in the count."""
        file = tmp_path / "test_them.py"
        file.write_text(TESTS)
        cell = run(this_release(), Suite("mine", (str(file),)), (), tmp_path / "logs")
        assert (cell.passed, cell.failed, cell.skipped, cell.deselected) == (1, 3, 2, 1)
        assert sorted(name.partition("::")[2] for name in cell.failures) == [
            "test_fails",
            "test_fails_in_its_set_up",
            "test_fails_in_its_tear_down",
        ]
        assert "assert False" in Path(cell.log).read_text()

    def test_options_reach_pytest_and_the_log_of_a_pass_goes(self, tmp_path: Path):
        file = tmp_path / "test_them.py"
        file.write_text(TESTS)
        suite = Suite("mine", (str(file),), "compiled or not compiled")
        cell = run(this_release(), suite, ("-k", "passes or compiled"), tmp_path / "logs")
        assert cell.ok
        assert cell.passed == 2
        assert list((tmp_path / "logs").iterdir()) == []

    def test_a_file_that_cannot_be_imported_is_a_failure(self, tmp_path: Path):
        (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
        (tmp_path / "test_fine.py").write_text("def test_fine(): ...\n")
        cell = run(this_release(), Suite("mine", (str(tmp_path),)), (), tmp_path / "logs")
        assert cell.failed == 1
        assert not cell.ok

    def test_another_vllm_on_the_path_is_noticed(self, tmp_path: Path):
        """The probe asks the environment that the tests will have."""
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.1.0'\n")
        variables = environment(PYTHONPATH=str(tmp_path))
        assert "vLLM 0.1.0 was found instead of" in probe(this_release(variables))
        (tmp_path / "vllm" / "__init__.py").write_text("import nothing_of_this_name\n")
        assert "No module named 'nothing_of_this_name'" in probe(this_release(variables))

    def test_the_users_own_path_comes_after_the_sources(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("PYTHONPATH", "/mine")
        assert environment(PYTHONPATH="/sources")["PYTHONPATH"] == "/sources:/mine"
        assert environment()["PYTHONPATH"] == "/mine"
        monkeypatch.delenv("PYTHONPATH")
        assert environment(PYTHONPATH="/sources")["PYTHONPATH"] == "/sources"
