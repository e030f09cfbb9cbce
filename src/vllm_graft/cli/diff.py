"""``vllm-graft diff``: what upstream has changed in the code under a patch since it was reviewed."""

from __future__ import annotations

import argparse
import difflib
import json

from vllm_graft.cli.patches import (
    INSTALLED,
    SOURCE_HELP,
    lock_file,
    patches,
    source,
    upstream_attributes,
)
from vllm_graft.patching.lock import Lock
from vllm_graft.sources import Definition
from vllm_graft.sources.finder import Finder

HELP = "show what upstream has changed in the code under a patch since it was reviewed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("patch", help="a registered patch")
    parser.add_argument(
        "--from", dest="old", metavar="SOURCE", help=f"{SOURCE_HELP} (default: the newest release that was reviewed)"
    )
    parser.add_argument("--to", dest="new", metavar="SOURCE", default=INSTALLED, help="likewise (default: installed)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> int:
    """Print a unified diff for each upstream attribute that differs; return 1 if one does."""
    (patch,) = patches([args.patch])
    reviewed = Lock.read(lock_file(patch)).patches.get(patch.declaration.name, {})
    new = Finder(source(args.new))
    rows = []
    for place in upstream_attributes(patch, new):
        seen = reviewed.get(place.name, {})
        now = place.definition
        known = [release for release, each in seen.items() if now is not None and each == now.fingerprint]
        old = args.old or (known or list(seen) or [""])[-1]
        before = None
        if old and (args.old or not known):
            before = next(
                (each for each in upstream_attributes(patch, Finder(source(old))) if each.name == place.name), None
            )
        was = before.definition if before is not None else None
        state, text = _compared(was, now, old, known, new.source.version, asked=args.old is not None)
        rows.append({"patch": args.patch, "upstream": place.name, "from": old, "state": state, "diff": text})
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['upstream']}: {row['state']}")
            print(row["diff"], end="")
    return 1 if any(row["state"].startswith(("changed", "gone", "not reviewed")) for row in rows) else 0


def _compared(
    was: Definition | None, now: Definition | None, old: str, known: list[str], version: str, *, asked: bool
) -> tuple[str, str]:
    if now is None:
        return f"gone in {version}", ""
    if known and not asked:
        return f"as reviewed in {', '.join(known)}", ""
    if was is None:
        return ("not reviewed yet: run `vllm-graft lock`" if not old else f"new since {old}"), ""
    if was.fingerprint == now.fingerprint:
        return f"the same in {old} and {version}", ""
    what = "body" if was.fingerprint.signature == now.fingerprint.signature else "signature"
    lines = difflib.unified_diff(
        was.text.splitlines(keepends=True), now.text.splitlines(keepends=True), f"vLLM {old}", f"vLLM {version}"
    )
    return f"changed in its {what} from {old} to {version}", "".join(lines)
