"""The inside of a JSON string, byte by byte: plain text in valid UTF-8, escapes, and surrogates in pairs only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

PLAIN: Final = 0
"""Where a string begins, and where its closing quote may come."""

CLOSED: Final = 254
"""What the closing quote leads to."""

NOWHERE: Final = 255
"""What a byte leads to that may not come."""

_HEX: Final = b"0123456789abcdefABCDEF"
_ONE, _TWO, _THREE = ((0x80, 0xBF),), ((0x80, 0xBF),) * 2, ((0x80, 0xBF),) * 3
_SEQUENCES: Final = (
    # Lead bytes, then the range of each byte that follows: overlong forms and surrogates are no UTF-8.
    ((0xC2, 0xDF), _ONE),
    ((0xE0, 0xE0), ((0xA0, 0xBF), *_ONE)),
    ((0xE1, 0xEC), _TWO),
    ((0xED, 0xED), ((0x80, 0x9F), *_ONE)),
    ((0xEE, 0xEF), _TWO),
    ((0xF0, 0xF0), ((0x90, 0xBF), *_TWO)),
    ((0xF1, 0xF3), _THREE),
    ((0xF4, 0xF4), ((0x80, 0x8F), *_TWO)),
)


class _Tables:
    """Grows one table of 256 bytes per mode: where each byte leads."""

    def __init__(self) -> None:
        self.rows: list[bytearray] = []
        self._known: dict[tuple[bytes, ...], int] = {}
        self.new()

    def new(self) -> int:
        self.rows.append(bytearray([NOWHERE] * 256))
        return len(self.rows) - 1

    def lead(self, mode: int, over: Iterable[int], to: int) -> None:
        for byte in over:
            self.rows[mode][byte] = to

    def through(self, sets: tuple[bytes, ...]) -> int:
        """Return the mode from which one byte out of each set, in order, leads back to plain text."""
        if not sets:
            return PLAIN
        if sets not in self._known:
            self._known[sets] = self.new()
            self.lead(self._known[sets], sets[0], self.through(sets[1:]))
        return self._known[sets]


def _tables() -> tuple[bytes, ...]:
    tables = _Tables()
    tables.lead(PLAIN, range(0x20, 0x80), PLAIN)
    tables.lead(PLAIN, b'"', CLOSED)
    for (low, high), following in _SEQUENCES:
        sets = tuple(bytes(range(first, last + 1)) for first, last in following)
        tables.lead(PLAIN, range(low, high + 1), tables.through(sets))
    escape = tables.new()
    tables.lead(PLAIN, b"\\", escape)
    tables.lead(escape, b'"\\/bfnrt', PLAIN)
    code = tables.new()
    tables.lead(escape, b"u", code)
    tables.lead(code, _HEX, tables.through((_HEX, _HEX, _HEX)))
    # \uD800 to \uDBFF must be followed by one of \uDC00 to \uDFFF: alone, many parsers refuse either.
    surrogate = tables.new()
    tables.lead(code, b"dD", surrogate)
    tables.lead(surrogate, b"01234567", tables.through((_HEX, _HEX)))
    tables.lead(surrogate, b"89abAB", tables.through((_HEX, _HEX, b"\\", b"u", b"dD", b"cdefCDEF", _HEX, _HEX)))
    return tuple(bytes(row) for row in tables.rows)


def _costs(tables: tuple[bytes, ...]) -> tuple[int, ...]:
    """Return the fewest bytes from each mode to behind the closing quote."""
    costs = {CLOSED: 0}
    while len(costs) <= len(tables):
        reached = {
            mode: 1 + min(costs[to] for to in set(row) & costs.keys())
            for mode, row in enumerate(tables)
            if mode not in costs and set(row) & costs.keys()
        }
        costs.update(reached)
    return tuple(costs[mode] for mode in range(len(tables)))


NEXT: Final = _tables()
"""``NEXT[mode][byte]``: the mode that follows, CLOSED or NOWHERE."""

COST: Final = _costs(NEXT)
"""``COST[mode]``: how many bytes it takes at least to close the string."""
