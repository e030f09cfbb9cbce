"""``vllm-graft rebase``: carry a function that was copied from upstream to another release."""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from vllm_graft import errors
from vllm_graft.audit.copies import Origin, nearest_release, oldest
from vllm_graft.audit.merge import lines
from vllm_graft.audit.rebase import RebaseResult, new_names, rebase
from vllm_graft.cli.patches import INSTALLED, SOURCE_HELP, is_version, lock_file, patches, source
from vllm_graft.errors import ConfigError
from vllm_graft.files import replace_file
from vllm_graft.patching.declaration import Patch
from vllm_graft.patching.functions import functions_in, innermost
from vllm_graft.patching.hooks import Hook
from vllm_graft.patching.lock import Lock, hook_name
from vllm_graft.sources.finder import Finder
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import bindings
from vllm_graft.versions import includes

HELP = "carry a function that was copied from upstream to another release, by a three-way merge"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("patch", help="a registered patch, or path/to/file.py:Class.method")
    parser.add_argument("attribute", nargs="?", default="", help="one replacement of the patch (default: all)")
    parser.add_argument("--to", required=True, metavar="SOURCE", help=f"where it is carried: {SOURCE_HELP}")
    parser.add_argument(
        "--from", dest="old", metavar="SOURCE", help="what it was copied from (default: found by comparison)"
    )
    upstream = "for a function in a file: what it is a copy of, as vllm.module:Class.method; else what it overrides"
    parser.add_argument("--upstream", metavar="NAME", help=upstream)
    parser.add_argument(
        "--offline", action="store_true", help="contact no server: use only what is cached or installed"
    )
    parser.add_argument("--write", action="store_true", help="put it into the file in place of the old one")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> int:
    """Print, or write, each rebased function; exit status 1 if one has conflicts."""
    new = Finder(source(args.to, offline=args.offline))
    if names_a_file(args.patch):
        copies = [in_file(args.patch, args.upstream or "")]
    elif args.upstream:
        raise ConfigError("a patch itself declares what it replaces", where="--upstream", fix="leave it out")
    else:
        copies = in_patch(args.patch, args.attribute, [each for each in (new.source.version, args.old) if each])
    known = _releases(copies, args)
    rows = [row for copy in copies if (row := _row(copy, known, new, args)) is not None]
    if not rows:
        raise ConfigError("none of its functions is a copy", where=args.patch, fix="there is nothing to carry")
    moved: dict[Path, int] = {}
    for row in rows if args.write else ():
        # Those further down a file move with those above.
        path = row.copy.path
        line = row.copy.line + moved.get(path, 0)
        moved[path] = moved.get(path, 0) + row.copy.write_replacement(row.done.text, line)
        _say(f"  written to {path}:{line}")
        for conflict in row.done.conflicts:
            _say(f"  conflict at {path}:{line + conflict - 1}")
    if args.json:
        print(json.dumps([row.as_dict(written=args.write) for row in rows], indent=2))
    elif not args.write:
        print("\n".join(row.done.text for row in rows), end="")
    return 1 if any(row.done.conflicts or row.done.broken for row in rows) else 0


@dataclass(frozen=True, slots=True)
class Copy:
    """A function that was copied.

    owner:             the patch, or the words that named it
    path, line:        its file, and the line that its decorators begin at
    text:              its source
    module, qualname:  upstream's function that it is a copy of
    reviewed:          the releases that the patch's lock has for it
    addition:          whether the patch may also mean a function that upstream does not have
    """

    owner: str
    path: Path
    line: int
    text: str
    module: str
    qualname: str
    reviewed: tuple[str, ...] = ()
    addition: bool = False

    @property
    def upstream(self) -> str:
        """Module and qualified name of upstream's function."""
        return f"{self.module}:{self.qualname}"

    def write_replacement(self, text: str, line: int) -> int:
        """Write a text in its place, which by now begins at ``line``; return by how many lines the rest moves."""
        whole, encoding = read(self.path)
        end = "\r\n" if "\r\n" in self.text else "\n"
        found, new, old = lines(whole), lines(text.replace("\n", end)), lines(self.text)
        place = slice(line - 1, line - 1 + len(old))
        if found[place] != old:
            raise ConfigError("the file has changed meanwhile", where=f"{self.path}:{line}", fix="run it again")
        found[place] = new
        replace_file(self.path, "".join(found).encode(encoding))
        return len(new) - len(old)


@dataclass(frozen=True, slots=True)
class RebasedCopy:
    """One copy, carried over; ``names`` are what it uses now and its file does not have."""

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
            yield "  it was formatted differently from upstream: its upstream parts now follow upstream's layout"
        if self.done.form == "formatted":
            yield "  it was formatted differently from upstream: it is formatted by ruff, comments are kept"
        if self.done.form == "normalised":
            yield (
                "  it was formatted differently from upstream: comments and line breaks are lost; "
                "with ruff installed they are kept: pip install ruff"
            )
        if self.done.broken:
            yield f"  the result is not valid Python: {self.done.broken}"
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
    """Find where a copy comes from, and carry it over; None if it is not a copy."""
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
    origin = nearest_release(copy.text, texts, prefer_old=True)
    if not origin.copied and not args.old:
        closest = f"the nearest is {origin.release}, from which {origin.differing} lines differ"
        what = f"it is not a copy of {copy.upstream} in any release that can be read; {closest}"
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


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def names_a_file(text: str) -> bool:
    """Return whether a word means a function in a file, and not a patch."""
    return text.endswith(".py") or text.rpartition(":")[0].endswith(".py")


def in_file(text: str, upstream: str) -> Copy:
    """Return the function that ``path/to/file.py:Class.method`` means, as a copy of ``module:qualname``.

    Without ``upstream`` it is a copy of what it overrides or is put in place of.
    """
    name, _, qualname = (f"{text}:" if text.endswith(".py") else text).rpartition(":")
    if not qualname:
        raise ConfigError("no function in it is named", where=name, fix=f"name one: {name}:Class.method")
    source, body = _parsed(Path(name))
    nodes: list[ast.AST] = []
    for part in qualname.split("."):
        nodes = bindings(body).get(part, [])
        last = nodes[-1] if nodes else None
        body = last.body if isinstance(last, ast.ClassDef | Function) else []
    if len(nodes) != 1 or not isinstance(nodes[0], Function):
        what = "is defined several times" if len(nodes) > 1 else "is not a function" if nodes else "is not there"
        raise ConfigError(f"{qualname} {what}", where=name, fix="name one function or method of this file")
    fix = "give --upstream vllm.module:Class.method"
    if not upstream:
        from vllm_graft.audit.uses import read as read_uses

        # The class around a function, or the name that it replaces, tells what it is a copy of.
        uses = [
            use for use in read_uses(Path(name)).uses if use.way in ("override", "replace") and use.body is not None
        ]
        found = sorted({use.name for use in uses if use.body is not None and use.body.lineno == nodes[0].lineno})
        if len(found) != 1:
            what = f"it may be a copy of {' or of '.join(found)}" if found else "nothing says what it is a copy of"
            why = "" if found else ": it overrides no method of a class that this file imports from vLLM"
            raise ConfigError(f"{what}{why}", where=text, fix=fix)
        upstream = found[0]
    module, _, theirs = upstream.partition(":")
    if not module or not theirs:
        raise ConfigError(f"{upstream!r} does not separate the module from the name", where=text, fix=fix)
    return _copy(text, Path(name), source, nodes[0], module, theirs)


def in_patch(name: str, attribute: str, releases: Sequence[str]) -> list[Copy]:
    """Return the functions with which a registered patch replaces upstream's, in the order of its files.

    Of several bodies of one function the one for the first of these releases decides.
    """
    (patch,) = patches([name])
    target = patch.declaration.target
    reviewed = Lock.read(lock_file(patch)).patches.get(patch.declaration.name, {})
    copies = []
    for hook in _hooks(patch, attribute, releases):
        code = innermost(functions_in(hook.value)[0]).__code__
        path = Path(code.co_filename)
        source, body = _parsed(path)
        inside = [each for statement in body for each in ast.walk(statement) if isinstance(each, Function)]
        node = next((each for each in inside if _first_line(each) == code.co_firstlineno), None)
        if node is None:
            where, fix = f"{path}:{code.co_firstlineno}", "write it with def, in the patch's own file"
            raise ConfigError(f"{hook.attribute!r} is not written there as a function", where=where, fix=fix)
        made = _copy(name, path, source, node, target.module, target.inside(hook.attribute))
        seen = tuple(reviewed.get(hook_name(patch.declaration, hook.attribute), ()))
        copies.append(replace(made, reviewed=seen, addition=hook.kind == "auto"))
    return sorted(copies, key=lambda copy: (copy.path, copy.line))


def _hooks(patch: Patch, attribute: str, releases: Sequence[str]) -> list[Hook]:
    """Return the hooks that may be copies."""
    offered: dict[str, list[Hook]] = {}
    for hook in patch.declaration.hooks:
        if hook.kind in ("replace", "auto") and len(functions_in(hook.value)) == 1:
            offered.setdefault(hook.attribute, []).append(hook)
    if not offered or (attribute and attribute not in offered):
        hint = errors.nearest(attribute, offered) if attribute and offered else ""
        what = f"it does not replace {attribute!r}{hint}" if attribute else "it replaces no function"
        fix = "name a function that it replaces: a wrap holds no copy of upstream's"
        raise ConfigError(what, where=patch.declaration.where, fix=fix)
    numbers = [Version(each).base_version for each in releases if is_version(each)]
    chosen = []
    for name, bodies in offered.items():
        if attribute not in ("", name):
            continue
        fitting = [[body for body in bodies if includes(body.vllm, number)] for number in numbers]
        found = bodies if len(bodies) == 1 else next((each for each in fitting if len(each) == 1), None)
        if found is None:
            what = f"there are several bodies of {name!r}, and none is for {' or '.join(releases)}"
            fix = "say with --from which release the one you mean is for"
            raise ConfigError(what, where=patch.declaration.where, fix=fix)
        chosen += found
    return chosen


def _copy(owner: str, path: Path, source: str, node: Function, module: str, qualname: str) -> Copy:
    first = _first_line(node)
    return Copy(owner, path, first, "".join(lines(source)[first - 1 : node.end_lineno]), module, qualname)


def _first_line(node: Function) -> int:
    """Return the line at which a function begins, its decorators included."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def read(path: Path) -> tuple[str, str]:
    """Return the text of a Python file with the line ends it has, and its encoding."""
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"it cannot be read: {error}", where=str(path), fix="name a Python file") from error


def _parsed(path: Path) -> tuple[str, list[ast.stmt]]:
    text = read(path)[0]
    try:
        return text, ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        fix = "repair it: conflict markers may be left in it"
        raise ConfigError(f"it is not valid Python: {error}", where=str(path), fix=fix) from error
