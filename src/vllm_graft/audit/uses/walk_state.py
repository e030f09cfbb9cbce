"""Where a walk through a file stands, and what it has found so far."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from vllm_graft.audit.model import Arguments, Branch, Condition, PatchDeclaration, Use, UseGuard, Way
from vllm_graft.audit.uses import guards
from vllm_graft.audit.uses.guards import TryBody
from vllm_graft.audit.uses.resolver import Resolver
from vllm_graft.audit.uses.source_file import SourceFile
from vllm_graft.audit.uses.values import TOP, Instance, LocalDef, Name, Receiver, Scope, Values, local_defs

AttributeSpelling = tuple[str, str]
"""An attribute as it is spelled: of what, and its name."""

_BARE: Final = UseGuard()
"""What stands around most code: nothing."""


@dataclass(slots=True)
class Assignment:
    """Something that a package puts in the place of a name of vLLM.

    How it uses what was there is seen when every function has been walked, because functions are bound to names
    that may be given later.

    way:     where the form alone tells
    value:   what is put there
    expr:    the expression for it, and the scope that it stands in
    handed:  whether the expression hands over what was there, as ``C.f = traced(C.f)`` does
    by:      how a wrapper is given what was there: by its "first" parameter, or in a patch by one named "call"
    """

    target: Name
    line: int
    owner: str
    guard: UseGuard
    scope: Scope
    alternatives: tuple[Name, ...] = ()
    way: Way | None = None
    value: Values = ()
    expr: ast.expr | None = None
    handed: bool = False
    by: Literal["", "first", "call"] = ""
    patch: PatchDeclaration | None = None


@dataclass(frozen=True, slots=True)
class ClassMember:
    """What a class body binds: a function, or the value of an assignment."""

    name: str
    line: int
    value: Values
    expr: ast.expr | None
    guard: UseGuard

    @property
    def function(self) -> LocalDef | None:
        """The function that a ``def`` of the body defines."""
        return next(local_defs(self.value), None) if self.expr is None else None


@dataclass(slots=True)
class Subclass:
    """A class of the package that derives from one of vLLM's, directly or through classes between."""

    cls: LocalDef
    target: Name
    line: int
    owner: str
    guard: UseGuard
    alternatives: tuple[Name, ...]
    fallback: bool
    methods: dict[str, tuple[LocalDef, int, UseGuard]]
    """The functions of its body, the line that binds each, and what stands around that."""


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call of a method on ``self`` or ``super()`` in a class of the package; whose it is shows when all are known."""

    cls: LocalDef
    method: str
    arguments: Arguments
    line: int
    owner: str
    guard: UseGuard
    above: bool
    """Whether it goes to ``super()``."""


@dataclass(slots=True)
class FileUses:
    """What one file holds.

    saved:     the attributes and keys under which a name of vLLM was kept, as in ``C._original_f = C.f``
    passed:    the names that stand anywhere but in a call of them
    calls:     calls of functions and classes of vLLM, and of methods of their objects
    reads:     attributes of such objects
    methods:   calls on ``self`` and ``super()``
    stored:    the attributes that the file gives to any object
    made:      the classes of the package that the file makes objects of
    imported:  other modules that it imports, and what stands around each import
    branches:  the lines that stand behind a test, first and last
    """

    file: SourceFile
    puts: list[Assignment] = field(default_factory=list)
    subclasses: list[Subclass] = field(default_factory=list)
    mentions: dict[Name, dict[UseGuard, int]] = field(default_factory=dict)
    saved: dict[str, set[Name]] = field(default_factory=dict)
    imported: list[tuple[str, UseGuard]] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    passed: set[Name] = field(default_factory=set)
    calls: list[Use] = field(default_factory=list)
    reads: list[Use] = field(default_factory=list)
    methods: list[MethodCall] = field(default_factory=list)
    stored: set[str] = field(default_factory=set)
    made: set[LocalDef] = field(default_factory=set)

    def forget(self) -> None:
        """Let go of everything but the branches, which the uses refer to."""
        for held in (self.puts, self.subclasses, self.imported, self.calls, self.reads, self.methods):
            held.clear()
        for names in (self.mentions, self.saved, self.passed, self.stored, self.made):
            names.clear()

    def imports(self) -> list[Use]:
        """The mentions as uses: one for each name that nothing stands around, else one for each guard."""
        bare = UseGuard()
        return [
            Use("import", name.module, name.qualname, self.file.shown, line, guard=guard, passed=name in self.passed)
            for name, places in self.mentions.items()
            for guard, line in ({bare: places[bare]} if bare in places else places).items()
        ]


class WalkState:
    """The file, the scope, what stands around, and whether that provides for an absent name.

    conditions:   the tests around; what is defined behind one exists only if the test went well
    caught:       the absences that a ``try`` around catches; a function defined there runs later, outside of it
    alternative:  whether its handler puts something in the place of what is missing
    attempts:     the bodies of ``try`` statements around
    """

    def __init__(self, file: SourceFile, resolver: Resolver, scope: Scope) -> None:
        self.file = file
        self.resolver = resolver
        self.scope = scope
        self.found = FileUses(file)
        self.owner: tuple[str, ...] = ()
        self.conditions: tuple[Condition, ...] = ()
        self.caught: frozenset[str] = frozenset()
        self.alternative = False
        self.attempts: tuple[TryBody, ...] = ()
        self.body_file = file
        """The file of the statements that are walked: another's where its functions are walked for what they change."""
        self._asked: dict[tuple[object, ...], bool] = {}
        self._normal: dict[Name, Name] = {}
        self.copies: dict[AttributeSpelling, Values] = {}
        """Attributes that the condition around has found to be copies of a name of vLLM."""
        self.called_at: tuple[int, ...] = ()
        """The lines of the calls whose functions are being walked for what they change."""

    @property
    def guard(self) -> UseGuard:
        """What stands around."""
        return UseGuard(self.conditions, self.caught, self.alternative) if self.conditions or self.caught else _BARE

    def _around(self, kinds: set[str]) -> UseGuard:
        """What stands around, for code that fails in one of some ways."""
        caught = self.caught & kinds
        return (
            UseGuard(self.conditions, caught, self.alternative and bool(caught)) if self.conditions or caught else _BARE
        )

    @contextmanager
    def behind(self, *conditions: Condition | None) -> Iterator[None]:
        """Walk on behind tests."""
        before = self.conditions
        self.conditions = (*before, *(one for one in conditions if one is not None and one not in before))
        try:
            yield
        finally:
            self.conditions = before

    @contextmanager
    def catching(self, caught: frozenset[str], attempt: TryBody | None = None, *, alternative: bool) -> Iterator[None]:
        """Walk on in a ``try``."""
        before = self.caught, self.alternative, self.attempts
        self.caught, self.alternative = self.caught | caught, self.alternative or (alternative and bool(caught))
        self.attempts = (*self.attempts, attempt) if attempt is not None else self.attempts
        try:
            yield
        finally:
            self.caught, self.alternative, self.attempts = before

    @contextmanager
    def within(self, scope: Scope, *owner: str) -> Iterator[None]:
        """Walk on in a scope inside this one."""
        before = self.scope, self.owner
        self.scope, self.owner = scope, (*self.owner, *owner)
        try:
            yield
        finally:
            self.scope, self.owner = before

    def value(self, node: ast.expr | None) -> Values:
        """What an expression stands for here."""
        return self.resolver.value(node, self.scope)

    def asks(self, node: ast.expr) -> bool:
        """Whether a condition asks for vLLM's version or for a name."""
        # By its place: a function that is walked again has been parsed again.
        place = self.body_file, type(node), node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
        if place not in self._asked:
            self._asked[place] = guards.tests(node, self.resolver.value, self.scope)
        return self._asked[place]

    def forget_tests(self) -> None:
        """Let go of which conditions ask: it is of use only as long as the file is walked."""
        self._asked.clear()

    def annotated(self, node: ast.expr | None) -> Values:
        """What an annotation promises."""
        return self.resolver.annotated(node, self.scope)

    def dotted(self, node: ast.expr) -> str:
        """The full name of what an expression stands for, where it is none of the package's own."""
        return self.resolver.dotted(node, self.scope)

    def normal(self, name: Name) -> Name:
        """The name with as much of it taken for the module as the file's import statements show."""
        known = self._normal.get(name)
        if known is None:
            module, rest = name.module, name.qualname.split(".") if name.qualname else []
            while rest and f"{module}.{rest[0]}" in self.file.imports:
                module = f"{module}.{rest.pop(0)}"
            known = self._normal[name] = Name(module, ".".join(rest))
        return known

    def mention(self, name: Name, line: int, *, by: str = guards.ATTRIBUTE, guarded: bool = False) -> None:
        """Note that a name is imported or spoken of; ``by`` says what its absence would raise."""
        if not name.is_vllm or name == Name(TOP) or self.called_at:
            return
        for attempt in self.attempts:
            attempt.names.append(name)
        guard = self._around({by}).and_also(UseGuard(caught=frozenset({by} if guarded else ())))
        places = self.found.mentions.setdefault(name, {})
        places[guard] = min(line, places.get(guard, line))

    def call(self, node: ast.Call, value: Values) -> None:
        """Note a call of something of vLLM's, of a method of one of its objects, or on ``self`` and ``super()``.

        ``value`` is what stands before its brackets.
        """
        if self.called_at:
            return
        if not value:
            self._call_of_method(node)
            return
        self.found.made.update(one for one in value if isinstance(one, LocalDef) and one.function is None)
        names = [one for one in value if isinstance(one, Instance) or (type(one) is Name and one.is_vllm)]
        # Where a name may be several things, a call that does not fit one of them may be meant for the other.
        for one in names:
            name, path = (self.normal(one.cls), one.path) if isinstance(one, Instance) else (self.normal(one), ())
            if isinstance(one, Instance) and len(path) < 1 + one.guessed:
                continue
            self.found.calls.append(
                Use(
                    "call",
                    name.module,
                    name.qualname,
                    self.file.shown,
                    node.lineno,
                    owner=".".join(self.owner),
                    guard=self._around({guards.CALL}),
                    fallback=len(value) > 1,
                    arguments=Arguments.of(node),
                    bound=isinstance(one, Instance),
                    path=path,
                    guessed=isinstance(one, Instance) and one.guessed,
                )
            )
        if not names:
            self._call_of_method(node)

    def _call_of_method(self, node: ast.Call) -> None:
        func = node.func
        if not isinstance(func, ast.Attribute):
            return
        cls, above = None, False
        if isinstance(func.value, ast.Name):
            cls = next((one.cls for one in self.scope.find(func.value.id) or () if isinstance(one, Receiver)), None)
        elif isinstance(func.value, ast.Call) and self.dotted(func.value.func) == "builtins.super":
            cls, above = self.scope.method() if not func.value.args else None, True
        if cls is not None:
            self.found.methods.append(
                MethodCall(
                    cls=cls,
                    method=func.attr,
                    arguments=Arguments.of(node),
                    line=node.lineno,
                    owner=".".join(self.owner),
                    guard=self._around({guards.CALL}),
                    above=above,
                )
            )

    def read(self, one: Instance, parts: Sequence[str], line: int) -> None:
        """Note that an attribute of an object of vLLM's is read."""
        path = (*one.path, *parts)
        if self.called_at or not path or (one.guessed and len(path) < 2 and one.path):
            return
        name = self.normal(one.cls)
        self.found.reads.append(
            Use(
                "read",
                name.module,
                name.qualname,
                self.file.shown,
                line,
                owner=".".join(self.owner),
                guard=self._around({guards.ATTRIBUTE}),
                path=path,
                guessed=one.guessed,
            )
        )

    def put(
        self,
        targets: Values,
        line: int,
        expr: ast.expr | None = None,
        *,
        way: Way | None = None,
        value: Values = (),
        by: Literal["", "first", "call"] = "",
    ) -> bool:
        """Note what is put in the place of names; False where none of them is vLLM's."""
        names = [self.normal(one) for one in targets if isinstance(one, Name) and one.is_vllm]
        held = value or self.value(expr)
        for name in names:
            self.found.puts.append(
                Assignment(
                    target=name,
                    line=self.called_at[0] if self.called_at else line,
                    owner=".".join(self.owner),
                    guard=self.guard,
                    scope=self.scope,
                    # Of several places that a name may be at, only one is there.
                    alternatives=tuple(one for one in names if one != name),
                    way=way,
                    value=held,
                    expr=expr,
                    handed=_hands(expr, name, self),
                    by=by,
                )
            )
        return bool(names)


def _hands(expr: ast.expr | None, target: Name, state: WalkState) -> bool:
    """Whether a call is given what is at ``target``, other than to copy its name and docstring."""
    if not isinstance(expr, ast.Call):
        return False
    if state.dotted(expr.func) == "functools.update_wrapper":
        return False
    given = [*expr.args, *(keyword.value for keyword in expr.keywords)]
    return any(
        state.normal(one) == target for arg in given for one in state.value(arg) if isinstance(one, Name)
    ) or any(_hands(arg, target, state) for arg in given)
