"""The parts that all renderers share: the word and colour of each state, the order of rows, and the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from vllm_graft.audit.model import Report, ReportCell, ReportRow, Use, Verdict, VerdictState
from vllm_graft.findings import Finding, worst_first

Tone = Literal["ok", "body", "sig", "bad", "idle", "news", "none"]
"""A family of states that share a colour; also the name of its class in style sheets."""


@dataclass(frozen=True, slots=True)
class StateWord:
    """The presentation of one state.

    short:  a word or a sign that fits a cell of a matrix
    tone:   its colour
    says:   what it means, as the end of the sentence "The name ..."
    brief:  the same in a word or three, if the short word does not say it
    """

    short: str
    tone: Tone
    says: str
    brief: str = ""


WORDS: Final[Mapping[VerdictState, StateWord]] = {
    "gone": StateWord("gone", "bad", "no longer exists"),
    "broken": StateWord("sig!", "bad", "has a signature that callers of the old one do not fit", "another signature"),
    "misfit": StateWord("misfit", "bad", "exists, but the code that uses it does not fit it", "does not fit"),
    "kind": StateWord(
        "kind", "bad", "is something else now, such as a function where a class was", "something else now"
    ),
    "moved": StateWord("moved", "bad", "has moved"),
    "grown": StateWord("new", "idle", "is added by the package, but upstream now has its own", "upstream's too now"),
    "uncalled": StateWord("uncalled", "idle", "exists, but nothing in vLLM mentions it any more", "never mentioned"),
    "inherited": StateWord("inherited", "idle", "is no longer defined by the class, but by a base", "from a base"),
    "extended": StateWord("sig+", "sig", "has new optional parameters", "more parameters"),
    "body": StateWord("body", "body", "has the same signature but different code", "other code"),
    "fixed": StateWord("fixed", "news", "is now in upstream, so the package's own is not needed"),
    "absent": StateWord("absent", "none", "is in neither release"),
    "same": StateWord("·", "ok", "is unchanged", "unchanged"),
    "": StateWord("", "none", "was not judged: the release cannot be read, or the patch is not for it"),
}
"""The word for each state, the worst state first."""

_RANKS: Final[Mapping[VerdictState, int]] = {state: len(WORDS) - index for index, state in enumerate(WORDS)}


def weight(state: VerdictState) -> int:
    """Return how much attention a state needs: more is worse."""
    return _RANKS[state]


def count(number: int, thing: str) -> str:
    """Return a number and what is counted, in the plural unless it is one."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "ink": ("#1c2024", "#e4e7eb"),
    "soft": ("#5c646e", "#98a1ac"),
    "paper": ("#ffffff", "#121417"),
    "line": ("#e3e6e9", "#2a2e34"),
    "link": ("#0a58a8", "#8ecaf9"),
    "ok": ("#2f6b41", "#86c596"),
    "ok-bg": ("#e9f4ec", "#15261a"),
    "body": ("#775100", "#e6bd66"),
    "body-bg": ("#fdf0cf", "#332a12"),
    "sig": ("#7c3d00", "#ffc078"),
    "sig-bg": ("#fbd9a5", "#553310"),
    "bad": ("#9c1c14", "#ffaaa1"),
    "bad-bg": ("#fbd3ce", "#561e1b"),
    "idle": ("#57309c", "#cbb2ff"),
    "idle-bg": ("#e8dff8", "#31244e"),
    "news": ("#0a4f8c", "#8ecaf9"),
    "news-bg": ("#d6e9fb", "#14344f"),
    "none": ("#68707a", "#949ca6"),
    "none-bg": ("#f4f5f6", "#1b1e22"),
}
"""Each colour for light screens, then for dark ones: of the page, of each tone's text, and behind it."""


def variables(selector: str) -> str:
    """Write rules that set the colours as variables: ``--body`` for text, ``--body-bg`` behind it, ``--ink``."""
    screens = [";".join(f"--{name}:{pair[screen]}" for name, pair in COLOURS.items()) for screen in (0, 1)]
    light, dark = (f"{selector}{{{declared}}}" for declared in screens)
    return f"{light}\n@media (prefers-color-scheme:dark){{{dark}}}"


@dataclass(frozen=True, slots=True)
class PackageRows:
    """The rows of one package, each list with the worst first.

    title:      the package, with its version if that is known
    changed:    rows that need attention in some release
    unchanged:  rows that were judged and need none
    unjudged:   rows without any verdict
    """

    title: str
    changed: list[ReportRow]
    unchanged: list[ReportRow]
    unjudged: list[ReportRow]

    @property
    def rows(self) -> list[ReportRow]:
        """All rows."""
        return [*self.changed, *self.unchanged, *self.unjudged]

    @property
    def folded(self) -> str:
        """The number of rows that need no attention, in words; empty if none."""
        absent = sum(any(cell.verdict.state == "absent" for cell in row.cells) for row in self.unchanged)
        numbers = {"unchanged": len(self.unchanged) - absent, "absent": absent, "not judged": len(self.unjudged)}
        return ", ".join(f"{number:,} {words}" for words, number in numbers.items() if number)


def short_name(use: Use) -> str:
    """Return the name that is used, without the "vllm." that all of them begin with."""
    return use.name.removeprefix("vllm.")


def cells(report: Report, row: ReportRow) -> list[ReportCell]:
    """Return a cell for each column of the report, not judged if the row has none."""
    known = {cell.release: cell for cell in row.cells}
    return [known.get(release) or ReportCell(release, "", Verdict("")) for release in report.releases]


def needs_attention(use: Use, state: VerdictState) -> bool:
    """Return whether a state needs attention; a missing name does not if the code adds it or provides for that."""
    if state == "absent":
        return use.way != "add" and not use.guarded
    return state not in ("same", "")


def groups(report: Report) -> list[PackageRows]:
    """Return the rows by package; packages and rows with the worst first, and as they came if they are alike."""
    titles = {reading.package: f"{reading.package} {reading.version}".strip() for reading in report.packages}
    packages = dict.fromkeys([*titles, *(row.package for row in report.rows)])
    found = {package: PackageRows(titles.get(package, package), [], [], []) for package in packages}
    for row in worst_first_rows(report):
        group, states = found[row.package], [cell.verdict.state for cell in cells(report, row)]
        if any(needs_attention(row.use, state) for state in states):
            group.changed.append(row)
        else:
            (group.unchanged if any(states) else group.unjudged).append(row)
    filled = [group for group in found.values() if group.rows]
    return sorted(filled, key=lambda group: _badness(report, group.rows[0]), reverse=True)


def worst_first_rows(report: Report) -> list[ReportRow]:
    """Return all rows with the worst first, whichever package they are of."""
    return sorted(report.rows, key=lambda row: _badness(report, row), reverse=True)


def findings(report: Report) -> list[Finding]:
    """Return all findings, files that could not be read among them, the worst first."""
    unread = [finding for reading in report.packages for finding in reading.unread]
    return worst_first(dict.fromkeys([*report.findings, *unread]))


def state_counts(report: Report) -> Counter[VerdictState]:
    """Return how often each state was given."""
    return Counter(cell.verdict.state for row in report.rows for cell in cells(report, row))


def attention_count(report: Report, release: str) -> int:
    """Count the rows that need attention in one release."""
    found = [(row.use, cell.verdict.state) for row in report.rows for cell in row.cells if cell.release == release]
    return sum(needs_attention(use, state) for use, state in found)


def comparison(report: Report) -> str:
    """Return what the releases are compared with."""
    return f"compared with {report.base}" if report.base else "each compared with the release before"


def summary(report: Report) -> tuple[str, str]:
    """Return what matters most in a few words, and the rest of the sentence."""
    packages = len({*(row.package for row in report.rows), *(reading.package for reading in report.packages)})
    uses = len(report.rows)
    if not uses:
        return "No use of vLLM was found", f" in {count(packages, 'package')}."
    need = sum(len(group.changed) for group in groups(report))
    span = f"vLLM {' to '.join(dict.fromkeys((report.releases[0], report.releases[-1])))}" if report.releases else ""
    against = f"{span}, {comparison(report)}" if span else "no release of vLLM"
    rest = f", in {count(packages, 'package')} checked against {against}."
    some = f"{need:,}" if need else "None"
    verb = "needs" if need < 2 else "need"
    return f"{some} of {count(uses, 'use')} of vLLM {verb} a look", rest


def blank_controls(words: str) -> str:
    """Return text from elsewhere with a space for each line end and control character."""
    return "".join(each if each.isprintable() else " " for each in words)


def one_line(words: str) -> str:
    """Return the same with single spaces, and none at its ends."""
    return " ".join(blank_controls(words).split())


def _badness(report: Report, row: ReportRow) -> tuple[bool, int, int]:
    states = [cell.verdict.state for cell in cells(report, row)]
    weights = [weight(state) for state in states]
    return any(needs_attention(row.use, state) for state in states), max(weights, default=0), sum(weights)
