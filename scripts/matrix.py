"""Run tests on several vLLM releases and print how many passed on each.

Without --cpu, each release is its bare Python sources on the simulated accelerator, with the packages of the
interpreter that runs this script. With --cpu, each is a real build for CPUs in an environment of its own below .venvs.
With --from, nothing is run: results are read from files that other runs printed with --json. Arguments after -- go to
pytest. The exit status is 1 if a test failed or a suite proved nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import suites
import table
from sources import FetchFailed, fetch
from suites import CPU_RELEASES, CPU_SUITES, RELEASES, ROOT, SUITES, Cell, Release, Suite

import vllm_graft
from vllm_graft.files import cache_folder

LOGS = ROOT / "build" / "matrix"


def say(text: str) -> None:
    """Print one line of progress on standard error; standard output is for the result."""
    # One write, because suites that run in parallel report in parallel.
    sys.stderr.write(f"matrix: {text}\n")
    sys.stderr.flush()


def bare(version: str) -> Release:
    """Fetch a release's Python sources; each has its own vLLM cache, whose model information differs by release."""
    folder = fetch(version, say)
    variables = {"PYTHONPATH": str(folder), "VLLM_CACHE_ROOT": str(cache_folder() / "vllm" / version)}
    return Release(version, Path(sys.executable), suites.environment(**variables), folder)


def built(version: str) -> Release:
    """Install a release's build for CPUs; the newest is the one that `make setup` installed."""
    home = Path(sys.prefix)
    if version != CPU_RELEASES[-1]:
        home = ROOT / ".venvs" / f"cpu-{version}"
        command = [sys.executable, str(ROOT / "scripts" / "setup.py"), "--vllm", version]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise FetchFailed(f"the environment for vLLM {version} could not be made; the output above says why")
    variables = {"VLLM_CACHE_ROOT": str(cache_folder() / "vllm" / f"cpu-{version}")}
    return Release(version, home / "bin" / "python", suites.environment(**variables), home)


def run_all(releases: Sequence[Release], chosen: Sequence[Suite], options: Sequence[str], jobs: int) -> list[Cell]:
    """Run all suites on all releases, ``jobs`` at a time; a release that fails its probe is not run."""
    troubles = {release.version: suites.probe(release) for release in releases}

    def cell(release: Release, suite: Suite) -> Cell:
        if trouble := troubles[release.version]:
            return Cell(release.version, suite.name, trouble=trouble)
        say(f"{release.version} {suite.name} ...")
        return suites.run(release, suite, options, LOGS)

    cells = []
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        futures = [pool.submit(cell, release, suite) for release in releases for suite in chosen]
        try:
            for future in futures:
                cells.append(future.result())
                say(cells[-1].line())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return cells


def arguments(given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into our arguments and the options for pytest."""
    place = list(given).index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="tests of your own, for pytest, instead of those of vllm-graft")
    parser.add_argument("--cpu", action="store_true", help="use real builds for CPUs instead of bare sources")
    parser.add_argument("--releases", metavar="LIST", help="for example 0.26.0,0.28.0 (default: all)")
    parser.add_argument("--suites", metavar="LIST", help="for example plan,boot (default: all)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="run N suites at a time (default: 2)")
    parser.add_argument("--json", action="store_true", help="print a list of results instead of the table")
    parser.add_argument("--table", type=Path, metavar="PAGE", help="merge the results into the table of this page")
    told = "read results that --json printed and run nothing; may be repeated, the last result of a cell counts"
    parser.add_argument("--from", dest="files", type=Path, action="append", default=[], metavar="FILE", help=told)
    found = parser.parse_args(given[:place])
    known = CPU_RELEASES if found.cpu else RELEASES
    found.releases = _chosen(parser, "release", found.releases, known)
    offered = {suite.name: suite for suite in (CPU_SUITES if found.cpu else SUITES)}
    found.target = "cpu-matrix" if found.cpu else "matrix"
    if found.table and not table.has_place(found.table, found.target):
        marks = f"<!-- {found.target} --> and <!-- /{found.target} -->"
        parser.error(f"{found.table} has no place for the table; write {marks} there, on lines of their own")
    if found.table:
        _readable(parser, found.table, found.target)
    if found.paths and found.suites:
        parser.error("--suites names suites of vllm-graft; leave it out, or the paths")
    named = _chosen(parser, "suite", found.suites, tuple(offered))
    found.suites = [offered[name] for name in named]
    if found.paths:
        every = "compiled or not compiled" if found.cpu else "not compiled"
        found.suites = [Suite(path, (path,), every, Path.cwd()) for path in _existing(parser, found.paths)]
    found.results = _results(parser, found.files, found.releases, [suite.name for suite in found.suites])
    return found, list(given[place + 1 :])


def _chosen(parser: argparse.ArgumentParser, what: str, text: str | None, known: tuple[str, ...]) -> list[str]:
    wanted = [name.strip() for name in text.split(",")] if text else list(known)
    for name in wanted:
        if name not in known:
            parser.error(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return wanted


def _existing(parser: argparse.ArgumentParser, paths: Sequence[str]) -> list[str]:
    for path in paths:
        if not Path(path.partition("::")[0]).exists():
            parser.error(f"there is no {path}; options for pytest go after --")
    return list(paths)


def _readable(parser: argparse.ArgumentParser, page: Path, mark: str) -> None:
    # Checked before anything runs: after an hour, results that cannot be merged would be lost.
    try:
        table.read(page, mark)
    except ValueError as error:
        parser.error(f"the table between the marks {mark} of {page} cannot be read: {error}; fix or delete it")


def _results(
    parser: argparse.ArgumentParser, files: Sequence[Path], releases: Sequence[str], names: Sequence[str]
) -> list[Cell]:
    found: dict[tuple[str, str], Cell] = {}
    for file in files:
        try:
            cells = [Cell.from_dict(values) for values in json.loads(file.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError, KeyError) as error:
            parser.error(f"{file} is no list of results as --json prints it: {error!r}")
        for cell in cells:
            if cell.release not in releases or cell.suite not in names:
                asked = "is not asked for; there are --cpu, --releases, --suites, and paths for tests of your own"
                parser.error(f"{file}: {cell.suite} on {cell.release} {asked}")
            found[cell.release, cell.suite] = cell
    return list(found.values())


def caption() -> str:
    """Describe the machine that the results come from."""
    python = platform.python_version()
    return f"vllm-graft {vllm_graft.__version__}, Python {python}, {os.cpu_count()} cores:"


def run_suites(asked: argparse.Namespace, options: Sequence[str]) -> list[Cell]:
    """Fetch or install the releases and run the suites on them."""
    releases = [built(version) if asked.cpu else bare(version) for version in asked.releases]
    return run_all(releases, asked.suites, options, asked.jobs)


def main(given: Sequence[str] | None = None) -> int:
    """Run the suites or read results of other runs, print the table, and write it into a page."""
    asked, options = arguments(sys.argv[1:] if given is None else given)
    began = time.monotonic()
    try:
        cells = asked.results if asked.files else run_suites(asked, options)
    except FetchFailed as failure:
        say(str(failure))
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    print(json.dumps([cell.as_dict() for cell in cells], indent=2) if asked.json else table.plain(table.grid(cells)))
    if asked.table:
        known = CPU_RELEASES if asked.cpu else RELEASES
        ours = [] if asked.paths else [suite.name for suite in (CPU_SUITES if asked.cpu else SUITES)]
        above = table.UNKNOWN if asked.files else caption()
        table.merge(asked.table, asked.target, cells, above, ours, known)
    again = f"make {asked.target} RELEASES={{release}} ARGS=" + ("{suite}" if asked.paths else '"--suites {suite}"')
    for line in table.complaints(cells, again):
        print(line, file=sys.stderr)
    say(f"done after {time.monotonic() - began:.0f} s")
    return 0 if all(cell.ok for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
