"""``vllm-graft lock``: record which upstream code was reviewed for each patch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_graft.cli.patches import (
    INSTALLED,
    SOURCE_HELP,
    lock_file,
    patches,
    source,
    upstream_attributes,
)
from vllm_graft.cli.printing import table
from vllm_graft.errors import ConfigError, PatchError
from vllm_graft.patching.declaration import Patch
from vllm_graft.patching.dry_run import try_in_child
from vllm_graft.patching.lock import Lock
from vllm_graft.patching.review import Reviewer
from vllm_graft.sources.finder import Finder
from vllm_graft.versions import InstalledVersion, includes

HELP = "write the fingerprints of the upstream code that patches stand on into patches.lock, once you have read it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("patch", nargs="*", help="registered patches; without any, all that other packages offer")
    parser.add_argument(
        "--against", action="append", metavar="SOURCE", help=f"{SOURCE_HELP}; may be repeated (default: installed)"
    )
    parser.add_argument(
        "--as", dest="release", metavar="RELEASE", help="the release that a development build stands for"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something is not locked")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> int:
    """Compare every patch with every source, and write what is new."""
    locks: dict[Path, Lock] = {}
    rows = []
    chosen = patches(args.patch)
    for text in args.against or [INSTALLED]:
        finder = Finder(source(text, args.release or ""))
        release = _release(args.release or finder.source.version, text)
        for patch in chosen:
            path = lock_file(patch)
            held = locks.setdefault(path, Lock.read(path))
            if not includes(patch.declaration.vllm, release):
                rows.append(_row(patch.declaration.name, "", release, "out of range", ""))
                continue
            places = list(upstream_attributes(patch, finder))
            # A trial judges by the version that is installed, which --as says is not the one meant.
            refusal = _refusal(patch, release, finder, trial=text == INSTALLED and not args.release)
            if refusal and all(place.definition is not None for place in places):
                # What a start refuses is not reviewed: the lock stays as it is.
                rows.append(_row(patch.declaration.name, refusal, release, "refused", ""))
                continue
            name = patch.declaration.name
            for place in places:
                if place.definition is None:
                    rows.append(_row(name, place.name, release, "not found", ""))
                    continue
                seen = held.patches.setdefault(name, {}).setdefault(place.name, {})
                now, before = place.definition.fingerprint, seen.get(release)
                seen[release] = now
                state = "same" if now == before else "changed" if before else "new"
                rows.append(_row(name, place.name, release, state, str(now)))
    bad = {"not found", "refused"} | ({"new", "changed", "out of range"} if args.check else set())
    if not args.check:
        for held in locks.values():
            if held.patches:
                held.write()
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        head = ("PATCH", "UPSTREAM", "RELEASE", "STATE", "FINGERPRINT")
        print(table(head, [tuple(value or "-" for value in row.values()) for row in rows]))
    bare = [patch.declaration.name for patch in chosen if not patch.declaration.locked]
    if bare and not args.check and not args.json:
        # How a lock gets to the server, for patches that would be applied without one.
        print(f"{', '.join(bare)}: without locked=True a start continues even if the")
        print(
            "lock is missing. Declare it in the class statement, and put patches.lock into the wheel as package data."
        )
    return 1 if any(row["state"] in bad for row in rows) else 0


def _refusal(patch: Patch, release: str, finder: Finder, *, trial: bool) -> str:
    """Return the reason for which a start on a release refuses a patch, whatever its lock says; empty if none does.

    With ``trial`` a patch that reading cannot judge is applied to the installed vLLM in a process of its own.
    """
    try:
        _, sure = Reviewer(InstalledVersion(release), finder, locks=False).examine(patch)
    except PatchError as error:
        return error.what
    return "" if sure or not trial else try_in_child(f"{patch.__module__}:{patch.__qualname__}", locks=False).what


def _row(patch: str, upstream: str, release: str, state: str, fingerprint: str) -> dict[str, str]:
    return {"patch": patch, "upstream": upstream, "release": release, "state": state, "fingerprint": fingerprint}


def _release(version: str, text: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(version)
    except InvalidVersion:
        found = Version("0.dev0")
    if found.is_devrelease:
        what = f"it is vLLM {version or 'of no stated version'}, which is not a release"
        raise ConfigError(what, where=text, fix="say with --as which release it stands for")
    return found.base_version
