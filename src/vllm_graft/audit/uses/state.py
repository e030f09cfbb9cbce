"""Where a walk through a file stands, and what it has found so far."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from vllm_graft.audit.model import Arguments, Declared, Use, Way
from vllm_graft.audit.uses.files import SourceFile
from vllm_graft.audit.uses.resolve import Resolver
from vllm_graft.audit.uses.sweeps import Place
from vllm_graft.audit.uses.values import TOP, Name, Object, Own, Scope, Self, Values


@dataclass(slots=True)
class Put:
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
    guarded: bool
    scope: Scope
    way: Way | None = None
    value: Values = ()
    expr: ast.expr | None = None
    handed: bool = False
    by: Literal["", "first", "call"] = ""
    patch: Declared | None = None


@dataclass(slots=True)
class Subclass:
    """A class of the package that derives from one of vLLM's, directly or through classes between."""

    cls: Own
    target: Name
    line: int
    owner: str
    guarded: bool
    methods: dict[str, tuple[Own, int, bool]]
    """The functions of its body, the line that binds each, and whether that is guarded."""


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a method on ``self`` or ``super()`` in a class of the package; whose it is shows when all are known."""

    cls: Own
    method: str
    arguments: Arguments
    line: int
    owner: str
    guarded: bool
    above: bool
    """Whether it goes to ``super()``."""


@dataclass(slots=True)
class Found:
    """What one file holds.

    saved:    the attributes and keys under which a name of vLLM was kept, as in ``C._original_f = C.f``
    passed:   the names that stand anywhere but in a call of them
    calls:    calls of functions and classes of vLLM, and of methods of their objects
    reads:    attributes of such objects
    methods:  calls on ``self`` and ``super()``
    stored:   the attributes that the file gives to any object
    made:     the classes of the package that the file makes objects of
    """

    file: SourceFile
    puts: list[Put] = field(default_factory=list)
    subclasses: list[Subclass] = field(default_factory=list)
    mentions: dict[Name, tuple[int, bool]] = field(default_factory=dict)
    saved: dict[str, set[Name]] = field(default_factory=dict)
    passed: set[Name] = field(default_factory=set)
    calls: list[Use] = field(default_factory=list)
    reads: list[Use] = field(default_factory=list)
    methods: list[Called] = field(default_factory=list)
    stored: set[str] = field(default_factory=set)
    made: set[Own] = field(default_factory=set)

    def imports(self) -> list[Use]:
        """The mentions as uses, one for each name."""
        return [
            Use(
                "import", name.module, name.qualname, self.file.shown, line, guarded=guarded, passed=name in self.passed
            )
            for name, (line, guarded) in self.mentions.items()
        ]


class State:
    """The file, the scope, what stands around, and whether that provides for an absent name.

    tested:  behind ``hasattr`` or a test of the version; what is defined there exists only if the test went well
    caught:  in a ``try`` that catches the absence; a function defined there runs later, outside of it
    excused: in a ``try`` that catches what a call with the wrong arguments raises
    """

    def __init__(self, file: SourceFile, resolver: Resolver, scope: Scope) -> None:
        self.file = file
        self.resolver = resolver
        self.scope = scope
        self.found = Found(file)
        self.owner: tuple[str, ...] = ()
        self.tested = False
        self.caught = False
        self.excused = False
        self.copies: dict[Place, Values] = {}
        """Attributes that the condition around has found to be copies of a name of vLLM."""
        self.called_at: tuple[int, ...] = ()
        """The lines of the calls whose functions are being walked for what they change."""

    @property
    def guarded(self) -> bool:
        """Whether the code around provides for the absence of a name."""
        return self.tested or self.caught

    @contextmanager
    def guard(self, *, tested: bool = False, caught: bool = False, excused: bool = False) -> Iterator[None]:
        """Walk on behind a test, or in a ``try``."""
        before = self.tested, self.caught, self.excused
        self.tested, self.caught = self.tested or tested, self.caught or caught
        self.excused = self.excused or excused
        try:
            yield
        finally:
            self.tested, self.caught, self.excused = before

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

    def annotated(self, node: ast.expr | None) -> Values:
        """What an annotation promises."""
        return self.resolver.annotated(node, self.scope)

    def dotted(self, node: ast.expr) -> str:
        """The full name of what an expression stands for, where it is none of the package's own."""
        return self.resolver.dotted(node, self.scope)

    def normal(self, name: Name) -> Name:
        """The name with as much of it taken for the module as the file's import statements show."""
        module, rest = name.module, name.qualname.split(".") if name.qualname else []
        while rest and f"{module}.{rest[0]}" in self.file.imports:
            module = f"{module}.{rest.pop(0)}"
        return Name(module, ".".join(rest))

    def mention(self, name: Name, line: int, *, guarded: bool = False) -> None:
        """Note that a name is imported or spoken of: one for each name, guarded if it is wherever it stands."""
        if not name.is_vllm or name == Name(TOP) or self.called_at:
            return
        known = self.found.mentions.get(name)
        safe = guarded or self.guarded
        if known is not None:
            line, safe = min(line, known[0]), safe and known[1]
        self.found.mentions[name] = line, safe

    def call(self, node: ast.Call) -> None:
        """Note a call of something of vLLM's, of a method of one of its objects, or on ``self`` and ``super()``."""
        if self.called_at:
            return
        value = self.value(node.func)
        self.found.made.update(one for one in value if isinstance(one, Own) and one.function is None)
        names = [one for one in value if isinstance(one, Object) or (type(one) is Name and one.is_vllm)]
        # Where a name may be several things, a call that does not fit one of them may be meant for the other.
        guarded = self.tested or self.excused or len(value) > 1
        for one in names:
            name, path = (self.normal(one.cls), one.path) if isinstance(one, Object) else (self.normal(one), ())
            if isinstance(one, Object) and len(path) < 1 + one.guessed:
                continue
            self.found.calls.append(
                Use(
                    "call",
                    name.module,
                    name.qualname,
                    self.file.shown,
                    node.lineno,
                    owner=".".join(self.owner),
                    guarded=guarded,
                    arguments=Arguments.of(node),
                    bound=isinstance(one, Object),
                    path=path,
                    guessed=isinstance(one, Object) and one.guessed,
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
            cls = next((one.cls for one in self.scope.find(func.value.id) or () if isinstance(one, Self)), None)
        elif isinstance(func.value, ast.Call) and self.dotted(func.value.func) == "builtins.super":
            cls, above = self.scope.method() if not func.value.args else None, True
        if cls is not None:
            self.found.methods.append(
                Called(
                    cls=cls,
                    method=func.attr,
                    arguments=Arguments.of(node),
                    line=node.lineno,
                    owner=".".join(self.owner),
                    guarded=self.tested or self.excused,
                    above=above,
                )
            )

    def read(self, one: Object, parts: Sequence[str], line: int) -> None:
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
                guarded=self.guarded,
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
        names = [one for one in targets if isinstance(one, Name) and one.is_vllm]
        held = value or self.value(expr)
        for name in map(self.normal, names):
            self.found.puts.append(
                Put(
                    target=name,
                    line=self.called_at[0] if self.called_at else line,
                    owner=".".join(self.owner),
                    # Of several places that a name may be at, only one is there.
                    guarded=self.guarded or len(names) > 1,
                    scope=self.scope,
                    way=way,
                    value=held,
                    expr=expr,
                    handed=_hands(expr, name, self),
                    by=by,
                )
            )
        return bool(names)


def _hands(expr: ast.expr | None, target: Name, state: State) -> bool:
    """Whether a call is given what is at ``target``, other than to copy its name and docstring."""
    if not isinstance(expr, ast.Call):
        return False
    if state.dotted(expr.func) == "functools.update_wrapper":
        return False
    given = [*expr.args, *(keyword.value for keyword in expr.keywords)]
    return any(
        state.normal(one) == target for arg in given for one in state.value(arg) if isinstance(one, Name)
    ) or any(_hands(arg, target, state) for arg in given)
