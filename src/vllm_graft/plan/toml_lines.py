"""The lines of the values in a TOML file, for errors.

``tomllib`` returns values without their lines. This scan follows table headers and keys, which is all that our
configuration has; a key inside an inline table gets the line of its nearest parent.
"""

from __future__ import annotations

import re
from typing import Final

Path = tuple[str | int, ...]

_HEADER: Final = re.compile(r"^\s*(\[{1,2})\s*([^\]]+?)\s*\]{1,2}\s*(?:#.*)?$")
_KEY: Final = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=""")
_NO_COMMENT: Final = re.compile(r"""(?:"[^"]*"|'[^']*'|[^#"'])*""")
_PART: Final = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")


class TomlLines:
    """The places of the keys of one TOML text."""

    def __init__(self, text: str) -> None:
        self._rows = text.splitlines()
        self._at: dict[Path, int] = {}
        self._scan()

    def of(self, path: Path, value: str | None = None) -> int:
        """Return the line of a key, or of one string in its list; 1 if nothing better is known."""
        # A table that only its parts have a header for, as in [a.b.c], begins at the first of them.
        parts = [at for key, at in self._at.items() if key[: len(path)] == path]
        line = 1
        for length in range(len(path), 0, -1):
            if path[:length] in self._at:
                line = self._at[path[:length]]
                break
            if length == len(path) and parts:
                line = min(parts)
                break
        return self._line_of_value(line, value) if value is not None else line

    def _line_of_value(self, start: int, value: str) -> int:
        for number in range(start, len(self._rows) + 1):
            row = self._rows[number - 1]
            if number > start and (_HEADER.match(row) or _KEY.match(row)):
                break
            shown = _NO_COMMENT.match(row)
            if shown and (f'"{value}"' in shown[0] or f"'{value}'" in shown[0]):
                return number
        return start

    def _scan(self) -> None:
        table: Path = ()
        counts: dict[Path, int] = {}
        for number, row in enumerate(self._rows, start=1):
            if header := _HEADER.match(row):
                table = _placed(_parts(header[2]), counts)
                if header[1] == "[[":
                    index = counts.get(table, 0)
                    counts[table] = index + 1
                    table = (*table, index)
                self._at.setdefault(table, number)
            elif key := _KEY.match(row):
                path: Path = (*table, *_parts(key[1]))
                self._at.setdefault(path, number)


def _placed(parts: Path, counts: dict[Path, int]) -> Path:
    """Return the path of a header: [profile.options.x] belongs to the last [[profile]] above it."""
    table: Path = ()
    for part in parts[:-1]:
        table = (*table, part)
        if table in counts:
            table = (*table, counts[table] - 1)
    return (*table, *parts[-1:])


def _parts(dotted: str) -> Path:
    return tuple(a or b or c for a, b, c in _PART.findall(dotted))
