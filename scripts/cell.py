"""Run pytest in this environment and write down what really ran, and with which vLLM: one cell of the matrix.

    python scripts/cell.py REPORT.json [options and paths for pytest]

Only tests whose call was run and passed count as passed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest


class Witness:
    """Sees every test: its worst outcome over set-up, call and tear-down."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.deselected = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Tests that an expression left out."""
        self.deselected += len(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failure of all its tests."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = "skipped"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes.setdefault(report.nodeid, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def report(self) -> dict[str, object]:
        """What was seen."""
        # Imported by pytest itself until now, which rewrites the assertions in it.
        from vllm_graft.versions import vllm_root, vllm_version

        counts = Counter(self.outcomes.values())
        return {
            "vllm": vllm_version(),
            "folder": str(vllm_root()),
            "passed": counts["passed"],
            "failed": counts["failed"],
            "skipped": counts["skipped"],
            "deselected": self.deselected,
            "failures": [name for name, outcome in self.outcomes.items() if outcome == "failed"],
        }


def main() -> int:
    """Run the tests; the report is written only when pytest came to its end."""
    # As `python -m pytest` has it: the working directory, and none of the modules next to this one.
    sys.path[0] = str(Path.cwd())
    witness = Witness()
    status = pytest.main(sys.argv[2:], plugins=[witness])
    Path(sys.argv[1]).write_text(json.dumps({"status": int(status), **witness.report()}), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
