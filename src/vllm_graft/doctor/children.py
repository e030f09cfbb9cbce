"""Plugins imported one by one, each in a child process of its own: what takes long, what fails, what never returns.

D008  an import that is slow, pulls in heavy packages, or initialises CUDA
D009  a platform plugin whose detector fails, which vLLM passes over
D010  a plugin that cannot be imported
D025  bfloat16 that stops the process, on CPUs
D029  a general plugin whose function fails, which stops every vLLM process
D032  a platform or general plugin whose function fails when it is called again

Platform and general plugins are called, as vLLM does before there is an engine; what they change is gone with the
child. They are not called in the middle of importing vLLM, as a platform plugin is in earnest: one that fails only
there, by importing vLLM in a circle, is not found out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from vllm_graft.doctor import child, engine, plans
from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.packages import GROUPS, OURS, Entry
from vllm_graft.doctor.processes import Ended, run
from vllm_graft.doctor.rules import d032_second_call
from vllm_graft.findings import Finding, worst_first

TITLES: Final = {
    "D008": "An import that is slow or heavy",
    "D009": "A platform plugin that vLLM passes over",
    "D010": "A plugin that cannot be imported",
    "D025": "bfloat16 that stops the process",
    "D029": "A general plugin whose function fails",
}
"""The rules of this module."""

_PLATFORMS: Final = "vllm.platform_plugins"
_EVERYWHERE: Final = ("vllm.general_plugins", _PLATFORMS)
_SLOW_S: Final = 1.0

# Large enough for the library that does it in earnest; small products are done by plain loops.
_BFLOAT16: Final = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print((a @ a).float().sum().item())"
_BFLOAT16_TYPES: Final = (None, "auto", "bfloat16")


@dataclass(frozen=True, slots=True)
class _Report:
    """What a child wrote, and how it ended."""

    ended: Ended
    stage: str = "import"
    error: str = ""
    seconds: float = 0.0
    heavy: tuple[str, ...] = ()
    cuda: bool = False

    @property
    def failure(self) -> str:
        """What went wrong, in words; empty where nothing did."""
        if self.error:
            return f"raises {self.error}"
        if self.stage == "done":
            return ""
        if self.ended.status is None:
            return "does not come to an end"
        if self.ended.signal:
            return f"is ended by {self.ended.signal}"
        return f"ends the process with status {self.ended.status}"


def examine_imports(
    facts: Facts, timeout_s: float = 60, progress: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """Import each plugin in a child and say what was found, worst first; this runs the plugins' code.

    vLLM's own plugins are left out. ``progress`` is told how many of how many are done.
    """
    entries = [entry for entry in facts.in_group(*GROUPS, OURS) if entry.module.partition(".")[0] != "vllm"]
    checks = [partial(_imported, facts, entry, timeout_s) for entry in entries]
    if _may_use_bfloat16(facts):
        checks.append(partial(_bfloat16, facts, timeout_s))
    findings: list[Finding] = []
    for done, check in enumerate(checks):
        if progress is not None:
            progress(done, len(checks))
        findings += check()
    if progress is not None:
        progress(len(checks), len(checks))
    return worst_first(findings)


def _imported(facts: Facts, entry: Entry, timeout_s: float) -> Iterator[Finding]:
    report = _ask(facts, entry, timeout_s)
    if report.failure and report.stage == "second call":
        yield _second_call_fails(facts, entry, report)
    elif report.failure and report.stage == "call":
        yield _detector_fails(entry, report) if entry.group == _PLATFORMS else _call_fails(facts, entry, report)
    elif report.failure:
        yield _import_fails(facts, entry, report, timeout_s)
    yield from _costs(entry, report)


def _ask(facts: Facts, entry: Entry, timeout_s: float) -> _Report:
    with tempfile.TemporaryDirectory(prefix="vllm-graft-") as folder:
        file = Path(folder) / "report.json"
        task = {
            "report": str(file),
            "path": list(facts.path),
            "module": entry.module,
            "attribute": entry.attribute,
            "call": entry.group in _EVERYWHERE and entry.module.partition(".")[0] != "vllm_graft",
        }
        ended = run([sys.executable, child.__file__, json.dumps(task)], facts.environ, timeout_s)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            found = {}
    return _Report(
        ended,
        str(found.get("stage", "import")),
        str(found.get("error", "")),
        float(found.get("seconds", 0.0)),
        tuple(found.get("heavy", ())),
        bool(found.get("cuda", False)),
    )


def _import_fails(facts: Facts, entry: Entry, report: _Report, timeout_s: float) -> Finding:
    silent = not report.error
    last = f"; its last line: {report.ended.last_line}" if silent and report.ended.last_line else ""
    limit = f" within {timeout_s:g} s" if report.ended.status is None and silent else ""
    return Finding(
        "D010",
        "error" if plans.loads(facts, entry) else "warning",
        _subject(entry),
        f"importing it {report.failure}{limit}{last}",
        f"{entry.package}: {entry.value}",
        f'try python -c "import {entry.module}", and mend or uninstall {entry.package}',
    )


def _detector_fails(entry: Entry, report: _Report) -> Finding:
    return Finding(
        "D009",
        "error",
        _subject(entry),
        f"its detector {report.failure}"
        + (", which vLLM does not show, and takes another platform" if report.error else ""),
        f"{entry.package}: {entry.value}",
        "have it return None where its hardware or libraries are not there",
    )


def _call_fails(facts: Facts, entry: Entry, report: _Report) -> Finding:
    return Finding(
        "D029",
        "error" if facts.loads(entry) else "warning",
        _subject(entry),
        f"its function {report.failure}, and vLLM does not catch that: every process stops, the command line included",
        f"{entry.package}: {entry.value}",
        f"mend what it needs, leave it out by VLLM_PLUGINS, or uninstall {entry.package}",
    )


def _second_call_fails(facts: Facts, entry: Entry, report: _Report) -> Finding:
    return Finding(
        d032_second_call.CODE,
        "error" if entry.group == _PLATFORMS and facts.loads(entry) else "warning",
        _subject(entry),
        f"its function {report.failure} when it is called a second time; {d032_second_call.CONSEQUENCES[entry.group]}",
        f"{entry.package}: {entry.value}",
        "have it do nothing where everything is registered already",
    )


def _costs(entry: Entry, report: _Report) -> Iterator[Finding]:
    where = f"{entry.package}: {entry.value}"
    if report.cuda:
        yield Finding(
            "D008",
            "warning",
            _subject(entry),
            "loading it initialises CUDA, which no process that is forked afterwards can use",
            where,
            "take what touches the device out of the module's body and its function",
        )
    if entry.group in _EVERYWHERE and (report.heavy or report.seconds >= _SLOW_S):
        heavy = f" and pulls in {', '.join(report.heavy)}" if report.heavy else ""
        yield Finding(
            "D008",
            "info",
            _subject(entry),
            f"importing it alone takes {report.seconds:.1f} s{heavy}; every vLLM process does it",
            where,
            "import what is heavy inside the functions that need it, and name classes by strings",
        )


def _may_use_bfloat16(facts: Facts) -> bool:
    """Whether a model would be computed in bfloat16 by this machine's CPU, for all that is known."""
    there = any(package.name == "torch" for package in facts.packages)
    return there and engine.runs_on_cpu(facts) and facts.arguments.value("--dtype") in _BFLOAT16_TYPES


def _bfloat16(facts: Facts, timeout_s: float) -> Iterator[Finding]:
    place = f"import sys; sys.path[:0] = {list(facts.path)!r}; "
    ended = run([sys.executable, "-c", place + _BFLOAT16], facts.environ, timeout_s)
    if ended.status is None or ended.signal:
        how = f"ends the process by {ended.signal}" if ended.signal else f"does not end within {timeout_s:g} s"
        yield Finding(
            "D025",
            "warning",
            "bfloat16 on this CPU",
            f"a product of two matrices {how}; models are computed in it unless told otherwise",
            "torch",
            "start with --dtype float32",
        )


def _subject(entry: Entry) -> str:
    return f"plugin {entry.name!r}"
