"""The matrix as text, and what a person is told of failures."""

import re
from pathlib import Path

import pytest
import table
from hypothesis import given
from hypothesis import strategies as st
from suites import CPU_RELEASES, CPU_SUITES, RELEASES, SUITES, Cell

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "releases.md"
HERE, THERE = "vllm-graft 0.1.0, Python 3.11.7, 2 cores:", "vllm-graft 0.1.0, Python 3.12.1, 16 cores:"

CELLS = [
    Cell("0.26.0", "plan", passed=5, seconds=2.2),
    Cell("0.26.0", "boot", passed=3, failed=1, seconds=60, failures=("t.py::test",), log="build/boot.log"),
    Cell("0.27.1", "plan", passed=5, seconds=2.4),
    Cell("0.27.1", "boot", passed=4, seconds=58),
]

names = st.text("abcxyz/.:-_ []|", min_size=1).map(str.strip).filter(lambda name: name not in ("", "all"))
counts = st.integers(0, 9999)


@st.composite
def some_cells(draw: st.DrawFn) -> list[Cell]:
    """Cells as a page can show them, at most one for a suite on a release."""
    cells = []
    places = st.tuples(st.sampled_from(RELEASES), names)
    for release, suite in draw(st.lists(places, unique=True, max_size=12)):
        counted = st.builds(Cell, *map(st.just, (release, suite)), counts, counts, counts, seconds=counts)
        cells.append(draw(counted | st.just(Cell(release, suite, trouble="no result"))))
    return cells


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


@given(some_cells())
def test_a_table_is_read_as_it_was_written(cells: list[Cell]):
    text = table.markdown(table.grid(cells, (), RELEASES))
    assert sorted(map(repr, table.parse(text))) == sorted(map(repr, cells))
    assert table.markdown(table.grid(table.parse(text), (), RELEASES)) == text


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("| plan | 5 tests |", "'5 tests' for plan on 0.26.0 is not a result that the matrix wrote"),
        ("| plan | 5 in 2 s | 6 in 2 s |", "the row plan has 2 cells for 1 releases"),
        ("| all |", "the row all has 0 cells for 1 releases"),
    ],
)
def test_what_the_matrix_did_not_write_is_refused(line: str, complaint: str):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        table.parse(f"| tests | 0.26.0 |\n| --- | --- |\n{line}\n")


class TestMerge:
    @pytest.fixture
    def page(self, tmp_path: Path) -> Path:
        page = tmp_path / "page.md"
        page.write_text("above\n<!-- matrix -->\n<!-- /matrix -->\nbelow\n")
        self.merge(page, CELLS, HERE)
        return page

    def merge(self, page: Path, cells: list[Cell], caption: str, suites: tuple[str, ...] = ("boot", "plan")) -> None:
        table.merge(page, "matrix", cells, caption, suites, ("0.26.0", "0.27.1", "0.28.0"))

    def test_the_table_has_every_suite_and_release_in_their_order(self, page: Path):
        assert page.read_text() == (
            f"above\n<!-- matrix -->\n{HERE}\n\n"
            "| tests | 0.26.0 | 0.27.1 | 0.28.0 |\n"
            "| --- | --- | --- | --- |\n"
            "| boot | 3 of 4 in 60 s | 4 in 58 s |  |\n"
            "| plan | 5 in 2 s | 5 in 2 s |  |\n"
            "| all | FAILED | 9 in 60 s |  |\n"
            "<!-- /matrix -->\nbelow\n"
        )

    def test_a_new_cell_takes_its_place_and_the_others_stay(self, page: Path):
        new = [Cell("0.26.0", "boot", passed=4, skipped=1, seconds=59.6), Cell("0.28.0", "plan", trouble="died")]
        self.merge(page, new, HERE)
        assert page.read_text().splitlines()[4:9] == [
            "| tests | 0.26.0 | 0.27.1 | 0.28.0 |",
            "| --- | --- | --- | --- |",
            "| boot | 4, 1 skipped in 60 s | 4 in 58 s |  |",
            "| plan | 5 in 2 s | 5 in 2 s | no result |",
            "| all | 9 in 62 s | 9 in 60 s | FAILED |",
        ]

    def test_nothing_new_only_adds_up_again(self, page: Path):
        right = page.read_text()
        page.write_text(right.replace("9 in 60 s", "8 in 1 s"))
        self.merge(page, [], THERE)
        assert page.read_text() == right

    def test_the_caption_is_true_of_every_cell(self, page: Path):
        self.merge(page, CELLS[:1], HERE)
        assert table.read(page, "matrix")[0] == HERE
        self.merge(page, CELLS[:1], THERE)
        assert table.read(page, "matrix")[0] == table.UNKNOWN
        self.merge(page, CELLS, THERE)
        assert table.read(page, "matrix")[0] == THERE

    def test_a_suite_or_release_that_is_no_more_is_dropped(self, page: Path):
        table.merge(page, "matrix", [], "", ("boot",), ("0.27.1",))
        assert table.read(page, "matrix") == (HERE, [CELLS[3]])

    def test_tests_of_your_own_keep_their_rows(self, page: Path):
        self.merge(page, [Cell("0.27.1", "mine", passed=1, seconds=3)], HERE, ())
        assert page.read_text().splitlines()[4:10] == [
            "| tests | 0.26.0 | 0.27.1 |",
            "| --- | --- | --- |",
            "| boot | 3 of 4 in 60 s | 4 in 58 s |",
            "| plan | 5 in 2 s | 5 in 2 s |",
            "| mine |  | 1 in 3 s |",
            "| all | FAILED | 10 in 63 s |",
        ]

    @given(some_cells(), some_cells())
    def test_merging_again_changes_nothing(
        self, tmp_path_factory: pytest.TempPathFactory, old: list[Cell], new: list[Cell]
    ):
        page = tmp_path_factory.mktemp("merge") / "page.md"
        page.write_text("<!-- matrix -->\n<!-- /matrix -->\n")
        texts = []
        for cells in (old, new, new, []):
            table.merge(page, "matrix", cells, HERE, (), RELEASES)
            texts.append(page.read_text())
        assert texts[1] == texts[2] == texts[3]
        wanted = {(cell.release, cell.suite): cell for cell in [*old, *new]}
        assert {(cell.release, cell.suite): cell for cell in table.read(page, "matrix")[1]} == wanted


@pytest.mark.parametrize(
    ("mark", "suites", "releases"), [("matrix", SUITES, RELEASES), ("cpu-matrix", CPU_SUITES, CPU_RELEASES)]
)
class TestPage:
    def test_the_rows_come_to_the_row_all(self, mark: str, suites: tuple, releases: tuple[str, ...]):
        found = re.search(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
        assert found is not None
        rows = [[cell.strip() for cell in row[1:-1].split("|")] for row in found[1].splitlines() if row[:1] == "|"]
        _, *columns = zip(rows[0], *rows[2:], strict=True)
        for release, *outcomes, whole in columns:
            figures = [re.fullmatch(r"(\d+)(?:, \d+ skipped)? in (\d+) s", text) for text in outcomes if text]
            fine = [(int(figure[1]), int(figure[2])) for figure in figures if figure and int(figure[1])]
            tests, seconds = map(sum, zip(*fine, strict=True)) if fine else (0, 0)
            expected = f"{tests} in {seconds} s" if figures else ""
            assert whole == (expected if len(fine) == len(figures) else "FAILED"), release

    def test_a_merge_of_nothing_leaves_it_as_it_is(self, tmp_path: Path, mark: str, suites: tuple, releases: tuple):
        page = tmp_path / "page.md"
        page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
        table.merge(page, mark, [], HERE, [suite.name for suite in suites], releases)
        assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_a_failure_names_the_test_the_log_and_how_to_run_it_alone():
    assert table.complaints(CELLS, 'make matrix RELEASES={release} ARGS="--suites {suite}"') == [
        "0.26.0 boot: 1 failed",
        "    t.py::test",
        "    log: build/boot.log",
        '    Next: make matrix RELEASES=0.26.0 ARGS="--suites boot"',
    ]
