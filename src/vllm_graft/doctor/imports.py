"""Import plugins one by one, each in a child process of its own: find what is slow, what fails, what never returns.

D008  an import that is slow, pulls in heavy packages, or initialises CUDA
D009  a platform plugin whose detector fails, which vLLM skips
D010  a plugin that cannot be imported
D025  bfloat16 that stops the process, on CPUs
D029  a general plugin whose function fails, which stops every vLLM process
D032  a platform or general plugin whose function fails when it is called again

Platform and general plugins are called, as vLLM does before there is an engine; what they change is gone with the
child. vLLM calls a platform plugin in the middle of its own import; one that fails only there, by a circular import, is
not found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from vllm_graft.doctor import import_child, plans, server
from vllm_graft.doctor.child_process import ChildExit, run, run_task
from vllm_graft.doctor.environment import GROUPS, EntryPoint, Environment
from vllm_graft.doctor.rules.d032_second_call import CONSEQUENCES
from vllm_graft.doctor.server import PLATFORMS
from vllm_graft.findings import Finding, Level, worst_first
from vllm_graft.plan.catalogue import ITEM_GROUP

TITLES: Final = {
    "D008": "An import that is slow or heavy",
    "D009": "A platform plugin that vLLM passes over",
    "D010": "A plugin that cannot be imported",
    "D025": "bfloat16 that stops the process",
    "D029": "A general plugin whose function fails",
}
"""The rules of this module; D032 has a file of its own."""

_EVERYWHERE: Final = ("vllm.general_plugins", PLATFORMS)  # groups whose plugins every vLLM process loads and calls

_SLOW_S: Final = 1.0

# Large enough for oneDNN, whose AMX kernels raise SIGILL on some virtual machines; plain loops do small products.
_BFLOAT16: Final = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print((a @ a).float().sum().item())"


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The report of a child, and how it ended."""

    exit: ChildExit
    stage: str = "import"
    error: str = ""
    seconds: float = 0.0
    heavy: tuple[str, ...] = ()
    cuda: bool = False

    @property
    def failure(self) -> str:
        """The failure in words; empty if the plugin works."""
        if self.error:
            return f"raises {self.error}"
        return "" if self.stage == "done" else self.exit.describe()


def examine_imports(
    env: Environment, timeout_s: float = 60, progress: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """Import each plugin in a child and return the findings, worst first; this runs the plugins' code.

    vLLM's own plugins are left out. ``progress`` is called with the number of plugins done and their total.
    """
    entries = [entry for entry in env.in_group(*GROUPS, ITEM_GROUP) if entry.top_level != "vllm"]
    checks = [partial(_check_import, env, entry, timeout_s) for entry in entries]
    # vLLM computes in bfloat16 by default.
    has_torch = any(package.name == "torch" for package in env.packages)
    if has_torch and server.runs_on_cpu(env) and env.arguments.value("--dtype") in (None, "auto", "bfloat16"):
        checks.append(partial(_check_bfloat16, env, timeout_s))
    progress = progress or (lambda done, total: None)
    findings: list[Finding] = []
    for done, check in enumerate(checks):
        progress(done, len(checks))
        findings += check()
    progress(len(checks), len(checks))
    return worst_first(findings)


def _check_import(env: Environment, entry: EntryPoint, timeout_s: float) -> Iterator[Finding]:
    call = entry.group in _EVERYWHERE and entry.top_level != "vllm_graft"
    task = {"path": list(env.path), "module": entry.module, "attribute": entry.attribute, "call": call}
    ended, found = run_task([sys.executable, import_child.__file__], task, env.variables, timeout_s)
    report = ImportReport(ended, **{**found, "heavy": tuple(found.get("heavy", ()))} if "stage" in found else {})
    subject = f"plugin {entry.name!r}"
    level: Level = "error" if env.loads(entry) else "warning"
    if report.failure and report.stage == "second call":
        what = f"its function {report.failure} when it is called a second time; {CONSEQUENCES[entry.group]}"
        fix = "have it do nothing if everything is already registered"
        yield Finding("D032", level if entry.group == PLATFORMS else "warning", subject, what, entry.origin, fix)
    elif report.failure and report.stage == "call" and entry.group == PLATFORMS:
        # vllm/platforms/__init__.py logs the exception of a detector at DEBUG.
        what = f"its detector {report.failure}"
        what += "; vLLM does not show that, and takes another platform" if report.error else ""
        fix = "have it return None if its hardware or libraries are not there"
        yield Finding("D009", "error", subject, what, entry.origin, fix)
    elif report.failure and report.stage == "call":
        # load_general_plugins calls the functions without a try.
        what = (
            f"its function {report.failure}, and vLLM does not catch that: every process stops, the command line "
            "included"
        )
        fix = f"fix what it needs, leave it out by VLLM_PLUGINS, or uninstall {entry.package}"
        yield Finding("D029", level, subject, what, entry.origin, fix)
    elif report.failure:
        what = f"importing it {report.failure}"
        if not report.error:
            what += f" within {timeout_s:g} s" if ended.status is None else ""
            what += f"; its last line: {ended.last_line}" if ended.last_line else ""
        level = "error" if plans.loads(env, entry) else "warning"
        fix = f'try python -c "import {entry.module}", and fix or uninstall {entry.package}'
        yield Finding("D010", level, subject, what, entry.origin, fix)
    if report.cuda:
        what = "loading it initialises CUDA, which no process that is forked afterwards can use"
        fix = "move what touches the device out of the module's body and its function"
        yield Finding("D008", "warning", subject, what, entry.origin, fix)
    if entry.group in _EVERYWHERE and (report.heavy or report.seconds >= _SLOW_S):
        heavy = f" and pulls in {', '.join(report.heavy)}" if report.heavy else ""
        what = f"importing it alone takes {report.seconds:.1f} s{heavy}; every vLLM process does it"
        fix = "import what is heavy inside the functions that need it, and name classes by strings"
        yield Finding("D008", "info", subject, what, entry.origin, fix)


def _check_bfloat16(env: Environment, timeout_s: float) -> Iterator[Finding]:
    path = f"import sys; sys.path[:0] = {list(env.path)!r}; "
    ended = run([sys.executable, "-c", path + _BFLOAT16], env.variables, timeout_s)
    if ended.status is None or ended.signal:
        how = f"ends the process by {ended.signal}" if ended.signal else f"does not end within {timeout_s:g} s"
        what = f"a product of two matrices {how}; models use it by default"
        yield Finding("D025", "warning", "bfloat16 on this CPU", what, "torch", "start with --dtype float32")
