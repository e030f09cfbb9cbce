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
_PART: Final = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")


class TomlLines:
    """The places of the keys of one TOML text."""

    def __init__(self, text: str) -> None:
        self._rows = text.splitlines()
        self._at: dict[Path, int] = {}
        self._scan()

    def of(self, path: Path, value: str | None = None) -> int:
        """Return the line of a key, or of one string in its list; 1 if nothing better is known."""
        line = 1
        for length in range(len(path), 0, -1):
            if path[:length] in self._at:
                line = self._at[path[:length]]
                break
        for number, row in enumerate(self._rows[line - 1 :] if value is not None else (), start=line):
            if number > line and (_HEADER.match(row) or _KEY.match(row)):
                break
            if f'"{value}"' in row or f"'{value}'" in row:
                return number
        return line

    def _scan(self) -> None:
        table: Path = ()
        counts: dict[Path, int] = {}
        for number, row in enumerate(self._rows, start=1):
            if header := _HEADER.match(row):
                table = _parts(header[2])
                if header[1] == "[[":
                    index = counts.get(table, 0)
                    counts[table] = index + 1
                    table = (*table, index)
                elif table[:1] in counts:
                    # [profile.options.x] belongs to the last [[profile]] above it.
                    table = (table[0], counts[table[:1]] - 1, *table[1:])
                self._at.setdefault(table, number)
            elif key := _KEY.match(row):
                path: Path = (*table, *_parts(key[1]))
                self._at.setdefault(path, number)


def _parts(dotted: str) -> Path:
    return tuple(a or b or c for a, b, c in _PART.findall(dotted))
