"""Output for people: tables, colours on a terminal, findings, progress."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from vllm_graft.findings import Finding, worst_first
from vllm_graft.text import printable_lines

_BAR_WIDTH: Final = 30
_COLOURS: Final = {"green": "32", "red": "31", "yellow": "33", "dim": "2", "bold": "1"}
_PAINT: Final = re.compile(rf"(\x1b\[(?:0|{'|'.join(_COLOURS.values())})m)")


def paint(text: str, colour: str) -> str:
    """Return the text in a colour if the output is a terminal; never with other control characters."""
    text = printable_lines(text)
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if _coloured() else text


def _coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Return aligned columns under a head. A cell may hold several lines; the last column is wrapped to the terminal.

    Of control characters a cell keeps line breaks and the colours of ``paint``.
    """

    def safe(cell: str) -> str:
        # Only colours that paint() itself writes are kept: a cell may hold words of plugins or clients.
        parts = _PAINT.split(cell) if _coloured() else [cell]
        return "".join(part if _PAINT.fullmatch(part) else printable_lines(part) for part in parts)

    cells = [[safe(cell).split("\n") for cell in row] for row in rows]
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


def show_findings(findings: Iterable[Finding]) -> str:
    """Return findings as lines, worst first."""
    tones = {"error": "red", "warning": "yellow", "info": "dim"}
    return "\n".join(paint(finding.explain(), tones[finding.level]) for finding in worst_first(findings))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def render_options(options: Mapping[str, object], origins: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return options as lines of ``name = value``, with the origin of those that have one; a dash if there are none."""
    lines = []
    for name, value in options.items():
        origin = f" ({origins[name]})" if name in origins else ""
        lines.append(f"{name} = {json.dumps(value)}{origin}")
    return "\n".join(lines) or "-"


class ProgressLine:
    """Shows progress on standard error: a bar on a terminal, redrawn at each percent; elsewhere one line per step.

    ``patience_s`` is the time in which nothing is drawn.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        self._step = ""
        self._percent = -1
        self._draws_at = time.monotonic() + patience_s

    def __call__(self, step: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` of this step is done; one without anything to do is done."""
        done, total = (done, total) if total else (1, 1)
        percent, filled = 100 * done // total, _BAR_WIDTH * done // total
        if not sys.stderr.isatty() and step != self._step:
            print(f"{step} ...", file=sys.stderr, flush=True)
        elif sys.stderr.isatty() and percent != self._percent and time.monotonic() >= self._draws_at:
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            end = "\n" if done == total else ""
            print(f"\r{step} [{bar}] {percent:3} %", end=end, file=sys.stderr, flush=True)
            self._percent = percent
        self._step = step
