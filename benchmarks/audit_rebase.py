"""How a copy of a long method fares from release to release: the lines that differ, and the conflicts of a rebase.

    python benchmarks/audit_rebase.py --base 0.24.0 0.25.0 0.26.0 0.30.0 0.31.0 0.32.0

The copy is one of ``Scheduler.schedule``, changed where vllm-ascend's ``BalanceScheduler`` changes it: a return at the
start, a stop in the loop over waiting requests, and a condition in the place of an assertion; once formatted as
upstream formats it, and once by ruff with lines of 120 characters. Releases are folders that hold vllm/, wheels, or
numbers of releases. Conflicts are counted by ``vllm_graft.audit.rebase`` and by
``git merge-file`` (in the style diff3, then in its own) on the same text.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from vllm_graft.audit.copies import nearest_release
from vllm_graft.audit.rebase import rebase
from vllm_graft.cli.patches import source
from vllm_graft.sources.finder import find

PLACE = ("vllm.v1.core.sched.scheduler", "Scheduler.schedule")
LOOP = "            while (self.waiting or self.skipped_waiting) and token_budget > 0:\n"
CHOICE = "                request_queue = self._select_waiting_queue_for_scheduling()\n"
STOP = """\
                # While one rank is full, none lets anybody in.
                highest = int(self.loads.max())
                if highest >= self.max_num_running_reqs:
                    break

"""
STOPS = {"late": (CHOICE, STOP + CHOICE), "early": (LOOP, LOOP + STOP)}
"""Where the copy stops: after upstream's own test for a full rank, which is where the public copy has it, or before."""

EDITS = (
    (
        "        self.current_step += 1\n",
        """\
        if self.loads is None:
            return super().schedule(throttle_prefills)
        self.current_step += 1
""",
    ),
    (
        "                assert request_queue is not None\n",
        """\
                if not request_queue:
                    break
""",
    ),
)
"""What is there upstream, and what the copy has in its place."""


def schedule(release: str) -> str:
    """Upstream's method."""
    found = find(source(release), *PLACE)
    assert found is not None, f"{release} has no {PLACE[1]}"
    return found.text


def changed(text: str, stop: str = "late") -> str:
    """The copy: upstream's method with the changes."""
    for before, after in (*EDITS, STOPS[stop]):
        assert text.count(before) == 1, f"expected once: {before}"
        text = text.replace(before, after)
    return text


def by_git(base: str, ours: str, theirs: str, *options: str) -> int:
    """How many conflicts ``git merge-file`` finds."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("ours", "base", "theirs")]
        for file, text in zip(files, (ours, base, theirs), strict=True):
            file.write_text(text, encoding="utf-8")
        done = subprocess.run(["git", "merge-file", "-p", *options, *files], capture_output=True, check=False)
    if done.returncode > 127:
        sys.exit(done.stderr.decode())
    return done.returncode


def formatted(text: str) -> str | None:
    """The method as ruff formats it with longer lines; None where there is no ruff."""
    if importlib.util.find_spec("ruff") is None:
        return None
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "120", "-"]
    done = subprocess.run(command, input=f"class Copy:\n{text}", capture_output=True, text=True, check=True)
    return done.stdout.partition("\n")[2]


def normalised(text: str) -> str:
    """The method as the fallback of ``rebase`` sees it."""
    return f"{ast.unparse(ast.parse(textwrap.dedent(text)))}\n"


def show(copy: str, base: str, texts: dict[str, str]) -> None:
    """A line for each release."""
    began = time.perf_counter()
    origin = nearest_release(copy, texts)
    took = 1000 * (time.perf_counter() - began)
    lines = f"{origin.differing} of {origin.of_lines} lines differ"
    print(f"  nearest: {origin.release}, {lines}, {'a copy' if origin.copied else 'no copy'} ({took:.0f} ms)")
    for release, text in texts.items():
        if release == base:
            continue
        began = time.perf_counter()
        done = rebase(copy, texts[base], text)
        took = 1000 * (time.perf_counter() - began)
        away = {origin.release: origin.differing, **origin.others}[release]
        forms = [(texts[base], copy, text), tuple(normalised(each) for each in (texts[base], copy, text))]
        diff3, plain = ([by_git(*form, *options) for form in forms] for options in (["--diff3"], []))
        print(
            f"  onto {release}: {away:3} lines differ; ours {len(done.conflicts)} ({done.form}, {took:3.0f} ms), git's "
            f"diff3 {diff3[0]} in text and {diff3[1]} normalised, git's own style {plain[0]} and {plain[1]}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="the release that the copy is taken from")
    parser.add_argument("releases", nargs="+", help="those that it is carried to")
    args = parser.parse_args()
    texts = {source(each).version: schedule(each) for each in (args.base, *args.releases)}
    base = source(args.base).version
    for stop in STOPS:
        copy = changed(texts[base], stop)
        print(f"{stop} stop, formatted as upstream's")
        show(copy, base, texts)
        if (other := formatted(copy)) is not None:
            print(f"{stop} stop, formatted with lines of 120 characters")
            show(other, base, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
