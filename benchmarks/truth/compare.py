"""The decided uses beside the audit's findings: recall, precision, misses, false alarms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from truth.corpus import Entry
from truth.decided import Decided, Truth
from truth.verdicts import BROKEN, FINE, UNDECIDED

_PATCH_WAYS = ("replace", "wrap", "delete")


@dataclass(frozen=True)
class Finding:
    """A finding of the audit, at level error or warning."""

    code: str
    level: str
    way: str
    name: str
    what: str
    file: str
    line: int

    @classmethod
    def parse(cls, data: dict[str, str]) -> Finding:
        """Read one from the report."""
        way, _, name = data["subject"].partition(" ")
        file, _, line = data["where"].rpartition(":")
        return cls(data["code"], data["level"], way, name, data["what"], file, int(line) if line.isdigit() else 0)

    @property
    def dotted(self) -> str:
        """The name with points only."""
        return self.name.replace(":", ".")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.code} {self.level} {self.way} {self.name}: {self.what}"


@dataclass
class Result:
    """What one package came to."""

    package: str
    held_out: bool
    uses: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    reported: Counter[str] = field(default_factory=Counter)
    undecided: Counter[str] = field(default_factory=Counter)
    levels: dict[str, Counter[str]] = field(default_factory=lambda: {"error": Counter(), "warning": Counter()})
    misses: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    seconds: float = 0.0
    base: str = ""


def compare(result: Result, entry: Entry, uses: Sequence[Decided], findings: Sequence[Finding], truth: Truth) -> Result:
    """Count what the audit reports of what is broken, and how much of what it reports is right."""
    near: dict[str, list[Finding]] = {}
    for finding in findings:
        near.setdefault(finding.file, []).append(finding)
    for use in _once(uses):
        result.uses[use.kind] += 1
        if use.verdict == UNDECIDED:
            result.undecided[use.kind] += 1
        if use.verdict != BROKEN:
            continue
        result.broken[use.kind] += 1
        if any(speaks_of(finding, use) for finding in near.get(use.file, ())):
            result.reported[use.kind] += 1
        else:
            result.misses.append(f"{use.where} {use.kind} {use.name}: {use.why}")
    files: dict[str, list[Decided]] = {}
    for use in uses:
        files.setdefault(use.file, []).append(use)
    for finding in findings:
        verdict, why = _judge(finding, entry, files.get(finding.file, ()), truth)
        result.levels[finding.level][verdict] += 1
        if verdict == "wrong":
            result.false_alarms.append(f"{finding}  [{why}]")
    return result


def _once(uses: Iterable[Decided]) -> list[Decided]:
    """Count a name once for each file and kind where the reason is the same, as the audit does."""
    found: dict[tuple[object, ...], Decided] = {}
    rank = {BROKEN: 0, UNDECIDED: 1, FINE: 2}
    for use in uses:
        key = (use.file, use.kind, use.owner, use.name, use.shape)
        if key not in found or rank[use.verdict] < rank[found[key].verdict]:
            found[key] = use
    return list(found.values())


def speaks_of(finding: Finding, use: Decided) -> bool:
    """Tell whether a finding is about a use: the same name in the same file, or the same line."""
    if use.kind in ("self call", "self read", "super call"):
        word = re.search(rf"\b{re.escape(use.member)}\b", f"{finding.name} {finding.what}")
        return word is not None and (_on_line(finding, use) or use.kind != "super call" or _in_class(finding, use))
    if use.kind == "field":
        return _on_line(finding, use) or finding.dotted.rpartition(".")[2] in use.path
    if use.kind == "abstract":
        missing = use.why.partition(":")[2].replace(",", " ").split()
        return _on_line(finding, use) and finding.way == "subclass" and any(_says(finding, name) for name in missing)
    if use.kind == "override":
        return _on_line(finding, use) and finding.dotted.endswith(f".{use.member}")
    if any(_same(finding.dotted, name) for name in use.names):
        return use.kind == "import" or finding.code not in ("P203",)
    return _on_line(finding, use) and any(_says(finding, name.rpartition(".")[2]) for name in use.names)


def _says(finding: Finding, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", f"{finding.name} {finding.what}") is not None


def _same(one: str, other: str) -> bool:
    """Tell whether two names are one, or one is part of the other: a class that is gone takes its methods along."""
    return one == other or other.startswith(f"{one}.")


def _on_line(finding: Finding, use: Decided) -> bool:
    return use.line <= finding.line <= use.end


def _in_class(finding: Finding, use: Decided) -> bool:
    return use.owner_lines[0] <= finding.line <= use.owner_lines[1]


def _judge(finding: Finding, entry: Entry, uses: Sequence[Decided], truth: Truth) -> tuple[str, str]:
    """Tell whether a finding is right: the use breaks, or for a patch what it says of the name is so."""
    if finding.way == "add":
        own = truth.reads(entry, finding.dotted.rpartition(".")[2])
        return ("wrong", "the package reads what it puts there") if own else ("undecided", "")
    about = [use for use in uses if speaks_of(finding, use)]
    if finding.code == "P217":
        # The last name is what is missing; that ``self.model_config`` can be read says nothing of the field below it.
        missing = finding.dotted.rpartition(".")[2]
        about = [use for use in about if use.kind not in ("self read", "self call") or use.member == missing]
    if finding.code in ("P201", "P205", "P213") and finding.way in (*_PATCH_WAYS, "override"):
        return _gone(finding, truth)
    if finding.code in ("P203", "P204", "P207", "P212", "P214") or (
        finding.way in _PATCH_WAYS and finding.code in ("P202", "P206", "P209")
    ):
        # What a patch puts there is called by vLLM; no use of the package shows whether the call fits.
        return "undecided", ""
    if finding.code == "P208":
        mentioned = truth.sources.mentions(finding.dotted.rpartition(".")[2])
        return ("right", "") if not mentioned else ("wrong", f"vLLM names it {mentioned} times")
    decided = [use for use in about if use.verdict != UNDECIDED]
    if any(use.verdict == BROKEN for use in decided):
        return "right", ""
    if finding.way in _PATCH_WAYS and finding.code in ("P210", "P218"):
        # What a patch reads from ``self``, and how vLLM calls it, no use of the package shows either.
        return "undecided", ""
    if finding.code == "P215" and not any(use.shape for use in decided):
        # The name is there; whether a call fits it no use tells.
        return "undecided", ""
    if finding.code in ("P202", "P206", "P211"):
        decided = [use for use in decided if use.kind in ("call", "construct", "override", "super call", "self call")]
        if len(decided) < len([use for use in about if use.kind != "import"]):
            return "undecided", ""
    if decided and len(decided) == len(about):
        return "wrong", f"{decided[0].kind} {decided[0].name}: {decided[0].why or 'it works'}"
    return "undecided", ""


def _gone(finding: Finding, truth: Truth) -> tuple[str, str]:
    """Tell whether a name that a patch stands on, or a method that is overridden, is gone."""
    module, _, path = finding.name.partition(":")
    status = truth.status(module, path)
    if status == FINE:
        return "wrong", "it is there"
    return ("right", "") if status == BROKEN else ("undecided", "")
