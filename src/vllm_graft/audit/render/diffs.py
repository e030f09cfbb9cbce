"""Unified diffs taken apart: which lines are new, which are gone, which only say where."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

Part = Literal["head", "hunk", "added", "removed", "context"]


def parts(diff: str) -> Iterator[tuple[Part, list[str]]]:
    """Runs of lines of one kind, in order. What stands before the first hunk is its head."""
    for part, run in itertools.groupby(_told(diff), key=lambda pair: pair[0]):
        yield part, [line for _, line in run]


def changed_lines(diff: str) -> tuple[int, int]:
    """How many lines are new and how many are gone."""
    kinds = [part for part, _ in _told(diff)]
    return kinds.count("added"), kinds.count("removed")


def _told(diff: str) -> Iterator[tuple[Part, str]]:
    # Only a newline ends a line of a diff: splitlines() would also cut at a form feed within one.
    lines = diff.removesuffix("\n").split("\n") if diff else []
    inside = not any(line.startswith("@@") for line in lines)
    for line in lines:
        inside = inside or line.startswith("@@")
        yield _part(line) if inside else "head", line


def _part(line: str) -> Part:
    if line.startswith("@@"):
        return "hunk"
    if line.startswith("+"):
        return "added"
    return "removed" if line.startswith("-") else "context"
