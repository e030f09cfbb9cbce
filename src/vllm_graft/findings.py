"""Findings: what every tool reports, with code, level, subject, place and next step.

A finding is data. Tables, colours and JSON documents are made of it in ``cli/``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, Literal

from vllm_graft.text import printable

Level = Literal["error", "warning", "info"]

_RANK: Final[dict[Level, int]] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact that a tool reports.

    code:     stable identifier, for example ``S001``; documented under ``docs/reference/findings.md``
    level:    ``error`` makes a command exit 1, ``warning`` and ``info`` do not
    subject:  the thing spoken of: an item, a process, a plugin
    what:     the fact, as one sentence without a final stop
    where:    file and line, process, environment variable
    fix:      the next step, as an imperative
    """

    code: str
    level: Level
    subject: str
    what: str
    where: str = ""
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the finding with stable lower-case keys, for ``--json``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, str]) -> Finding:
        """Return the finding that ``as_dict`` made the row of."""
        level: Level = next((known for known in _RANK if known == row["level"]), "error")
        return cls(row["code"], level, row["subject"], row["what"], row["where"], row["fix"])

    def explain(self) -> str:
        """Return the finding as one line of text, without control characters."""
        where = f" [{self.where}]" if self.where else ""
        fix = f". Next: {self.fix}" if self.fix else ""
        return printable(f"{self.code} {self.level}: {self.subject}: {self.what}{where}{fix}")


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by level, errors first; equal levels stay in order."""
    return sorted(findings, key=lambda finding: _RANK[finding.level])


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if anything is at level error, else 0: the exit status of every reporting command."""
    return int(any(finding.level == "error" for finding in findings))
