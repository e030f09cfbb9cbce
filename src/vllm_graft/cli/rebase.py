"""``vllm-graft rebase``: carry a function that was copied from upstream to another release."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_graft.audit.copies import Origin, nearest, oldest
from vllm_graft.audit.rebase import RebaseResult, new_names, rebase
from vllm_graft.cli.copies import Copy, in_file, in_patch, names_a_file, read
from vllm_graft.cli.patches import INSTALLED, SOURCE_HELP, source
from vllm_graft.errors import ConfigError
from vllm_graft.sources.finder import Finder

HELP = "carry a function that was copied from upstream to another release, by a three-way merge"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("patch", help="a registered patch, or path/to/file.py:Class.method")
    parser.add_argument("attribute", nargs="?", default="", help="one replacement of the patch; all without it")
    parser.add_argument("--to", required=True, metavar="SOURCE", help=f"where it is carried: {SOURCE_HELP}")
    parser.add_argument(
        "--from", dest="old", metavar="SOURCE", help="what it was copied from; found by comparison without it"
    )
    parser.add_argument(
        "--upstream",
        metavar="NAME",
        help="for a function in a file: what it is a copy of, as vllm.module:Class.method; else what it overrides",
    )
    parser.add_argument("--offline", action="store_true", help="ask no server: only what is kept or installed here")
    parser.add_argument("--write", action="store_true", help="put it into the file in place of the old one")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> int:
    """Print, or write, each rebased function; exit status 1 where one has conflicts."""
    new = Finder(source(args.to, offline=args.offline))
    if names_a_file(args.patch):
        copies = [in_file(args.patch, args.upstream or "")]
    elif args.upstream:
        raise ConfigError("a patch says itself what it replaces", where="--upstream", fix="leave it out")
    else:
        copies = in_patch(args.patch, args.attribute, [each for each in (new.source.version, args.old) if each])
    known = _releases(copies, args)
    rows = [row for copy in copies if (row := _row(copy, known, new, args)) is not None]
    if not rows:
        raise ConfigError("none of its functions is a copy", where=args.patch, fix="there is nothing to carry")
    if args.write:
        _write(rows)
    if args.json:
        print(json.dumps([row.as_dict(written=args.write) for row in rows], indent=2))
    elif not args.write:
        print("\n".join(row.done.text for row in rows), end="")
    return 1 if any(row.done.conflicts or row.done.broken for row in rows) else 0


@dataclass(frozen=True, slots=True)
class RebasedCopy:
    """One copy, carried over.

    origin:  the release that it was taken from
    to:      the one it was carried to
    done:    the outcome
    names:   what it uses now and its file does not have
    """

    copy: Copy
    origin: Origin
    to: str
    done: RebaseResult
    names: Sequence[str]

    def as_dict(self, *, written: bool) -> dict[str, object]:
        """Return the copy as JSON shows it; conflicts are lines of the text."""
        return {
            "patch": self.copy.owner,
            "upstream": self.copy.upstream,
            "file": str(self.copy.path),
            "line": self.copy.line,
            "from": self.origin.release,
            "to": self.to,
            "differing": self.origin.differing,
            "of_lines": self.origin.of_lines,
            "form": self.done.form,
            "conflicts": list(self.done.conflicts),
            "broken": self.done.broken,
            "new_names": list(self.names),
            "text": self.done.text,
            "written": written,
        }

    def explain(self) -> Iterator[str]:
        """Describe what was done and what is left to do."""
        copied = f"copied from {self.origin.release}: {self.origin.differing} of {self.origin.of_lines} lines differ"
        count = len(self.done.conflicts)
        yield (
            f"{self.copy.upstream}: {copied}; {count or 'no'} conflict{'' if count == 1 else 's'} onto {self.to}, "
            f"{self.done.theirs} of upstream's changes taken"
        )
        if self.done.form == "laid out":
            yield "  it was formatted otherwise than upstream: what it has of upstream's is laid out as there"
        if self.done.form == "formatted":
            yield "  it was formatted otherwise than upstream: it is formatted by ruff, comments are kept"
        if self.done.form == "normalised":
            yield (
                "  it was formatted otherwise than upstream: comments and line breaks are lost; "
                "with ruff installed they are kept: pip install ruff"
            )
        if self.done.broken:
            yield f"  the result is no Python: {self.done.broken}"
        if self.names:
            yield f"  it now uses {', '.join(self.names)}, which {self.copy.path} does not have: import or define it"


def _releases(copies: Iterable[Copy], args: argparse.Namespace) -> dict[str, Finder]:
    """Return the releases that a copy may come from: reviewed, in the catalogue, cached, installed."""
    if args.old:
        finder = Finder(source(args.old, offline=args.offline))
        return {finder.source.version or args.old: finder}
    from vllm_graft.audit.releases.catalogue import Catalogue
    from vllm_graft.files import cache_folder

    kept = [path.name for shelf in ("sources", "wheels") for path in sorted(cache_folder().glob(f"{shelf}/[0-9]*"))]
    reviewed = [release for copy in copies for release in copy.reviewed]
    numbers = [name for name in [*reviewed, *Catalogue.shipped().releases, *kept] if not name.endswith(".lock")]
    known: dict[str, Finder] = {}
    missing = []
    for text in dict.fromkeys([*numbers, INSTALLED]):
        try:
            found = source(text, offline=args.offline)
        except ConfigError:
            missing.append(text)
            continue
        if found.version:
            known.setdefault(found.version, Finder(found))
    if missing:
        _say(f"vLLM {', '.join(missing)} cannot be read here and is left out of the comparison")
    return known


def _row(copy: Copy, known: Mapping[str, Finder], new: Finder, args: argparse.Namespace) -> RebasedCopy | None:
    """Find where a copy comes from, and carry it over; None where it is not a copy."""
    found = {release: finder.find(copy.module, copy.qualname) for release, finder in known.items()}
    texts = {release: each.text for release, each in found.items() if each is not None}
    now, to = new.find(copy.module, copy.qualname), new.source.version or args.to
    if now is None and not texts and copy.addition:
        _say(f"{copy.upstream}: upstream has none, so there is nothing to carry")
        return None
    if now is None or not texts:
        lacking = f"vLLM {args.old}" if args.old else "no release that can be read"
        what = f"{f'vLLM {to}' if now is None else lacking} has no {copy.qualname} in {copy.module}"
        fix = "compare the name with upstream: it may have been renamed or moved"
        raise ConfigError(what, where=copy.owner, fix=fix)
    origin = nearest(copy.text, texts, prefer_old=True)
    if not origin.copied and not args.old:
        what = f"it is not a copy of {copy.upstream} in any release that can be read; the nearest is {origin.release}, "
        what += f"from which {origin.differing} lines differ"
        where = f"{copy.path}:{copy.line}"
        if args.attribute or names_a_file(args.patch):
            raise ConfigError(what, where=where, fix="name the release that it was taken from with --from")
        _say(f"{where}: {what}")
        return None
    names = (copy.owner, f"vLLM {origin.release}", f"vLLM {to}")
    done = rebase(copy.text, texts[origin.release], now.text, names=names)
    row = RebasedCopy(copy, origin, to, done, sorted(new_names(done.text, copy.text, read(copy.path)[0])))
    for line in row.explain():
        _say(line)
    if not args.old and origin.differing and origin.release == oldest(texts):
        _say("  no older release can be read here; if it is from one, name that with --from, or changes may be lost")
    return row


def _write(rows: Iterable[RebasedCopy]) -> None:
    """Write each into its file; those further down a file move with those above."""
    moved: dict[Path, int] = {}
    for row in rows:
        path = row.copy.path
        line = row.copy.line + moved.get(path, 0)
        moved[path] = moved.get(path, 0) + row.copy.write_replacement(row.done.text, line)
        _say(f"  written to {path}:{line}")
        for conflict in row.done.conflicts:
            _say(f"  conflict at {path}:{line + conflict - 1}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
