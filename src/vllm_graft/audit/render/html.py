"""A report as one page: no script, nothing loaded from elsewhere, readable without colours.

What needs action comes first: the number of findings, and each with its next step. Below is the matrix of names and
releases, one row for a name however many files use it, with unchanged rows folded away.

Each changed cell of the matrix is a link into the line below its row. Following it, a browser opens the ``<details>``
around the target by itself; one that does not still scrolls there, and the line opens by hand.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from typing import Final, Literal, get_args

from vllm_graft.audit.model import Report, ReportCell, ReportRow, Use
from vllm_graft.audit.render.presentation import (
    WORDS,
    Tone,
    attention_count,
    blank_controls,
    cells,
    comparison,
    count,
    findings,
    groups,
    short_name,
    state_counts,
    summary,
    variables,
)
from vllm_graft.findings import Finding, Level

DiffPart = Literal["head", "hunk", "added", "removed", "context"]


def parts(diff: str) -> Iterator[tuple[DiffPart, list[str]]]:
    """Yield runs of lines of one kind, in order. What stands before the first hunk is its head."""
    for part, run in itertools.groupby(_told(diff), key=lambda pair: pair[0]):
        yield part, [line for _, line in run]


def changed_lines(diff: str) -> tuple[int, int]:
    """Return how many lines are new and how many are gone."""
    kinds = [part for part, _ in _told(diff)]
    return kinds.count("added"), kinds.count("removed")


def _told(diff: str) -> Iterator[tuple[DiffPart, str]]:
    # Only a newline ends a line of a diff: splitlines() would also cut at a form feed within one.
    lines = diff.removesuffix("\n").split("\n") if diff else []
    inside = not any(line.startswith("@@") for line in lines)
    signs: dict[str, DiffPart] = {"@@": "hunk", "+": "added", "-": "removed"}
    for line in lines:
        inside = inside or line.startswith("@@")
        part: DiffPart = next((part for sign, part in signs.items() if line.startswith(sign)), "context")
        yield part if inside else "head", line


_RULES: Final = """
*{box-sizing:border-box}
html{color-scheme:light dark;font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:2rem 1.5rem 4rem;max-width:82rem;color:var(--ink);background:var(--paper)}
h1{margin:0;font-size:1.5rem;line-height:1.25;letter-spacing:-.01em}
h2{margin:2.5rem 0 .6rem;font-size:1.05rem}
p{margin:.4rem 0;max-width:60rem}
a{color:var(--link)}
small,.soft{color:var(--soft)}
small{font-size:.8rem;font-weight:400}
code,pre,tbody th{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{font-size:.86em;overflow-wrap:anywhere}
.lead{font-size:1.1rem;margin:1rem 0 .5rem}
.chips{display:flex;flex-wrap:wrap;gap:.4rem;margin:.8rem 0 0;padding:0;list-style:none;font-size:.85rem}
.chips li,b.w{padding:.05rem .5rem;border-radius:.25rem}
b.w{display:inline-block;min-width:3.2rem;text-align:center;font-size:.8rem;font-weight:500}
.matrix{overflow-x:auto;container-type:inline-size;border-top:1px solid var(--line)}
table{border-collapse:separate;border-spacing:0;min-width:100%}
thead th{white-space:nowrap;padding:.5rem .3rem;font-weight:600;font-size:.85rem;line-height:1.3;text-align:center;
vertical-align:bottom;background:var(--paper);border-bottom:1px solid var(--line)}
thead small{display:block;font-size:.72rem}
thead th:first-child,tbody th{position:sticky;white-space:normal;left:0;z-index:1;background:var(--paper);
text-align:left;padding-left:0}
tbody th{padding:.4rem .8rem 0 0;font-size:.8rem;font-weight:400;line-height:1.35;overflow-wrap:anywhere}
tbody th span{color:var(--soft)}
tbody th b{font-weight:600}
h3.p{margin:1.2rem 0 .2rem;font-size:.95rem}
td{width:5.2rem;min-width:4.6rem;padding:.4rem .12rem 0;text-align:center;vertical-align:top;font-size:.78rem;
line-height:1.35rem}
td>*{display:block;border-radius:.2rem}
td a{color:inherit;text-decoration:none}
td a:hover{text-decoration:underline}
.m td{width:auto;padding:0 0 .35rem;text-align:left;line-height:1.5;border-bottom:1px solid var(--line)}
.m td>div{position:sticky;left:0;width:100cqw;font-size:.78rem;color:var(--soft)}
summary{cursor:pointer;width:fit-content;max-width:100%;overflow-wrap:anywhere}
summary:hover{color:var(--ink)}
.v{margin:.5rem 0 .6rem;padding-left:.8rem;border-left:2px solid var(--line);color:var(--ink)}
.v>*{margin:.25rem 0}
.v p{font-size:.8rem}
.v [id]{scroll-margin-top:30vh}
p:target,li:target{box-shadow:-.8rem 0 var(--paper),-1rem 0 var(--link)}
:target>pre{border-color:var(--link)}
pre{margin:.4rem 0;max-height:70vh;overflow:auto;border:1px solid var(--line);border-radius:.3rem;
font-size:.76rem;line-height:1.45;tab-size:4}
pre code{display:block;width:max-content;min-width:100%;padding:.5rem 0;font-size:inherit;overflow-wrap:normal}
pre :is(ins,del,i,b,span){display:block;padding:0 .7rem;font-style:normal;font-weight:400;text-decoration:none}
pre ins{background:#2ea04324}
pre del{background:#e5534b24}
pre i{color:var(--soft)}
pre b{color:var(--news);background:var(--none-bg)}
.rest{margin:.6rem 0}
.rest>summary{padding:.3rem 0;color:var(--soft)}
.v ul{margin:.4rem 0;padding-left:1.1rem}
.v li{overflow-wrap:anywhere}
.f{margin:0;padding:0;list-style:none}
.f details{font-size:.92rem}
.f li{padding:.5rem 0;border-top:1px solid var(--line);max-width:60rem;overflow-wrap:anywhere}
.f p{margin:.1rem 0;font-size:.92rem}
.f a{font-weight:600;text-decoration:none}
.l{display:grid;grid-template-columns:max-content 1fr;gap:.35rem .9rem;margin:0;font-size:.9rem}
.l dd{margin:0}
@media (min-width:62rem){.fits{overflow:visible}.fits thead th{position:sticky;top:0;z-index:2}
.fits thead th:first-child{z-index:3}}
@media (max-width:40rem){body{padding:1.2rem .9rem 3rem}td{min-width:4.2rem}
tbody th,thead th:first-child{min-width:9.6rem;max-width:46vw}tbody th span{display:block;font-size:.68rem}
.m td>div>details>summary{word-break:break-all}}
"""


def style() -> str:
    """Return the rules for a ``<style>`` element."""
    tones = "".join(f".{tone}{{color:var(--{tone});background:var(--{tone}-bg)}}" for tone in get_args(Tone))
    return f"{variables(':root')}{_RULES}{tones}"


# The number of releases that fit a desktop's width; with more the matrix scrolls, and its head cannot stay in view.
_FITS: Final = 8
_ELEMENTS: Final[dict[DiffPart, str]] = {"head": "i", "hunk": "b", "added": "ins", "removed": "del", "context": "span"}
# The number of places of one finding that are in view; more are folded.
_LISTED: Final = 3
_LEVELS: Final[dict[Level, str]] = {"error": "error", "warning": "warning", "info": "note"}
_TONES: Final[dict[Level, str]] = {"error": "bad", "warning": "body", "info": "none"}


def html(report: Report, title: str = "vLLM audit", when: str = "") -> str:
    """Return the page. ``when`` is the time of the audit, in words: a renderer has no clock."""
    first, rest = summary(report)
    numbers = Counter(finding.level for finding in findings(report))
    chips = [
        f'<li class="{tone}">{_text(count(numbers[level], _LEVELS[level]))}</li>' for level, tone in _TONES.items()
    ]
    lines = [
        f'<dt><b class="w {word.tone}">{word.short or "blank"}</b></dt><dd>The name {_text(word.says)}.</dd>'
        for word in WORDS.values()
    ]
    read = []
    for one in report.packages:
        base = f", made for vLLM {one.base}" if one.base else ""
        files = f", {count(one.files, 'file')} read" if one.files else ""
        read.append(_text(f"{one.package} {one.version}".strip() + base + files))
    read += [_text(when)] if when else []
    packages = f'<p class="soft">{"<br>".join(read)}</p>' if read else ""
    pieces = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>\n{style()}\n</style>\n</head>\n<body>",
        f"<header>\n<h1>{_text(title)}</h1>\n{packages}\n</header>",
        f'<p class="lead"><strong>{_text(first)}</strong>{_text(rest)}</p>',
        f'<ul class="chips" aria-label="findings">{"".join(chips)}</ul>',
        *_findings(findings(report)),
        *_matrix(report),
        f'<h2 id="legend">What the words mean</h2>\n<dl class="l">\n{chr(10).join(lines)}\n</dl>',
        "</body>\n</html>\n",
    ]
    return "\n".join(filter(None, pieces))


def _matrix(report: Report) -> Iterator[str]:
    if not report.rows or not report.releases:
        return
    # The number of cells with each verdict.
    numbers = state_counts(report)
    chips = [
        f'<li class="{word.tone}">{numbers[state]:,} {word.short if word.tone != "ok" else "unchanged"}</li>'
        for state, word in WORDS.items()
        if numbers[state] and word.short
    ]
    verdicts = f'<ul class="chips" aria-label="verdicts">{"".join(chips)}</ul>' if chips else ""
    yield f'<h2 id="matrix">Uses and releases</h2>\n{verdicts}'
    # The releases, and the number of rows that need attention in each.
    head = f'<th scope="col"><small>{_text(comparison(report))}</small></th>'
    for release in report.releases:
        words = f"{attention_count(report, release):,} of {len(report.rows):,}"
        head += f'<th scope="col">{_text(release)}<small>{words}</small></th>'
    fits = " fits" if len(report.releases) <= _FITS else ""
    found = groups(report)
    number = 0
    for group in found:
        if len(found) > 1:
            yield f'<h3 class="p">{_text(group.title)}</h3>'
        for rows, folded in ((group.changed, ""), ([*group.unchanged, *group.unjudged], group.folded)):
            if not rows:
                continue
            # The rows of one name are one, if each release has the same verdict wherever the name is used.
            merged: dict[object, list[ReportRow]] = {}
            for row in rows:
                declared = row.use.patch.name if row.use.patch is not None else ""
                said = tuple((cell.since, cell.release, cell.verdict) for cell in cells(report, row))
                merged.setdefault((row.use.name, declared, said), []).append(row)
            lines = [_row(report, alike, f"r{place}") for place, alike in enumerate(merged.values(), number + 1)]
            number += len(lines)
            table = (
                f'<div class="matrix{fits}" tabindex="0" role="region" aria-labelledby="matrix">\n<table>\n'
                f"<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody>\n</table>\n</div>"
            )
            yield f'<details class="rest"><summary>{folded}</summary>{table}</details>' if folded else table


def _row(report: Report, alike: list[ReportRow], anchor: str) -> str:
    """Write one name, and all places that use it."""
    row, patch = alike[0], alike[0].use.patch
    module, colon, name = short_name(row.use).rpartition(":")
    title = f"<span>{_broken(module + colon)}</span><b>{_broken(name)}</b>"
    words = changes = ""
    for index, cell in enumerate(cells(report, row), 1):
        verdict, word = cell.verdict, WORDS[cell.verdict.state]
        # There may be more to say of a cell than its word does.
        opens = verdict.state != ""
        if verdict.state in ("same", "absent"):
            opens = bool(cell.diff or verdict.detail or verdict.now)
        if opens:
            words += f'<td><a class="{word.tone}" href="#{anchor}-{index}">{word.short}</a></td>'
            changes += _verdict(cell, f"{anchor}-{index}")
        elif word.short:
            words += f'<td><span class="{word.tone}">{word.short}</span></td>'
        else:
            words += f'<td title="{_text(verdict.detail)}"></td>' if verdict.detail else "<td></td>"
    listed = [f"{each.use.way} in {_text(each.use.where)}{_owner(each.use)}" for each in alike]
    place, more = listed[0], ""
    if len(alike) > 1:
        ways = ", ".join(dict.fromkeys(each.use.way for each in alike))
        files = count(len({each.use.file for each in alike}), "file")
        place = _text(f"{ways} in {count(len(alike), 'place')}, {files}")
        more = f"<ul>{''.join(f'<li>{each}</li>' for each in listed)}</ul>"
    if changes or more:
        said = {}
        if patch is not None and changes:
            said = {"for vLLM": patch.vllm, "why": patch.why, "upstream": patch.upstream}
            said["remove when"] = patch.remove_when
        declared = "; ".join(f"{key} {value}" for key, value in said.items() if value)
        declared = f'<p class="soft">{_text(declared)}</p>' if declared else ""
        place = f'<details><summary>{place}</summary><div class="v">{declared}{changes}{more}</div></details>'
    return (
        f'<tr id="{anchor}"><th scope="row">{title}</th>{words}</tr>\n'
        f'<tr class="m"><td colspan="{len(report.releases) + 1}"><div>{place}</div></td></tr>'
    )


def _broken(name: str) -> str:
    """Return a name that may go on in another line after a dot or a colon."""
    return re.sub("([.:])", r"\1<wbr>", _text(name))


def _owner(use: Use) -> str:
    owner = use.patch.name if use.patch else use.owner
    return (f", {_text(owner)}" if owner else "") + (", guarded" if use.guarded else "")


def _verdict(cell: ReportCell, anchor: str) -> str:
    """Write one verdict in full. The anchor is within what opens: only then does a link to it open it."""
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
    """Yield the findings, those at level info folded; one that is the same in many places stands there once."""
    if not found:
        return
    yield f'<h2 id="findings">{_text(count(len(found), "finding"))}</h2>'
    # Each finding once, with all that releases say of it, and all places that they say it of.
    places: dict[Finding, list[str]] = {}
    for finding in found:
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    said: dict[tuple[Finding, tuple[str, ...]], list[str]] = {}
    for finding, wheres in places.items():
        said.setdefault((replace(finding, what=""), tuple(wheres)), []).append(finding.what)
    told, notes = list[str](), list[str]()
    for number, ((finding, found_at), whats) in enumerate(said.items(), 1):
        listed = [where for where in dict.fromkeys(found_at) if where]
        (notes if finding.level == "info" else told).append(_finding(number, finding, whats, listed))
    if told:
        yield f'<ul class="f">\n{chr(10).join(told)}\n</ul>'
    if notes:
        title = _text(count(sum(finding.level == "info" for finding in found), _LEVELS["info"]))
        yield f'<details class="rest"><summary>{title}</summary><ul class="f">\n{chr(10).join(notes)}\n</ul></details>'


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


def _prose(words: str) -> str:
    """Return a sentence; what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", _text(words))


def _text(words: str) -> str:
    return escape(blank_controls(words))
