"""Suites of tests, releases of vLLM, and the outcome of one suite on one release."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
CELL = ROOT / "scripts" / "cell.py"
NO_RESULT = "no result"
SHOWN = re.compile(r"(?P<passed>\d+)( of (?P<run>\d+))?(, (?P<skipped>\d+) skipped)? in (?P<seconds>\d+) s")

RELEASES = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
CPU_RELEASES = ("0.27.1", "0.30.0", "0.32.0")


@dataclass(frozen=True)
class Suite:
    """Tests that are counted together: their paths, the marker expression, and the folder to run pytest in."""

    name: str
    paths: tuple[str, ...]
    tests: str = "not compiled"
    folder: Path = ROOT


# A path may be a pattern, relative to the repository. The longest suites come first, so that --jobs fills the gaps.
SUITES = (
    Suite("boot", ("tests/boot/test_process.py", "tests/boot/test_simulated.py", "tests/boot/test_nodes.py")),
    Suite("simulation", ("tests/simulator",)),
    Suite("refusals", ("tests/boot/test_refused.py", "tests/boot/test_platforms.py")),
    Suite(
        "serve",
        (
            "tests/boot/test_serve.py",
            "tests/boot/test_guard.py",
            "tests/boot/test_seeds.py",
            "tests/boot/test_managers.py",
            "tests/plugins/patches",
        ),
    ),
    Suite("scheduling", ("tests/plugins/schedulers", "tests/server")),
    Suite("bindings", ("tests/bindings/sampling", "tests/bindings/scheduling", "tests/bindings/test_*.py")),
    Suite("attention", ("tests/bindings/attention",)),
    Suite("models", ("tests/bindings/models", "tests/bindings/routing")),
    Suite(
        "balancing",
        (
            "tests/bindings/balancing/test_policy.py",
            "tests/bindings/balancing/test_two_ranks.py",
            "tests/plugins/balancers",
        ),
    ),
    Suite(
        "patches",
        ("tests/patching", "tests/test_docs.py::TestExamples::test_patches_name_what_the_installed_vllm_has"),
    ),
    Suite("doctor", ("tests/doctor/test_real_vllm.py", "tests/doctor/test_real_server.py")),
    Suite("plan", ("tests/plan",)),
    Suite("ledger", ("tests/ledger",)),
)
CPU_SUITES = (
    Suite("boot", ("tests/boot", "tests/plugins/patches"), "compiled"),
    Suite("bindings", ("tests/bindings",), "compiled"),
    Suite("testing", ("tests/testing", "tests/launcher"), "compiled"),
)


@dataclass(frozen=True)
class Release:
    """One vLLM release: its interpreter, its environment variables, and the folder it must be imported from."""

    version: str
    python: Path
    environment: Mapping[str, str]
    home: Path


@dataclass(frozen=True)
class Cell:
    """The outcome of one suite on one release; ``trouble`` is the reason if it proves nothing."""

    release: str
    suite: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    deselected: int = 0
    seconds: float = 0.0
    trouble: str = ""
    failures: tuple[str, ...] = ()
    log: str = ""

    @property
    def ok(self) -> bool:
        """True if tests ran on the intended release and all of them passed."""
        return not self.trouble and not self.failed and self.passed > 0

    def as_dict(self) -> dict[str, object]:
        """Return the fields, and ``ok``, for JSON."""
        return {**asdict(self), "ok": self.ok}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cell:
        """Restore a cell from :meth:`as_dict`."""
        cell = cls(**{field.name: values[field.name] for field in fields(cls)})
        return replace(cell, failures=tuple(cell.failures))

    @classmethod
    def from_text(cls, release: str, suite: str, text: str) -> Cell:
        """Parse the text that ``str()`` gives; it lacks the names of failed tests."""
        if text == NO_RESULT:
            return cls(release, suite, trouble=text)
        shown = SHOWN.fullmatch(text)
        if shown is None:
            raise ValueError(f"{text!r} for {suite} on {release} is not a result that the matrix wrote")
        passed, run, skipped, seconds = (int(shown[name] or 0) for name in ("passed", "run", "skipped", "seconds"))
        return cls(release, suite, passed, run - passed if run else 0, skipped, seconds=seconds)

    def __str__(self) -> str:
        if self.trouble:
            return NO_RESULT
        count = f"{self.passed} of {self.passed + self.failed}" if self.failed else f"{self.passed}"
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{count}{skipped} in {self.seconds:.0f} s"

    def line(self) -> str:
        """Return one line of progress."""
        return f"{self.release} {self.suite}: {self.trouble or f'passed {self}'}"


def expand(paths: Sequence[str], root: Path = ROOT) -> list[str]:
    """Expand patterns; one that matches nothing is dropped, and a plain path is kept."""
    found: list[str] = []
    for path in paths:
        found += sorted(str(match.relative_to(root)) for match in root.glob(path)) if "*" in path else [path]
    return found


def probe(release: Release) -> str:
    """Import vLLM in the release's environment and return what is wrong with it, or an empty string."""
    text = (
        "import importlib.metadata, json, vllm; "
        "print(json.dumps([vllm.__version__, vllm.__file__, importlib.metadata.version('vllm')]))"
    )
    done = subprocess.run(
        [release.python, "-c", text], env=release.environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"vLLM cannot be imported: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    version, file, metadata = json.loads(done.stdout.splitlines()[-1])
    return mismatch(release, version, file) or mismatch(release, metadata, file)


def mismatch(release: Release, version: str | None, place: str) -> str:
    """Return how the imported vLLM differs from the intended one, or an empty string."""
    if version is None or Version(version).base_version != release.version:
        return f"vLLM {version} was found instead of {release.version}, in {place}"
    if not Path(place).is_relative_to(release.home):
        return f"vLLM was found in {place} instead of {release.home}"
    return ""


def run(release: Release, suite: Suite, options: Sequence[str], logs: Path) -> Cell:
    """Run one suite on one release in its own pytest process; the log is kept if it fails."""
    logs.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.]+", "-", f"{release.version}-{suite.name}").strip("-.")
    log, report = logs / f"{name}.log", logs / f"{name}.json"
    report.unlink(missing_ok=True)
    command = [str(release.python), str(CELL), str(report), "-p", "no:cacheprovider", "--color=no", "--durations=10"]
    command += ["-m", suite.tests, *options, *expand(suite.paths)]
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        done = subprocess.run(command, env=release.environment, cwd=suite.folder, check=False, **streams)
    took = time.monotonic() - began
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else None
    report.unlink(missing_ok=True)
    cell = judge(release, suite.name, found, done.returncode, took, str(log))
    if cell.ok:
        log.unlink()
    return cell


def judge(
    release: Release, suite: str, found: dict[str, Any] | None, status: int, seconds: float, log: str = ""
) -> Cell:
    """Turn a report into a cell; it proves nothing unless tests ran on the intended release."""
    if found is None:
        trouble = f"pytest died with status {status} before its end"
        return Cell(release.version, suite, seconds=seconds, trouble=trouble, log=log)
    trouble = mismatch(release, found["vllm"], found["folder"])
    if not trouble and not found["passed"] + found["failed"]:
        trouble = "no test was run"
    elif not trouble and status and not found["failed"]:
        trouble = f"pytest ended with status {status}"
    counts = {name: found[name] for name in ("passed", "failed", "skipped", "deselected")}
    cell = Cell(release.version, suite, **counts, seconds=seconds, trouble=trouble, failures=tuple(found["failures"]))
    return cell if cell.ok else Cell(**{**asdict(cell), "log": log})


def environment(**changes: str) -> dict[str, str]:
    """This process's variables with some set; a folder for ``PYTHONPATH`` goes before those that are there."""
    if before := os.environ.get("PYTHONPATH"):
        changes["PYTHONPATH"] = os.pathsep.join(filter(None, [changes.get("PYTHONPATH"), before]))
    return {**os.environ, **changes}
