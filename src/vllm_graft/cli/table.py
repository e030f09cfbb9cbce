"""Tables and colours for people: aligned columns, colour only on a terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from vllm_graft.findings import Finding, worst_first
from vllm_graft.text import printable_lines

_COLOURS: Final = {"green": "32", "red": "31", "yellow": "33", "dim": "2", "bold": "1"}
_PAINT: Final = re.compile(rf"(\x1b\[(?:0|{'|'.join(_COLOURS.values())})m)")


def paint(text: str, colour: str) -> str:
    """The text in a colour, on a terminal that wants colours; the bare text elsewhere, without control characters."""
    text = printable_lines(text)
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if _coloured() else text


def _coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Aligned columns under a head. A cell may hold several lines; the last column is wrapped to fit the terminal.

    Of control characters a cell keeps line breaks and the colours of ``paint``.
    """
    cells = [[_safe(cell).split("\n") for cell in row] for row in rows]
    widths = [
        max([len(title), *(len(line) for row in cells for line in row[index])]) for index, title in enumerate(head)
    ]
    room = (width or shutil.get_terminal_size((160, 24)).columns) - sum(widths[:-1]) - 2 * (len(head) - 1)
    for row in cells:
        row[-1] = [part for line in row[-1] for part in (textwrap.wrap(line, max(room, 30)) or [""])]
    widths[-1] = 0
    lines = [paint(_line(head, widths), "bold")]
    for row in cells:
        for index in range(max(len(cell) for cell in row)):
            lines.append(_line([cell[index] if index < len(cell) else "" for cell in row], widths))
    return "\n".join(lines)


def _safe(cell: str) -> str:
    parts = _PAINT.split(cell) if _coloured() else [cell]
    return "".join(part if _PAINT.fullmatch(part) else printable_lines(part) for part in parts)


def show_findings(findings: Iterable[Finding]) -> str:
    """Findings as lines, worst first."""
    tones = {"error": "red", "warning": "yellow", "info": "dim"}
    return "\n".join(paint(finding.explain(), tones[finding.level]) for finding in worst_first(findings))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
