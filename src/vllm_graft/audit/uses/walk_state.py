"""The position of a walk through a file, and what it has found there so far."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Final, Literal

from vllm_graft.audit.model import Arguments, Branch, Condition, PatchDeclaration, Use, UseGuard, Way
from vllm_graft.audit.uses import guards
from vllm_graft.audit.uses.guards import TryBody
from vllm_graft.audit.uses.resolver import Resolver, dotted_of
from vllm_graft.audit.uses.source_file import SourceFile
from vllm_graft.audit.uses.values import (
    TOP,
    FlagValue,
    Instance,
    LocalDef,
    Name,
    ParentMethods,
    Receiver,
    ReceiverClass,
    Scope,
    Values,
    local_defs,
    vllm_names,
)

AttributeSpelling = tuple[str, str]
"""An attribute as it is spelled: its owner and its name."""

_REPLACERS: Final = frozenset({"dataclasses.replace", "copy.replace"})

# The guard of most code: none.
_BARE: Final = UseGuard()
_UNCHANGED: Final = nullcontext()


@dataclass(slots=True)
class Assignment:
    """Something that a package assigns to a name of vLLM.

    Whether it calls the original shows when every function has been walked, because names in a function may be bound
    later.

    way:     set if the form of the assignment alone tells
    value:   the new value
    expr:    the expression for it, in ``scope``
    handed:  whether the expression passes the original on, as ``C.f = traced(C.f)`` does
    by:      how a wrapper gets the original: as its "first" parameter, or in a patch as one named "call"
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
    """A name in a class body: a function, or the value of an assignment."""

    name: str
    line: int
    value: Values
    expr: ast.expr | None
    guard: UseGuard

    @property
    def function(self) -> LocalDef | None:
        """The function, if a ``def`` of the body defines it."""
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
    """The functions of its body, each with the line that binds it and the guard of that line."""


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call on ``self`` or ``super()`` in a class of the package; its target shows when all classes are known."""

    cls: LocalDef
    method: str
    arguments: Arguments
    line: int
    owner: str
    guard: UseGuard
    via_super: bool
    """True if it goes to ``super()``."""

    def use(self, file: str, module: str, qualname: str) -> Use:
        """Return the use of the method of vLLM that it reaches."""
        return Use("call", module, qualname, file, self.line, self.owner, self.guard, arguments=self.arguments)


@dataclass(slots=True)
class FileUses:
    """The uses of vLLM in one file.

    saved:     the attributes and keys that a name of vLLM was stored under, as in ``C._original_f = C.f``
    passed:    the names that occur other than in a call of them
    calls:     calls of functions and classes of vLLM, and of methods of their instances
    reads:     attributes of such instances
    methods:   calls on ``self`` and ``super()``
    constructions: calls of the package's own classes; those of ``cls`` in a class method have it as their method
    starred:   names that star imports may bind, each with the others that it may stand for
    owners:    names that are reached through one of several owners, each with the others
    stored:    the attributes that the file gives to any object
    spelled:   those that it sets by ``setattr``, which spells them as text
    made:      the classes of the package that the file instantiates
    imported:  other modules that it imports, each with the guard of the import
    branches:  the tests, each with the first and last position behind it
    """

    file: SourceFile
    assignments: list[Assignment] = field(default_factory=list)
    subclasses: list[Subclass] = field(default_factory=list)
    mentions: dict[Name, dict[UseGuard, int]] = field(default_factory=dict)
    saved: dict[str, set[Name]] = field(default_factory=dict)
    imported: list[tuple[str, UseGuard]] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    passed: set[Name] = field(default_factory=set)
    calls: list[Use] = field(default_factory=list)
    reads: list[Use] = field(default_factory=list)
    methods: list[MethodCall] = field(default_factory=list)
    constructions: list[MethodCall] = field(default_factory=list)
    starred: dict[Name, tuple[Name, ...]] = field(default_factory=dict)
    owners: dict[Name, tuple[Name, ...]] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    spelled: set[str] = field(default_factory=set)
    made: set[LocalDef] = field(default_factory=set)

    def forget(self) -> None:
        """Drop everything but the branches, which the uses refer to."""
        for each in fields(self):
            if each.name not in ("file", "branches"):
                getattr(self, each.name).clear()

    def imports(self) -> Iterator[Use]:
        """Yield the mentions as uses: one for each name that occurs without a guard, else one for each guard."""
        for name, places in self.mentions.items():
            others, owners = (
                tuple((one.module, one.qualname) for one in held.get(name, ())) for held in (self.starred, self.owners)
            )
            whole = Use("import", name.module, name.qualname, self.file.shown, 0, passed_on=name in self.passed)
            for guard, line in ({_BARE: places[_BARE]} if _BARE in places else places).items():
                yield whole.but(line=line, guard=guard, alternatives=others, owners=owners)


class WalkState:
    """The position of a walk: the file, the scope, and the tests and handlers around.

    conditions:   the tests around; what is defined behind one exists only if it held
    caught:       the failures that a ``try`` around catches; a function defined there runs later, outside of it
    alternative:  whether its handler provides a replacement for what is missing
    tries:        the bodies of ``try`` statements around
    body_file:    the file of the statements that are walked: another's if its functions are walked for a call
    called_at:    the lines of the calls whose functions are being walked for what they change
    copies:       attributes that the condition around has found to be copies of a name of vLLM
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
        self.tries: tuple[TryBody, ...] = ()
        self.body_file = file
        self.copies: Mapping[AttributeSpelling, Values] = {}
        self.called_at: tuple[int, ...] = ()
        self.asked: dict[tuple[object, ...], bool] = {}
        self._normal: dict[Name, Name] = {}

    @property
    def guard(self) -> UseGuard:
        """The tests and handlers around."""
        return UseGuard(self.conditions, self.caught, self.alternative) if self.conditions or self.caught else _BARE

    def _guard_for(self, kind: str) -> UseGuard:
        """Return the tests and handlers around for code that fails in one way."""
        caught = self.caught & {kind}
        if not self.conditions and not caught:
            return _BARE
        return UseGuard(self.conditions, caught, self.alternative and bool(caught))

    @contextmanager
    def temporarily(self, **values: object) -> Iterator[None]:
        """Change attributes for a while."""
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        try:
            yield
        finally:
            self.__dict__.update(before)

    def behind(self, *conditions: Condition | None) -> AbstractContextManager[None]:
        """Walk on behind tests."""
        more = [one for one in conditions if one is not None and one not in self.conditions]
        return self.temporarily(conditions=(*self.conditions, *more)) if more else _UNCHANGED

    def catching(
        self, caught: frozenset[str], body: TryBody | None = None, *, alternative: bool
    ) -> AbstractContextManager[None]:
        """Walk on in a ``try``."""
        return self.temporarily(
            caught=self.caught | caught,
            alternative=self.alternative or (alternative and bool(caught)),
            tries=(*self.tries, body) if body is not None else self.tries,
        )

    def within(self, scope: Scope, *owner: str) -> AbstractContextManager[None]:
        """Walk on in a scope inside this one."""
        return self.temporarily(scope=scope, owner=(*self.owner, *owner))

    def value(self, node: ast.expr | None) -> Values:
        """Return what an expression stands for here."""
        return self.resolver.value(node, self.scope)

    def asks(self, node: ast.expr) -> bool:
        """Return whether a condition asks for vLLM's version or for a name."""
        # By its place: a function that is walked again has been parsed again.
        place = self.body_file, type(node), node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
        if place not in self.asked:
            self.asked[place] = guards.asks_vllm(node, self.resolver, self.scope)
        return self.asked[place]

    def annotated(self, node: ast.expr | None) -> Values:
        """Return what an annotation promises."""
        return self.resolver.annotated(node, self.scope)

    def dotted(self, node: ast.expr) -> str:
        """Return the full name of what an expression stands for, if it is not the package's own."""
        return self.resolver.dotted(node, self.scope)

    def normal(self, name: Name) -> Name:
        """Extend the module part of a name as far as the file's import statements show."""
        known = self._normal.get(name)
        if known is None:
            module, rest = name.module, name.qualname.split(".") if name.qualname else []
            while rest and f"{module}.{rest[0]}" in self.file.imports:
                module = f"{module}.{rest.pop(0)}"
            known = self._normal[name] = Name(module, ".".join(rest))
        return known

    def mention(
        self, name: Name, line: int, *, by: str = guards.ATTRIBUTE, guarded: bool = False, owners: tuple[Name, ...] = ()
    ) -> None:
        """Record that a name is imported or mentioned; ``by`` is the failure that its absence would cause.

        ``owners`` are the other classes or modules that it may be an attribute of.
        """
        if not name.is_vllm or self.called_at:
            return
        for body in () if guarded else reversed(self.tries):
            body.names.append((name, self.conditions))
            if by in body.caught:
                break
        if name == Name(TOP):
            return
        guard = self._guard_for(by).and_also(UseGuard(caught=frozenset({by} if guarded else ())))
        others = self.found.owners.setdefault(name, owners)
        if others != owners:
            self.found.owners[name] = ()
        places = self.found.mentions.setdefault(name, {})
        places[guard] = min(line, places.get(guard, line))

    def call(self, node: ast.Call, value: Values) -> None:
        """Record a call of something from vLLM, of a method of its instances, or on ``self`` and ``super()``.

        ``value`` is the value of the expression that is called.
        """
        if self.called_at:
            return
        if not value:
            self._call_of_method(node)
            return
        self.found.made.update(one for one in local_defs(value) if one.function is None)
        if len(value) == 1 and isinstance(value[0], (LocalDef, ReceiverClass)):
            # A call of a class of the package, by its name or as ``cls``.
            by = "cls" if isinstance(value[0], ReceiverClass) else ""
            cls = value[0].cls if isinstance(value[0], ReceiverClass) else value[0]
            if cls.function is None and cls.bases:
                owner, guard = ".".join(self.owner), self._guard_for(guards.CALL)
                call = MethodCall(cls, by, Arguments.of(node), node.lineno, owner, guard, via_super=False)
                self.found.constructions.append(call)
        elif dotted_of(value) in _REPLACERS and node.args:
            # ``dataclasses.replace(instance, field=...)`` calls the constructor with some of its fields. The instance
            # may be of a subclass with more fields.
            held = self.value(node.args[0])
            if len(held) == 1 and isinstance(held[0], Instance) and not held[0].path and not held[0].guessed:
                named = Arguments(keywords=Arguments.of(node).keywords, unpacks_keywords=True)
                use = self._use("call", held[0], node.lineno, guards.CALL, ())
                self.found.calls.append(replace(use, arguments=named, guessed=True))
        elif dotted_of(value) == "functools.partial" and node.args:
            # What ``partial(function, ...)`` binds must fit, and the rest comes later.
            held, given = self.value(node.args[0]), Arguments.of(node)
            if len(held) == 1 and type(held[0]) is Name and held[0].is_vllm:
                some = Arguments(max(given.positional - 1, 0), given.keywords, unpacks=True, unpacks_keywords=True)
                use = self._use("call", held[0], node.lineno, guards.CALL, ())
                self.found.calls.append(replace(use, arguments=some))
        names = [one for one in value if isinstance(one, Instance) or (type(one) is Name and one.is_vllm)]
        if not names:
            self._call_of_method(node)
        for one in names:
            instance = one if isinstance(one, Instance) else None
            if instance is not None and len(instance.path) < 1 + instance.guessed:
                continue
            path, bound = instance.path if instance is not None else (), instance is not None
            use = self._use("call", one, node.lineno, guards.CALL, path, Arguments.of(node), bound)
            # If a name may be several things, a call that does not fit one of them may be meant for another, unless a
            # release has only this one. None, which an import in a ``try`` may leave behind, is not called.
            others = [each for each in value if each != one and not isinstance(each, FlagValue)]
            known = [self.normal(each) for each in others if type(each) is Name and each.is_vllm]
            alternatives = tuple((each.module, each.qualname) for each in known)
            if others:
                use = use.but(alternatives=alternatives, fallback=len(known) < len(others))
            self.found.calls.append(use)

    def _use(
        self,
        way: Way,
        target: Name | Instance,
        line: int,
        failure: str,
        path: tuple[str, ...],
        arguments: Arguments | None = None,
        bound: bool = False,
    ) -> Use:
        name = self.normal(target.cls if isinstance(target, Instance) else target)
        guessed = isinstance(target, Instance) and (target.guessed or target.declared)
        owner, guard = ".".join(self.owner), self._guard_for(failure)
        place = (name.module, name.qualname, self.file.shown, line, owner, guard)
        return Use(way, *place, path=path, guessed=guessed, arguments=arguments, bound=bound)

    def _call_of_method(self, node: ast.Call) -> None:
        func = node.func
        if not isinstance(func, ast.Attribute):
            return
        cls, above = None, False
        if isinstance(func.value, ast.Name):
            held = self.scope.find(func.value.id) or ()
            cls = next((one.cls for one in held if isinstance(one, (Receiver, ParentMethods))), None)
            above = len(held) == 1 and isinstance(held[0], ParentMethods)
        elif isinstance(func.value, ast.Call):
            cls, above = next((one.cls for one in self.value(func.value) if isinstance(one, ParentMethods)), None), True
        if cls is not None:
            # What ``super()`` lacks is missed by another error than what it does not take.
            failure = guards.ATTRIBUTE if above and guards.ATTRIBUTE in self.caught else guards.CALL
            owner, guard, arguments = ".".join(self.owner), self._guard_for(failure), Arguments.of(node)
            self.found.methods.append(MethodCall(cls, func.attr, arguments, node.lineno, owner, guard, above))

    def read_above(self, cls: LocalDef, name: str, line: int) -> None:
        """Record that a method is taken from ``super()`` without a call of it there: it must exist."""
        if not self.called_at:
            anything, guard = Arguments(unpacks=True, unpacks_keywords=True), self._guard_for(guards.ATTRIBUTE)
            self.found.methods.append(
                MethodCall(cls, name, anything, line, ".".join(self.owner), guard, via_super=True)
            )

    def read(self, one: Instance, parts: Sequence[str], line: int) -> None:
        """Record that an attribute of an instance of a vLLM class is read."""
        path = (*one.path, *parts)
        if self.called_at or not path or (one.guessed and len(path) < 2 and one.path):
            return
        self.found.reads.append(self._use("read", one, line, guards.ATTRIBUTE, path))

    def assign(
        self,
        targets: Values,
        line: int,
        expr: ast.expr | None = None,
        *,
        way: Way | None = None,
        value: Values = (),
        by: Literal["", "first", "call"] = "",
    ) -> bool:
        """Record what replaces names; False if none of them is vLLM's."""
        names = [self.normal(one) for one in vllm_names(targets)]
        if not names:
            return False
        held = value or self.value(expr)
        for name in names:
            self.found.assignments.append(
                Assignment(
                    target=name,
                    line=self.called_at[0] if self.called_at else line,
                    owner=".".join(self.owner),
                    guard=self.guard,
                    scope=self.scope,
                    # A name may be in one of several places, and only one of them exists.
                    alternatives=tuple(one for one in names if one != name),
                    way=way,
                    value=held,
                    expr=expr,
                    handed=_passes_original(expr, name, self),
                    by=by,
                )
            )
        return True


def _passes_original(expr: ast.expr | None, target: Name, state: WalkState) -> bool:
    """Return whether a call gets what is at ``target``, other than to copy its name and docstring."""
    if not isinstance(expr, ast.Call) or state.dotted(expr.func) == "functools.update_wrapper":
        return False
    given = [*expr.args, *(keyword.value for keyword in expr.keywords)]
    return any(
        state.normal(one) == target for arg in given for one in state.value(arg) if isinstance(one, Name)
    ) or any(_passes_original(arg, target, state) for arg in given)
