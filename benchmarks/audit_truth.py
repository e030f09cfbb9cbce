"""How often the audit is right, measured against the real vLLM.

    python benchmarks/audit_truth.py [--only trl verl] [--tuned] [--list] [--json FILE]

For each package in `truth/corpus.py`, pinned and fetched from the package index once: every use of vLLM is read from
its syntax trees, without code of the audit, and decided by running the installed vLLM: the module is imported, the
attribute read, the call bound to the real signature, the class built. A use is broken, fine or undecided; one behind a
condition that does not hold on this release is fine. Then `vllm-graft audit` goes over the same package:

recall      of the uses that are broken, those that a finding at level error or warning speaks of
precision   of the findings that running can decide, those that are right

What running decided is kept: a second run only audits, and does not import vLLM. `--list` prints every miss and false
alarm, without those of the packages that are held out: nobody tunes on them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from truth.collect import is_test
from truth.compare import Finding, Result, compare
from truth.corpus import CORPUS, Entry, unpack
from truth.decided import Truth

KINDS = (
    "import", "read", "call", "construct", "override", "super call", "self call", "self read", "abstract", "field",
)  # fmt: skip


def audit(folder: Path, release: str) -> tuple[dict[str, Any], float]:
    """Run the command as a user would; return its report and the seconds it took."""
    words = [sys.executable, "-m", "vllm_graft.cli", "audit", str(folder), "--against", release, "--json"]
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"{' '.join(words)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout), time.perf_counter() - began


def measure(entry: Entry, truth: Truth, release: str, reasons: bool = False) -> Result:
    """Measure one package."""
    folder = unpack(entry)
    document, seconds = audit(folder, release)
    left_out = any(package.get("tests_left_out") for package in document["packages"])
    uses = [use for use in truth.uses(entry) if not left_out or not is_test(use.file)]
    if reasons:
        for line, count in Counter(
            f"{use.kind}: {use.why}" for use in uses if use.verdict == "undecided"
        ).most_common():
            print(f"undecided {count:6} {line}")
    findings = [Finding.parse(one) for one in document["findings"] if one["level"] in ("error", "warning")]
    result = compare(Result(entry.label, entry.held_out), entry, uses, findings, truth)
    result.seconds, result.base = round(seconds, 1), document["base"]
    return result


def share(part: int, whole: int) -> str:
    """Write a share in percent."""
    return f"{100 * part / whole:5.1f} %" if whole else "      -"


def row(name: str, results: Iterable[Result]) -> str:
    """Write one line of the table."""
    results = list(results)
    broken = sum(one.broken.total() for one in results)
    reported = sum(one.reported.total() for one in results)
    cells = [
        f"{name:28}",
        f"{sum(one.uses.total() for one in results):7}",
        f"{reported:5}/{broken:<5}",
        share(reported, broken),
    ]
    for level in ("error", "warning"):
        counts = sum((one.levels[level] for one in results), Counter())
        judged = counts["right"] + counts["wrong"]
        cells.append(f"{counts['right']:5}/{judged:<5}{share(counts['right'], judged)} {counts['undecided']:5}")
    return "  ".join(cells)


def show(results: Sequence[Result]) -> None:
    """Print the tables."""
    print(f"{'package':28}     uses  broken: reported     errors right, undecided    warnings right, undecided")
    for one in results:
        print(row(f"{one.package}{' (held out)' if one.held_out else ''}", [one]))
    print(row("all but held out", [one for one in results if not one.held_out]))
    print(row("held out", [one for one in results if one.held_out]))
    print(f"\n{'kind':12}{'uses':>8}{'undecided':>11}{'broken':>8}{'reported':>10}   recall")
    for kind in KINDS:
        counts = [
            sum(getattr(one, name)[kind] for one in results) for name in ("uses", "undecided", "broken", "reported")
        ]
        print(f"{kind:12}{counts[0]:8}{counts[1]:11}{counts[2]:8}{counts[3]:10}   {share(counts[3], counts[2])}")


def list_faults(results: Sequence[Result]) -> None:
    """Print misses and false alarms."""
    for one in results:
        if one.held_out:
            continue
        for title, lines in (("missed", one.misses), ("false alarm", one.false_alarms)):
            for line in lines:
                print(f"{title}: {line}")


def document(results: Sequence[Result], release: str) -> dict[str, Any]:
    """Return the figures as data."""
    return {
        "vllm": release,
        "packages": [
            {
                "package": one.package,
                "held_out": one.held_out,
                "base": one.base,
                "seconds": one.seconds,
                "uses": dict(one.uses),
                "undecided": dict(one.undecided),
                "broken": dict(one.broken),
                "reported": dict(one.reported),
                "findings": {level: dict(counts) for level, counts in one.levels.items()},
            }
            for one in results
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these packages")
    parser.add_argument("--tuned", action="store_true", help="leave out the packages that are held out")
    parser.add_argument("--list", action="store_true", dest="faults", help="print misses and false alarms")
    parser.add_argument("--undecided", action="store_true", help="print why uses are undecided")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    truth = Truth()
    release = truth.version.partition("+")[0]
    results = []
    if unknown := set(args.only or ()) - {entry.name for entry in CORPUS}:
        parser.error(f"not in the corpus: {', '.join(sorted(unknown))}")
    for entry in CORPUS:
        if (not args.only or entry.name in args.only) and not (args.tuned and entry.held_out):
            results.append(measure(entry, truth, release, args.undecided))
            print(f"{entry.label}: done", file=sys.stderr, flush=True)
    show(results)
    if args.faults:
        list_faults(results)
    if args.json:
        args.json.write_text(json.dumps(document(results, release), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
