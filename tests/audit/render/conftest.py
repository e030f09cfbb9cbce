"""Small reports made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_graft.audit.model import (
    PackageUses,
    PatchDeclaration,
    Report,
    ReportCell,
    ReportRow,
    Use,
    Verdict,
    VerdictState,
    Way,
)
from vllm_graft.findings import Finding

RELEASES = ("0.31.0", "0.32.0")
DIFF = """\
--- vLLM 0.31.0
+++ vLLM 0.32.0
@@ -1,3 +1,3 @@
 def schedule(self):
-    return old(a < b)
+    return new(a & b)
"""
HOSTILE = "a|b`c``d</code></td><script>alert('x')</script>\"&@octocat #12\n**e**\x1b[31m"

Make = Callable[..., ReportRow]


@pytest.fixture
def make() -> Make:
    """Makes a row: a package, a name, a word for each release."""

    def row(
        package: str, name: str, *states: VerdictState, way: Way = "wrap", diff: str = "", **more: object
    ) -> ReportRow:
        module, _, qualname = name.partition(":")
        use = Use(way, module, qualname, f"{package}/patches.py", 7, **more)
        steps = zip(("0.30.0", "0.31.0"), RELEASES, states, strict=False)
        cells = [
            ReportCell(new, old, Verdict(state), diff if state not in ("same", "") else "") for old, new, state in steps
        ]
        return ReportRow(package, use, tuple(cells))

    return row


@pytest.fixture
def report(make: Make) -> Report:
    """Two packages; the second has the worse news, and comes after the first."""
    moved = ReportCell("0.32.0", "0.31.0", Verdict("moved", "its module is a package now", "vllm.v1.queues:make_queue"))
    patch = PatchDeclaration("fair", vllm=">=0.26", why="tenants starve", remove_when="vllm>=0.34")
    rows = (
        make("alpha", "vllm.config.vllm:VllmConfig.check", "same", "same", way="import"),
        make("alpha", "vllm.v1.sched:Scheduler.schedule", "same", "body", diff=DIFF, patch=patch),
        make("alpha", "vllm.v1.sched:Scheduler.__init__", "body", "extended"),
        make("alpha", "vllm.v1.late:Later", "", ""),
        make("beta", "vllm.v1.worker:Worker.stop", "broken", "gone", way="override"),
        ReportRow("beta", Use("replace", "vllm.v1.queue", "make_queue", "beta/q.py", 3, "Queues"), (moved,)),
    )
    findings = (
        Finding(
            "P207", "info", "vllm.v1.sched:Scheduler.schedule", "its code changed", "alpha/patches.py:7", "read it"
        ),
        Finding(
            "P201", "error", "vllm.v1.worker:Worker.stop", "it is nowhere", "beta/patches.py:7", "run `vllm-graft diff`"
        ),
    )
    packages = (PackageUses("alpha", (), files=3, version="1.2", base="0.30.0"), PackageUses("beta", (), files=1))
    return Report(packages, "", RELEASES, rows, findings)


@pytest.fixture
def empty() -> Report:
    """A package that uses nothing of vLLM."""
    return Report((PackageUses("alpha", ()),), "0.31.0", ("0.32.0",), (), ())


@pytest.fixture
def hostile() -> Report:
    """Names and words that try to be markup, wherever a report has text."""
    use = Use("replace", f"vllm.{HOSTILE}", HOSTILE, HOSTILE, 1, HOSTILE, patch=PatchDeclaration(HOSTILE, why=HOSTILE))
    diff = f"--- a\n+++ b\n@@ -1 +1 @@\n-````` {HOSTILE}\n+</code></pre><script>\n"
    cells = (
        ReportCell("0.32.0", HOSTILE, Verdict("moved", HOSTILE, HOSTILE), diff),
        ReportCell("0.31.0", "", Verdict("", HOSTILE)),
    )
    findings = (Finding(HOSTILE, "error", HOSTILE, HOSTILE, HOSTILE, HOSTILE),)
    return Report(
        (PackageUses(HOSTILE, (), version=HOSTILE),), "", RELEASES, (ReportRow(HOSTILE, use, cells),), findings
    )


@pytest.fixture
def big(make: Make) -> Report:
    """The size of a large patch set: 400 rows, each with a long diff and a finding."""
    diff = "@@ -1,300 +1,300 @@\n" + "+    a line of upstream's code\n" * 300
    rows = tuple(
        make("alpha", f"vllm.v1.module{number}:Class.method", "same", "body", diff=diff) for number in range(400)
    )
    findings = tuple(
        Finding("P205", "warning", row.use.name, "its code changed", row.use.where, "read it") for row in rows
    )
    return Report((PackageUses("alpha", ()),), "", RELEASES, rows, findings)
