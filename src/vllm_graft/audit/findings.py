"""Turn verdicts into findings: code, level, and the next step."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from vllm_graft.audit.compatibility import (
    find_unsupported_call,
    refuses_new_calls,
    takes_every_call,
    vanished_attributes,
)
from vllm_graft.audit.model import PackageUses, PatchDeclaration, ReportCell, ReportRow, Use, VerdictState, Way, line_at
from vllm_graft.audit.releases.release import FOREIGN, Release, Shape, alternatives
from vllm_graft.audit.uses import body_dependencies, is_class_method
from vllm_graft.audit.verdicts import ReleaseFacts, find_owner, find_shape, is_on_demand
from vllm_graft.findings import Finding, Level
from vllm_graft.patching.checks import ENUMS, refuse_enum_value
from vllm_graft.patching.functions import parameter_mismatch, parameters_from_tokens, parameters_in_source
from vllm_graft.sources.fingerprint import Function, parse_parameter
from vllm_graft.sources.scopes import dotted
from vllm_graft.versions import InstalledVersion, includes

# The code, the sentence and the next step for each state.
_RULES: Final[Mapping[VerdictState, tuple[str, str, str]]] = {
    "gone": ("P201", "it is gone", "find what took its place, or limit the code to the releases that have it"),
    "broken": ("P202", "its signature has changed", "fit the code to the new parameters"),
    "body": ("P203", "its code has changed", "read the diff, and carry over what it needs"),
    "fixed": ("P204", "the patch is no longer needed", "remove the patch, or limit it to older releases"),
    "moved": ("P205", "it has moved", "name the new place"),
    "kind": ("P206", "it is another kind of thing", "write it anew for what is there now"),
    "inherited": ("P207", "it is inherited now", "decide whether the base class is what you mean, and name it"),
    "uncalled": (
        "P208", "nothing calls it any more", "find what vLLM calls instead: the change has no effect any more"
    ),
    "extended": ("P209", "its signature has grown", "accept the new parameters and hand them on"),
    "grown": ("P212", "upstream has a name of its own there", "choose another name, or use upstream's"),
    "absent": (
        "P213", "it is in neither release",
        "correct the name, remove the code, or say with --base which release it is for",
    ),
}  # fmt: skip

# The same for states that mean something else in one way of using a name.
_RULES_BY_WAY: Final[Mapping[tuple[Way, VerdictState], tuple[str, str, str]]] = {
    ("call", "misfit"): ("P215", "the call fails", "pass what it takes now"),
    ("subclass", "misfit"): ("P216", "no object of the subclass can be made", "define the method in the subclass"),
    ("read", "gone"): (
        "P217",
        "the attribute is gone",
        "find what took its place, or read it with a default: getattr(object, name, None)",
    ),
    ("read", "absent"): ("P217", *_RULES["absent"][1:]),
}

# The difflib ratio from which two names count as one misspelt: one letter of eight.
_NEAR: Final = 0.87


def findings_for(
    row: ReportRow, releases: Mapping[str, Release], known: Mapping[str, Sequence[Release]]
) -> Iterator[Finding]:
    """Report one use; ``known`` are other releases that its code may have been written for, by each that it is for."""
    use = row.use
    for cell in row.cells:
        state = cell.verdict.state
        old, new = releases.get(cell.since), releases.get(cell.release)
        was, now = (find_shape(release, use) if release is not None else None for release in (old, new))
        code, sentence, fix = _RULES_BY_WAY.get((use.way, state)) or _RULES.get(state, ("", "", ""))
        level: Level = "info"
        # The code may mean another name that the release has.
        several = bool(use.alternatives) and (new is None or bool(ReleaseFacts(new).open_alternatives(use)))
        # A patch lost its target, and a test or a handler around it hides that.
        lost = state in ("gone", "moved") and use.way in ("replace", "wrap", "delete")
        if lost and cell.verdict.standing != "runs":
            gone = _describe(sentence, cell)
            what = f"{gone}, and the code around it silently continues: the patch no longer applies"
            yield _finding("P221", "error", use, what, fix)
        elif code:
            level = _level(use, cell, was, now, several=several)
            if level == "error" and state in ("broken", "extended") and new and takes_every_call(use, new):
                level = "info"
            yield _finding(code, level, use, _describe(sentence, cell), fix)
        if old is not None and new is not None and state not in ("gone", "moved", "absent", ""):
            facts, before = ReleaseFacts(new), (old, *known.get(cell.release, ()))
            on_class = use.body is not None and is_class_method(use.body)
            for name, place, version in vanished_attributes(use, before, new):
                if facts.runs(use.branches, place):
                    owner, to = use.container, cell.release
                    what = f"the code reads self.{name}, which {owner} had in {version} but no longer has in {to}"
                    if on_class:
                        what = f"the code calls cls.{name}, which {owner} had in {version} but no longer has in {to}"
                    yield _finding("P210", "error", use, what, "find what took its place", line_at(place))
            if use.body is not None and was is not None and now is not None:
                # Keyword arguments that the code passes to the original, and that it no longer takes.
                taken = [[token for token in one.signature[1:] if token[:1] not in "*/"] for one in (was, now)]
                had, has = ({parse_parameter(token).name for token in tokens} for tokens in taken)
                anything = any(token.startswith("**") for token in now.signature)
                for name, place in body_dependencies(use).keywords.items() if not anything else ():
                    if name in had - has and facts.runs(use.branches, place):
                        what = f"the code passes {name}= to the original, which no longer takes it in {cell.release}"
                        yield _finding("P211", "error", use, what, "pass what it takes now", line_at(place))
            if level != "error" or state not in ("broken", "extended"):
                said, reason = find_unsupported_call(use, before, new)
                if said:
                    what = f"it does not take what upstream passes in {cell.release}: {said}"
                    what += f"; {reason}" if reason else f"; nor in {cell.since}"
                    other = ", or choose a name of your own" if use.way == "override" else ""
                    fix = f"accept the parameters and hand them on{other}"
                    sure = bool(reason) and cell.verdict.standing == "runs" and not (several or use.fallback)
                    yield _finding("P218", "error" if sure else "warning", use, what, fix)


def _finding(code: str, level: Level, use: Use, what: str, fix: str, line: int | None = None) -> Finding:
    """Report a use, or a line of the body that replaces upstream's."""
    where = use.where if line is None else f"{use.body_file or use.file}:{line}"
    return Finding(code, level, f"{use.way} {use.name}", what, where, fix)


def is_for(releases: str, version: str) -> bool:
    """Return whether a range has a release; a development build, whose number says nothing, is in every range."""
    known = InstalledVersion(version).releases
    return not known or includes(releases, known[0])


def start_refusals(package: PackageUses, release: Release) -> Iterator[Finding]:
    """Report what a start with a release refuses of patches made with vllm-graft: their range, or their form."""
    hooks: dict[tuple[str, str, str], list[tuple[Use, PatchDeclaration]]] = {}
    for use in package.uses:
        patch = use.patch
        if patch is None:
            continue
        hooks.setdefault((use.file, patch.name, use.qualname), []).append((use, patch))
        if patch.locked and not patch.reviewed and use.way != "add":
            what = "it declares locked=True, but its package's patches.lock has no entry for it: a start refuses it"
            fix = f"run `vllm-graft lock {patch.name}`, and put patches.lock into the wheel as package data"
            yield _finding("P224", "error", use, what, fix)
        if not is_for(patch.vllm, release.version):
            what = f"it is for vLLM {patch.vllm}, so a start with {release.version} refuses it"
            fix = "read what has become of its target, and widen vllm=; or leave the patch out from this release on"
            yield Finding("P222", "error", f"patch {patch.name}", what, f"{use.file}:{patch.line}", fix)
        elif is_for(patch.releases, release.version) and (form := _form_change(use, release)):
            what = f"{form}, so a start with {release.version} refuses it"
            yield _finding("P222", "error", use, what, "write the patch for what is there")
    for bodies in hooks.values():
        use, patch = bodies[0]
        ranges = [each.releases for _, each in bodies]
        fitting = [one for one in ranges if is_for(one, release.version)]
        if len(fitting) != 1 and is_for(patch.vllm, release.version):
            count = "no body" if not fitting else f"{len(fitting)} bodies"
            what = f"{count} of {use.attribute!r} ({' and '.join(ranges)}) for {release.version}: a start refuses it"
            fix = "make the ranges of its bodies cover each release once"
            yield Finding("P222", "error", f"patch {patch.name}", what, use.where, fix)


# Methods that Python makes static or class methods without a decorator.
_SPECIAL: Final = frozenset({"__new__", "__init_subclass__", "__class_getitem__"})


def _form_change(use: Use, release: Release) -> str:
    """Explain how a hook's form differs from what upstream has in its place; empty if it does not."""
    now = find_shape(release, use) if use.way != "add" else None
    above = find_owner(release, use) if use.container else None
    if above is not None and above.kind == "function":
        return f"its target is a {above.kind} upstream, but only classes and modules can be patched"
    if is_on_demand(use) and use.patch is not None and use.patch.marked and use.way != "add":
        return f"there is no {use.attribute!r} to {use.way}: vllm.envs reads it from the environment on demand"
    if above is not None and above.kind == "class" and now is not None and not isinstance(use.body, Function):
        enum = use.body is None and release.outside(above.module, above.qualname) & ENUMS
        if enum:
            return refuse_enum_value(use.attribute, above.qualname)[0]
    if now is None or use.attribute in _SPECIAL or now.kind in ("value", "module", FOREIGN):
        return ""
    if not isinstance(use.body, Function):
        return ""
    marks = {dotted(one).rpartition(".")[2] for one in use.body.decorator_list}
    mine = next((form for form in ("classmethod", "staticmethod", "property") if form in marks), "function")
    if mine != now.kind and not (mine == "staticmethod" and not use.container):
        return f"{use.attribute!r} is a {now.kind} upstream but a {mine} in the patch"
    taken = alternatives(now.signature)
    if mine == "property" or len(taken) != 1:
        return ""
    own = use.patch.function if use.patch is not None else None
    if own is not None and now.function is not None and own != now.function:
        return f"{use.attribute!r} is a {now.function} function upstream but a {own} function in the patch"
    if now.opaque:
        return ""
    # The same check as a start makes, so that both say the same.
    bound = bool(use.container) and mine != "staticmethod"
    ours = parameters_in_source(use.body.args)
    place = 1 if bound else 0
    call = place if use.way == "wrap" and len(ours) > place and ours[place].name == "call" else None
    return parameter_mismatch(use.attribute, ours, parameters_from_tokens(taken[0]), call, bound)


def misspellings(use: Use, base: Release) -> Iterator[Finding]:
    """Report a name that a package adds where vLLM has one that is nearly the same."""
    name = use.attribute
    known = base.attributes(use.module, use.container) or frozenset()
    near = difflib.get_close_matches(name, known - {name}, 1, _NEAR) if name not in known else []
    if not near or use.patch is not None:
        return
    # ``Engine._orig_step = Engine.step``, ``step_v2``: a name of its own, made from upstream's on purpose.
    stem = re.escape(near[0].lstrip("_"))
    if re.fullmatch(rf"\w*_{stem}(_\w+|\d+)?|_*{stem}(_\w+|\d+)", name):
        return
    what = f"it is added, but {near[0]!r} exists in {base.version}: an assignment to a misspelt name has no effect"
    yield Finding("P213", "warning", f"add {use.name}", what, use.where, "correct the name if that one is meant")


def _describe(sentence: str, cell: ReportCell) -> str:
    detail = f": {cell.verdict.detail}" if cell.verdict.detail else ""
    if cell.verdict.state == "absent" and cell.since == cell.release:
        return f"it is not in {cell.release}{detail}"
    if cell.verdict.state == "absent":
        return f"{sentence}, {cell.since} or {cell.release}{detail}"
    if cell.verdict.state == "misfit":
        return f"{sentence} in {cell.release}{detail}"
    return f"{sentence} from {cell.since} to {cell.release}{detail}"


def _level(use: Use, cell: ReportCell, was: Shape | None, now: Shape | None, *, several: bool) -> Level:
    """Return how serious a verdict is; ``several`` says that the code may mean another name."""
    state = cell.verdict.state
    provided = cell.verdict.standing in ("caught", "unsure", "unmet") or several or use.fallback
    if use.way in ("call", "read"):
        # An override whose method is gone is never called, so its call of ``super()`` does not fail either.
        dead = use.via_super and state != "misfit" and use.owner.rpartition(".")[2] == use.attribute
        if state == "broken":
            # The call is accepted, and its arguments mean something else.
            return "info" if provided else "warning"
        return "info" if provided else "warning" if dead else "error"
    if state == "misfit":
        return "info" if provided else "error" if cell.verdict.fitted else "warning"
    if state in ("gone", "moved", "kind", "absent"):
        return "info" if provided else "warning" if use.way == "override" else "error"
    if state in ("broken", "extended"):
        if use.way in ("import", "subclass"):
            return "warning" if state == "broken" else "info"
        if use.constructed_here and use.attribute == "__init__" and use.container:
            return "info"
        if use.body is None or now is None:
            # The replacement is a class, a value, or a function that is not in sight.
            return "warning" if state == "broken" and use.way != "delete" else "info"
        return "error" if refuses_new_calls(use, was, now) else "info"
    if state == "body":
        reviewed = use.patch is not None and cell.release in use.patch.reviewed
        return "info" if use.way not in ("replace", "delete") or reviewed else "warning"
    if state == "grown":
        return "warning" if use.patch is None else "error"
    return "error" if state == "uncalled" else "warning"
