"""A report as a comment on a pull request: a summary, the matrix, the findings, and diffs that open on demand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Final

from vllm_graft.audit.model import Report, ReportCell, ReportRow
from vllm_graft.audit.render.presentation import (
    WORDS,
    blank_controls,
    cells,
    count,
    findings,
    groups,
    needs_attention,
    one_line,
    short_name,
    summary,
    weight,
)
from vllm_graft.findings import Finding

# The most characters that GitHub takes in a comment.
LIMIT: Final = 65_536
# The most lines of one diff.
DIFF_LINES: Final = 200

# Room kept for the note on what was left out.
_NOTE: Final = 300
# The most characters of one name or sentence.
_MAX_CELL_CHARS: Final = 300


def markdown(report: Report, limit: int = LIMIT) -> str:
    """Write a comment within a limit of characters; what does not fit is left out, the least bad first, with a note.

    The matrix may take half of the room, the findings half of what it leaves, and the diffs the rest.
    """
    first, rest = summary(report)
    pieces = [f"**{_plain(first)}**{_plain(rest)}"]
    room = limit - len(pieces[0]) - _NOTE
    tables, rows = _tables(report, room // 2)
    room -= sum(len(piece) + 2 for piece in tables)
    said, unsaid = _fit([_finding(each) for each in findings(report)], room // 2)
    room -= sum(len(piece) + 2 for piece in said)
    # Every cell with a diff that needs attention, the worst first.
    changed = [row for group in groups(report) for row in group.changed]
    found = [(row, cell) for row in changed for cell in cells(report, row) if cell.diff]
    shown = [(row, cell) for row, cell in found if needs_attention(row.use, cell.verdict.state)]
    shown.sort(key=lambda pair: weight(pair[1].verdict.state), reverse=True)
    diffs, closed = _fit([_diff(row, cell) for row, cell in shown], room)
    pieces += [*tables, "\n".join(said), *diffs]
    left = [count(number, thing) for number, thing in ((rows, "row"), (unsaid, "finding"), (closed, "diff")) if number]
    if left:
        pieces.append(f"_Left out, so that this fits in a comment: {', '.join(left)}. The page of the audit has all._")
    return "\n\n".join(piece.strip("\n") for piece in pieces if piece.strip())[: limit - 1] + "\n"


def _fit(pieces: Sequence[str], room: int) -> tuple[list[str], int]:
    """Return the first pieces, as many as there is room for, and how many are left out."""
    taken: list[str] = []
    for piece in pieces:
        room -= len(piece) + 2
        if room < 0:
            break
        taken.append(piece)
    return taken, len(pieces) - len(taken)


def _tables(report: Report, room: int) -> tuple[list[str], int]:
    """Return the matrix of each package, and how many rows were left out."""
    found = groups(report)
    tables, missing = [], 0
    for group in found:
        head = [f"### {_plain(group.title)}\n"] if len(found) > 1 else []
        head.append("| target | " + " | ".join(map(_cell, report.releases)) + " |")
        head.append("|---|" + ":-:|" * len(report.releases))
        size = sum(len(piece) + 2 for piece in head)
        rows, cut = _fit([_row(report, row) for row in group.changed], room - size)
        missing += cut
        table = "\n".join([*head, *rows] if rows else head[:-2])
        folded = ""
        if group.folded:
            names = [f"- {_code(short_name(row.use))} {row.use.way}" for row in [*group.unchanged, *group.unjudged]]
            shown, more = _fit(names, 8_000)
            shown += [f"- and {more:,} more"] if more else []
            folded = f"<details><summary>{group.folded}</summary>\n\n" + "\n".join(shown) + "\n\n</details>"
        tables += [each for each in (table, folded) if each and len(each) < room]
        room -= len(table) + len(folded) + 4
    return tables, missing


def _row(report: Report, row: ReportRow) -> str:
    words = [WORDS[cell.verdict.state].short for cell in cells(report, row)]
    where = f"<br><sub>{row.use.way} {_cell(_code(row.use.where))}</sub>"
    return f"| {_cell(_code(short_name(row.use)))}{where} | " + " | ".join(words) + " |"


def _finding(finding: Finding) -> str:
    where = f" ({_code(finding.where)})" if finding.where else ""
    fix = f". Next: {_prose(finding.fix)}" if finding.fix else ""
    return f"- **{_plain(finding.code)}** {finding.level}: {_code(finding.subject)}: {_prose(finding.what)}{where}{fix}"


def _diff(row: ReportRow, cell: ReportCell) -> str:
    lines = cell.diff.removesuffix("\n").split("\n")
    shown = "\n".join(lines[:DIFF_LINES])
    more = f"{count(len(lines) - DIFF_LINES, 'more line')} of this diff left out." if len(lines) > DIFF_LINES else ""
    fence = "`" * max(3, 1 + _ticks(shown))
    verdict = cell.verdict
    name = escape(_short(short_name(row.use)), quote=False)
    step = f"{cell.since} → {cell.release}" if cell.since else cell.release
    step = _silent(escape(one_line(step), quote=False))
    title = f"<details><summary><code>{name}</code> {WORDS[verdict.state].short}, {step}</summary>"
    now = f"Now: {_code(verdict.now)}" if verdict.now else ""
    pieces = [title, _prose(verdict.detail), now, f"{fence}diff\n{shown}\n{fence}", more]
    return "\n\n".join([*filter(None, pieces), "</details>"])


def _ticks(words: str) -> int:
    """Return the longest run of backticks."""
    return max(map(len, re.findall("`+", words)), default=0)


def _code(words: str) -> str:
    """Write a code span, whatever it holds."""
    words = _short(words)
    if not words:
        return ""
    ticks = "`" * (1 + _ticks(words))
    pad = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{ticks}{pad}{words}{pad}{ticks}"


def _cell(words: str) -> str:
    """Escape bars, which end the cell of a table even in code."""
    return words.replace("|", "\\|")


def _prose(words: str) -> str:
    """Write a sentence, with code between backticks."""
    pieces = re.split("`([^`]+)`", _short(words))
    return "".join(_code(piece) if index % 2 else _plain(piece) for index, piece in enumerate(pieces))


def _plain(words: str) -> str:
    """Escape markup."""
    return _silent(re.sub(r"([\\`*_\[\]|~])", r"\\\1", escape(blank_controls(words), quote=False)))


def _silent(words: str) -> str:
    """Keep GitHub from linking users and issues, by an empty comment after the sign."""
    return re.sub("([@#])", r"\1<!-- -->", words)


def _short(words: str) -> str:
    words = one_line(words)
    return words if len(words) <= _MAX_CELL_CHARS else f"{words[: _MAX_CELL_CHARS - 1]}…"
