"""A report as one page: no script, nothing loaded from elsewhere, readable without colours.

What a person has to act on comes first: how many findings there are, and each with its next step. Below is the matrix
of names and releases, one row for a name however many files use it, with what has not changed folded away.

Each changed cell of the matrix is a link into the line below its row. Following it, a browser opens the ``<details>``
around the target by itself; one that does not still scrolls there, and the line opens by hand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Final

from vllm_graft.audit.model import Cell, Reading, Report, Row, Use
from vllm_graft.audit.render.diffs import Part, changed_lines, parts
from vllm_graft.audit.render.selection import (
    asking,
    cells,
    compared,
    findings,
    groups,
    label,
    printable,
    summary,
    totals,
)
from vllm_graft.audit.render.style import style
from vllm_graft.audit.render.words import WORDS, count
from vllm_graft.findings import Finding, Level

_FITS: Final = 8
"""So many releases fit a desktop's width; with more the matrix scrolls in its box, and its head cannot stay in view."""

_ELEMENTS: Final[dict[Part, str]] = {"head": "i", "hunk": "b", "added": "ins", "removed": "del", "context": "span"}
_LISTED: Final = 3
"""So many places of one finding are in view; more are folded."""

_LEVELS: Final[dict[Level, str]] = {"error": "error", "warning": "warning", "info": "note"}
_TONES: Final[dict[Level, str]] = {"error": "bad", "warning": "body", "info": "none"}


def html(report: Report, title: str = "vLLM audit", when: str = "") -> str:
    """The page. ``when`` is the time of the audit, in words: a renderer has no clock."""
    first, rest = summary(report)
    pieces = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>\n{style()}\n</style>\n</head>\n<body>",
        f"<header>\n<h1>{_text(title)}</h1>\n{_packages(report, when)}\n</header>",
        f'<p class="lead"><strong>{_text(first)}</strong>{_text(rest)}</p>',
        _levels(findings(report)),
        *_findings(findings(report)),
        *_matrix(report),
        _legend(),
        "</body>\n</html>\n",
    ]
    return "\n".join(filter(None, pieces))


def _packages(report: Report, when: str) -> str:
    lines = [_package(reading) for reading in report.packages]
    lines += [_text(when)] if when else []
    return f'<p class="soft">{"<br>".join(lines)}</p>' if lines else ""


def _package(reading: Reading) -> str:
    base = f", made for vLLM {reading.base}" if reading.base else ""
    files = f", {count(reading.files, 'file')} read" if reading.files else ""
    return _text(f"{reading.package} {reading.version}".strip() + base + files)


def _levels(found: list[Finding]) -> str:
    """How many findings there are at each level."""
    numbers = Counter(finding.level for finding in found)
    chips = [
        f'<li class="{tone}">{_text(count(numbers[level], _LEVELS[level]))}</li>' for level, tone in _TONES.items()
    ]
    return f'<ul class="chips" aria-label="findings">{"".join(chips)}</ul>'


def _chips(report: Report) -> str:
    """How often each verdict was given."""
    found = totals(report)
    shown = [(word, found[state]) for state, word in WORDS.items() if found[state]]
    chips = [
        f'<li class="{word.tone}">{number:,} {word.short if word.tone != "ok" else "unchanged"}</li>'
        for word, number in shown
        if word.short
    ]
    return f'<ul class="chips" aria-label="verdicts">{"".join(chips)}</ul>' if chips else ""


def _matrix(report: Report) -> Iterator[str]:
    if not report.rows or not report.releases:
        return
    yield f'<h2 id="matrix">Uses and releases</h2>\n{_chips(report)}'
    found = groups(report)
    number = 0
    for group in found:
        if len(found) > 1:
            yield f'<h3 class="p">{_text(group.title)}</h3>'
        for rows, folded in ((group.changed, ""), ([*group.unchanged, *group.unjudged], group.folded)):
            if not rows:
                continue
            lines = [_row(report, alike, f"r{place}") for place, alike in enumerate(_merged(report, rows), number + 1)]
            number += len(lines)
            table = _table(report, lines)
            yield f'<details class="rest"><summary>{folded}</summary>{table}</details>' if folded else table


def _table(report: Report, lines: list[str]) -> str:
    fits = " fits" if len(report.releases) <= _FITS else ""
    return (
        f'<div class="matrix{fits}" tabindex="0" role="region" aria-labelledby="matrix">\n<table>\n'
        f"<thead>\n<tr>{_head(report)}</tr>\n</thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody>\n</table>\n</div>"
    )


def _merged(report: Report, rows: Sequence[Row]) -> list[list[Row]]:
    """The rows with those of one name together, where each release says the same of it wherever it is used."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        declared = row.use.patch.name if row.use.patch is not None else ""
        said = tuple((cell.since, cell.release, cell.verdict) for cell in cells(report, row))
        found.setdefault((row.use.name, declared, said), []).append(row)
    return list(found.values())


def _head(report: Report) -> str:
    """The releases, and of how many rows each asks for a look."""
    columns = [
        f'<th scope="col">{_text(release)}<small>{asking(report, release):,} of {len(report.rows):,}</small></th>'
        for release in report.releases
    ]
    return f'<th scope="col"><small>{_text(compared(report))}</small></th>{"".join(columns)}'


def _row(report: Report, alike: list[Row], anchor: str) -> str:
    """One name, and all places that use it."""
    row = alike[0]
    module, colon, name = label(row.use).rpartition(":")
    title = f"<span>{_broken(module + colon)}</span><b>{_broken(name)}</b>"
    found = [(f"{anchor}-{index}", cell) for index, cell in enumerate(cells(report, row), 1)]
    words = "".join(_cell(cell, anchor) for anchor, cell in found)
    changes = "".join(_verdict(cell, anchor) for anchor, cell in found if _opens(cell))
    place = f"{row.use.way} in {_text(row.use.where)}{_owner(row.use)}" if len(alike) == 1 else _places(alike)
    listed = [f"<li>{each.use.way} in {_text(each.use.where)}{_owner(each.use)}</li>" for each in alike[1:] and alike]
    more = f"<ul>{''.join(listed)}</ul>" if listed else ""
    if changes or more:
        verdicts = f'<div class="v">{_declared(row.use) if changes else ""}{changes}{more}</div>'
        place = f"<details><summary>{place}</summary>{verdicts}</details>"
    return (
        f'<tr id="{anchor}"><th scope="row">{title}</th>{words}</tr>\n'
        f'<tr class="m"><td colspan="{len(found) + 1}"><div>{place}</div></td></tr>'
    )


def _places(alike: list[Row]) -> str:
    ways = ", ".join(dict.fromkeys(row.use.way for row in alike))
    files = count(len({row.use.file for row in alike}), "file")
    return _text(f"{ways} in {count(len(alike), 'place')}, {files}")


def _broken(name: str) -> str:
    """A name that may go on in another line after a dot or a colon."""
    return re.sub("([.:])", r"\1<wbr>", _text(name))


def _opens(cell: Cell) -> bool:
    """Whether there is more to say of a cell than its word does."""
    verdict = cell.verdict
    if verdict.state in ("same", "absent"):
        return bool(cell.diff or verdict.detail or verdict.now)
    return verdict.state != ""


def _cell(cell: Cell, anchor: str) -> str:
    word = WORDS[cell.verdict.state]
    if _opens(cell):
        return f'<td><a class="{word.tone}" href="#{anchor}">{word.short}</a></td>'
    if word.short:
        return f'<td><span class="{word.tone}">{word.short}</span></td>'
    return f'<td title="{_text(cell.verdict.detail)}"></td>' if cell.verdict.detail else "<td></td>"


def _owner(use: Use) -> str:
    owner = use.patch.name if use.patch else use.owner
    return (f", {_text(owner)}" if owner else "") + (", guarded" if use.guarded else "")


def _declared(use: Use) -> str:
    """What the patch says of itself."""
    if use.patch is None:
        return ""
    said = {
        "for vLLM": use.patch.vllm,
        "why": use.patch.why,
        "upstream": use.patch.upstream,
        "remove when": use.patch.remove_when,
    }
    words = "; ".join(f"{key} {value}" for key, value in said.items() if value)
    return f'<p class="soft">{_text(words)}</p>' if words else ""


def _verdict(cell: Cell, anchor: str) -> str:
    """One verdict in full. The anchor is within what opens: only then does a link to it open it."""
    verdict = cell.verdict
    word = WORDS[verdict.state]
    step = f"{cell.since} → {cell.release}" if cell.since else cell.release
    head = f'<b class="w {word.tone}">{word.short}</b> {_text(step)}'
    head += f": {_prose(verdict.detail)}" if verdict.detail else ""
    now = f"now <code>{_text(verdict.now)}</code>" if verdict.now else ""
    if not cell.diff:
        return f'<p id="{anchor}">{head}{", " if now else ""}{now}</p>'
    added, removed = changed_lines(cell.diff)
    now = f"<p>{now}</p>" if now else ""
    return (
        f"<details><summary>{head}, +{added:,} −{removed:,} lines</summary>"
        f'<div id="{anchor}">{now}{_diff(cell.diff)}</div></details>'
    )


def _diff(diff: str) -> str:
    runs = [f"<{_ELEMENTS[part]}>{escape(chr(10).join(lines))}\n</{_ELEMENTS[part]}>" for part, lines in parts(diff)]
    return f"<pre><code>{''.join(runs)}</code></pre>"


def _findings(found: list[Finding]) -> Iterator[str]:
    """The findings, those at level info folded; one that is the same in many places stands there once."""
    if not found:
        return
    yield f'<h2 id="findings">{_text(count(len(found), "finding"))}</h2>'
    numbered = list(enumerate(_alike(found), 1))
    told = [_finding(number, one, *more) for number, (one, *more) in numbered if one.level != "info"]
    notes = [_finding(number, one, *more) for number, (one, *more) in numbered if one.level == "info"]
    if told:
        yield f'<ul class="f">\n{chr(10).join(told)}\n</ul>'
    if notes:
        title = _text(count(sum(finding.level == "info" for finding in found), _LEVELS["info"]))
        yield f'<details class="rest"><summary>{title}</summary><ul class="f">\n{chr(10).join(notes)}\n</ul></details>'


def _alike(found: list[Finding]) -> Iterator[tuple[Finding, list[str], list[str]]]:
    """Each finding once, with all that releases say of it, and all places that they say it of."""
    places: dict[Finding, list[str]] = {}
    for finding in found:
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    said: dict[tuple[Finding, tuple[str, ...]], list[str]] = {}
    for finding, wheres in places.items():
        said.setdefault((replace(finding, what=""), tuple(wheres)), []).append(finding.what)
    for (finding, found_at), whats in said.items():
        yield finding, whats, [where for where in dict.fromkeys(found_at) if where]


def _finding(number: int, finding: Finding, whats: list[str], places: list[str]) -> str:
    said = "".join(f"<p>{_prose(what)}</p>" for what in whats)
    listed = [f"<code>{_text(place)}</code>" for place in places]
    where = f'<p class="soft">{"<br>".join(listed)}</p>' if listed else ""
    if len(listed) > _LISTED:
        where = f'<details class="soft"><summary>{count(len(listed), "place")}</summary>{"<br>".join(listed)}</details>'
    fix = f"<p>Next: {_prose(finding.fix)}</p>" if finding.fix else ""
    return (
        f'<li id="f{number}"><a href="#f{number}">{_text(finding.code)}</a> '
        f'<b class="w {_TONES[finding.level]}">{finding.level}</b> <code>{_text(finding.subject)}</code>'
        f"{said}{where}{fix}</li>"
    )


def _legend() -> str:
    lines = [
        f'<dt><b class="w {word.tone}">{word.short or "blank"}</b></dt><dd>The name {_text(word.says)}.</dd>'
        for word in WORDS.values()
    ]
    return f'<h2 id="legend">What the words mean</h2>\n<dl class="l">\n{chr(10).join(lines)}\n</dl>'


def _prose(words: str) -> str:
    """A sentence; what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", _text(words))


def _text(words: str) -> str:
    return escape(printable(words))
