"""The matrix as text, and what a person is told of failures."""

from pathlib import Path

import table
from suites import Cell

CELLS = [
    Cell("0.26.0", "plan", passed=5, seconds=2.2),
    Cell("0.26.0", "boot", passed=3, failed=1, seconds=60, failures=("t.py::test",), log="build/boot.log"),
    Cell("0.27.1", "plan", passed=5, seconds=2.4),
    Cell("0.27.1", "boot", passed=4, seconds=58),
]


def test_a_row_per_suite_and_a_column_per_release():
    assert table.plain(table.grid(CELLS)).splitlines() == [
        "tests  0.26.0          0.27.1",
        "plan   5 in 2 s        5 in 2 s",
        "boot   3 of 4 in 60 s  4 in 58 s",
        "all    FAILED          9 in 60 s",
    ]


def test_it_is_written_between_the_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- matrix -->\nold\n<!-- /matrix -->\nbelow\n")
    table.write(page, "matrix", table.markdown([["tests", "0.26.0"], ["plan", "5"]]))
    assert page.read_text() == (
        "above\n<!-- matrix -->\n| tests | 0.26.0 |\n| --- | --- |\n| plan | 5 |\n<!-- /matrix -->\nbelow\n"
    )
    assert table.has_place(page, "matrix")
    assert not table.has_place(page, "cpu-matrix")
    assert not table.has_place(tmp_path / "other.md", "matrix")


def test_a_failure_names_the_test_the_log_and_how_to_run_it_alone():
    assert table.complaints(CELLS, 'make matrix RELEASES={release} ARGS="--suites {suite}"') == [
        "0.26.0 boot: 1 failed",
        "    t.py::test",
        "    log: build/boot.log",
        '    Next: make matrix RELEASES=0.26.0 ARGS="--suites boot"',
    ]
