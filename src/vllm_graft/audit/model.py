"""What the audit passes around: a use of vLLM, the verdict on it in one release, and the report on all of them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

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

State = Literal[
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
class Declared:
    """What a ``VLLMPatch`` says of itself, as far as its source shows it."""

    name: str
    vllm: str = ""
    why: str = ""
    upstream: str = ""
    remove_when: str = ""
    reviewed: Mapping[str, str] = field(default_factory=dict)
    """For the hook of this use: the fingerprint that ``patches.lock`` has for each release."""


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
    guarded:   whether the code itself provides for the name's absence: in a ``try`` that catches it, behind ``hasattr``
               or a test of the version
    body:      the function that stands in the place of upstream's, where reading finds it
    body_file: the file that it stands in
    source:    its text, decorators included
    patch:     what the patch says of itself, where it is a ``VLLMPatch``
    own:       the attributes that the package itself puts on the object that the body is given
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
    guarded: bool = False
    body: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None = field(default=None, repr=False, compare=False)
    body_file: str = field(default="", repr=False, compare=False)
    source: str = field(default="", repr=False, compare=False)
    patch: Declared | None = None
    own: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
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
        """Return the use without its syntax tree, for a report that is kept."""
        return replace(self, body=None)

    @property
    def changes_vllm(self) -> bool:
        """Whether it is a patch of some kind."""
        return self.way in PATCHES


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of one package: its uses of vLLM, and the files that could not be read.

    package:   the name it was asked for by
    version:   that of the distribution, where there is one
    base:      the release of vLLM that it pins; empty where it does not
    allowed:   the releases that it allows, such as ">=0.24,<0.29"; empty where there is no upper bound
    stated_in: the file that says so
    """

    package: str
    uses: Sequence[Use]
    unread: Sequence[Finding] = ()
    files: int = 0
    version: str = ""
    base: str = ""
    allowed: str = ""
    stated_in: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one name: a state, in words, and where it is now if that is another place."""

    state: State
    detail: str = ""
    now: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """The verdict on one use in one release, compared with another."""

    release: str
    since: str
    verdict: Verdict
    diff: str = field(default="", repr=False)
    """What upstream changed, as a unified diff, where its source could be read."""


@dataclass(frozen=True, slots=True)
class Row:
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

    packages: tuple[Reading, ...]
    base: str
    releases: tuple[str, ...]
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
