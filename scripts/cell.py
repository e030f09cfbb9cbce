"""Run one cell of the matrix: pytest in this environment, with a report of what ran on which vLLM.

    python scripts/cell.py REPORT.json [options and paths for pytest]

Only tests whose call phase ran and passed count as passed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest


class OutcomeRecorder:
    """Record the worst outcome of each test over set-up, call and tear-down."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.deselected = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Count tests that a marker expression deselected."""
        self.deselected += len(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be imported as one failure."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = "skipped"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record one phase of one test."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes.setdefault(report.nodeid, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def report(self) -> dict[str, object]:
        """Return the counts, the failures, and the vLLM that was imported."""
        # Imported late: pytest rewrites the assertions of modules that it imports first.
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
    """Run the tests, and write the report if pytest finishes."""
    # As with `python -m pytest`: the working directory is importable, the modules next to this one are not.
    sys.path[0] = str(Path.cwd())
    recorder = OutcomeRecorder()
    status = pytest.main(sys.argv[2:], plugins=[recorder])
    Path(sys.argv[1]).write_text(json.dumps({"status": int(status), **recorder.report()}), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
