"""One name in two releases: what became of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from vllm_graft.audit.compatibility import judge_call, judge_read, lacking
from vllm_graft.audit.model import Branch, Condition, Outcome, Standing, Use, UseGuard, Verdict, standing
from vllm_graft.audit.releases.release import FOREIGN, NOT_OURS, Release, Shape

SAME: Final = Verdict("same")

_METHODS: Final = frozenset({"function", "classmethod", "staticmethod"})

_COMPILED: Final = re.compile(r"^vllm\.(\w+\.)?([a-z0-9_]*_C(_\w+)?|cumem_allocator|spinloop|_rust_\w+)\.")
"""The modules of vLLM that are no Python: ``_C``, ``_moe_C``, ``_C_stable_libtorch``."""


class ReleaseFacts:
    """What a release tells the tests around a use."""

    def __init__(self, release: Release) -> None:
        self._release = release
        self._standings: dict[UseGuard, Standing] = {}
        self.outcomes: dict[Condition, Outcome] = {}
        self.version = release.version.partition("+")[0]

    def has(self, module: str, qualname: str) -> bool | None:
        """Whether a name is there; None where it would not be found if it were."""
        use = Use("import", module, qualname, "", 0)
        if located(self._release, use) is not None:
            return True
        return None if _unread(use) else False

    def attribute(self, module: str, qualname: str, name: str) -> bool | None:
        """Whether a class or module has an attribute; None where the owner itself is not there."""
        owner = located(self._release, Use("import", module, qualname, "", 0)) if module != "vllm" or qualname else None
        if self.has(module, f"{qualname}.{name}".strip(".")):
            return True
        if owner is None or owner.kind not in ("class", "module"):
            return None
        known = self._release.attributes(owner.module, owner.qualname) or frozenset()
        if name in known or self._release.shape(f"{owner.module}.{name}", "") is not None:
            return True
        return None if owner.qualname and self._release.outside(owner.module, owner.qualname) else False

    def standing(self, guard: UseGuard) -> Standing:
        """What a guard makes of the code behind it in this release."""
        if not guard:
            return "runs"
        if guard not in self._standings:
            self._standings[guard] = standing(guard, self)
        return self._standings[guard]

    def runs(self, branches: Sequence[Branch], line: int) -> bool:
        """Whether a line is sure to be reached once the function around it is called."""
        inside = (condition for condition, first, last in branches if first <= line <= last)
        return all(condition.outcome(self).runs for condition in inside)


@dataclass(frozen=True, slots=True)
class ReleasePair:
    """Two releases.

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
        """The pair, with what has fallen silent of the names that patches stand on."""
        names = {use.qualname.rpartition(".")[2] for use in uses if use.changes_vllm and use.qualname}
        return cls(old, new, new.unmentioned(names) - old.unmentioned(names), tuple(known))

    @property
    def before(self) -> tuple[Release, ...]:
        """The releases that code may have been written for, the old one first."""
        return (self.old, *self.known)

    def judge(self, use: Use) -> Verdict:
        """What became of a use's name from the one to the other, as far as the code runs in the newer one."""
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
        return replace(found, standing=stands)

    def _missing(self, use: Use, found: Verdict, stands: Standing) -> Verdict:
        """What a missing name comes to: nothing where the code has something else in its place."""
        elsewhere = next((name for name in use.alternatives if self.new_facts.has(*name)), None)
        if elsewhere is not None:
            return Verdict("", f"{':'.join(elsewhere)} is in its place")
        if stands == "runs":
            return found
        if stands == "unmet" and (not use.changes_vllm or found.state == "absent"):
            return Verdict("", f"it does not run in {self.new.version}, by a test for a name")
        if use.changes_vllm and (use.guard.alternative or any(one.alternative for one in use.guard.conditions)):
            return Verdict("", "the code does something else where it is missing")
        return found

    def _judge(self, use: Use) -> Verdict:
        if use.way == "call":
            return judge_call(use, self.before, self.new)
        if use.way == "read":
            return judge_read(use, self.before, self.new)
        missing, is_new = lacking(use, self.before, self.new)
        if missing:
            names = ", ".join(map(repr, missing))
            said = f"it does not define {names}, which {'is' if len(missing) == 1 else 'are'} abstract"
            return Verdict("misfit", said if is_new else f"{said}, as before", fitted=is_new)
        was, now = located(self.old, use), located(self.new, use)
        if (was is None or now is None) and (why := _unread(use)):
            return Verdict("", why)
        if use.way == "add" and use.patch is not None and now is not None:
            return Verdict("grown", f"upstream has a {now.kind} of this name", now.name)
        if was is None:
            return _new_name(use, now, self.new)
        if now is None:
            return SAME if self._answered(use) else _lost(use, was, self)
        if was.kind == FOREIGN or (now.kind == FOREIGN and (use.way == "import" or was.module.startswith(NOT_OURS))):
            return SAME
        if use.way == "import" and {was.kind, now.kind} <= _METHODS and "." in use.qualname:
            # How a method is called is told of where it is called.
            return SAME
        if was.kind != now.kind:
            return Verdict("kind", f"a {was.kind} is a {now.kind} now", _elsewhere(was, now))
        if use.way == "import":
            return _imported(was, now) if use.passed else SAME
        if now.inherited and not was.inherited:
            return Verdict("inherited", f"{_class(use)} no longer defines it: {now.name} is what runs", now.name)
        return self._compared(was, now, use)

    def _answered(self, use: Use) -> bool:
        """Whether a class may have from outside vLLM now what it does not define any more."""
        above = _container(use)
        found = [located(release, above) if above is not None else None for release in (self.old, self.new)]
        if any(shape is None or shape.kind != "class" for shape in found):
            return False
        old, new = (
            release.outside(shape.module, shape.qualname) if shape is not None else frozenset()
            for release, shape in zip((self.old, self.new), found, strict=True)
        )
        return bool(new - old)

    def _compared(self, was: Shape, now: Shape, use: Use) -> Verdict:
        elsewhere = _elsewhere(was, now)
        if was.signature != now.signature:
            state, detail = signature_change(was.signature, now.signature)
            return Verdict(state, detail, elsewhere)
        if use.changes_vllm and was.qualname.rpartition(".")[2] in self.silent:
            return Verdict("uncalled", "nothing in vLLM mentions it any more", elsewhere)
        return Verdict("body" if was.body != now.body else "same", "", elsewhere)


def located(release: Release, use: Use) -> Shape | None:
    """What a release has where a use points; a name may turn out to be a module, or to lie in one."""
    for module, rest in _splits(release, use):
        found = release.shape(module, ".".join(rest))
        if found is None and use.way not in ("add", "override"):
            found = _value(release, module, rest)
        if found is not None:
            return found
    return None


def spelled(use: Use, releases: Sequence[Release]) -> Use:
    """The use with its name parted where the module ends, as the first release shows that has something there.

    ``from vllm.v1.core.sched import scheduler`` does not say that this is a module, nor does a text in which mock is
    given a name say where the module ends.
    """
    ways = [(release, module, rest) for release in releases for module, rest in _splits(release, use)]
    there = [way for way in ways if way[0].shape(way[1], ".".join(way[2][:1])) is not None]
    _, module, rest = there[0] if there else max(ways, key=lambda way: len(way[1]))
    return replace(use, module=module, qualname=".".join(rest)) if there or len(module) > len(use.module) else use


def _splits(release: Release, use: Use) -> Iterator[tuple[str, Sequence[str]]]:
    """The ways to read a dotted name as a module and a name in it."""
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


def _value(release: Release, module: str, parts: Sequence[str]) -> Shape | None:
    """The value or function whose own attribute a name is; what that has is not vLLM's to say."""
    for kept in range(len(parts) - 1, 0, -1):
        found = release.shape(module, ".".join(parts[:kept]))
        if found is not None:
            return Shape(found.module, found.qualname, found.kind) if found.kind not in ("class", "module") else None
    return None


def _unread(use: Use) -> str:
    """Why a name that is not found may be there all the same; empty where it would be found."""
    whole = f"{use.module}.{use.qualname}."
    if whole.startswith(f"{NOT_OURS}."):
        return "vLLM carries it of others, and it is not compared"
    return "it is compiled, and only Python is read" if _COMPILED.search(whole) else ""


def adds(use: Use, base: Release, known: Sequence[ReleaseFacts] = ()) -> bool:
    """Whether an assignment puts a name on a class or module of vLLM that has none such in the release it is for.

    Where one of the releases that are ``known`` has it, and the assignment is made there, it replaces what is gone.
    """
    # A hook of vllm-graft's without a mark adds what is not there; one that reaches what is beneath does not.
    auto = use.patch is None or (not use.patch.marked and use.way == "replace")
    above = _container(use) if use.way in ("replace", "wrap") and auto else None
    if above is None or located(base, above) is None or located(base, use) is not None:
        return False
    having = (facts for facts in known if facts.has(use.module, use.qualname))
    return not any(facts.standing(use.guard) not in ("skipped", "unmet") for facts in having)


def is_dynamic(release: Release, use: Use) -> bool:
    """Whether a name that is not there belongs to a class that is: it may come from outside vLLM, or at run time."""
    above = _container(use)
    found = located(release, above) if above is not None and above.qualname else None
    return found is not None and found.kind == "class"


def has_owner(release: Release, use: Use) -> bool:
    """Whether the class or module that a name is put on is there."""
    above = _container(use)
    return above is not None and located(release, above) is not None


def may_inherit(release: Release, use: Use) -> bool:
    """Whether a name that is not there may come from a class of another package, or be one that Python makes."""
    above = _container(use)
    found = located(release, above) if above is not None and above.qualname else None
    if found is None or found.kind != "class":
        return False
    name = use.qualname.rpartition(".")[2]
    special = name.startswith("__") and name.endswith("__")
    known = release.attributes(found.module, found.qualname) or frozenset()
    return special or name in known or bool(release.outside(found.module, found.qualname))


def _new_name(use: Use, now: Shape | None, new: Release) -> Verdict:
    if now is None:
        return Verdict("absent")
    if use.way == "override" and use.qualname.rpartition(".")[2] in new.abstract(use.module, _class(use)):
        return Verdict("same", "upstream asks for it now")
    if use.way in ("add", "override"):
        return Verdict("grown", f"upstream has a {now.kind} of this name now", now.name)
    return Verdict("same", "it is new")


def _lost(use: Use, was: Shape, pair: ReleasePair) -> Verdict:
    now = moved(was, pair.old, pair.new)
    if now is not None:
        return Verdict("moved", f"it is {now.name} now", now.name)
    above = _container(use)
    if above is not None and located(pair.new, above) is None:
        return Verdict("gone", f"so is {above.name}, which it was part of")
    return Verdict("gone")


def moved(was: Shape, old: Release, new: Release) -> Shape | None:
    """Where a name is now that is no longer where it was: another module, one that did not have it before."""
    if not was.qualname:
        return None
    first, _, rest = was.qualname.partition(".")
    known = {shape.module for shape in old.elsewhere(first)}
    fresh = [shape for shape in new.elsewhere(first) if shape.module not in known]
    found = [new.shape(shape.module, was.qualname) for shape in fresh] if rest else fresh
    alike = [shape for shape in found if shape is not None and shape.kind == was.kind]
    same = [shape for shape in alike if shape.body == was.body]
    return next(iter(same or alike), None)


def _imported(was: Shape, now: Shape) -> Verdict:
    """For code that hands a function on its signature counts, and not how it is done; calls in sight are uses."""
    if was.signature == now.signature:
        return SAME
    state, detail = signature_change(was.signature, now.signature)
    return SAME if state == "extended" else Verdict("broken", detail)


def signature_change(old: Sequence[str], new: Sequence[str]) -> tuple[Literal["extended", "broken"], str]:
    """Whether only parameters that need not be given were added, or anything else; and that in words."""
    added = [one for one in new if one not in old]
    removed = [one for one in old if one not in new]
    words = _words({_said(one): one for one in added}, {_said(one): one for one in removed})
    optional = all(one.endswith("=") or one.startswith("*") for one in added)
    if not removed and optional and [one for one in new if one in old] == list(old):
        return "extended", words
    return "broken", words or "its parameters stand in another order"


def _words(added: Mapping[str, str], removed: Mapping[str, str]) -> str:
    said = [f"{name} is new" for name in added if name not in removed]
    said += [f"{name} is gone" for name in removed if name not in added]
    for name in added:
        if name in removed:
            default = added[name].endswith("=") - removed[name].endswith("=")
            said.append(
                f"{name} has {'a' if default > 0 else 'no'} default now" if default else f"{name} is passed otherwise"
            )
    return ", ".join(said)


_KINDS: Final = {"FunctionDef": "a plain function", "AsyncFunctionDef": "a coroutine function"}


def _said(token: str) -> str:
    if token in _KINDS:
        return _KINDS[token]
    name = token.removeprefix("kw ").removeprefix("/").removesuffix("=")
    return f"{name!r}" if name.isidentifier() or name.startswith("*") else token


def _elsewhere(was: Shape, now: Shape) -> str:
    return now.name if now.name != was.name else ""


def _class(use: Use) -> str:
    return use.qualname.rpartition(".")[0] or use.module


def _container(use: Use) -> Use | None:
    if not use.qualname:
        return None
    return replace(use, qualname=use.qualname.rpartition(".")[0])
