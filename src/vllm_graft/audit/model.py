"""What the audit passes around: a use of vLLM, the verdict on it in one release, and the report on all of them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from vllm_graft.findings import Finding

Way = Literal["replace", "wrap", "add", "delete", "override", "subclass", "import", "call", "read"]
"""How a package uses a name of vLLM.

replace:   puts something of its own in its place: an assignment, ``setattr``, a patch
wrap:      the same, and what it puts there calls what was there
add:       puts a name there that upstream did not have
delete:    takes the name away
override:  defines a method in a subclass that upstream's class has too
subclass:  derives a class from it
import:    imports or mentions it
call:      calls it, constructs an object of it, or calls a method that it has
read:      reads an attribute of an object of it
"""

PATCHES: Final[tuple[Way, ...]] = ("replace", "wrap", "add", "delete")
"""The ways that change vLLM itself."""

VerdictState = Literal[
    "same", "body", "extended", "broken", "misfit", "moved", "gone", "kind", "inherited", "uncalled", "fixed", "grown",
    "absent", "",
]  # fmt: skip
"""What became of a name between two releases.

same:       nothing that counts
body:       the code changed, the signature did not
extended:   the signature has new parameters that need not be given
broken:     the signature changed otherwise
misfit:     it is there, and the code that uses it does not fit it: an argument, an attribute, a method that is lacking
moved:      it is elsewhere now
gone:       it is nowhere
kind:       it is something else now: a class became a function, a method a property
inherited:  the class no longer defines it, a base does
uncalled:   it is there, and nothing in vLLM mentions it any more
fixed:      upstream now has the package's own code, or what the patch's ``remove_when`` waits for has come
grown:      a name that the package adds is upstream's now
absent:     it was in neither release
(empty):    it was not judged: the release cannot be read, or the patch is not for it
"""


@dataclass(frozen=True, slots=True)
class PatchDeclaration:
    """What a ``VLLMPatch`` says of itself, as far as its source shows it."""

    name: str
    line: int = 0
    vllm: str = ""
    releases: str = ""
    """Of this body alone, where a hook has several: the releases that it is for."""
    marked: bool = False
    """Whether the hook says what it does: ``@wrap``, ``@replace``, ``@add``."""
    locked: bool = False
    """Whether it says that it has a lock."""
    why: str = ""
    upstream: str = ""
    remove_when: str = ""
    reviewed: Mapping[str, str] = field(default_factory=dict)
    """For the hook of this use: the fingerprint that ``patches.lock`` has for each release."""


class Facts(Protocol):
    """What a release tells a condition."""

    @property
    def version(self) -> str:
        """Its number."""
        ...

    @property
    def outcomes(self) -> dict[Condition, Outcome]:
        """What has been worked out so far."""
        ...

    def has(self, module: str, qualname: str) -> bool | None:
        """Whether a name is there; None where that cannot be told."""
        ...

    def attribute(self, module: str, qualname: str, name: str) -> bool | None:
        """Whether a class or module has an attribute, however it gets it; None where that cannot be told."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether code runs in a release, None where that cannot be told; ``asked``: the presence of a name decides it."""

    runs: bool | None
    asked: bool = False


class Condition(Protocol):
    """A test that stands around code."""

    @property
    def alternative(self) -> bool:
        """Whether something else is done where it does not hold."""
        ...

    def outcome(self, facts: Facts) -> Outcome:
        """Whether the code behind it runs in a release."""
        ...


@dataclass(frozen=True, slots=True)
class PrecomputedCondition:
    """A condition whose outcome in each release of the catalogue is stored."""

    outcomes: tuple[tuple[str, Outcome], ...]
    alternative: bool = False

    def outcome(self, facts: Facts) -> Outcome:
        """Look up whether the code behind it runs in a release of the catalogue."""
        return dict(self.outcomes)[facts.version]


@dataclass(frozen=True, slots=True)
class UseGuard:
    """What stands around code and decides whether it runs, or what happens where a name is missing.

    conditions:   tests, all of which must hold
    caught:       the absences ("import", "attribute") that a handler around it goes on after
    alternative:  whether such a handler puts something in the place of what is missing
    """

    conditions: tuple[Condition, ...] = ()
    caught: frozenset[str] = frozenset()
    alternative: bool = False

    def __bool__(self) -> bool:
        return bool(self.conditions or self.caught)

    def and_also(self, other: UseGuard) -> UseGuard:
        """Both of them."""
        more = tuple(one for one in other.conditions if one not in self.conditions)
        alternative = self.alternative or other.alternative
        return UseGuard((*self.conditions, *more), self.caught | other.caught, alternative)


Branch = tuple[Condition, int, int]
"""A test, and the first and the last of the lines behind it."""

Standing = Literal["runs", "caught", "unsure", "skipped", "unmet"]
"""What becomes of code in a release.

runs:     it runs, and fails where a name that it needs is missing
caught:   it runs, and a handler goes on where a name is missing
unsure:   it stands behind a test that cannot be worked out
skipped:  a test of the version keeps it from running
unmet:    a test for a name keeps it from running
"""


def standing(guard: UseGuard, facts: Facts) -> Standing:
    """What a guard makes of the code behind it in a release."""
    outcomes = [condition.outcome(facts) for condition in guard.conditions]
    stopped = [one for one in outcomes if one.runs is False]
    if stopped:
        return "unmet" if all(one.asked for one in stopped) else "skipped"
    if guard.caught:
        return "caught"
    return "unsure" if any(one.runs is None for one in outcomes) else "runs"


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call passes, as far as it is in plain sight.

    positional:        how many arguments stand before the first ``*``
    keywords:          those passed by name
    unpacks:           whether there is a ``*``
    unpacks_keywords:  whether there is a ``**``
    """

    positional: int = 0
    keywords: tuple[str, ...] = ()
    unpacks: bool = False
    unpacks_keywords: bool = False

    @classmethod
    def of(cls, node: ast.Call) -> Arguments:
        """The arguments of a call."""
        stars = [place for place, one in enumerate(node.args) if isinstance(one, ast.Starred)]
        return cls(
            positional=stars[0] if stars else len(node.args),
            keywords=tuple(one.arg for one in node.keywords if one.arg is not None),
            unpacks=bool(stars),
            unpacks_keywords=any(one.arg is None for one in node.keywords),
        )


@dataclass(frozen=True, slots=True)
class Use:
    """One place where a package leans on vLLM.

    way:       how; see ``Way``
    module:    the module of vLLM that the code names, such as "vllm.v1.core.sched.scheduler"
    qualname:  the name in it, such as "Scheduler.schedule"; empty for the module itself
    file:      the file that it stands in, as it was found
    line:      and the line
    owner:     what it belongs to in the package: a patch, or the class or function around it; empty at the top level
    guard:     what stands around it: tests of the version or for a name, a ``try`` that catches a name's absence
    alternatives: the names of vLLM that the code has in the same place where this one is missing
    fallback:  whether it has something of its own in that place
    body:      the function that stands in the place of upstream's, where reading finds it
    body_file: the file that it stands in
    source:    its text, decorators included
    patch:     what the patch says of itself, where it is a ``VLLMPatch``
    own:       the attributes that the package itself puts on the object that the body is given
    branches:  the tests in the file of the body
    passed:    of an imported name: whether it is handed on as a value, so that calls of it are not all in sight
    arguments: of a call: what it passes
    bound:     of a call: whether it goes through an object or ``super()``, so that the first parameter is given
    path:      the attributes that lead from an object of the class to what is called or read
    guessed:   whether only the name of a variable, such as ``model_config``, says what the object is
    above:     of a call: whether it goes to ``super()``
    owners:    of a method that is called: where else it may come from, as the bases stand in order; of a subclass: the
               other classes of vLLM that it derives from
    mixed:     of a subclass and its methods: whether a base from elsewhere may have what vLLM's classes do not
    made:      of a subclass and its methods: whether the package itself calls the constructor
    concrete:  of a subclass: whether objects of it are made, so that it has to define every abstract method
    """

    way: Way
    module: str
    qualname: str
    file: str
    line: int
    owner: str = ""
    guard: UseGuard = field(default=UseGuard(), compare=False)
    alternatives: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)
    fallback: bool = field(default=False, repr=False, compare=False)
    body: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None = field(default=None, repr=False, compare=False)
    body_file: str = field(default="", repr=False, compare=False)
    source: str = field(default="", repr=False, compare=False)
    patch: PatchDeclaration | None = None
    own: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    branches: Sequence[Branch] = field(default=(), repr=False, compare=False)
    passed: bool = False
    arguments: Arguments | None = None
    bound: bool = False
    path: tuple[str, ...] = ()
    guessed: bool = False
    above: bool = False
    owners: tuple[tuple[str, str], ...] = ()
    concrete: bool = False
    mixed: bool = False
    made: bool = False

    @property
    def name(self) -> str:
        """Module and qualified name, with the attributes that are read on from there."""
        whole = ".".join([*filter(None, [self.qualname]), *self.path])
        return f"{self.module}:{whole}" if whole else self.module

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    def without_tree(self) -> Use:
        """Return the use without syntax trees, and of its guard only that there is one, for a report that is kept."""
        guard = UseGuard(caught=frozenset({"worked out"})) if self.guard else UseGuard()
        return replace(self, body=None, guard=guard, branches=())

    @property
    def guarded(self) -> bool:
        """Whether the code itself has something to say of the name's absence, or of the releases it runs in."""
        return bool(self.guard) or bool(self.alternatives) or self.fallback

    @property
    def changes_vllm(self) -> bool:
        """Whether it is a patch of some kind."""
        return self.way in PATCHES


@dataclass(frozen=True, slots=True)
class PackageUses:
    """What was read of one package: its uses of vLLM, and the files that could not be read.

    package:   the name it was asked for by
    files:     how many were read
    tests:     how many of its tests were left out
    version:   that of the distribution, where there is one
    base:      the release of vLLM that it pins; empty where it does not
    allowed:   the releases that it allows, such as ">=0.24,<0.29"; empty where there is no upper bound
    stated_in: the file that says so
    """

    package: str
    uses: Sequence[Use]
    unread: Sequence[Finding] = ()
    files: int = 0
    tests: int = 0
    version: str = ""
    base: str = ""
    allowed: str = ""
    stated_in: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one name: a state, in words, and where it is now if that is another place."""

    state: VerdictState
    detail: str = ""
    now: str = ""
    standing: Standing = "runs"
    """What becomes of the code itself in the newer release."""
    fitted: bool = True
    """Whether a release is known that the code worked in, where it does not now."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The verdict on one use in one release, compared with another."""

    release: str
    since: str
    verdict: Verdict
    diff: str = field(default="", repr=False)
    """What upstream changed, as a unified diff, where its source could be read."""


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One use, and a cell for each release it was held against."""

    package: str
    use: Use
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All that an audit found.

    releases:  the columns
    base:      the release that verdicts compare with; empty where each column compares with the one before
    """

    packages: tuple[PackageUses, ...]
    base: str
    releases: tuple[str, ...]
    rows: tuple[ReportRow, ...]
    findings: tuple[Finding, ...]
