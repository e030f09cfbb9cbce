"""Verdicts that a person has to know of: code, level, and the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from vllm_graft.audit.compatibility import refuses, takes_every_call, uncallable, vanished
from vllm_graft.audit.model import Cell, PackageUses, ReportRow, Use, VerdictState, Way
from vllm_graft.audit.releases.release import FOREIGN, Release, Shape, alternatives
from vllm_graft.audit.uses import body_dependencies
from vllm_graft.audit.verdicts import ReleaseFacts, located
from vllm_graft.findings import Finding, Level
from vllm_graft.patching.functions import parameter_mismatch, parameters_from_tokens, parameters_in_source
from vllm_graft.patching.upstream.fingerprint import Function
from vllm_graft.patching.upstream.scopes import dotted
from vllm_graft.versions import InstalledVersion, includes

CODES: Final[Mapping[VerdictState, str]] = {
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

_BY_WAY: Final[Mapping[tuple[Way, VerdictState], str]] = {
    ("call", "misfit"): "P215",
    ("subclass", "misfit"): "P216",
    ("read", "gone"): "P217",
    ("read", "absent"): "P217",
}
"""Codes that are for one way of using a name."""

_WHAT: Final[Mapping[VerdictState, str]] = {
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

_WHAT_BY_WAY: Final[Mapping[tuple[Way, VerdictState], str]] = {
    ("call", "misfit"): "the call fails",
    ("subclass", "misfit"): "no object of the subclass can be made",
    ("read", "gone"): "the attribute is gone",
}

_FIX: Final[Mapping[VerdictState, str]] = {
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

_FIX_BY_WAY: Final[Mapping[tuple[Way, VerdictState], str]] = {
    ("subclass", "misfit"): "define the method in the subclass",
    ("read", "gone"): "find what took its place, or read it with a default: getattr(object, name, None)",
}

_NEAR: Final = 0.87
"""How alike two names are that are taken for one, by difflib's ratio: one letter of eight."""


def reported(row: ReportRow, releases: Mapping[str, Release], known: Sequence[Release] = ()) -> Iterator[Finding]:
    """What is to be said of one use; ``known`` are other releases that its code may have been written for."""
    for cell in row.cells:
        state = cell.verdict.state
        old, new = releases.get(cell.since), releases.get(cell.release)
        now = located(new, row.use) if new is not None else None
        code = _BY_WAY.get((row.use.way, state), CODES.get(state, ""))
        level: Level = "info"
        if _stops_silently(row.use, cell):
            what = f"{_said(row.use, cell)}, and the code around it goes on without a word: the patch no longer applies"
            yield _finding("P221", "error", row, cell, what, _FIX[state])
        elif code:
            was = located(old, row.use) if old is not None else None
            level = _level(row.use, cell, was, now)
            if level == "error" and state in ("broken", "extended") and new and takes_every_call(row.use, new):
                level = "info"
            fix = _FIX_BY_WAY.get((row.use.way, state), _FIX[state])
            yield _finding(code, level, row, cell, _said(row.use, cell), fix)
        if old is not None and new is not None and state not in ("gone", "moved", "absent", ""):
            facts = ReleaseFacts(new)
            yield from _vanished(row, cell, (old, *known), new, facts)
            yield from _refused(row, cell, old, now, facts)
            if level != "error" or state not in ("broken", "extended"):
                yield from _uncallable(row, cell, (old, *known), new)


def is_for(releases: str, version: str) -> bool:
    """Whether a range has a release; a development build, whose number says nothing, is in every one."""
    known = InstalledVersion(version).releases
    return not known or includes(releases, known[0])


def refused(reading: PackageUses, release: Release) -> Iterator[Finding]:
    """What a start with a release says of patches made with vllm-graft: not in their range, or of another form."""
    uses = [use for use in reading.uses if use.patch is not None]
    hooks: dict[tuple[str, str, str], list[Use]] = {}
    for use in uses:
        assert use.patch is not None
        if use.patch.locked and not use.patch.reviewed and use.way != "add":
            what = "it says locked=True, and no patches.lock of its package speaks of it: a start refuses it"
            fix = f"run `vllm-graft lock {use.patch.name}`, and put patches.lock into the wheel as package data"
            yield Finding("P224", "error", f"{use.way} {use.name}", what, use.where, fix)
        hooks.setdefault((use.file, use.patch.name, use.qualname), []).append(use)
        if not is_for(use.patch.vllm, release.version):
            what = f"it is for vLLM {use.patch.vllm}, and a start with {release.version} refuses it"
            fix = "read what has become of its target, and widen vllm=; or leave the patch out from this release on"
            yield Finding("P222", "error", f"patch {use.patch.name}", what, f"{use.file}:{use.patch.line}", fix)
        elif is_for(use.patch.releases, release.version) and (form := _form_change(use, release)):
            what = f"{form}, and a start with {release.version} refuses it"
            yield Finding(
                "P222", "error", f"{use.way} {use.name}", what, use.where, "write the patch for what is there"
            )
    for (_, name, qualname), bodies in hooks.items():
        ranges = [use.patch.releases for use in bodies if use.patch is not None]
        fitting = [one for one in ranges if is_for(one, release.version)]
        if len(fitting) != 1 and is_for(_range(bodies[0]), release.version):
            count = "no body" if not fitting else f"{len(fitting)} bodies"
            attribute = qualname.rpartition(".")[2]
            what = f"{count} of {attribute!r} ({' and '.join(ranges)}) for {release.version}: a start refuses it"
            fix = "make the ranges of its bodies cover each release once"
            yield Finding("P222", "error", f"patch {name}", what, bodies[0].where, fix)


def _range(use: Use) -> str:
    return use.patch.vllm if use.patch is not None else ""


_SPECIAL: Final = frozenset({"__new__", "__init_subclass__", "__class_getitem__"})
"""Methods that Python itself makes static or class methods."""


def _form_change(use: Use, release: Release) -> str:
    """What a hook is and what upstream has in its place, where these are of different forms."""
    now = located(release, use) if use.way != "add" else None
    attribute = use.qualname.rpartition(".")[2]
    above = located(release, replace(use, qualname=use.qualname.rpartition(".")[0])) if "." in use.qualname else None
    if above is not None and above.kind == "function":
        return f"its target is a {above.kind} upstream, and only classes and modules can be patched"
    if (
        now is None
        or attribute in _SPECIAL
        or now.kind in ("value", "module", FOREIGN)
        or not isinstance(use.body, Function)
    ):
        return ""
    marks = {dotted(one).rpartition(".")[2] for one in use.body.decorator_list}
    mine = next((form for form in ("classmethod", "staticmethod", "property") if form in marks), "function")
    if mine == now.kind or (mine == "staticmethod" and "." not in use.qualname):
        return _arguments_refused(use, now, mine)
    return f"{attribute!r} is a {now.kind} upstream and a {mine} in the patch"


def _arguments_refused(use: Use, now: Shape, form: str) -> str:
    """Why a hook cannot take what upstream's function takes, as a start says it."""
    taken = alternatives(now.signature)
    if use.body is None or form == "property" or len(taken) != 1 or now.opaque:
        return ""
    in_class = "." in use.qualname
    bound = in_class and form != "staticmethod"
    ours = parameters_in_source(use.body.args)
    place = 1 if bound else 0
    call = place if use.way == "wrap" and len(ours) > place and ours[place].name == "call" else None
    attribute = use.qualname.rpartition(".")[2]
    return parameter_mismatch(attribute, ours, parameters_from_tokens(taken[0]), call, bound)


def misspelt(use: Use, base: Release) -> Iterator[Finding]:
    """What is to be said of a name that a package adds, where vLLM has one that is nearly the same."""
    above, _, name = use.qualname.rpartition(".")
    known = base.attributes(use.module, above) or frozenset()
    near = difflib.get_close_matches(name, known - {name}, 1, _NEAR) if name not in known else []
    if near and use.patch is None and not _keeps(name, near[0]):
        what = (
            f"it is added, and {near[0]!r} is there in {base.version}: an assignment to a misspelt name has no effect"
        )
        yield Finding("P213", "warning", f"add {use.name}", what, use.where, "correct the name if that one is meant")


def _keeps(name: str, original: str) -> bool:
    """Whether a name is what the original is kept under: ``_orig_step = Engine.step``."""
    prefix, _, rest = name.lstrip("_").partition("_")
    return prefix.lower().startswith(("orig", "old", "prev", "saved", "real")) and rest == original.lstrip("_")


def _said(use: Use, cell: Cell) -> str:
    state = cell.verdict.state
    detail = f": {cell.verdict.detail}" if cell.verdict.detail else ""
    if state == "absent":
        return f"{_WHAT['absent']}, {cell.since} or {cell.release}{detail}"
    what = _WHAT_BY_WAY.get((use.way, state), _WHAT[state])
    if state == "misfit":
        return f"{what} in {cell.release}{detail}"
    return f"{what} from {cell.since} to {cell.release}{detail}"


def _finding(code: str, level: Level, row: ReportRow, cell: Cell, what: str, fix: str) -> Finding:
    return Finding(code, level, f"{row.use.way} {row.use.name}", what, row.use.where, fix)


def _level(use: Use, cell: Cell, was: Shape | None, now: Shape | None) -> Level:
    state = cell.verdict.state
    provided = cell.verdict.standing in ("caught", "unsure", "unmet") or bool(use.alternatives) or use.fallback
    if use.way in ("call", "read"):
        # An override whose method is gone is not called, and what it hands on to neither.
        dead = use.above and state != "misfit" and use.owner.rpartition(".")[2] == use.qualname.rpartition(".")[2]
        return "info" if provided else "warning" if dead else "error"
    if state == "misfit":
        return "info" if provided else "error" if cell.verdict.fitted else "warning"
    if state in ("gone", "moved", "kind", "absent"):
        return "info" if provided else "warning" if use.way == "override" else "error"
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
    if state == "grown":
        return "warning" if use.patch is None else "error"
    return "error" if state == "uncalled" else "warning"


def _stops_silently(use: Use, cell: Cell) -> bool:
    """Whether a patch has lost its target, and a test or a handler around it lets that pass."""
    lost = cell.verdict.state in ("gone", "moved")
    return lost and use.way in ("replace", "wrap", "delete") and cell.verdict.standing != "runs"


def _parameters(shape: Shape) -> list[str]:
    tokens = shape.signature[1:]
    return [token.removeprefix("kw ").removesuffix("=") for token in tokens if token[:1] not in "*/"]


def _vanished(
    row: ReportRow, cell: Cell, before: Sequence[Release], new: Release, facts: ReleaseFacts
) -> Iterator[Finding]:
    """Attributes that the code reads from ``self``, that the class had, and that it has no more."""
    use = row.use
    owner = use.qualname.rpartition(".")[0]
    for name, line, had in vanished(use, before, new):
        if not facts.runs(use.branches, line):
            continue
        what = f"the code reads self.{name}, which {owner} had in {had} and has no more in {cell.release}"
        place = f"{use.body_file or use.file}:{line}"
        yield Finding("P210", "error", f"{use.way} {use.name}", what, place, "find what took its place")


def _refused(row: ReportRow, cell: Cell, old: Release, now: Shape | None, facts: ReleaseFacts) -> Iterator[Finding]:
    """Keyword arguments that the code hands to the original, and that it no longer takes."""
    use = row.use
    was = located(old, use)
    relied = body_dependencies(use) if use.body is not None else None
    if relied is None or was is None or now is None or any(token.startswith("**") for token in now.signature):
        return
    for name, line in relied.keywords.items():
        if name in _parameters(was) and name not in _parameters(now) and facts.runs(use.branches, line):
            what = f"the code passes {name}= to the original, which takes it no more in {cell.release}"
            place = f"{use.body_file or use.file}:{line}"
            yield Finding("P211", "error", f"{use.way} {use.name}", what, place, "pass what it takes now")


def _uncallable(row: ReportRow, cell: Cell, before: Sequence[Release], new: Release) -> Iterator[Finding]:
    """An override that does not take what upstream's callers pass."""
    said, known = uncallable(row.use, before, new)
    if said:
        what = f"what upstream passes the override does not take in {cell.release}: {said}"
        what += f"; {known}" if known else f"; nor in {cell.since}"
        fix = "accept the parameters and hand them on, or choose a name of your own"
        level: Level = "error" if known and not row.use.guarded else "warning"
        yield Finding("P218", level, f"{row.use.way} {row.use.name}", what, row.use.where, fix)
