"""How fast the audit is, and how much of what people patch changes from release to release.

    python benchmarks/audit.py [--json FILE] [--ranges 0.25.0] [--griffe] [--drift] [--svg FILE]

Always: the functions in `audit_targets.txt`, which people patch, from vLLM 0.26.0 to 0.32.0, out of the catalogue that
ships: seconds (target 5), and whether the verdicts are those in the file. `--ranges` reads one release from the package
index into an empty cache (target 15 s). `--griffe` diffs 0.31.0 and 0.32.0 with griffe, from the sources that
`make matrix` keeps, beside ours. `--drift` goes over all releases from 0.18 on, by ranges, and prints the share that
changed. `--svg` draws the picture in the README.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).with_name("audit_targets.txt")
EARLIER = ("0.18.0", "0.19.0", "0.20.2", "0.22.0", "0.23.0", "0.24.0", "0.25.0")
CAPTION = "Ten of 44 functions of vLLM that people patch. Of all, 43 % change in each release from 0.18 to 0.32."
CHANGED = ("body", "extended", "broken", "gone", "moved", "kind", "inherited")


def targets() -> dict[str, list[str]]:
    """Each function, and what became of it in each step."""
    lines = [line.split() for line in TARGETS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {name: states for name, *states in lines}


def package(folder: Path) -> Path:
    """A package that patches all of them."""
    lines = []
    for number, name in enumerate(targets()):
        module, _, qualname = name.partition(":")
        lines += [f"import {module} as m{number}", f"m{number}.{qualname} = None"]
    file = folder / "patches_all.py"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def command(*arguments: str, env: dict[str, str] | None = None) -> tuple[dict[str, Any], float]:
    """One run of the command in a process of its own: its JSON, and its seconds."""
    began = time.perf_counter()
    words = [sys.executable, "-m", "vllm_graft.cli", "audit", *arguments, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"{' '.join(words)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout), time.perf_counter() - began


def states(document: dict[str, Any]) -> dict[str, list[str]]:
    """The states of each patched function."""
    rows = (row for row in document["rows"] if row["way"] == "replace")
    return {row["name"]: [cell["state"] for cell in row["cells"]] for row in rows}


def offline(folder: Path) -> dict[str, Any]:
    document, seconds = command(str(package(folder)), "--matrix", "--offline")
    found = states(document)
    wrong = [name for name, wanted in targets().items() if found.get(name) != wanted]
    counted = Counter(state for each in found.values() for state in each)
    return {"seconds": round(seconds, 2), "targets": len(found), "wrong": wrong, "states": dict(counted)}


def by_ranges(folder: Path, version: str) -> dict[str, Any]:
    """One release that neither the catalogue nor the cache has: everything comes from the index."""
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    document, seconds = command(str(package(folder)), "--against", version, "--base", "0.26.0", env=cache)
    return {"version": version, "seconds": round(seconds, 1), "judged": len(states(document))}


def griffe(folder: Path) -> dict[str, Any]:
    """griffe's breakages between two releases, beside our changes."""
    from vllm_graft.files import cache_folder

    trees = [str(cache_folder() / "sources" / version) for version in ("0.31.0", "0.32.0")]
    code = (
        "import griffe, json, sys\n"
        "old, new = (griffe.load('vllm', search_paths=[tree], allow_inspection=False) for tree in sys.argv[1:3])\n"
        "print(json.dumps([breakage.obj.path for breakage in griffe.find_breaking_changes(old, new)]))\n"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *trees], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:] or ["griffe is not installed: pip install griffe"]}
    seconds = time.perf_counter() - began
    broken = set(json.loads(done.stdout))
    wanted = {name.replace(":", ".") for name in targets()}
    ours, our_seconds = command(str(package(folder)), "--base", "0.31.0", "--against", "0.32.0", "--offline")
    changed = [name for name, (state,) in states(ours).items() if state in CHANGED]
    return {
        "griffe_seconds": round(seconds, 1),
        "griffe_alarms_on_the_targets": sum(any(path.startswith(name) for path in broken) for name in wanted),
        "griffe_alarms_in_all": len(broken),
        "our_seconds": round(our_seconds, 2),
        "our_changes_on_the_targets": len(changed),
    }


def drift(folder: Path) -> dict[str, Any]:
    """Every step from the oldest release on."""
    known = ["0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"]
    order = [*EARLIER, *known]
    file, steps, total = package(folder), [], Counter[str]()
    for old, new in pairwise(order):
        document, _ = command(str(file), "--base", old, "--against", new)
        counted = Counter(state for (state,) in states(document).values() if state != "absent")
        changed = sum(counted[state] for state in CHANGED)
        steps.append({"from": old, "to": new, "changed": changed, "of": counted.total()})
        print(f"  {old:7} to {new:7} {changed:3} of {counted.total()}  {dict(counted)}", flush=True)
        total += counted
    changed = sum(total[state] for state in CHANGED)
    share = changed / total.total()
    print(f"  {changed} of {total.total()} changed: {100 * share:.0f} % in each release; {dict(total)}")
    return {"steps": steps, "changed": changed, "of": total.total(), "share": round(share, 3), "states": dict(total)}


def picture(folder: Path, file: Path) -> None:
    """Ten of the functions over the releases in the catalogue."""
    from vllm_graft.audit.releases.catalogue import Catalogue
    from vllm_graft.audit.render import svg
    from vllm_graft.audit.report import audit
    from vllm_graft.audit.uses import read

    catalogue = Catalogue.shipped()
    reading = read(package(folder))
    patches = replace(reading, uses=[use for use in reading.uses if use.changes_vllm])
    base, *against = (catalogue.release(version) for version in catalogue.releases)
    file.write_text(svg(audit([patches], base, against, steps=True), rows=10, caption=CAPTION), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranges", metavar="VERSION", help="read this release by ranges; one outside the catalogue")
    parser.add_argument("--griffe", action="store_true")
    parser.add_argument("--drift", action="store_true")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    facts: dict[str, Any] = {"python": platform.python_version(), "machine": platform.processor() or platform.machine()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        facts["offline"] = one = offline(folder)
        verdict = "all as in the file" if not one["wrong"] else f"DIFFERENT: {one['wrong']}"
        print(f"{one['targets']} targets, 0.26.0 to 0.32.0, offline: {one['seconds']} s; {verdict}; {one['states']}")
        if args.ranges:
            facts["ranges"] = one = by_ranges(folder, args.ranges)
            print(f"vLLM {args.ranges} by ranges, nothing kept: {one['seconds']} s for {one['judged']} targets")
        if args.griffe:
            facts["griffe"] = one = griffe(folder)
            print(f"0.31.0 to 0.32.0 beside griffe: {one}")
        if args.drift:
            facts["drift"] = drift(folder)
        if args.svg:
            picture(folder, args.svg)
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 1 if facts["offline"]["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
