"""How long an audit of a large package takes and how much memory it needs, with and without what earlier runs kept.

    python benchmarks/audit_speed.py [--only vllm-ascend ray] [--json FILE]

Packages come from the corpus of `audit_truth.py`. Cold is a run with an empty cache, warm the same run again, and other
a run against another release afterwards. Seconds are those of the processor as well as those on the clock: the latter
also count what else the machine does. The audit is one process, and the megabytes are the most that it held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from truth.corpus import CORPUS, unpack

LARGE = ("vllm-ascend", "vllm-omni", "lmcache", "ray", "tpu-inference")


def measure(folder: Path, release: str, base: str, cache: Path) -> dict[str, float]:
    """Run the command once; return seconds and the most megabytes it held."""
    words = [sys.executable, "-m", "vllm_graft.cli", "audit", str(folder), "--against", release, "--base", base]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [*words, "--offline", "--json"], stdout=output, env={**os.environ, "GRAFT_CACHE_DIR": str(cache)}
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        # Findings make it 1, and so does a traceback, which prints nothing.
        if child.returncode not in (0, 1) or not os.fstat(output.fileno()).st_size:
            sys.exit(f"exit status {child.returncode}: {' '.join(words)}")
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "megabytes": round(used.ru_maxrss / 1024),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=LARGE, help="measure these packages of the corpus")
    parser.add_argument("--base", default="0.26.0", help="the release to compare with (0.26.0)")
    parser.add_argument("--against", default="0.32.0", help="the release to audit (0.32.0)")
    parser.add_argument("--other", default="0.31.0", help="the release to audit afterwards (0.31.0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    rows = []
    print(f"{'package':30}{'':6}{'seconds':>9}{'of CPU':>9}{'MB':>7}")
    for entry in (entry for entry in CORPUS if entry.name in args.only):
        with tempfile.TemporaryDirectory() as cache:
            for run, release in (("cold", args.against), ("warm", args.against), ("other", args.other)):
                row = measure(unpack(entry), release, args.base, Path(cache))
                print(
                    f"{entry.label:30}{run:6}{row['seconds']:9}{row['cpu_seconds']:9}{row['megabytes']:7}", flush=True
                )
                rows.append({"package": entry.label, "run": run, **row})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
