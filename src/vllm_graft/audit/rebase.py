"""A copied function carried to another release: what its author changed, merged with what upstream changed since.

The copy's own decorators, name and docstring stay out of the merge, and so does its indentation. The merge is one of
text, so that upstream's comments and line breaks come along. Where that gives conflicts, because the copy was formatted
otherwise, the copy is laid out as upstream was, and all three are formatted alike by ruff; both keep comments, and what
has the fewest conflicts counts. Without ruff, statements are also merged as ``ast.unparse`` writes them, and comments
are lost.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import symtable
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vllm_graft.audit.layout import format_alike, laid_out
from vllm_graft.audit.merge import Merged, lines, merge
from vllm_graft.audit.provenance import canonical_lines
from vllm_graft.errors import ConfigError
from vllm_graft.patching.upstream.fingerprint import Function
from vllm_graft.patching.upstream.scopes import bindings

Form = Literal["text", "laid out", "formatted", "normalised"]
"""What was merged: the text as it is; the text, with the statements that the copy shares with upstream written as
upstream writes them; the text as ruff formats it; or statements without comments and line breaks."""

NAMES: Final = ("your copy", "upstream before", "upstream now")
"""What the three functions are called in conflict markers."""

_MARKER: Final = re.compile(r"(?:<{7}|\|{7}|>{7}) |={7}$")
_RAW: Final = "\0"
"""Stands before a line that begins inside a string, which no indentation may change."""

_JOIN: Final = 3
"""Conflicts with at most this many lines between them are one, as in git's own style."""

_DOCSTRING: Final = "__docstring__"
"""Stands for the docstring while it is kept out of a merge; a statement, so that the rest can be parsed."""


@dataclass(frozen=True, slots=True)
class Rebased:
    """The outcome.

    text:       the function, indented as the copy was, with git's markers around each conflict
    conflicts:  the lines of the text, from 1, that the conflicts begin at
    form:       what was merged; see ``Form``
    ours:       how many of the copy's own changes went in
    theirs:     how many of upstream's
    alike:      how many both had made alike
    broken:     why a text without conflicts is still no Python; empty where it is
    """

    text: str
    conflicts: tuple[int, ...]
    form: Form
    ours: int
    theirs: int
    alike: int
    broken: str = ""


def rebase(text: str, base: str, new: str, *, names: tuple[str, str, str] = NAMES) -> Rebased:
    """Carry ``text``, a copy of upstream's function ``base``, to upstream's ``new``."""
    copy, old, now = (_Function.read(each, name) for each, name in zip((text, base, new), names, strict=True))
    own = copy.own_decorators(old)
    apart = copy.docstring != old.docstring and all(each.has_block for each in (copy, old, now))
    cores = [each.core(copy.node.name, skipped, apart) for each, skipped in ((copy, own), (old, 0), (now, 0))]
    docstring = copy.lines[copy.block : copy.after_docstring] if apart else []
    head = copy.lines[:own]

    best: Rebased | None = None
    for form, (ours, before, after) in _forms(*cores):
        merged = merge(before, ours, after, names=names, join=_JOIN)
        done = _finished(form, merged, head, docstring, copy.margin)
        if best is None or _badness(done) < _badness(best):
            best = done
        if not any(_badness(best)):
            break
    assert best is not None
    return best


def _forms(ours: list[str], before: list[str], after: list[str]) -> Iterator[tuple[Form, tuple[str, str, str]]]:
    """The three functions in each form, those that keep more of the text first."""
    yield "text", ("".join(ours), "".join(before), "".join(after))
    if (laid := laid_out(ours, before, raw=_RAW)) is not None:
        yield "laid out", ("".join(laid), "".join(before), "".join(after))
    formatted = False
    for texts in format_alike([_plain(ours), _plain(before), _plain(after)]):
        formatted = True
        mine, old, new = (_flat(lines(text), "") for text in texts)
        yield "formatted", ("".join(mine), "".join(old), "".join(new))
        # ruff keeps comments where they stand and strings as they are cut: equal statements may still differ in lines.
        if (laid := laid_out(mine, old, raw=_RAW)) is not None:
            yield "formatted", ("".join(laid), "".join(old), "".join(new))
    if not formatted:
        yield "normalised", (_normalised(ours), _normalised(before), _normalised(after))


def _badness(done: Rebased) -> tuple[int, bool]:
    return len(done.conflicts), bool(done.broken)


def new_names(text: str, before: str, module: str) -> set[str]:
    """The global names that a function uses, that it did not use before, and that its module does not have.

    None where the text has conflicts, or where the module imports everything from another.
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
    """What a function looks up outside of itself; annotations, which need not be evaluated, are left out."""
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
        """Take a function's source apart; ConfigError where it is something else."""
        found = lines(text.replace("\r\n", "\n").lstrip("\n"))
        margin = _indentation(found[0]) if found else ""
        try:
            flat = _flat(found, margin)
            (node,) = ast.parse(_plain(flat)).body
        except (SyntaxError, ValueError, tokenize.TokenError) as error:
            raise ConfigError(
                f"it is not one function: {error}", where=name, fix="name a single function or method"
            ) from error
        if not isinstance(node, Function):
            raise ConfigError("it is no function", where=name, fix="name a function or method")
        block = _signature_end(flat, node)
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
        """How many lines on top hold decorators that upstream's function did not have."""
        known = {ast.dump(each) for each in base.node.decorator_list}
        shared = [each.lineno - 1 for each in self.node.decorator_list if ast.dump(each) in known]
        return shared[0] if shared else self.node.lineno - 1

    def core(self, name: str, skipped: int, docstring_apart: bool) -> list[str]:
        """What takes part in a merge: the lines after the first, under another name, with a line for the docstring."""
        core = list(self.lines)
        at = self.node.lineno - 1
        core[at] = re.sub(rf"(\bdef\s+){re.escape(self.node.name)}\b", rf"\g<1>{name}", core[at], count=1)
        if docstring_apart:
            core[self.block : self.after_docstring] = [f"{' ' * self.node.body[0].col_offset}{_DOCSTRING}\n"]
        return core[skipped:]


def _flat(found: Sequence[str], margin: str) -> list[str]:
    """The lines without the margin."""
    wrapped = "if True:\n" + "".join(found) if margin else "".join(found)
    offset = 2 if margin else 1
    inside = _in_strings(wrapped)
    flat = []
    for number, line in enumerate(found, offset):
        if number in inside:
            flat.append(_RAW + line)
        else:
            flat.append(line.removeprefix(margin) if line.startswith(margin) else line.lstrip(" \t"))
    if flat and not flat[-1].endswith("\n"):
        flat[-1] += "\n"
    return flat


def _in_strings(text: str) -> set[int]:
    """The lines that begin inside a string; those of docstrings and other strings that nothing uses do not count."""
    inside: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type].endswith(("STRING", "STRING_MIDDLE")):
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            inside.difference_update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    return inside


def _plain(flat: Iterable[str]) -> str:
    return "".join(line.removeprefix(_RAW) for line in flat)


def _signature_end(flat: Sequence[str], node: Function) -> int:
    """The last line of the signature, where its logical line ends."""
    for token in tokenize.generate_tokens(io.StringIO(_plain(flat)).readline):
        if token.type == tokenize.NEWLINE and token.start[0] >= node.lineno:
            return token.start[0]
    return len(flat)


def _normalised(core: Iterable[str]) -> str:
    return f"{ast.unparse(ast.parse(_plain(core)))}\n"


def _finished(form: Form, merged: Merged, head: Sequence[str], docstring: Sequence[str], margin: str) -> Rebased:
    """The merged function with all that was kept out of the merge."""
    whole = list(head)
    for line in lines(merged.text):
        whole += _moved(docstring, _indentation(line)) if line.strip() == _DOCSTRING else [line]
    text = "".join(_indented(line, margin) for line in whole)
    conflicts = tuple(number for number, line in enumerate(lines(text), 1) if line.startswith("<<<<<<< "))
    broken = ""
    if not conflicts:
        try:
            ast.parse(_plain(whole))
        except SyntaxError as error:
            broken = f"{error.msg} in line {error.lineno}"
    return Rebased(text, conflicts, form, merged.ours, merged.theirs, merged.alike, broken)


def _moved(block: Sequence[str], indentation: str) -> list[str]:
    """Lines that begin at another indentation."""
    before = _indentation(block[0]) if block else ""
    return [indentation + line.removeprefix(before) if line.strip() else line for line in block]


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _indented(line: str, margin: str) -> str:
    if line.startswith(_RAW):
        return line.removeprefix(_RAW)
    return line if not line.strip() or _MARKER.match(line) else margin + line
