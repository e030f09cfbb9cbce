"""Tell a misspelt name from another one, at a bounded cost."""

from __future__ import annotations

from typing import Final

_SHORTEST: Final = 6
"""Names of up to this many letters are too short for one letter to be a slip and not another word."""


def is_similar(name: str, known: str) -> bool:
    """Whether a name is probably a known one misspelt: a few letters wrong, missing, added or exchanged.

    Upper and lower case, ``-`` and ``_`` are the same. One letter in eight may be wrong at most, so that ``threshold``
    is not taken for ``xtc_threshold``; of a name of up to six letters none: ``sigma`` is another word than ``nsigma``.
    """
    one, other = _folded(name), _folded(known)
    limit = (len(other) + 3) // 8 if len(other) > _SHORTEST else 0
    return abs(len(one) - len(other)) <= limit and _distance(one, other, limit) <= limit


def _folded(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _distance(one: str, other: str, limit: int) -> int:
    """The number of edits from one text to the other, exchanges of neighbours included; ``limit + 1`` for any more."""
    start = 0
    while start < min(len(one), len(other)) and one[start] == other[start]:
        start += 1
    one, other = one[start:], other[start:]
    end = 0
    while end < min(len(one), len(other)) and one[-1 - end] == other[-1 - end]:
        end += 1
    one, other = one[: len(one) - end], other[: len(other) - end]
    before: list[int] = []
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        before, last, row = row, before, [number]
        for at, theirs in enumerate(other, 1):
            cost = min(row[-1] + 1, before[at] + 1, before[at - 1] + (letter != theirs))
            if number > 1 and at > 1 and letter == other[at - 2] and one[number - 2] == theirs:
                cost = min(cost, last[at - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
    return row[-1]
