"""The rows of a tally: figures with a place on the board, and the tokens of the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from vllm_graft.ledger import Figures
from vllm_graft.ledger.figures import WINDOW_S

_PARTS: Final = 12


class Row(Figures):
    """The figures of one value, its place on the board, and how many requests are yet to count there."""

    __slots__ = ("index", "live")

    def __init__(self, label: str, value: str, index: int) -> None:
        super().__init__(label, value)
        self.index = index
        self.live = 0


class Window:
    """The tokens of the last minute, in parts of some seconds; what is ``recent`` in a row is the sum of its parts."""

    def __init__(self) -> None:
        self._parts: deque[dict[Row, int]] = deque([{}])
        self._until = 0.0

    def count(self, rows: Iterable[Row], tokens: int) -> None:
        """Tokens were served now that count in these rows."""
        part = self._parts[-1]
        for row in rows:
            row.tokens += tokens
            row.recent += tokens
            part[row] = part.get(row, 0) + tokens

    def move(self, now: float) -> Iterable[Row]:
        """Let go of what is too old; the rows of which something was."""
        if now < self._until:
            return ()
        length = WINDOW_S / _PARTS
        changed: dict[Row, None] = {}
        for _ in range(min(_PARTS, 1 + int((now - self._until) // length))):
            self._parts.append({})
            gone = self._parts.popleft() if len(self._parts) > _PARTS else {}
            for row, tokens in gone.items():
                row.recent -= tokens
                changed[row] = None
        self._until = now + length
        return changed

    def hand_over(self, row: Row, other: Row) -> None:
        """What was counted for one row counts for another from now on."""
        for part in self._parts:
            if row in part:
                part[other] = part.get(other, 0) + part.pop(row)
