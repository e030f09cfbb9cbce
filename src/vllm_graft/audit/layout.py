"""One function laid out as another: the statements that both have, written as the other writes them.

A copy that a formatter has been over differs from its origin in most lines and in hardly a statement. Laid out as its
origin it differs where it means something else, and can be merged as text. Statements of its own stay as they are, with
the comments before them; before the others the origin's comments take their place, unless the copy has some that the
origin has not: then the copy's stay.

Where that is not enough, because its statements are cut otherwise, both are formatted alike by ruff.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import io
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_NARROW: Final = 72
_WIDE: Final = 160
"""The shortest and the longest lines that a copy is taken to be formatted with."""

_UPSTREAM: Final = 88
"""The length of vLLM's own lines."""

_SKIPPED: Final = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
_IF: Final = "if x:\n    pass\n"
_TRY: Final = "try:\n    pass\n"
_BEFORE: Final = {"elif": _IF, "else": _IF, "except": _TRY, "finally": _TRY}
"""What has to stand before a clause that is no statement of its own."""


def laid_out(ours: Sequence[str], theirs: Sequence[str], *, raw: str) -> list[str] | None:
    """The lines of ``ours``, laid out as ``theirs``; None where that would change what they mean.

    ``raw`` is what stands before lines that begin inside a string, and does not count.
    """
    mine, other = _statements(ours, raw), _statements(theirs, raw)
    old, new = ([each.key for each in side] for side in (other, mine))
    result: list[str] = []
    for kind, low, high, first, last in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            for one, their in zip(mine[first:last], other[low:high], strict=True):
                result += _as_theirs(ours, one, theirs, their)
        else:
            result += [line for each in mine[first:last] for line in ours[each.start : each.stop]]
    try:
        same = ast.dump(ast.parse(_plain(result, raw))) == ast.dump(ast.parse(_plain(ours, raw)))
    except SyntaxError:
        return None
    return result if same else None


def _as_theirs(ours: Sequence[str], mine: _Statement, theirs: Sequence[str], other: _Statement) -> Sequence[str]:
    """The lines of a statement that both have: the other's, as far as that loses no comment."""
    if mine.inside - other.inside:
        return ours[mine.start : mine.stop]
    code = theirs[other.code : other.stop]
    if mine.above - other.above:
        return [*ours[mine.start : mine.code], *code]
    return theirs[other.start : other.stop]


def format_alike(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts as ruff formats them: all in lines as long as the first has them, then in upstream's; none without ruff.

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
    """The command of ruff: of this environment, else on the path."""
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


def _statements(lines: Sequence[str], raw: str) -> list[_Statement]:
    return list(_read(_plain(lines, raw), len(lines)))


def _read(text: str, count: int) -> Iterator[_Statement]:
    source = text.split("\n")
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
            yield _Statement(start, first.start[0] - 1, token.start[0], key, above, inside)
            start, first, above, inside = token.start[0], None, Counter[str](), Counter[str]()
        elif token.type != tokenize.ENDMARKER:
            first, last = first or token, token.string
    if start < count:
        yield _Statement(start, count, count, (0, ""), above, inside)


def _meaning(said: str, first: str, *, is_head: bool) -> str:
    """What a statement says, whatever its layout; the statement itself where it cannot be parsed alone."""
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


def _plain(lines: Sequence[str], raw: str) -> str:
    return "".join(line.removeprefix(raw) for line in lines)
