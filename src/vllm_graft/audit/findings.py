"""Verdicts that a person has to know of: code, level, and the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from vllm_graft.audit.callers import refuses, uncallable, vanished
from vllm_graft.audit.judging import located
from vllm_graft.audit.model import Cell, Row, State, Use, Way
from vllm_graft.audit.releases.shape import Release, Shape
from vllm_graft.audit.uses import relies
from vllm_graft.findings import Finding, Level

CODES: Final[Mapping[State, str]] = {
    "gone": "P201",
    "broken": "P202",
    "body": "P203",
    "fixed": "P204",
    "moved": "P205",
    "kind": "P206",
    "inherited": "P207",
    "uncalled": "P208",
    "extended": "P209",
    "grown": "P212",
    "absent": "P213",
}

_BY_WAY: Final[Mapping[tuple[Way, State], str]] = {
    ("call", "misfit"): "P215",
    ("subclass", "misfit"): "P216",
    ("read", "gone"): "P217",
    ("read", "absent"): "P217",
}
"""Codes that are for one way of using a name."""

_WHAT: Final[Mapping[State, str]] = {
    "gone": "it is gone",
    "broken": "its signature has changed",
    "body": "its code has changed",
    "fixed": "the patch is no longer needed",
    "moved": "it has moved",
    "kind": "it is another kind of thing",
    "inherited": "it is inherited now",
    "uncalled": "nothing calls it any more",
    "extended": "its signature has grown",
    "grown": "upstream has a name of its own there",
    "absent": "it is in neither release",
    "misfit": "the code does not fit it",
}

_WHAT_BY_WAY: Final[Mapping[tuple[Way, State], str]] = {
    ("call", "misfit"): "the call fails",
    ("subclass", "misfit"): "no object of the subclass can be made",
    ("read", "gone"): "the attribute is gone",
}

_FIX: Final[Mapping[State, str]] = {
    "gone": "find what took its place, or limit the code to the releases that have it",
    "broken": "fit the code to the new parameters",
    "body": "read the diff, and carry over what it needs",
    "fixed": "remove the patch, or limit it to older releases",
    "moved": "name the new place",
    "kind": "write it anew for what is there now",
    "inherited": "decide whether the base class is what you mean, and name it",
    "uncalled": "find what vLLM calls instead: the change has no effect any more",
    "extended": "accept the new parameters and hand them on",
    "grown": "choose another name, or use upstream's",
    "absent": "correct the name, remove the code, or say with --base which release it is for",
    "misfit": "pass what it takes now",
}

_FIX_BY_WAY: Final[Mapping[tuple[Way, State], str]] = {
    ("subclass", "misfit"): "define the method in the subclass",
    ("read", "gone"): "find what took its place, or read it with a default: getattr(object, name, None)",
}

_NEAR: Final = 0.87
"""How alike two names are that are taken for one, by difflib's ratio: one letter of eight."""


def reported(row: Row, releases: Mapping[str, Release], known: Sequence[Release] = ()) -> Iterator[Finding]:
    """What is to be said of one use; ``known`` are other releases that its code may have been written for."""
    for cell in row.cells:
        state = cell.verdict.state
        old, new = releases.get(cell.since), releases.get(cell.release)
        now = located(new, row.use) if new is not None else None
        code = _BY_WAY.get((row.use.way, state), CODES.get(state, ""))
        if code:
            was = located(old, row.use) if old is not None else None
            level = _level(row.use, cell, was, now)
            fix = _FIX_BY_WAY.get((row.use.way, state), _FIX[state])
            yield _finding(code, level, row, cell, _said(row.use, cell), fix)
        if old is not None and new is not None and state not in ("gone", "moved", "absent", ""):
            yield from _vanished(row, cell, (old, *known), new)
            yield from _refused(row, cell, old, now)
            yield from _uncallable(row, cell, (old, *known), new)


def misspelt(use: Use, base: Release) -> Iterator[Finding]:
    """What is to be said of a name that a package adds, where vLLM has one that is nearly the same."""
    above, _, name = use.qualname.rpartition(".")
    known = base.attributes(use.module, above) or frozenset()
    near = difflib.get_close_matches(name, known - {name}, 1, _NEAR) if name not in known else []
    if near and use.patch is None:
        what = (
            f"it is added, and {near[0]!r} is there in {base.version}: an assignment to a misspelt name has no effect"
        )
        yield Finding("P213", "warning", f"add {use.name}", what, use.where, "correct the name if that one is meant")


def _said(use: Use, cell: Cell) -> str:
    state = cell.verdict.state
    detail = f": {cell.verdict.detail}" if cell.verdict.detail else ""
    if state == "absent":
        return f"{_WHAT['absent']}, {cell.since} or {cell.release}{detail}"
    what = _WHAT_BY_WAY.get((use.way, state), _WHAT[state])
    if state == "misfit":
        return f"{what} in {cell.release}{detail}"
    return f"{what} from {cell.since} to {cell.release}{detail}"


def _finding(code: str, level: Level, row: Row, cell: Cell, what: str, fix: str) -> Finding:
    return Finding(code, level, f"{row.use.way} {row.use.name}", what, row.use.where, fix)


def _level(use: Use, cell: Cell, was: Shape | None, now: Shape | None) -> Level:
    state = cell.verdict.state
    if use.way in ("call", "read"):
        # An override whose method is gone is not called, and what it hands on to neither.
        dead = use.above and state != "misfit" and use.owner.rpartition(".")[2] == use.qualname.rpartition(".")[2]
        return "info" if use.guarded else "warning" if dead else "error"
    if state == "misfit":
        return "info" if use.guarded else "error"
    if state in ("gone", "moved", "kind", "absent"):
        return "info" if use.guarded else "warning" if use.way == "override" else "error"
    if state in ("broken", "extended"):
        if use.way in ("import", "subclass"):
            return "warning" if state == "broken" else "info"
        if use.made and use.qualname.endswith(".__init__"):
            return "info"
        if use.body is None or now is None:
            # A class or a value is put there, or a function that is not in sight.
            return "warning" if state == "broken" and use.way != "delete" else "info"
        return "error" if refuses(use, was, now) else "info"
    if state == "body":
        reviewed = use.patch is not None and cell.release in use.patch.reviewed
        return "info" if use.way not in ("replace", "delete") or reviewed else "warning"
    return "error" if state == "uncalled" else "warning"


def _parameters(shape: Shape) -> list[str]:
    tokens = shape.signature[1:]
    return [token.removeprefix("kw ").removesuffix("=") for token in tokens if token[:1] not in "*/"]


def _vanished(row: Row, cell: Cell, before: Sequence[Release], new: Release) -> Iterator[Finding]:
    """Attributes that the code reads from ``self``, that the class had, and that it has no more."""
    use = row.use
    owner = use.qualname.rpartition(".")[0]
    for name, line, had in vanished(use, before, new):
        what = f"the code reads self.{name}, which {owner} had in {had} and has no more in {cell.release}"
        place = f"{use.body_file or use.file}:{line}"
        yield Finding("P210", "error", f"{use.way} {use.name}", what, place, "find what took its place")


def _refused(row: Row, cell: Cell, old: Release, now: Shape | None) -> Iterator[Finding]:
    """Keyword arguments that the code hands to the original, and that it no longer takes."""
    use = row.use
    was = located(old, use)
    relied = relies(use) if use.body is not None else None
    if relied is None or was is None or now is None or any(token.startswith("**") for token in now.signature):
        return
    for name, line in relied.keywords.items():
        if name in _parameters(was) and name not in _parameters(now):
            what = f"the code passes {name}= to the original, which takes it no more in {cell.release}"
            place = f"{use.body_file or use.file}:{line}"
            yield Finding("P211", "error", f"{use.way} {use.name}", what, place, "pass what it takes now")


def _uncallable(row: Row, cell: Cell, before: Sequence[Release], new: Release) -> Iterator[Finding]:
    """An override that upstream's callers do not fit, and did not fit in the base."""
    said, fitted = uncallable(row.use, before, new)
    if said:
        what = f"what upstream passes the override does not take in {cell.release}, nor in {cell.since}: {said}"
        what += f"; it fitted {fitted}" if fitted else ""
        fix = "accept the parameters and hand them on, or choose a name of your own"
        level: Level = "error" if fitted and not row.use.guarded else "warning"
        yield Finding("P218", level, f"{row.use.way} {row.use.name}", what, row.use.where, fix)
