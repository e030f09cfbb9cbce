"""The matrix as text: a table for a terminal, one for a page, and what a person is told of failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from suites import Cell


def grid(cells: Sequence[Cell]) -> list[list[str]]:
    """A row per suite and a column per release, in the order in which they were run; empty where nothing was."""
    releases = list(dict.fromkeys(cell.release for cell in cells))
    suites = list(dict.fromkeys(cell.suite for cell in cells))
    outcome = {(cell.suite, cell.release): str(cell) for cell in cells}
    rows = [[suite, *(outcome.get((suite, release), "") for release in releases)] for suite in suites]
    return [["tests", *releases], *rows, ["all", *(_all(cells, release) for release in releases)]]


def _all(cells: Iterable[Cell], release: str) -> str:
    mine = [cell for cell in cells if cell.release == release]
    whole = all(cell.ok for cell in mine)
    return f"{sum(cell.passed for cell in mine)} in {sum(cell.seconds for cell in mine):.0f} s" if whole else "FAILED"


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
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def has_place(page: Path, mark: str) -> bool:
    """Whether a page has lines between which the table goes."""
    return page.is_file() and bool(_between(mark).search(page.read_text(encoding="utf-8")))


def write(page: Path, mark: str, text: str) -> None:
    """Put a text between ``<!-- mark -->`` and ``<!-- /mark -->``, in place of what is there."""
    before = page.read_text(encoding="utf-8")
    page.write_text(_between(mark).sub(lambda match: f"{match[1]}{text}{match[2]}", before), encoding="utf-8")


def _between(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)


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
