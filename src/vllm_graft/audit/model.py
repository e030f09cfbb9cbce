"""The audit's data: a use of vLLM, the verdict on it in one release, and the report on all of them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self

from vllm_graft.findings import Finding
from vllm_graft.patching.functions import FunctionKind

if TYPE_CHECKING:
    from vllm_graft.audit.verdicts import ReleaseFacts

Way = Literal["replace", "wrap", "add", "delete", "override", "subclass", "import", "call", "read"]
"""The way in which a package uses a name of vLLM.

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

# The ways that change vLLM itself.
PATCHES: Final[tuple[Way, ...]] = ("replace", "wrap", "add", "delete")

VerdictState = Literal[
    "same", "body", "extended", "broken", "misfit", "moved", "gone", "kind", "inherited", "uncalled", "fixed", "grown",
    "absent", "",
]  # fmt: skip
"""The change of a name between two releases.

same:       no change that matters
body:       the code changed, the signature did not
extended:   the signature has new optional parameters
broken:     the signature changed in another way
misfit:     it exists, but the code that uses it does not fit: an argument, an attribute, a missing method
moved:      it is in another place
gone:       it no longer exists
kind:       it is another kind of thing: a class became a function, a method a property
inherited:  the class no longer defines it, a base does
uncalled:   it exists, but no code of vLLM mentions it any more
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
    """The releases that this body is for, if a hook has several bodies."""
    marked: bool = False
    """True if the hook is marked ``@wrap``, ``@replace`` or ``@add``."""
    function: FunctionKind | None = None
    """The kind of function that the hook is, if that is certain."""
    locked: bool = False
    """True if it declares ``locked=True``."""
    why: str = ""
    upstream: str = ""
    remove_when: str = ""
    reviewed: Mapping[str, str] = field(default_factory=dict)
    """The fingerprint in ``patches.lock`` of this use's hook, for each release."""


class _Packed:
    """Pickles a dataclass as its arguments, in half the time that dataclasses with slots take by themselves."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])

    def but(self, **changes: object) -> Self:
        """Copy it with other values for some fields, in a third of the time that ``dataclasses.replace`` takes."""
        assert changes.keys() <= set(self.__slots__), changes
        return type(self)(*[changes[name] if name in changes else getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class Outcome(_Packed):
    """Whether code runs in a release.

    runs:   None if that is unknown
    asked:  whether the presence of a name decides it
    vague:  of an unknown one: whether it only asks objects that need not be vLLM's
    """

    runs: bool | None
    asked: bool = False
    vague: bool = False


class Condition(Protocol):
    """A test around code."""

    @property
    def alternative(self) -> bool:
        """True if the code does something else when it does not hold."""

    def outcome(self, facts: ReleaseFacts) -> Outcome:
        """Return whether the code behind it runs in a release."""


@dataclass(frozen=True, slots=True)
class PrecomputedCondition(_Packed):
    """A condition whose outcome in each release of the catalogue is stored."""

    outcomes: tuple[tuple[str, Outcome], ...]
    alternative: bool = False

    def outcome(self, facts: ReleaseFacts) -> Outcome:
        """Look up whether the code behind it runs in a release of the catalogue."""
        return dict(self.outcomes)[facts.version]


# Stands for the tests and handlers of a use that is stored without them: there are some.
UNKNOWN_GUARD: Final = frozenset({"unknown"})


@dataclass(frozen=True, slots=True)
class UseGuard(_Packed):
    """The tests and handlers around code: whether it runs, and what happens if a name is missing.

    conditions:   tests, all of which must hold
    caught:       the failures ("import", "attribute", "call") that a handler around it catches; or ``UNKNOWN_GUARD``
    alternative:  whether that handler provides a replacement for what is missing
    """

    conditions: tuple[Condition, ...] = ()
    caught: frozenset[str] = frozenset()
    alternative: bool = False

    def __bool__(self) -> bool:
        return bool(self.conditions or self.caught)

    def and_also(self, other: UseGuard) -> UseGuard:
        """Combine two guards."""
        if self == _BARE or other == _BARE:
            return other if self == _BARE else self
        more = tuple(one for one in other.conditions if one not in self.conditions)
        alternative = self.alternative or other.alternative
        return UseGuard((*self.conditions, *more), self.caught | other.caught, alternative)


_BARE: Final = UseGuard()

_COLUMNS: Final = 4096


def position(line: int, column: int) -> int:
    """Return a place in a file as one number, in the order of reading."""
    return line * _COLUMNS + min(column, _COLUMNS - 1)


def line_at(place: int) -> int:
    """Return the line of a position."""
    return place // _COLUMNS


Branch = tuple[Condition, int, int]
"""A test, and the first and last position behind it: both arms of a conditional expression may be on one line."""

Standing = Literal["runs", "caught", "unsure", "skipped", "unmet"]
"""The standing of code in a release.

runs:     it runs, and fails if a name that it needs is missing
caught:   it runs, and a handler catches a missing name
unsure:   it is behind a test whose outcome is unknown
skipped:  a test of the version keeps it from running
unmet:    a test for a name keeps it from running
"""


@dataclass(frozen=True, slots=True)
class Arguments(_Packed):
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
        # ``**{"name": value}`` and ``**dict(name=value)`` show their keywords as well as ``name=value`` does.
        spelled = [[one.arg] if one.arg is not None else _spelled_keys(one.value) for one in node.keywords]
        return cls(
            positional=stars[0] if stars else len(node.args),
            keywords=tuple(name for names in spelled for name in names or ()),
            unpacks=bool(stars),
            unpacks_keywords=None in spelled,
        )


def _spelled_keys(mapping: ast.expr) -> list[str] | None:
    """Return the keys of a dictionary that the source spells out; None if it has others."""
    if isinstance(mapping, ast.Dict):
        keys = [key.value for key in mapping.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
        return keys if len(keys) == len(mapping.keys) else None
    if isinstance(mapping, ast.Call) and isinstance(mapping.func, ast.Name) and mapping.func.id == "dict":
        names = [one.arg for one in mapping.keywords if one.arg is not None]
        return names if not mapping.args and len(names) == len(mapping.keywords) else None
    return None


@dataclass(frozen=True, slots=True)
class Use(_Packed):
    """One place where a package depends on vLLM.

    way:       how; see ``Way``
    module:    the module of vLLM that the code names, such as "vllm.v1.core.sched.scheduler"
    qualname:  the name in it, such as "Scheduler.schedule"; empty for the module itself
    file, line: where the use is
    owner:     the patch, class or function around it in the package; empty at the top level
    guard:     the tests and handlers around it
    alternatives: the names of vLLM that the code uses instead if this one is missing
    fallback:  whether it uses something of its own instead
    body:      the function that replaces upstream's, if the source shows it
    body_file: the file of that function
    source:    its text, decorators included
    patch:     its declaration, if it is a ``VLLMPatch``
    as_written: of a patch without a ``VLLMPatch``: whether the body is put in upstream's place as it is written
    own_attributes: the attributes that the package itself sets on the object that the body gets
    branches:  the tests in the file of the body
    passed_on: of an imported name: whether it is passed on as a value, so that not all calls of it are in sight
    arguments: of a call: its arguments
    bound:     of a call: whether it goes through an object or ``super()``, which fills the first parameter
    path:      the attributes that lead from an instance of the class to what is called or read
    guessed:   whether only the name of a variable, such as ``model_config``, or the annotation of an attribute shows
               what the object is, or only a star import can have bound the name
    via_super: of a call: whether it goes to ``super()``
    owners:    of a method that is called: its other possible owners, in the order of the bases; of a subclass: the
               other classes of vLLM that it derives from; of an imported name: the other classes or modules that it may
               be an attribute of
    has_other_bases: of a subclass and its methods: whether a base from elsewhere may have what vLLM's classes lack
    constructed_here: of a subclass and its methods: whether the package itself calls the constructor
    instantiated: of a subclass: whether it is instantiated, so that it has to define every abstract method
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
    as_written: bool = field(default=False, repr=False, compare=False)
    own_attributes: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    branches: Sequence[Branch] = field(default=(), repr=False, compare=False)
    passed_on: bool = False
    arguments: Arguments | None = None
    bound: bool = False
    path: tuple[str, ...] = ()
    guessed: bool = False
    via_super: bool = False
    owners: tuple[tuple[str, str], ...] = ()
    instantiated: bool = False
    has_other_bases: bool = False
    constructed_here: bool = False

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
        """Return the use without syntax trees and conditions, for the cache; its guard only tells that there is one."""
        guard = UseGuard(caught=UNKNOWN_GUARD) if self.guard else UseGuard()
        return self.but(body=None, guard=guard, branches=())

    @property
    def guarded(self) -> bool:
        """True if the code provides for the name's absence, or restricts the releases it runs in."""
        return bool(self.guard) or bool(self.alternatives) or self.fallback

    @property
    def changes_vllm(self) -> bool:
        """True if it is a patch of some kind."""
        return self.way in PATCHES


@dataclass(frozen=True, slots=True)
class PackageUses:
    """The uses of vLLM in one package, and the files that could not be read.

    package:   the name or path that it was located by
    files:     the number of files read
    tests:     the number of its tests left out
    version:   that of the distribution, if there is one
    base:      the release of vLLM that it pins; empty if it does not
    allowed:   the releases that it allows, such as ">=0.24,<0.29"; empty if there is no upper bound
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
class Verdict(_Packed):
    """The change of one name: its state, the details in words, and its new place if it has one."""

    state: VerdictState
    detail: str = ""
    now: str = ""
    standing: Standing = "runs"
    """The standing of the code itself in the newer release."""
    fitted: bool = True
    """False if the code works in no known release either."""


@dataclass(frozen=True, slots=True)
class ReportCell(_Packed):
    """The verdict on one use in one release, compared with another."""

    release: str
    since: str
    verdict: Verdict
    diff: str = field(default="", repr=False)
    """Upstream's change as a unified diff, if its source could be read."""


@dataclass(frozen=True, slots=True)
class ReportRow(_Packed):
    """One use, with a cell for each release."""

    package: str
    use: Use
    cells: tuple[ReportCell, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an audit.

    releases:  the columns
    base:      the release that verdicts compare with; empty if each column compares with the one before
    """

    packages: tuple[PackageUses, ...]
    base: str
    releases: tuple[str, ...]
    rows: tuple[ReportRow, ...]
    findings: tuple[Finding, ...]
