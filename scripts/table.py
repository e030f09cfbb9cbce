"""The matrix as text: a table for a terminal, a table for a page, and a list of failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from suites import Cell

ALL = "all"
BAR = r"\|"
UNKNOWN = "From runs on machines that may differ:"


def grid(cells: Sequence[Cell], suites: Sequence[str] = (), releases: Sequence[str] = ()) -> list[list[str]]:
    """Return a row per suite and a column per release, with empty cells where nothing ran.

    The given suites and releases come first, in that order; others follow in the order of the cells.
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
    # Rounded first, so that the sum is that of the seconds shown.
    return f"{sum(cell.passed for cell in mine)} in {sum(round(cell.seconds) for cell in mine)} s"


def plain(rows: Sequence[Sequence[str]]) -> str:
    """Format rows for a terminal."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(cell.replace('|', BAR) for cell in line)} |\n" for line in lines)


def parse(text: str) -> list[Cell]:
    """Parse the cells of a table that :func:`markdown` wrote; other lines are ignored."""
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
    """True if a page has the two marks between which the table goes."""
    return page.is_file() and bool(_between(mark).search(page.read_text(encoding="utf-8")))


def read(page: Path, mark: str) -> tuple[str, list[Cell]]:
    """Read the caption and the cells of a page; raises ValueError for a malformed table."""
    found = _between(mark).search(page.read_text(encoding="utf-8"))
    text = found[2] if found else ""
    return re.split(r"^\|", text, maxsplit=1, flags=re.MULTILINE)[0].strip(), parse(text)


def merge(
    page: Path, mark: str, new: Sequence[Cell], caption: str, suites: Sequence[str], releases: Sequence[str]
) -> None:
    """Merge new cells into the table of a page and keep its other cells.

    The table gets exactly these suites and releases, in this order; other rows and columns of the page are dropped.
    Without suites, every row of the page is kept, and only releases with a cell get a column. The old or new caption
    is used only if it is true of every cell.
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
    """Replace the text between ``<!-- mark -->`` and ``<!-- /mark -->``."""
    before = page.read_text(encoding="utf-8")
    page.write_text(_between(mark).sub(lambda match: f"{match[1]}{text}{match[3]}", before), encoding="utf-8")


def _between(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {mark} -->\n)(.*?)(<!-- /{mark} -->)", re.DOTALL)


def complaints(cells: Iterable[Cell], again: str) -> list[str]:
    """List, for each failed cell, its tests or its trouble, its log, and the command that runs it alone."""
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
