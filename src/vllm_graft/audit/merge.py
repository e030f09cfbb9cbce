"""A three-way merge of lines: what two sides made of one text, put together where they do not meet.

It follows ``git merge-file --diff3``: changes that overlap or touch are a conflict, those that both sides made alike
are taken once, and an insertion or a deletion that could stand in several places stands in the last.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

# The names of the three texts in conflict markers.
NAMES: Final = ("ours", "base", "theirs")
_ENDS: Final = re.compile(r"(?<=\n)")


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of a merge.

    text:       the merged text, with git's markers around each conflict
    conflicts:  the lines, from 1, that the conflicts begin at
    ours:       how many changes were taken from our side alone
    theirs:     and from theirs
    alike:      how many were made on both sides alike
    """

    text: str
    conflicts: tuple[int, ...] = ()
    ours: int = 0
    theirs: int = 0
    alike: int = 0


def merge(base: str, ours: str, theirs: str, *, names: tuple[str, str, str] = NAMES, join: int = 0) -> MergeResult:
    """Merge two versions of ``base``; ``names`` are those of ours, the base and theirs in markers.

    Two conflicts with at most ``join`` lines between them become one. ``git merge-file`` does so with 3, unless it is
    given ``--diff3``: the markers of two conflicts would take more lines than the text between them.
    """
    old, left, right = lines(base), lines(ours), lines(theirs)
    merged: list[str] = []
    conflicts: list[int] = []
    taken = {"ours": 0, "theirs": 0, "alike": 0}
    done = 0
    regions = _joined(_regions(_changes(old, left), _changes(old, right)), old, left, right, join)
    for region in regions:
        merged += old[done : region.start]
        done = region.stop
        before = old[region.start : region.stop]
        mine, yours = _side(region.left, region, left, before), _side(region.right, region, right, before)
        if not region.right or mine == yours:
            taken["alike" if region.right else "ours"] += 1
            merged += mine
        elif not region.left:
            taken["theirs"] += 1
            merged += yours
        else:
            _close(merged)
            conflicts.append(len(merged) + 1)
            heads = (f"<<<<<<< {names[0]}\n", f"||||||| {names[1]}\n", "=======\n")
            for head, part in zip(heads, (mine, before, yours), strict=True):
                _close(part)
                merged += [head, *part]
            merged.append(f">>>>>>> {names[2]}\n")
    merged += old[done:]
    return MergeResult("".join(merged), tuple(conflicts), **taken)


def lines(text: str) -> list[str]:
    """Split a text into lines with their ends, as Python's parser counts them: a form feed ends none."""
    return [line for line in _ENDS.split(text) if line]


@dataclass(frozen=True, slots=True)
class _Change:
    """One side has ``[low, high)`` in place of the base's ``[start, stop)``."""

    start: int
    stop: int
    low: int
    high: int


@dataclass(slots=True)
class _Region:
    """Changes that overlap or touch, and the lines of the base that they span."""

    start: int
    stop: int
    left: list[_Change]
    right: list[_Change]


def _changes(base: Sequence[str], side: Sequence[str]) -> Iterator[_Change]:
    """Yield the changes of a side, in the order of the base.

    An insertion or a deletion is moved as far down as possible without changing its effect. Of an inserted "break" and
    blank line after another, either pair may count as the new one. The choice has to be the same on both sides, and the
    last is git's.
    """
    codes = difflib.SequenceMatcher(None, base, side, autojunk=False).get_opcodes()
    found = [where for kind, *where in codes if kind != "equal"]
    starts = [*(start for start, *_ in found), len(base)]
    for (start, stop, low, high), limit in zip(found, starts[1:], strict=True):
        steps = 0
        if start == stop or low == high:
            text, first, last = (base, start, stop) if low == high else (side, low, high)
            while stop + steps < limit and text[first + steps] == text[last + steps]:
                steps += 1
        yield _Change(start + steps, stop + steps, low + steps, high + steps)


def _regions(left: Iterable[_Change], right: Iterable[_Change]) -> Iterator[_Region]:
    """Yield the changes of both sides, grouped where they touch."""
    region: _Region | None = None
    both = [*((one, True) for one in left), *((one, False) for one in right)]
    for change, of_left in sorted(both, key=lambda each: (each[0].start, each[0].stop)):
        if region is None or change.start > region.stop:
            if region is not None:
                yield region
            region = _Region(change.start, change.stop, [], [])
        region.stop = max(region.stop, change.stop)
        (region.left if of_left else region.right).append(change)
    if region is not None:
        yield region


def _joined(
    regions: Iterable[_Region], old: Sequence[str], left: Sequence[str], right: Sequence[str], most: int
) -> Iterator[_Region]:
    """Join neighbouring conflicts with at most ``most`` lines between them."""
    last: _Region | None = None
    for region in regions:
        before = old[region.start : region.stop]
        both = region.left and region.right
        conflict = both and _side(region.left, region, left, before) != _side(region.right, region, right, before)
        if last is not None and conflict and region.start - last.stop <= most:
            last = _Region(last.start, region.stop, last.left + region.left, last.right + region.right)
            continue
        if last is not None:
            yield last
        last = region if conflict else None
        if not conflict:
            yield region
    if last is not None:
        yield last


def _side(changes: Sequence[_Change], region: _Region, side: Sequence[str], before: Sequence[str]) -> list[str]:
    """Return what one side has in place of a region."""
    if not changes:
        return list(before)
    first, last = changes[0], changes[-1]
    return list(side[first.low - (first.start - region.start) : last.high + (region.stop - last.stop)])


def _close(part: list[str]) -> None:
    """End the last line, which would otherwise run into the marker."""
    if part and not part[-1].endswith("\n"):
        part[-1] += "\n"
