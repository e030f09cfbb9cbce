"""The matrix as text: a table for a terminal, one for a page, and what a person is told of failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from suites import Cell

ALL = "all"
BAR = r"\|"
UNKNOWN = "From runs on machines that may differ:"


def grid(cells: Sequence[Cell], suites: Sequence[str] = (), releases: Sequence[str] = ()) -> list[list[str]]:
    """A row per suite and a column per release, empty where nothing was run.

    Those that are named come first, in their order; the others follow as they come in the cells.
    """
    releases = list(dict.fromkeys([*releases, *(cell.release for cell in cells)]))
    suites = list(dict.fromkeys([*suites, *(cell.suite for cell in cells)]))
    outcome = {(cell.suite, cell.release): str(cell) for cell in cells}
    rows = [[suite, *(outcome.get((suite, release), "") for release in releases)] for suite in suites]
    return [["tests", *releases], *rows, [ALL, *(_all(cells, release) for release in releases)]]


def _all(cells: Iterable[Cell], release: str) -> str:
    mine = [cell for cell in cells if cell.release == release]
    if not mine:
        return ""
    if not all(cell.ok for cell in mine):
        return "FAILED"
    # Of the figures that are shown: a reader who adds them up finds this sum.
    return f"{sum(cell.passed for cell in mine)} in {sum(round(cell.seconds) for cell in mine)} s"


def plain(rows: Sequence[Sequence[str]]) -> str:
    """For a terminal."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """For a page."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(cell.replace('|', BAR) for cell in line)} |\n" for line in lines)


def parse(text: str) -> list[Cell]:
    """The cells of a table that :func:`markdown` wrote, row by row; what is no table is passed over."""
    rows = [_row(line) for line in text.splitlines() if line.startswith("|")]
    if not rows:
        return []
    releases = rows[0][1:]
    cells: list[Cell] = []
    for suite, *outcomes in rows[2:]:
        if len(outcomes) != len(releases):
            raise ValueError(f"the row {suite} has {len(outcomes)} cells for {len(releases)} releases")
        if suite != ALL:
            shown = zip(releases, outcomes, strict=True)
            cells += [Cell.from_text(release, suite, text) for release, text in shown if text]
    return cells


def _row(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace(BAR, "|") for cell in re.split(r"(?<!\\)\|", inner)]


def has_place(page: Path, mark: str) -> bool:
    """Whether a page has lines between which the table goes."""
    return page.is_file() and bool(_between(mark).search(page.read_text(encoding="utf-8")))


def read(page: Path, mark: str) -> tuple[str, list[Cell]]:
    """The caption and the cells that stand in a page; a ValueError says what cannot be read."""
    found = _between(mark).search(page.read_text(encoding="utf-8"))
    text = found[2] if found else ""
    return re.split(r"^\|", text, maxsplit=1, flags=re.MULTILINE)[0].strip(), parse(text)


def merge(
    page: Path, mark: str, new: Sequence[Cell], caption: str, suites: Sequence[str], releases: Sequence[str]
) -> None:
    """Put new cells into the table of a page; the other cells stay.

    The table has these suites and releases, in this order; what the page has beyond them is dropped. Without suites,
    every row of the page stays, and a release has a column where there is a cell of it. A caption, the page's or the
    new one, stands above the table only where it is true of every cell.
    """
    before, old = read(page, mark)
    kept = {
        (cell.suite, cell.release): cell
        for cell in old
        if cell.release in releases and (not suites or cell.suite in suites)
    }
    fresh = {(cell.suite, cell.release): cell for cell in new}
    cells = list((kept | fresh).values())
    captions = {text for text, mine in ((before, kept.keys() - fresh.keys()), (caption, fresh.keys())) if mine}
    above = captions.pop() if len(captions) == 1 else UNKNOWN
    columns = releases if suites else [name for name in releases if any(cell.release == name for cell in cells)]
    write(page, mark, f"{above}\n\n{markdown(grid(cells, suites, columns))}".lstrip())


def write(page: Path, mark: str, text: str) -> None:
    """Put a text between ``<!-- mark -->`` and ``<!-- /mark -->``, in place of what is there."""
    before = page.read_text(encoding="utf-8")
    page.write_text(_between(mark).sub(lambda match: f"{match[1]}{text}{match[3]}", before), encoding="utf-8")


def _between(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {mark} -->\n)(.*?)(<!-- /{mark} -->)", re.DOTALL)


def complaints(cells: Iterable[Cell], again: str) -> list[str]:
    """For each cell that is not well: which tests failed or what went wrong, the log, and how to run it alone."""
    lines: list[str] = []
    for cell in cells:
        if cell.ok:
            continue
        what = cell.trouble or f"{cell.failed} failed"
        lines.append(f"{cell.release} {cell.suite}: {what}")
        lines += [f"    {name}" for name in cell.failures]
        if cell.log:
            lines.append(f"    log: {cell.log}")
        lines.append(f"    Next: {again.format(release=cell.release, suite=cell.suite)}")
    return lines
