"""Counting how often a hook was called: the proof that a patch is not only applied but runs."""

from __future__ import annotations

from typing import Protocol


class Cells(Protocol):
    """A row of integers: a list, an array, a view of shared memory."""

    def __getitem__(self, at: int, /) -> int: ...

    def __setitem__(self, at: int, count: int, /) -> None: ...


class Tally(Protocol):
    """Where hits are counted: a row of integers, and who may use which.

    ``cells`` is read anew at each hit, so that a process may put other memory there, for instance after a fork.
    """

    @property
    def cells(self) -> Cells:
        """The integers in which hits are counted."""
        ...

    def allot(self, key: str) -> int:
        """The index of the cell of ``key``; the same key gets the same cell again."""
        ...


class LocalTally:
    """A tally in this process's own memory."""

    def __init__(self) -> None:
        self.cells: list[int] = []
        self._indices: dict[str, int] = {}

    def allot(self, key: str) -> int:
        """The index of the cell of ``key``, made on first use."""
        if key not in self._indices:
            # The cell before its index: whoever is interrupted between them leaves a spare cell, and no index too many.
            self.cells.append(0)
            self._indices[key] = len(self.cells) - 1
        return self._indices[key]
