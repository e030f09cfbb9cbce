"""A report as a picture for a README: some rows of the matrix, in the colours of the page."""

from __future__ import annotations

import textwrap
from typing import Final, get_args
from xml.sax.saxutils import escape

from vllm_graft.audit.model import Report, ReportRow
from vllm_graft.audit.render.presentation import (
    WORDS,
    Tone,
    blank_controls,
    cells,
    short_name,
    summary,
    variables,
    worst_first_rows,
)

# Width of the names.
_LABEL: Final = 410
_CELL: Final = 66
_LINE: Final = 27
_HEAD: Final = 44
_EDGE: Final = 16
# The middle of the first cell.
_CENTRE: Final = _EDGE + _LABEL + _CELL // 2
# Width of a character of a name: no font of a picture is certain, so names are cut with some room to spare.
_CHARACTER: Final = 7.25

_STYLE: Final = """
text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:var(--ink)}
.s{fill:var(--soft)}.q{font-weight:600}.c{text-anchor:middle;font-size:11.5px}
.t{font:13px system-ui,-apple-system,"Segoe UI",sans-serif}.k{font-size:11.5px;white-space:pre}.paper{fill:var(--paper)}
"""


def svg(report: Report, rows: int = 8, caption: str = "") -> str:
    """Return the picture: that number of rows, taken evenly from the worst to the unchanged so that they stand for all.

    Without a caption the sentence that sums the report up stands below.
    """
    shown = _sample(report, rows)
    width = max(2 * _EDGE + _LABEL + _CELL * len(report.releases), 560)
    body = [_text(release, _CENTRE + index * _CELL, 28, "c s") for index, release in enumerate(report.releases)]
    for index, row in enumerate(shown):
        body += _row(report, row, _HEAD + index * _LINE)
    below = _HEAD + len(shown) * _LINE + 26
    states = {cell.verdict.state for row in shown for cell in cells(report, row)}
    told = [f"{word.short} {word.brief}" for state, word in WORDS.items() if state in states and word.brief]
    tones = [",  ".join(told)] if shown else []
    said = textwrap.wrap(blank_controls(caption or "".join(summary(report))), int((width - 2 * _EDGE) / 7.3))
    body += [_text(line, _EDGE, below + 19 * number, "t") for number, line in enumerate(said)]
    below += 19 * len(said) + 4
    body += [_text(line, _EDGE, below, "k s") for line in tones]
    height = below + (16 if tones else 0)
    colours = "".join(f".{tone}{{fill:var(--{tone})}}.{tone}-bg{{fill:var(--{tone}-bg)}}" for tone in get_args(Tone))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img">\n<title>{_escape(" ".join(said))}</title>\n<style>{variables("svg")}{_STYLE}{colours}</style>\n'
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _sample(report: Report, rows: int) -> list[ReportRow]:
    """Return rows at equal distances from the worst to the unchanged; a name is shown once."""
    names = {short_name(row.use): row for row in reversed(worst_first_rows(report))}
    known = list(reversed(names.values()))
    if len(known) <= rows or rows < 2:
        return known[: max(rows, 0)]
    return [known[round(index * (len(known) - 1) / (rows - 1))] for index in range(rows)]


def _row(report: Report, row: ReportRow, top: int) -> list[str]:
    # A name that does not fit its column loses its beginning.
    whole, most = short_name(row.use), int((_LABEL - 8) / _CHARACTER)
    whole = whole if len(whole) <= most else f"…{whole[len(whole) - most + 1 :]}"
    module, colon, name = whole.rpartition(":")
    pieces = [
        f'<text x="{_EDGE}" y="{top + 17}"><tspan class="s">{_escape(module + colon)}</tspan>'
        f'<tspan class="q">{_escape(name)}</tspan></text>'
    ]
    for index, cell in enumerate(cells(report, row)):
        word = WORDS[cell.verdict.state]
        if not word.short:
            continue
        left = _EDGE + _LABEL + index * _CELL + 2
        pieces.append(f'<rect class="{word.tone}-bg" x="{left}" y="{top + 2}" width="{_CELL - 4}" height="21" rx="3"/>')
        pieces.append(_text(word.short, _CENTRE + index * _CELL, top + 17, f"c {word.tone}"))
    return pieces


def _text(words: str, x: int, y: int, names: str) -> str:
    return f'<text class="{names}" x="{x}" y="{y}">{_escape(words)}</text>'


def _escape(words: str) -> str:
    return escape(blank_controls(words))
