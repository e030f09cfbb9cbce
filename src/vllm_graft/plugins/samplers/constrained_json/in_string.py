"""The inside of a JSON string, byte by byte: plain text in valid UTF-8, escapes, and surrogates in pairs only."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

PLAIN: Final = 0
"""The mode in which a string begins, and in which its closing quote may come."""

CLOSED: Final = 254
"""The mode after the closing quote."""

NOWHERE: Final = 255
"""The mode after a byte that may not come."""

_HEX: Final = b"0123456789abcdefABCDEF"
_ONE, _TWO, _THREE = ((0x80, 0xBF),), ((0x80, 0xBF),) * 2, ((0x80, 0xBF),) * 3
_SEQUENCES: Final = (
    # Lead bytes, then the range of each byte that follows: overlong forms and surrogates are not UTF-8.
    ((0xC2, 0xDF), _ONE),
    ((0xE0, 0xE0), ((0xA0, 0xBF), *_ONE)),
    ((0xE1, 0xEC), _TWO),
    ((0xED, 0xED), ((0x80, 0x9F), *_ONE)),
    ((0xEE, 0xEF), _TWO),
    ((0xF0, 0xF0), ((0x90, 0xBF), *_TWO)),
    ((0xF1, 0xF3), _THREE),
    ((0xF4, 0xF4), ((0x80, 0x8F), *_TWO)),
)


def _tables() -> tuple[bytes, ...]:
    """Make one table of 256 bytes per mode: where each byte leads."""
    rows: list[bytearray] = []

    def new() -> int:
        rows.append(bytearray([NOWHERE] * 256))
        return len(rows) - 1

    def lead(mode: int, over: Iterable[int], to: int) -> None:
        for byte in over:
            rows[mode][byte] = to

    @functools.cache
    def through(*sets: bytes) -> int:
        """Return the mode from which one byte out of each set, in order, leads back to plain text."""
        if not sets:
            return PLAIN
        mode = new()
        lead(mode, sets[0], through(*sets[1:]))
        return mode

    assert new() == PLAIN
    lead(PLAIN, range(0x20, 0x80), PLAIN)
    lead(PLAIN, b'"', CLOSED)
    for (low, high), following in _SEQUENCES:
        lead(PLAIN, range(low, high + 1), through(*(bytes(range(first, last + 1)) for first, last in following)))
    escape = new()
    lead(PLAIN, b"\\", escape)
    lead(escape, b'"\\/bfnrt', PLAIN)
    code = new()
    lead(escape, b"u", code)
    lead(code, _HEX, through(_HEX, _HEX, _HEX))
    # \uD800 to \uDBFF must be followed by one of \uDC00 to \uDFFF: alone, many parsers refuse either.
    surrogate = new()
    lead(code, b"dD", surrogate)
    lead(surrogate, b"01234567", through(_HEX, _HEX))
    lead(surrogate, b"89abAB", through(_HEX, _HEX, b"\\", b"u", b"dD", b"cdefCDEF", _HEX, _HEX))
    return tuple(bytes(row) for row in rows)


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
