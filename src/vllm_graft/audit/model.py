"""The audit's data: a use of vLLM, the verdict on it in one release, and the report on all of them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

from vllm_graft.findings import Finding

if TYPE_CHECKING:
    from vllm_graft.audit.verdicts import ReleaseFacts

Way = Literal["replace", "wrap", "add", "delete", "override", "subclass", "import", "call", "read"]
"""How a package uses a name of vLLM.

replace:   replaces it: an assignment, ``setattr``, a patch
wrap:      replaces it by something that calls the original
add:       adds a name that upstream does not have
delete:    deletes it
override:  overrides a method of upstream's class in a subclass
subclass:  derives a class from it
import:    imports or mentions it
call:      calls it, instantiates it, or calls one of its methods
read:      reads an attribute of an instance of it
"""

PATCHES: Final[tuple[Way, ...]] = ("replace", "wrap", "add", "delete")
"""The ways that change vLLM itself."""

VerdictState = Literal[
    "same", "body", "extended", "broken", "misfit", "moved", "gone", "kind", "inherited", "uncalled", "fixed", "grown",
    "absent", "",
]  # fmt: skip
"""The change of a name between two releases.

same:       no change that matters
body:       the code changed, the signature did not
extended:   the signature has new optional parameters
broken:     the signature changed in another way
misfit:     it exists, and the code that uses it does not fit: an argument, an attribute, a missing method
moved:      it is in another place
gone:       it no longer exists
kind:       it is another kind of thing: a class became a function, a method a property
inherited:  the class no longer defines it, a base does
uncalled:   it exists, and no code of vLLM mentions it any more
fixed:      upstream has the package's own code now, or the patch's ``remove_when`` has come true
grown:      upstream now has a name that the package adds
absent:     neither release has it
(empty):    not judged: the release cannot be read, or the patch is not for it
"""


@dataclass(frozen=True, slots=True)
class PatchDeclaration:
    """The declaration of a ``VLLMPatch``, as far as its source shows it."""

    name: str
    line: int = 0
    vllm: str = ""
    releases: str = ""
    """The releases that this body is for, where a hook has several bodies."""
    marked: bool = False
    """Whether the hook is marked ``@wrap``, ``@replace`` or ``@add``."""
    locked: bool = False
    """Whether it declares ``locked=True``."""
    why: str = ""
    upstream: str = ""
    remove_when: str = ""
    reviewed: Mapping[str, str] = field(default_factory=dict)
    """The fingerprint in ``patches.lock`` of this use's hook, for each release."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether code runs in a release, None where that is unknown; ``asked``: the presence of a name decides it."""

    runs: bool | None
    asked: bool = False


class Condition(Protocol):
    """A test around code."""

    @property
    def alternative(self) -> bool:
        """Whether the code does something else where it does not hold."""
        ...

    def outcome(self, facts: ReleaseFacts) -> Outcome:
        """Return whether the code behind it runs in a release."""
        ...


@dataclass(frozen=True, slots=True)
class PrecomputedCondition:
    """A condition whose outcome in each release of the catalogue is stored."""

    outcomes: tuple[tuple[str, Outcome], ...]
    alternative: bool = False

    def outcome(self, facts: ReleaseFacts) -> Outcome:
        """Look up whether the code behind it runs in a release of the catalogue."""
        return dict(self.outcomes)[facts.version]


@dataclass(frozen=True, slots=True)
class UseGuard:
    """The tests and handlers around code: whether it runs, and what happens where a name is missing.

    conditions:   tests, all of which must hold
    caught:       the failures ("import", "attribute", "call") that a handler around it catches
    alternative:  whether that handler provides a replacement for what is missing
    """

    conditions: tuple[Condition, ...] = ()
    caught: frozenset[str] = frozenset()
    alternative: bool = False

    def __bool__(self) -> bool:
        return bool(self.conditions or self.caught)

    def and_also(self, other: UseGuard) -> UseGuard:
        """Combine two guards."""
        more = tuple(one for one in other.conditions if one not in self.conditions)
        alternative = self.alternative or other.alternative
        return UseGuard((*self.conditions, *more), self.caught | other.caught, alternative)


Branch = tuple[Condition, int, int]
"""A test, and the first and last line behind it."""

Standing = Literal["runs", "caught", "unsure", "skipped", "unmet"]
"""Whether code runs in a release.

runs:     it runs, and fails where a name that it needs is missing
caught:   it runs, and a handler catches a missing name
unsure:   it is behind a test whose outcome is unknown
skipped:  a test of the version keeps it from running
unmet:    a test for a name keeps it from running
"""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call, as far as they are visible.

    positional:        the number of arguments before the first ``*``
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
        """Read the arguments of a call."""
        stars = [place for place, one in enumerate(node.args) if isinstance(one, ast.Starred)]
        return cls(
            positional=stars[0] if stars else len(node.args),
            keywords=tuple(one.arg for one in node.keywords if one.arg is not None),
            unpacks=bool(stars),
            unpacks_keywords=any(one.arg is None for one in node.keywords),
        )


@dataclass(frozen=True, slots=True)
class Use:
    """One place where a package depends on vLLM.

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
    def attribute(self) -> str:
        """The last part of the qualified name."""
        return self.qualname.rpartition(".")[2]

    @property
    def container(self) -> str:
        """The qualified name of the class around it; empty at the top level of a module."""
        return self.qualname.rpartition(".")[0]

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
