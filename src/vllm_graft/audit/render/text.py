"""A report for a terminal: aligned columns, no colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vllm_graft.audit.model import Report, ReportRow
from vllm_graft.audit.render.presentation import WORDS, cells, groups, one_line, short_name, summary

# The fewest characters that distinguish a name from others.
_LEAST: Final = 24


def text(report: Report, width: int, *, every: bool = False) -> str:
    """Return the matrix as a table that fits a terminal of this width, and a line that sums it up.

    Rows that need no attention are folded into one line for each package, unless every row is asked for. If the
    width is short, names and places lose their beginnings, then places go; with more releases than fit, lines are
    longer than the width. Findings are not shown: a command prints them beside the table.
    """
    found = groups(report)
    shown = [group.rows if every else group.changed for group in found]
    rows = [_row(report, row) for part in shown for row in part]
    head = ["TARGET", "WAY", *report.releases, "WHERE"]
    # Names come before places, and places that would be too narrow are dropped.
    widths = [max(map(len, column)) for column in zip(*[head, *rows], strict=True)]
    room = width - sum(widths[1:-1]) - 2 * (len(widths) - 1)
    if widths[0] + widths[-1] > room:
        widths[-1] = min(widths[-1], max(room - widths[0], _LEAST))
        if room - widths[-1] < _LEAST:
            widths[-1] = 0
            room += 2
        widths[0] = min(widths[0], max(room - widths[-1], _LEAST))
    lines = [_line(head, widths)] if rows else []
    for group, part in zip(found, shown, strict=True):
        if len(found) > 1:
            lines.append(f"{one_line(group.title)}:")
        lines += [_line(_row(report, row), widths) for row in part]
        if group.folded and not every:
            lines.append(f"{'and ' if group.changed else ''}{group.folded}")
    return "\n".join([*lines, "".join(summary(report))])


def _row(report: Report, row: ReportRow) -> list[str]:
    words = [WORDS[cell.verdict.state].short for cell in cells(report, row)]
    return [one_line(short_name(row.use)), row.use.way, *words, one_line(row.use.where)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Return a row; of a text that does not fit the end, where names differ."""
    columns: list[str] = []
    for words, width in zip(row, widths, strict=True):
        if len(words) > width:
            words = f"…{words[len(words) - width + 1 :]}" if width else ""
        columns.append(words.ljust(width))
    return "  ".join(columns).rstrip()
