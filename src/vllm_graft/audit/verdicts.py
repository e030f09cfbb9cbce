"""Judge one use in two releases: what became of the name, as far as the code that uses it runs."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from vllm_graft.audit.compatibility import judge_call, judge_read, missing_methods
from vllm_graft.audit.model import Branch, Condition, Outcome, Standing, Use, UseGuard, Verdict
from vllm_graft.audit.releases.release import FOREIGN, METHODS, NOT_OURS, Release, Shape, alternatives
from vllm_graft.patching.checks import ENUMS
from vllm_graft.sources.fingerprint import parse_parameter

SAME: Final = Verdict("same")

# The compiled modules of vLLM: ``_C``, ``_moe_C``, ``_C_stable_libtorch``.
_COMPILED: Final = re.compile(r"^vllm\.(\w+\.)?([a-z0-9_]*_C(_\w+)?|cumem_allocator|spinloop|_rust_\w+)\.")
_KINDS: Final = {"FunctionDef": "a plain function", "AsyncFunctionDef": "a coroutine function"}


class ReleaseFacts:
    """Answers the tests around a use for one release; ``outcomes`` holds the conditions evaluated so far."""

    def __init__(self, release: Release) -> None:
        self.release = release
        self._standings: dict[UseGuard, Standing] = {}
        self.outcomes: dict[Condition, Outcome] = {}
        self.version = release.version.partition("+")[0]

    def has(self, module: str, qualname: str) -> bool | None:
        """Return whether a name exists; None if it may exist without being found."""
        use = Use("import", module, qualname, "", 0)
        if find_shape(self.release, use) is not None:
            return True
        return None if _unread(use) else False

    def attribute(self, module: str, qualname: str, name: str) -> bool | None:
        """Return whether a class or module has an attribute; None if the owner itself is missing."""
        owner = Use("import", module, qualname, "", 0)
        found = find_shape(self.release, owner) if module != "vllm" or qualname else None
        if found is not None and found.kind in METHODS:
            # A function has what every function has, and what a decorator may set; not the mark of a patch.
            may_have = found.opaque and (name == "__wrapped__" or not name.startswith("_"))
            return True if hasattr(find_shape, name) else None if may_have else False
        if self.has(module, f"{qualname}.{name}".strip(".")):
            return True
        if found is None or found.kind not in ("class", "module"):
            return None
        known = self.release.attributes(found.module, found.qualname) or frozenset()
        if name in known or self.release.shape(f"{found.module}.{name}", "") is not None:
            return True
        return None if found.qualname and self.release.outside(found.module, found.qualname) else False

    def open_alternatives(self, use: Use) -> tuple[tuple[str, str], ...]:
        """Return the other names that a use may mean in this release: an import in a ``try`` leaves one of several."""
        return tuple(
            (module, qualname)
            for module, qualname in use.alternatives
            if self.has(module, qualname.rpartition(".")[0] or qualname) is not False
        )

    def takes(self, module: str, qualname: str, parameter: str) -> bool | None:
        """Return whether a function or the constructor of a class has a parameter; None if that is not known."""
        found = find_shape(self.release, Use("import", module, qualname, "", 0))
        if found is None or found.opaque:
            return None
        signatures = alternatives(found.signature) if found.kind in METHODS else None
        if found.kind == "class":
            signatures = list(self.release.constructor(found.module, found.qualname) or ())
        if not signatures or len(signatures) > 1:
            return None
        return any(parse_parameter(token).name == parameter for token in signatures[0])

    def standing(self, guard: UseGuard) -> Standing:
        """Return what a guard makes of the code behind it in this release."""
        if guard and guard not in self._standings:
            outcomes = [condition.outcome(self) for condition in guard.conditions]
            stopped = [one for one in outcomes if one.runs is False]
            found: Standing = "unsure" if any(one.runs is None and not one.vague for one in outcomes) else "runs"
            if stopped:
                found = "unmet" if all(one.asked for one in stopped) else "skipped"
            elif guard.caught:
                found = "caught"
            self._standings[guard] = found
        return self._standings[guard] if guard else "runs"

    def runs(self, branches: Sequence[Branch], place: int) -> bool:
        """Return whether a position is certain to be reached once the function around it is called."""
        inside = (condition for condition, first, last in branches if first <= place <= last)
        return all(condition.outcome(self).runs for condition in inside)


@dataclass(frozen=True, slots=True)
class ReleasePair:
    """Two releases to compare.

    silent:  the names that the old one mentions and the new one does not
    known:   others before the new one, for code that was written for an older release than the old one
    """

    old: Release
    new: Release
    silent: frozenset[str] = frozenset()
    known: tuple[Release, ...] = ()
    old_facts: ReleaseFacts = field(init=False, repr=False, compare=False)
    new_facts: ReleaseFacts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "old_facts", ReleaseFacts(self.old))
        object.__setattr__(self, "new_facts", ReleaseFacts(self.new))

    @classmethod
    def of(cls, old: Release, new: Release, uses: Iterable[Use], known: Iterable[Release] = ()) -> ReleasePair:
        """Pair two releases, with the names of patch targets that fell silent between them."""
        names = {use.attribute for use in uses if use.changes_vllm and use.qualname}
        return cls(old, new, new.unmentioned(names) - old.unmentioned(names), tuple(known))

    @property
    def before(self) -> tuple[Release, ...]:
        """The releases that code may have been written for, the old one first."""
        return (self.old, *self.known)

    def judge(self, use: Use) -> Verdict:
        """Judge a use's name from the old release to the new one, as far as the code runs in the new one."""
        stands = self.new_facts.standing(use.guard)
        if stands == "skipped":
            return Verdict("", f"it is not for {self.new.version}, by a test of the version", standing=stands)
        found = self._judge(use)
        if found.state in ("gone", "moved", "absent"):
            return replace(self._missing(use, found, stands), standing=stands)
        if stands == "unmet":
            return Verdict("", f"it does not run in {self.new.version}, by a test for a name", standing=stands)
        if found.state not in ("", "misfit") and self.old_facts.standing(use.guard) == "skipped":
            return Verdict("same", f"the code is not for {self.old.version}")
        return replace(found, standing=stands) if stands != found.standing else found

    def _missing(self, use: Use, found: Verdict, stands: Standing) -> Verdict:
        """Judge a missing name: no loss if the code has something else in its place."""
        elsewhere = next((name for name in use.alternatives if self.new_facts.has(*name)), None)
        if elsewhere is None and use.container and find_owner(self.new, use) is None:
            # Of two classes or modules that a variable may hold, the other one is there.
            elsewhere = next(iter(self.new_facts.open_alternatives(use)), None)
        if elsewhere is not None:
            return Verdict("", f"{':'.join(elsewhere)} is in its place")
        if use.way == "import" and find_owner(self.new, use) is None:
            # ``try: from new import C; except ImportError: from old import C``, and later ``C.attribute``.
            owner = next((name for name in use.owners if self.new_facts.has(*name)), None)
            if owner is not None:
                return Verdict("", f"{':'.join(owner)} is in place of {use.container or use.module}")
        if stands == "runs":
            return found
        if stands == "unmet" and (not use.changes_vllm or found.state == "absent"):
            return Verdict("", f"it does not run in {self.new.version}, by a test for a name")
        if use.changes_vllm and (use.guard.alternative or any(one.alternative for one in use.guard.conditions)):
            return Verdict("", "the code has a fallback for when it is missing")
        return found

    def _judge(self, use: Use) -> Verdict:
        if use.way == "call":
            return judge_call(use, self.before, self.new)
        if use.way == "read":
            return judge_read(use, self.before, self.new)
        missing, is_new = missing_methods(use, self.before, self.new)
        if missing:
            names = ", ".join(map(repr, missing))
            said = f"it does not define {names}, which {'is' if len(missing) == 1 else 'are'} abstract"
            return Verdict("misfit", said if is_new else f"{said}, as before", fitted=is_new)
        was, now = find_shape(self.old, use), find_shape(self.new, use)
        if (was is None or now is None) and (why := _unread(use)):
            return Verdict("", why)
        if use.way == "add" and use.patch is not None and now is not None and not is_on_demand(use):
            return Verdict("grown", f"upstream has a {now.kind} of this name", now.name)
        if was is None:
            if now is None:
                return Verdict("absent")
            if use.way == "override" and use.attribute in self.new.abstract(use.module, use.container or use.module):
                return Verdict("same", "upstream requires it now")
            if use.way in ("add", "override"):
                return Verdict("grown", f"upstream has a {now.kind} of this name now", now.name)
            return Verdict("same", "it is new")
        if now is None:
            added = use.way == "add" and (not use.qualname or find_owner(self.new, use) is not None)
            return SAME if added else self._lost(use, was)
        return self._compare(use, was, now)

    def _lost(self, use: Use, was: Shape) -> Verdict:
        """Judge a name that the new release does not have where it was."""
        before, after = (find_owner(release, use) for release in (self.old, self.new))
        if before is not None and after is not None and before.kind == after.kind == "class":
            # A new base outside vLLM may define what the class no longer does itself.
            outside = (self.new.outside(after.module, after.qualname), self.old.outside(before.module, before.qualname))
            if outside[0] - outside[1]:
                return SAME
        if was.qualname:
            # It may be in a module that did not have it before.
            first, _, rest = was.qualname.partition(".")
            known = {shape.module for shape in self.old.elsewhere(first)}
            fresh = [shape for shape in self.new.elsewhere(first) if shape.module not in known]
            found = [self.new.shape(shape.module, was.qualname) for shape in fresh] if rest else fresh
            alike = [shape for shape in found if shape is not None and shape.kind == was.kind]
            for moved in [shape for shape in alike if shape.body == was.body] or alike:
                return Verdict("moved", f"it is {moved.name} now", moved.name)
        if use.qualname and after is None:
            return Verdict("gone", f"so is {replace(use, qualname=use.container).name}, which it was part of")
        return Verdict("gone")

    def _compare(self, use: Use, was: Shape, now: Shape) -> Verdict:
        """Compare the definitions of a name that both releases have."""
        if was.kind == FOREIGN or (now.kind == FOREIGN and (use.way == "import" or was.module.startswith(NOT_OURS))):
            return SAME
        if use.way == "import" and was.kind in METHODS and now.kind in METHODS and "." in use.qualname:
            # Calls of a method are uses of their own.
            return SAME
        elsewhere = now.name if now.name != was.name else ""
        if was.kind != now.kind:
            return Verdict("kind", f"a {was.kind} is a {now.kind} now", elsewhere)
        change = signature_change(was.signature, now.signature) if was.signature != now.signature else None
        if use.way == "import":
            # If code passes a function on, its signature counts but its body does not.
            return Verdict("broken", change[1]) if use.passed_on and change and change[0] == "broken" else SAME
        if now.inherited and not was.inherited:
            owner = use.container or use.module
            return Verdict("inherited", f"{owner} no longer defines it: {now.name} is what runs", now.name)
        if change is not None:
            return Verdict(*change, elsewhere)
        if use.changes_vllm and was.qualname.rpartition(".")[2] in self.silent:
            return Verdict("uncalled", "nothing in vLLM mentions it any more", elsewhere)
        return Verdict("body" if was.body != now.body else "same", "", elsewhere)


def find_shape(release: Release, use: Use) -> Shape | None:
    """Find what a release has where a use points; a name may turn out to be a module, or to be in one."""
    for module, parts in _splits(release, use):
        found = release.shape(module, ".".join(parts))
        if found is not None:
            return found
        # A value or function may have it as an attribute, which vLLM's source does not show.
        for count in range(len(parts) - 1, 0, -1) if use.way not in ("add", "override") else ():
            owner = release.shape(module, ".".join(parts[:count]))
            if owner is not None and owner.kind not in ("class", "module"):
                return Shape(owner.module, owner.qualname, owner.kind)
            if owner is not None:
                break
    return None


def is_on_demand(use: Use) -> bool:
    """Return whether a name is one of vLLM's variables, which the module's ``__getattr__`` reads from the environment.

    They are declared for type checkers alone, and are not attributes that a VLLMPatch could replace.
    """
    return use.module == "vllm.envs" and use.qualname.isupper()


def find_owner(release: Release, use: Use) -> Shape | None:
    """Find the class or module that a use's name belongs to; None for a module itself."""
    return find_shape(release, replace(use, qualname=use.container)) if use.qualname else None


def normalize(use: Use, releases: Sequence[Release]) -> Use:
    """Split a use's name where its module ends, as in the first release that has something there.

    ``from vllm.v1.core.sched import scheduler`` does not say that this is a module, and a string given to mock does not
    say where the module ends.
    """
    ways = [(release, module, rest) for release in releases for module, rest in _splits(release, use)]
    there = [way for way in ways if way[0].shape(way[1], ".".join(way[2][:1])) is not None]
    release, module, rest = there[0] if there else max(ways, key=lambda way: len(way[1]))
    first = release.shape(module, rest[0]) if use.way == "import" and len(rest) > 1 else None
    if first is not None and first.kind not in ("class", "module"):
        # ``function.cache_clear``: what a function or a value has, the sources do not show.
        return replace(use, module=module, qualname=rest[0])
    if (module, ".".join(rest)) == (use.module, use.qualname) or not (there or len(module) > len(use.module)):
        return use
    return replace(use, module=module, qualname=".".join(rest))


def _splits(release: Release, use: Use) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the ways to read a dotted name as a module and a name in it."""
    module, parts = use.module, use.qualname.split(".") if use.qualname else []
    while use.changes_vllm and release.shape(module, "") is None and "." in module:
        module, _, last = module.rpartition(".")
        parts = [last, *parts]
    yield module, parts
    while parts:
        # A module below, or one that is imported there.
        inner = release.shape(f"{module}.{parts[0]}", "") or release.shape(module, parts[0])
        if inner is None or inner.kind != "module":
            return
        module, parts = inner.module, parts[1:]
        yield module, parts


def _unread(use: Use) -> str:
    """Explain why a name may exist without being found; empty if it would be found."""
    whole = f"{use.module}.{use.qualname}."
    if whole.startswith(f"{NOT_OURS}."):
        return "it is third-party code vendored by vLLM and is not compared"
    return "it is compiled, but only Python is read" if _COMPILED.search(whole) else ""


def adds(use: Use, base: ReleaseFacts, known: Sequence[ReleaseFacts] = ()) -> bool:
    """Return whether an assignment adds a name that its class or module does not have in the release it is for.

    If the base or one of the ``known`` releases has the name, and the assignment is made there, it replaces what is
    gone; behind ``if not hasattr(...)`` it is made elsewhere only.
    """
    # A vllm-graft hook without a mark adds a missing name; one that calls the original does not.
    auto = use.patch is None or (not use.patch.marked and use.way == "replace")
    if use.way not in ("replace", "wrap") or not auto:
        return False
    if use.qualname and find_owner(base.release, use) is None:
        return False
    having = [facts for facts in (base, *known) if find_shape(facts.release, use) is not None]
    if base in having and (use.patch is not None or base.standing(use.guard) != "unmet"):
        return False
    return bool(use.qualname or having) and all(facts.standing(use.guard) in ("skipped", "unmet") for facts in having)


def is_dynamic(release: Release, use: Use) -> bool:
    """Return whether a missing name's class exists: it may get the name from outside vLLM, or at run time."""
    found = find_owner(release, use) if use.container else None
    return found is not None and found.kind == "class"


def may_inherit(release: Release, use: Use) -> bool:
    """Return whether a missing name may come from a class of another package, or be one that Python defines."""
    found = find_owner(release, use) if use.container else None
    if found is None or found.kind != "class":
        return False
    special = use.attribute.startswith("__") and use.attribute.endswith("__")
    # What methods set on ``self`` is not an attribute of the class, which is what a VLLMPatch changes.
    known = release.attributes(found.module, found.qualname) if use.patch is None else None
    outside = release.outside(found.module, found.qualname)
    if outside and outside <= ENUMS:
        return special or any(hasattr(getattr(enum, base), use.attribute) for base in outside)
    return special or use.attribute in (known or ()) or bool(outside)


def signature_change(old: Sequence[str], new: Sequence[str]) -> tuple[Literal["extended", "broken"], str]:
    """Tell whether a signature only has new optional parameters, and describe the change in words."""
    added = {_parameter(one): one for one in new if one not in old}
    removed = {_parameter(one): one for one in old if one not in new}
    said = [f"{name} is new" for name in added if name not in removed]
    said += [f"{name} is gone" for name in removed if name not in added]
    for name in (name for name in added if name in removed):
        default = parse_parameter(added[name]).has_default - parse_parameter(removed[name]).has_default
        changed = f"has {'a' if default > 0 else 'no'} default now" if default else "is now passed differently"
        said.append(f"{name} {changed}")
    fresh = [parse_parameter(one) for one in new if one not in old]
    optional = all(one.has_default or one.rest for one in fresh)
    if not removed and optional and [one for one in new if one in old] == list(old):
        return "extended", ", ".join(said)
    return "broken", ", ".join(said) or "its parameters are in a different order"


def _parameter(token: str) -> str:
    one = parse_parameter(token)
    return _KINDS.get(token) or (repr(f"{one.rest}{one.name}") if one.name.isidentifier() else token)
