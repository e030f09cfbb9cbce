"""What of a report is shown, in what order, and the sentence that sums it up. Every renderer asks here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_graft.audit.model import Cell, Report, Row, State, Use, Verdict
from vllm_graft.audit.render.words import count, weight
from vllm_graft.findings import Finding, worst_first


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one package, each list with the worst first.

    title:      the package, with its version where that is known
    changed:    rows of which some release asks for a look
    unchanged:  rows that were judged, and no release asks for one
    unjudged:   rows on which there is no verdict at all
    """

    title: str
    changed: Sequence[Row]
    unchanged: Sequence[Row]
    unjudged: Sequence[Row]

    @property
    def rows(self) -> list[Row]:
        """All of them."""
        return [*self.changed, *self.unchanged, *self.unjudged]

    @property
    def folded(self) -> str:
        """How many rows ask for no look, in words; empty if none."""
        absent = sum(any(cell.verdict.state == "absent" for cell in row.cells) for row in self.unchanged)
        numbers = {
            "unchanged": len(self.unchanged) - absent,
            "absent": absent,
            "not judged": len(self.unjudged),
        }
        return ", ".join(f"{number:,} {words}" for words, number in numbers.items() if number)


def label(use: Use) -> str:
    """The name that is used, without the "vllm." that all of them begin with."""
    return use.name.removeprefix("vllm.")


def cells(report: Report, row: Row) -> list[Cell]:
    """A cell for each column of the report, not judged where the row has none."""
    known = {cell.release: cell for cell in row.cells}
    return [known.get(release) or Cell(release, "", Verdict("")) for release in report.releases]


def asks(use: Use, state: State) -> bool:
    """Whether a state asks for a look. That a name is in no release is well for who adds it or provides for that."""
    if state == "absent":
        return use.way != "add" and not use.guarded
    return state not in ("same", "")


def groups(report: Report) -> list[Group]:
    """The rows by package; packages and rows with the worst first, and as they came where they are alike."""
    titles = {reading.package: f"{reading.package} {reading.version}".strip() for reading in report.packages}
    packages = dict.fromkeys([*titles, *(row.package for row in report.rows)])
    found = [_group(report, titles.get(package, package), package) for package in packages]
    filled = [group for group in found if group.rows]
    return sorted(filled, key=lambda group: _worth(report, group.rows[0]), reverse=True)


def by_worth(report: Report) -> list[Row]:
    """All rows with the worst first, whichever package they are of."""
    return sorted(report.rows, key=lambda row: _worth(report, row), reverse=True)


def findings(report: Report) -> list[Finding]:
    """All findings, files that could not be read among them, the worst first."""
    unread = [finding for reading in report.packages for finding in reading.unread]
    return worst_first(dict.fromkeys([*report.findings, *unread]))


def totals(report: Report) -> Counter[State]:
    """How often each state was given."""
    return Counter(cell.verdict.state for row in report.rows for cell in cells(report, row))


def asking(report: Report, release: str) -> int:
    """Of how many rows one release asks for a look."""
    return sum(
        asks(row.use, cell.verdict.state) for row in report.rows for cell in row.cells if cell.release == release
    )


def against(report: Report) -> str:
    """Which releases, and what they are compared with."""
    if not report.releases:
        return "no release of vLLM"
    first, last = report.releases[0], report.releases[-1]
    span = f"vLLM {first}" if len(report.releases) == 1 else f"vLLM {first} to {last}"
    return f"{span}, {compared(report)}"


def compared(report: Report) -> str:
    """What the releases are compared with."""
    if report.base:
        return f"compared with {report.base}"
    return "each compared with the release before"


def summary(report: Report) -> tuple[str, str]:
    """What matters most in a few words, and the rest of the sentence."""
    packages = len({*(row.package for row in report.rows), *(reading.package for reading in report.packages)})
    uses = len(report.rows)
    if not uses:
        return "No use of vLLM was found", f" in {count(packages, 'package')}."
    need = sum(len(group.changed) for group in groups(report))
    rest = f", in {count(packages, 'package')} held against {against(report)}."
    some = f"{need:,}" if need else "None"
    verb = "needs" if need < 2 else "need"
    return f"{some} of {count(uses, 'use')} of vLLM {verb} a look", rest


def printable(words: str) -> str:
    """Text from elsewhere with a space for each line end and control character."""
    return "".join(each if each.isprintable() else " " for each in words)


def one_line(words: str) -> str:
    """The same with single spaces, and none at its ends."""
    return " ".join(printable(words).split())


def _group(report: Report, title: str, package: str) -> Group:
    changed, unchanged, unjudged = [], [], []
    for row in by_worth(report):
        if row.package != package:
            continue
        states = [cell.verdict.state for cell in cells(report, row)]
        if any(asks(row.use, state) for state in states):
            changed.append(row)
        elif any(states):
            unchanged.append(row)
        else:
            unjudged.append(row)
    return Group(title, changed, unchanged, unjudged)


def _worth(report: Report, row: Row) -> tuple[bool, int, int]:
    states = [cell.verdict.state for cell in cells(report, row)]
    weights = [weight(state) for state in states]
    return any(asks(row.use, state) for state in states), max(weights, default=0), sum(weights)
