"""One function laid out as another: the statements that both have, written as the other writes them.

A copy that a formatter has been over differs from its origin in most lines and in hardly a statement. Laid out as its
origin it differs where it means something else, and can be merged as text. Statements of its own stay as they are, with
the comments before them; before the others the origin's comments take their place. A copy with comments of its own
there is not laid out: they would be lost.

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

_SKIPPED: Final = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
_IF: Final = "if x:\n    pass\n"
_TRY: Final = "try:\n    pass\n"
_BEFORE: Final = {"elif": _IF, "else": _IF, "except": _TRY, "finally": _TRY}
"""What has to stand before a clause that is no statement of its own."""


def laid_out(ours: Sequence[str], theirs: Sequence[str], *, raw: str) -> list[str] | None:
    """The lines of ``ours``, laid out as ``theirs``; None where that would change what they mean, or lose a comment.

    ``raw`` is what stands before lines that begin inside a string, and does not count.
    """
    mine, other = _statements(ours, raw), _statements(theirs, raw)
    old, new = ([each.key for each in side] for side in (other, mine))
    result: list[str] = []
    for kind, low, high, first, last in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        lines, chosen = (theirs, other[low:high]) if kind == "equal" else (ours, mine[first:last])
        for each in chosen:
            result += lines[each.start : each.stop]
    try:
        same = ast.dump(ast.parse(_plain(result, raw))) == ast.dump(ast.parse(_plain(ours, raw)))
    except SyntaxError:
        return None
    lost = _comments(_plain(ours, raw)) - _comments(_plain(result, raw)) if same else Counter()
    return result if same and not lost else None


def _comments(text: str) -> Counter[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return Counter(token.string.strip() for token in tokens if token.type == tokenize.COMMENT)


def format_alike(texts: Sequence[str]) -> list[str] | None:
    """Texts as ruff formats them, all in lines as long as the first has them; None where there is no ruff.

    Trailing commas do not keep a call in several lines: whether they are there depends on who formatted it before.
    """
    ruff = _ruff()
    if ruff is None:
        return None
    longest = max((len(line) for line in texts[0].splitlines() if "#" not in line and '"' not in line), default=0)
    width = min(max(longest, _NARROW), _WIDE)
    options = ["--isolated", "--line-length", str(width), "--config", "format.skip-magic-trailing-comma=true"]
    found: list[str] = []
    for text in texts:
        command = [*ruff, "format", *options, "--stdin-filename", "copy.py", "-"]
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, encoding="utf-8", check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        found.append(done.stdout)
    return found


def _ruff() -> list[str] | None:
    """The command of ruff: of this environment, else on the path."""
    if importlib.util.find_spec("ruff") is not None:
        return [sys.executable, "-m", "ruff"]
    path = shutil.which("ruff")
    return [path] if path is not None else None


@dataclass(frozen=True, slots=True)
class _Statement:
    """A simple statement or the head of a compound one: its lines, those of comments before it included."""

    start: int
    stop: int
    key: tuple[int, str]
    """How deep it is indented, and what it says."""


def _statements(lines: Sequence[str], raw: str) -> list[_Statement]:
    return list(_read(_plain(lines, raw), len(lines)))


def _read(text: str, count: int) -> Iterator[_Statement]:
    source = text.split("\n")
    start, depth = 0, 0
    first: tokenize.TokenInfo | None = None
    last = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        if token.type in _SKIPPED:
            continue
        if token.type == tokenize.NEWLINE and first is not None:
            said = "\n".join(source[first.start[0] - 1 : token.start[0]])[first.start[1] :]
            yield _Statement(start, token.start[0], (depth, _meaning(said, first.string, is_head=last == ":")))
            start, first = token.start[0], None
        elif token.type != tokenize.ENDMARKER:
            first, last = first or token, token.string
    if start < count:
        yield _Statement(start, count, (0, ""))


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
