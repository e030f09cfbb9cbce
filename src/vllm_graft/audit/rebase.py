"""Carry a copied function to another release: merge its author's changes with upstream's since.

The copy's own decorators, name and docstring stay out of the merge, and so does its indentation. The merge is one of
text, so that upstream's comments and line breaks are preserved. If that gives conflicts, because a formatter has
been over the copy, two more forms are tried, and the one with the fewest conflicts is taken. In the first the copy is
laid out as its origin: statements that both have are written as upstream writes them, so that the copy differs only
where it means something else. In the second all three are formatted alike by ruff. Both preserve comments. Without
ruff, statements are also merged as ``ast.unparse`` writes them, and comments are lost.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib.util
import io
import re
import shutil
import subprocess
import symtable
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vllm_graft.audit.copies import canonical_lines
from vllm_graft.audit.merge import lines, merge
from vllm_graft.errors import ConfigError
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import bindings

# The shortest and the longest lines that a copy is taken to be formatted with.
_NARROW: Final = 72
_WIDE: Final = 160
# The length of vLLM's own lines.
_UPSTREAM: Final = 88
_SKIPPED: Final = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
_IF: Final = "if x:\n    pass\n"
_TRY: Final = "try:\n    pass\n"
# The statement that has to precede a clause, which is not a statement on its own.
_BEFORE: Final = {"elif": _IF, "else": _IF, "except": _TRY, "finally": _TRY}


def _laid_out(ours: Sequence[str], theirs: Sequence[str]) -> list[str] | None:
    """Lay ``ours`` out as ``theirs``; None if that would change its meaning.

    Statements that only ``ours`` has keep their lines and comments. A shared statement is written as in ``theirs``,
    unless that would lose a comment.
    """
    mine, other = _statements(ours), _statements(theirs)
    old, new = ([each.key for each in side] for side in (other, mine))
    result: list[str] = []
    for kind, low, high, first, last in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            for one, their in zip(mine[first:last], other[low:high], strict=True):
                # The other's lines, as far as that loses no comment.
                if one.inside - their.inside:
                    result += ours[one.start : one.stop]
                elif one.above - their.above:
                    result += [*ours[one.start : one.code], *theirs[their.code : their.stop]]
                else:
                    result += theirs[their.start : their.stop]
        else:
            result += [line for each in mine[first:last] for line in ours[each.start : each.stop]]
    try:
        same = ast.dump(ast.parse(_plain(result))) == ast.dump(ast.parse(_plain(ours)))
    except SyntaxError:
        return None
    return result if same else None


def format_alike(texts: Sequence[str]) -> Iterator[list[str]]:
    """Format texts with ruff: in lines as long as those of the first, then in upstream's; nothing without ruff.

    Trailing commas do not keep a call in several lines: whether they are there depends on who formatted it before.
    """
    ruff = _ruff()
    if ruff is None:
        return
    longest = max((len(line) for line in texts[0].splitlines() if "#" not in line and '"' not in line), default=0)
    for width in dict.fromkeys((min(max(longest, _NARROW), _WIDE), _UPSTREAM)):
        options = ["--isolated", "--line-length", str(width), "--config", "format.skip-magic-trailing-comma=true"]
        command = [*ruff, "format", *options, "--stdin-filename", "copy.py", "-"]
        try:
            yield [
                subprocess.run(command, input=text, capture_output=True, text=True, encoding="utf-8", check=True).stdout
                for text in texts
            ]
        except (OSError, subprocess.CalledProcessError):
            return


def _ruff() -> list[str] | None:
    """Return ruff's command: of this environment, else on the path."""
    if importlib.util.find_spec("ruff") is not None:
        return [sys.executable, "-m", "ruff"]
    path = shutil.which("ruff")
    return [path] if path is not None else None


@dataclass(frozen=True, slots=True)
class _Statement:
    """A simple statement or the head of a compound one: its lines, those of comments before it included.

    code:    the first line after the comments and blank lines before it
    key:     how deep it is indented, and what it says
    above:   the comments before it
    inside:  those beside and between its lines
    """

    start: int
    code: int
    stop: int
    key: tuple[int, str]
    above: Counter[str]
    inside: Counter[str]


def _statements(lines: Sequence[str]) -> list[_Statement]:
    text = _plain(lines)
    source = text.split("\n")
    found: list[_Statement] = []
    start, depth = 0, 0
    first: tokenize.TokenInfo | None = None
    last = ""
    above, inside = Counter[str](), Counter[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        if token.type == tokenize.COMMENT:
            (above if first is None else inside)[token.string.strip()] += 1
        if token.type in _SKIPPED:
            continue
        if token.type == tokenize.NEWLINE and first is not None:
            said = "\n".join(source[first.start[0] - 1 : token.start[0]])[first.start[1] :]
            key = depth, _meaning(said, first.string, is_head=last == ":")
            found.append(_Statement(start, first.start[0] - 1, token.start[0], key, above, inside))
            start, first, above, inside = token.start[0], None, Counter[str](), Counter[str]()
        elif token.type != tokenize.ENDMARKER:
            first, last = first or token, token.string
    if start < len(lines):
        found.append(_Statement(start, len(lines), len(lines), (0, ""), above, inside))
    return found


def _meaning(said: str, first: str, *, is_head: bool) -> str:
    """Return what a statement means, whatever its layout; its text if it cannot be parsed alone."""
    if first == "@":
        whole = f"{said}\ndef f(): pass"
    elif is_head:
        whole = f"{_BEFORE.get(first, '')}{said}\n    pass"
    else:
        whole = said
    try:
        return ast.dump(ast.parse(whole))
    except SyntaxError:
        return said


MergeForm = Literal["text", "laid out", "formatted", "normalised"]
"""The form that was merged: the text as it is; the text, with the statements shared with upstream written as
upstream writes them; the text as ruff formats it; or statements without comments and line breaks."""

# The names of the three functions in conflict markers.
NAMES: Final = ("your copy", "upstream before", "upstream now")
_MARKER: Final = re.compile(r"(?:<{7}|\|{7}|>{7}) |={7}$")
# Stands before a line that begins inside a string, which no indentation may change.
_RAW: Final = "\0"
# Conflicts with at most this many lines between them are one, as in git's own style.
_JOIN: Final = 3
# Stands for the docstring while it is kept out of a merge; a statement, so that the rest can be parsed.
_DOCSTRING: Final = "__docstring__"


@dataclass(frozen=True, slots=True)
class RebaseResult:
    """The result of carrying a copy over.

    text:       the function, indented as the copy was, with git's markers around each conflict
    conflicts:  the lines of the text, from 1, that the conflicts begin at
    form:       what was merged; see ``Form``
    ours:       how many of the copy's own changes went in
    theirs:     how many of upstream's
    alike:      how many both had made alike
    broken:     why a text without conflicts is still not valid Python; empty if it is
    """

    text: str
    conflicts: tuple[int, ...]
    form: MergeForm
    ours: int
    theirs: int
    alike: int
    broken: str = ""


def rebase(text: str, base: str, new: str, *, names: tuple[str, str, str] = NAMES) -> RebaseResult:
    """Carry ``text``, a copy of upstream's function ``base``, to upstream's ``new``."""
    copy, old, now = (_Function.read(each, name) for each, name in zip((text, base, new), names, strict=True))
    own = copy.own_decorators(old)
    apart = copy.docstring != old.docstring and all(each.has_block for each in (copy, old, now))
    cores = [each.core(copy.node.name, skipped, apart) for each, skipped in ((copy, own), (old, 0), (now, 0))]
    docstring = copy.lines[copy.block : copy.after_docstring] if apart else []
    inner = docstring[0][: len(docstring[0]) - len(docstring[0].lstrip())] if docstring else ""
    docstring = [line.removeprefix(inner) if line.strip() else line for line in docstring]
    head = copy.lines[:own]

    best: RebaseResult | None = None
    for form, (ours, before, after) in _forms(*cores):
        merged = merge(before, ours, after, names=names, join=_JOIN)
        # Add to the merged function what was left out of the merge.
        whole = list(head)
        for line in lines(merged.text):
            margin = line.partition(_DOCSTRING)[0]
            moved = [margin + each if each.strip() else each for each in docstring]
            whole += moved if line.strip() == _DOCSTRING else [line]
        indented = ""
        for line in whole:
            as_is = line.startswith(_RAW) or not line.strip() or _MARKER.match(line)
            indented += line.removeprefix(_RAW) if as_is else copy.margin + line
        conflicts = tuple(number for number, line in enumerate(lines(indented), 1) if line.startswith("<<<<<<< "))
        broken = ""
        if not conflicts:
            try:
                ast.parse(_plain(whole))
            except SyntaxError as error:
                broken = f"{error.msg} in line {error.lineno}"
        done = RebaseResult(indented, conflicts, form, merged.ours, merged.theirs, merged.alike, broken)
        if best is None or (len(conflicts), bool(broken)) < (len(best.conflicts), bool(best.broken)):
            best = done
        if not best.conflicts and not best.broken:
            break
    assert best is not None
    return best


def _forms(ours: list[str], before: list[str], after: list[str]) -> Iterator[tuple[MergeForm, tuple[str, str, str]]]:
    """Yield the three functions in each form, those that preserve more of the text first."""
    yield "text", ("".join(ours), "".join(before), "".join(after))
    if (laid := _laid_out(ours, before)) is not None:
        yield "laid out", ("".join(laid), "".join(before), "".join(after))
    formatted = False
    for texts in format_alike([_plain(ours), _plain(before), _plain(after)]):
        formatted = True
        mine, old, new = (_flat(lines(text), "") for text in texts)
        yield "formatted", ("".join(mine), "".join(old), "".join(new))
        # ruff keeps comments where they stand and strings as they are cut: equal statements may still differ in lines.
        if (laid := _laid_out(mine, old)) is not None:
            yield "formatted", ("".join(laid), "".join(old), "".join(new))
    if not formatted:
        texts = [f"{ast.unparse(ast.parse(_plain(each)))}\n" for each in (ours, before, after)]
        yield "normalised", (texts[0], texts[1], texts[2])


def new_names(text: str, before: str, module: str) -> set[str]:
    """Return the global names that a function uses, that it did not use before, and that its module does not have.

    None if the text has conflicts, or if the module imports everything from another.
    """
    try:
        used = _globals(text) - _globals(before)
    except SyntaxError:
        return set()
    body = ast.parse(module).body
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in body):
        return set()
    return used - set(bindings(body)) - set(dir(builtins)) - {"__file__"}


def _globals(text: str) -> set[str]:
    """Return the global names that a function uses, without annotations, which may never be evaluated."""
    tables = [symtable.symtable("\n".join(canonical_lines(text)), "<function>", "exec")]
    found: set[str] = set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        if table.get_type() != "module":
            found |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
    return found


@dataclass(frozen=True, slots=True)
class _Function:
    """One of the three functions, brought to the left margin.

    lines:            its lines; those that begin inside a string are marked, and as they were
    block:            how many lines decorators and signature take
    has_block:        whether the body stands on lines of its own
    after_docstring:  how many lines there are up to the end of the docstring and the blank lines after it
    """

    lines: list[str]
    margin: str
    node: Function
    block: int
    has_block: bool
    after_docstring: int

    @classmethod
    def read(cls, text: str, name: str) -> _Function:
        """Parse a function's source; ConfigError if it is something else."""
        found = lines(text.replace("\r\n", "\n").lstrip("\n"))
        margin = found[0][: len(found[0]) - len(found[0].lstrip())] if found else ""
        try:
            flat = _flat(found, margin)
            (node,) = ast.parse(_plain(flat)).body
        except (SyntaxError, ValueError, tokenize.TokenError) as error:
            raise ConfigError(
                f"it is not one function: {error}", where=name, fix="name a single function or method"
            ) from error
        if not isinstance(node, Function):
            raise ConfigError("it is not a function", where=name, fix="name a function or method")
        # The signature ends where its logical line does.
        tokens = tokenize.generate_tokens(io.StringIO(_plain(flat)).readline)
        ends = (one.start[0] for one in tokens if one.type == tokenize.NEWLINE and one.start[0] >= node.lineno)
        block = next(ends, len(flat))
        documented = ast.get_docstring(node, clean=False) is not None
        after = (node.body[0].end_lineno or block) if documented else block
        while documented and after < len(flat) and not flat[after].strip():
            after += 1
        return cls(flat, margin, node, block, node.body[0].lineno > block, after)

    @property
    def docstring(self) -> str | None:
        """The docstring, without its indentation."""
        return ast.get_docstring(self.node)

    def own_decorators(self, base: _Function) -> int:
        """Count the lines at the top with decorators that upstream's function does not have."""
        known = {ast.dump(each) for each in base.node.decorator_list}
        shared = [each.lineno - 1 for each in self.node.decorator_list if ast.dump(each) in known]
        return shared[0] if shared else self.node.lineno - 1

    def core(self, name: str, skipped: int, docstring_apart: bool) -> list[str]:
        """Return the lines for the merge: under another name, with one line in place of the docstring."""
        core = list(self.lines)
        at = self.node.lineno - 1
        core[at] = re.sub(rf"(\bdef\s+){re.escape(self.node.name)}\b", rf"\g<1>{name}", core[at], count=1)
        if docstring_apart:
            core[self.block : self.after_docstring] = [f"{' ' * self.node.body[0].col_offset}{_DOCSTRING}\n"]
        return core[skipped:]


def _flat(found: Sequence[str], margin: str) -> list[str]:
    """Remove the margin from lines."""
    wrapped = "if True:\n" + "".join(found) if margin else "".join(found)
    offset = 2 if margin else 1
    # The lines that begin inside a string, without docstrings and other unused strings.
    inside: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(wrapped).readline):
        if tokenize.tok_name[token.type].endswith(("STRING", "STRING_MIDDLE")):
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    for node in ast.walk(ast.parse(wrapped)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            inside.difference_update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    flat = []
    for number, line in enumerate(found, offset):
        if number in inside:
            flat.append(_RAW + line)
        else:
            flat.append(line.removeprefix(margin) if line.startswith(margin) else line.lstrip(" \t"))
    if flat and not flat[-1].endswith("\n"):
        flat[-1] += "\n"
    return flat


def _plain(flat: Iterable[str]) -> str:
    return "".join(line.removeprefix(_RAW) for line in flat)
