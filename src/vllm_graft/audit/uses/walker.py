"""X"""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from vllm_graft.audit.model import Condition, UseGuard
from vllm_graft.audit.uses import guards, patches, syntax
from vllm_graft.audit.uses.bodies import body_contents
from vllm_graft.audit.uses.classes import upstream
from vllm_graft.audit.uses.guards import ExpressionCondition, TryBody, TryCondition, UnknownCondition
from vllm_graft.audit.uses.patches import (
    arguments,
    attributes,
    compared,
    decorating,
    helpers,
    keep,
    put_on,
    putting,
)
from vllm_graft.audit.uses.relevance import Relevance
from vllm_graft.audit.uses.resolver import GETTERS, IMPORTERS, dotted_of, guessed, is_class, items_of
from vllm_graft.audit.uses.source_file import SourceFile
from vllm_graft.audit.uses.syntax import local_names, parameters, statements
from vllm_graft.audit.uses.values import (
    TOP,
    ConditionValue,
    FlagValue,
    Instance,
    LocalDef,
    Name,
    Receiver,
    Scope,
    Values,
    local_defs,
    texts_in,
    union,
    vllm_names,
)
from vllm_graft.audit.uses.walk_state import AttributeSpelling, ClassMember, Subclass, WalkState
from vllm_graft.patching.upstream.fingerprint import Function
from vllm_graft.patching.upstream.scopes import absolute, dotted

_LEAVES: Final = frozenset({ast.Constant, ast.Load, ast.Store, ast.Del})
"""Nodes that hold nothing to look at, and are most of a tree."""

_Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


class Functions(Protocol):
    """What makes a function of a lambda, and walks through it later."""

    def __call__(self, node: ast.Lambda, /) -> LocalDef:
        """The function that the node defines."""
        ...


class ExpressionWalker:
    """The expressions of one file; ``helper`` walks through a function of the package that changes what it is given."""

    def __init__(
        self, state: WalkState, function: Functions, helper: Callable[[LocalDef, dict[str, Values], int], object]
    ) -> None:
        self.state = state
        self._function = function
        self._helper = helper

    def visit(self, node: ast.AST | None) -> None:
        """Walk through an expression, or a statement that consists of expressions."""
        way = _EXPRESSIONS.get(type(node)) if node is not None else None
        if way is not None:
            way(self, node)
        elif node is not None:
            self.below(node)

    def alias(self, node: ast.expr) -> None:
        """Walk through what a variable is given; a function that only gets another name is still called in sight."""
        if isinstance(node, ast.Attribute):
            self._attribute(node, called=True)
        elif not isinstance(node, ast.Name):
            self.visit(node)

    def below(self, node: ast.AST) -> None:
        """Walk through the parts of a node, not the node itself."""
        # As ast.iter_child_nodes, at half the price: most of the time goes by here.
        for value in node.__dict__.values():
            if type(value) is list:
                for one in value:
                    if isinstance(one, ast.AST) and type(one) not in _LEAVES:
                        self.visit(one)
            elif isinstance(value, ast.AST) and type(value) not in _LEAVES:
                self.visit(value)

    def _name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            for name in vllm_names(self.state.scope.find(node.id) or ()):
                self.state.found.passed.add(self.state.normal(name))

    def _attribute(self, node: ast.Attribute, *, called: bool = False) -> None:
        inner: ast.expr = node
        parts: list[str] = []
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        held = self.state.value(inner)
        for name in vllm_names(held):
            self._chain(name, parts, node.lineno, called=called)
        for one in held:
            if isinstance(one, Instance) and len(held) == 1:
                self.state.read(one, parts, node.lineno)
        if all(isinstance(one, Receiver) for one in held) and isinstance(node.ctx, ast.Load):
            self._guess(node, parts)
        if not isinstance(inner, ast.Name):
            self.visit(inner)

    def _guess(self, node: ast.Attribute, parts: Sequence[str]) -> None:
        """Of ``anything.model_config.x`` the name alone says what ``x`` is read from."""
        for place, part in enumerate(parts[:-1]):
            for one in guessed(part):
                if isinstance(one, Instance):
                    self.state.read(one, parts[place + 1 :], node.lineno)
                    return

    def _chain(
        self, base: Name, parts: Sequence[str], line: int, *, guarded: bool = False, called: bool = False
    ) -> None:
        """Note an attribute of a module or of a class; those of an object are followed no further."""
        if not _has_names(self.state.normal(base)) or "__dict__" in base.qualname.split("."):
            return
        whole = self.state.normal(Name(base.module, ".".join([*base.qualname.split("."), *parts]).strip(".")))
        rest = whole.qualname.split(".")
        above = base.qualname.split(".") if base.qualname and whole.module == base.module else []
        in_class = any(map(_is_capital, above))
        kept = _defined(rest[len(above) :], modules=whole.module == TOP and not above, in_class=in_class)
        if kept:
            name = Name(whole.module, ".".join([*above, *kept]))
            self.state.mention(name, line, guarded=guarded)
            if not called:
                self.state.found.passed.add(name)

    def _call(self, node: ast.Call) -> None:
        value = self.state.value(node.func)
        left = putting(self.state, node, value)
        if left is not None:
            for one in left:
                self.visit(one)
            return
        called = dotted_of(value)
        if called in IMPORTERS or called == "sys.modules.get":
            for name in self.state.value(node):
                if isinstance(name, Name):
                    self.state.mention(name, node.lineno, by=guards.IMPORT)
                    if not name.is_vllm:
                        self.state.found.imported.append((name.dotted, self.state.guard))
        elif called in GETTERS and len(node.args) > 1:
            for base in vllm_names(self.state.value(node.args[0])):
                for text in texts_in(self.state.value(node.args[1])):
                    self._chain(base, [text], node.lineno, guarded=len(node.args) > 2)
        self.state.call(node, value)
        if isinstance(node.func, ast.Attribute):
            self._attribute(node.func, called=True)
        elif not isinstance(node.func, ast.Name):
            self.visit(node.func)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)
        for own, given in helpers(self.state, node, value) if value else ():
            self._helper(own, given, node.lineno)

    def _subscript(self, node: ast.Subscript) -> None:
        if self.state.dotted(node.value) == "sys.modules":
            for name in vllm_names(self.state.value(node)):
                self.state.mention(name, node.lineno)
        self.below(node)

    def _lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self.state.resolver.lambdas[node] = self._function(node)

    def _named(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.state.scope.bind(node.target.id, self.state.value(node.value))

    def _test(self, node: ast.expr, *, wanted: bool = True) -> Condition | None:
        state = self.state
        if not state.asks(node):
            return None
        return ExpressionCondition(node, state.scope, state.resolver, wanted)

    def _if(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        for wanted, arm in ((True, node.body), (False, node.orelse)):
            with self.state.behind(self._test(node.test, wanted=wanted)):
                self.visit(arm)

    def _both(self, node: ast.BoolOp) -> None:
        """The values of ``and`` and ``or``, each of which is looked at only where those before it let it."""
        before: list[Condition | None] = []
        for one in node.values:
            with self.state.behind(*before):
                self.visit(one)
            before.append(self._test(one, wanted=isinstance(node.op, ast.And)))

    def _comprehension(self, node: _Comprehension) -> None:
        scope = Scope("function", self.state.scope)
        for one in node.generators:
            self.visit(one.iter)
            item = union(*items_of(self.state.value(one.iter)))
            for name in ast.walk(one.target):
                if isinstance(name, ast.Name):
                    scope.names[name.id] = item if name is one.target else ()
        tests = [test for one in node.generators for test in one.ifs]
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        with self.state.within(scope), self.state.behind(*map(self._test, tests)):
            for part in (*tests, *parts):
                self.visit(part)


_EXPRESSIONS: Final[Mapping[type[ast.AST], Callable[..., None]]] = {
    ast.Name: ExpressionWalker._name,
    ast.Attribute: ExpressionWalker._attribute,
    ast.Call: ExpressionWalker._call,
    ast.Subscript: ExpressionWalker._subscript,
    ast.Lambda: ExpressionWalker._lambda,
    ast.NamedExpr: ExpressionWalker._named,
    ast.IfExp: ExpressionWalker._if,
    ast.BoolOp: ExpressionWalker._both,
    ast.ListComp: ExpressionWalker._comprehension,
    ast.SetComp: ExpressionWalker._comprehension,
    ast.GeneratorExp: ExpressionWalker._comprehension,
    ast.DictComp: ExpressionWalker._comprehension,
}
"""What walks through each kind of expression; of others, their parts are walked."""


def _has_names(name: Name) -> bool:
    """Whether a name is that of a module or class, as far as imports tell, and the way that vLLM names them."""
    if any(_is_capital(part) for part in name.qualname.split(".")):
        return is_class(name.qualname)
    if any(part.startswith("__") for part in name.qualname.split(".")):
        return False
    # What is imported under a small name is a module or an object, which only a release can tell.
    return name.qualname != "logger"


def _is_capital(part: str) -> bool:
    return part.lstrip("_")[:1].isupper()


def _defined(parts: Sequence[str], *, modules: bool, in_class: bool = False) -> list[str]:
    """As much of a chain of attributes as a source can be expected to define: ``Enum.MEMBER.value`` ends at the member.

    A function or a value ends it, unless ``modules`` says that there may be modules before them. What belongs to every
    object, such as ``__name__``, is defined nowhere.
    """
    kept: list[str] = []
    for part in parts:
        if not part or (part.startswith("__") and part.endswith("__")):
            break
        kept.append(part)
        is_class = _is_capital(part)
        constant = part.isupper() and (in_class or "_" in part)
        if constant or (not is_class and (in_class or not modules)):
            break
        in_class = in_class or is_class
    return kept


def _class_statement(walker: Walker, node: ast.ClassDef) -> None:
    """Walk through a class statement."""
    state = walker.state
    _head(walker, node)
    bases = tuple(state.value(_bare(base)) for base in node.bases)
    inner = Scope("class", state.scope)
    own = LocalDef(state.file, node, state.scope, inside=inner, bases=bases)
    walker.members.append([])
    walker.classes.append(own)
    with state.within(inner, node.name):
        walker.block(node.body)
        members = walker.members.pop()
    walker.classes.pop()
    state.scope.bind(node.name, (own,))
    targets = union(*(patches.targets(state, base) for base in node.bases))
    if targets:
        patches.declare(state, node, targets, members)
    else:
        _subclass(walker, own, members)
    _decorated(walker, node, members)


def _head(walker: Walker, node: ast.ClassDef) -> None:
    """Walk through what stands above the body; a base that is vLLM's is a subclass or a patch, and no mere mention."""
    state = walker.state
    for one in (*node.decorator_list, *(keyword.value for keyword in node.keywords)):
        walker.expressions.visit(one)
    for base in node.bases:
        if patches.targets(state, base):
            continue
        if any(vllm_names(state.value(_bare(base)))):
            if isinstance(base, ast.Subscript):
                walker.expressions.visit(base.slice)
        else:
            walker.expressions.visit(base)


def _bare(base: ast.expr) -> ast.expr:
    """Of ``Base[T]`` the ``Base``."""
    return base.value if isinstance(base, ast.Subscript) else base


def _subclass(walker: Walker, own: LocalDef, members: list[ClassMember]) -> None:
    state = walker.state
    methods: dict[str, tuple[LocalDef, int, UseGuard]] = {}
    for member in members:
        # ``step = traced`` overrides as a ``def`` does.
        held = next((one for one in local_defs(member.value) if one.function is not None), None)
        if held is not None:
            methods.setdefault(member.name, (held, member.line, member.guard))
    assert isinstance(own.node, ast.ClassDef)
    for target, base in {state.normal(name): base for name, base in upstream(own)}.items():
        names = [state.normal(one) for one in vllm_names(base)]
        state.found.subclasses.append(
            Subclass(
                cls=own,
                target=target,
                line=own.node.lineno,
                owner=".".join((*state.owner, own.node.name)),
                guard=state.guard,
                alternatives=tuple(one for one in names if one != target),
                fallback=any(isinstance(one, LocalDef) or (isinstance(one, Name) and not one.is_vllm) for one in base),
                methods=methods,
            )
        )


def _decorated(walker: Walker, node: ast.ClassDef, members: list[ClassMember]) -> None:
    """``@gorilla.patches(Target)``: every function of the body goes to the target."""
    state = walker.state
    for one in node.decorator_list:
        if isinstance(one, ast.Call) and one.args and state.dotted(one.func) == "gorilla.patches":
            for member in members:
                if member.function is not None:
                    state.put(
                        attributes(state.value(one.args[0]), [member.name]), member.line, value=(member.function,)
                    )


_UNROLLED: Final = 64
"""The longest list of names that a loop is followed through, one by one."""

_TESTS: Final = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Call)
"""Expressions whose outcome may be kept under a name, to be tested later."""

_NONE: Final[Mapping[AttributeSpelling, Values]] = MappingProxyType({})

_LEAVING: Final = frozenset({ast.If, ast.Try, ast.TryStar})
"""Statements that may keep those after them from running."""

_NESTED: Final = 3
"""How many functions deep a change is followed from the call that asks for it."""


@dataclass(frozen=True, slots=True)
class _DefinitionSite:
    """Where a function was defined, for the walk through its body: the state of that time."""

    scope: Scope
    owner: tuple[str, ...]
    conditions: tuple[Condition, ...]
    called_at: tuple[int, ...]
    file: SourceFile


class Walker:
    """One walk through one file."""

    def __init__(self, state: WalkState) -> None:
        self.state = state
        self.members: list[list[ClassMember]] = []
        self.classes: list[LocalDef] = []
        self._later: deque[tuple[LocalDef, Callable[[], None]]] = deque()
        self._attempts: dict[ast.stmt, TryBody] = {}
        self.expressions = ExpressionWalker(state, self.function, self._helper)

    def top_level(self) -> None:
        """Walk through the statements of the module itself."""
        self.block(self.state.file.tree.body)
        self.state.file.forget_tree()
        self._attempts.clear()

    def functions(self, relevance: Relevance, refuse: Callable[[SourceFile, Exception], None]) -> None:
        """Walk through the bodies of functions, those that they define in turn included; irrelevant ones are put off.

        RecursionError where one is too deep; ``refuse`` is told of it where that shows later.
        """
        self.state.found.stored.update(self.state.file.stored)
        while self._later:
            own, walk = self._later.popleft()
            if not syntax.is_outline(own.node) or relevance.concerns(own):
                walk()
            else:
                own.unwalked = functools.partial(self._catch_up, walk, refuse)
        self.state.forget_tests()

    def _catch_up(self, walk: Callable[[], None], refuse: Callable[[SourceFile, Exception], None]) -> None:
        """Walk through a body that was put off, and through the functions in it."""
        try:
            walk()
            while self._later:
                self._later.popleft()[1]()
        except RecursionError as error:
            refuse(self.state.file, error)

    def block(self, body: Sequence[ast.stmt]) -> None:
        """Walk through statements that run one after the other."""
        for place, node in enumerate(body):
            way = _STATEMENTS.get(type(node))
            if way is None:
                self.expressions.visit(node)
            else:
                way(self, node)
            if type(node) in _LEAVING and (after := self._after(node)) is not None:
                self._arm(after, body[place + 1 :])
                return

    def _after(self, node: ast.stmt) -> Condition | None:
        """What has to hold for the statements after one to run, where it may leave the function or the loop."""
        if isinstance(node, ast.If) and guards.leaves(node.body):
            return self._test(node.test, wanted=False, other=node.body)
        if isinstance(node, ast.If) and guards.leaves(node.orelse):
            return self._test(node.test, other=node.orelse)
        if isinstance(node, ast.Try | ast.TryStar) and node in self._attempts:
            handlers = [one for one in node.handlers if guards.handles_absence(self.state, one)]
            if handlers and all(guards.leaves(one.body) for one in handlers):
                alternative = not all(guards.does_nothing(one.body) for one in handlers)
                return TryCondition(self._attempts[node], failed=False, alternative=alternative)
        return None

    def _test(self, test: ast.expr, *, wanted: bool = True, other: Sequence[ast.stmt] = ()) -> Condition | None:
        """The condition, if it asks for vLLM's version or a name; ``other`` is what runs where it does not hold."""
        state = self.state
        if not state.asks(test):
            return None
        return ExpressionCondition(
            test, state.scope, state.resolver, wanted, alternative=not guards.does_nothing(other)
        )

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._note(Name(alias.name), alias.lineno)
            name = alias.asname or alias.name.partition(".")[0]
            self.state.scope.bind(name, (Name(alias.name if alias.asname else name),))

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = absolute(node, self.state.file.name, self.state.file.is_package)
        for alias in node.names:
            name = Name(module, "" if alias.name == "*" else alias.name)
            self._note(name, alias.lineno)
            if name.qualname:
                self.state.scope.bind(alias.asname or alias.name, (name,))

    def _note(self, name: Name, line: int) -> None:
        """Note an import: a use of vLLM, or of a module of the package that may be there for some releases only."""
        self.state.mention(name, line, by=guards.IMPORT)
        if not name.is_vllm:
            self.state.found.imported.append((name.dotted, self.state.guard))

    def _assign(self, node: ast.Assign) -> None:
        self.expressions.alias(node.value)
        for target in node.targets:
            self.assign(target, node.value, self._value(node.value))

    def _value(self, node: ast.expr) -> Values:
        """What an expression stands for; the outcome of a test, and a flag set behind one, are kept as such."""
        state = self.state
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool)):
            tried = tuple(TryCondition(attempt, failed=False) for attempt in state.attempts)
            conditions = (*state.conditions, *tried)
            return (FlagValue(node.value, UseGuard(conditions)),) if conditions else ()
        found = state.value(node)
        if not found and isinstance(node, _TESTS) and state.asks(node):
            return (ConditionValue(node, state.scope),)
        return found

    def _annotated(self, node: ast.AnnAssign) -> None:
        self.expressions.visit(node.annotation)
        if node.value is not None:
            self.expressions.alias(node.value)
            self.assign(node.target, node.value, self._annotated_value(node))
        elif isinstance(node.target, ast.Name) and self.state.scope.kind == "function":
            self.state.scope.bind(node.target.id, self.state.annotated(node.annotation))

    def _annotated_value(self, node: ast.AnnAssign) -> Values:
        """What a variable is, or where that does not show, what its annotation promises."""
        known = self._value(node.value) if node.value is not None else ()
        if all(isinstance(one, Instance) and one.guessed for one in known):
            return self.state.annotated(node.annotation) or known
        return known

    def _augmented(self, node: ast.AugAssign) -> None:
        self.expressions.visit(node.value)
        # Counting is what an object is for, and no change of the code.
        if not isinstance(node.value, ast.Constant) or isinstance(node.target, ast.Name):
            self.assign(node.target, None, ())

    def assign(self, target: ast.expr, expr: ast.expr | None, value: Values) -> None:
        """Give a value to what stands on the left of an assignment."""
        if isinstance(target, ast.Name):
            self.state.scope.bind(target.id, value)
            if self.state.scope.kind == "class" and self.members:
                keep(self.state, target.id, value)
                self.members[-1].append(ClassMember(target.id, target.lineno, value, expr, self.state.guard))
        elif isinstance(target, ast.Starred):
            self.assign(target.value, None, ())
        elif isinstance(target, ast.Tuple | ast.List):
            for part, (inner, held) in zip(target.elts, self._parts(target.elts, expr, value), strict=True):
                self.assign(part, inner, held)
        else:
            if isinstance(target, ast.Attribute):
                self._keep_test(target, value)
            if not put_on(self.state, target, expr, value):
                self.expressions.below(target)

    def _keep_test(self, target: ast.Attribute, value: Values) -> None:
        """Keep the outcome of a test that a method stores on its object: ``self.has_x = hasattr(vllm, "x")``."""
        holders = [one.cls for one in self.state.value(target.value) if isinstance(one, Receiver)]
        kept = bool(value) and all(isinstance(one, ConditionValue) and self._asks_vllm(one.node) for one in value)
        for cls in holders:
            if cls.inside is not None and (kept or target.attr in cls.inside.tests):
                cls.inside.tests[target.attr] = union(cls.inside.tests.get(target.attr, ()), value) if kept else ()

    def _asks_vllm(self, test: ast.expr) -> bool:
        """Whether a test asks vLLM itself; what an object has, such as a request, is another matter."""
        calls = [one for one in ast.walk(test) if isinstance(one, ast.Call) and one.args]
        asking = [one for one in calls if dotted(one.func) in ("hasattr", "getattr")]
        return all(any(vllm_names(self.state.value(one.args[0]))) for one in asking)

    def _parts(
        self, targets: Sequence[ast.expr], expr: ast.expr | None, value: Values
    ) -> list[tuple[ast.expr | None, Values]]:
        if isinstance(expr, ast.Tuple | ast.List) and len(expr.elts) == len(targets):
            return [(one, self.state.value(one)) for one in expr.elts]
        items = items_of(value)
        return [(None, item) for item in items] if len(items) == len(targets) else [(None, ())] * len(targets)

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if not put_on(self.state, target, None, (), way="delete"):
                self.expressions.below(target)

    def _define(self, node: Function) -> None:
        state = self.state
        for one in (node.args, node.returns):
            self.expressions.visit(one)
        own = self.function(node, _imported_module(state, node))
        for one in node.decorator_list:
            if not decorating(state, one, own):
                self.expressions.visit(one)
                self._decorate(one, own)
        state.scope.bind(node.name, (own,))
        if state.scope.kind == "class" and self.members:
            self.members[-1].append(ClassMember(node.name, node.lineno, (own,), None, state.guard))

    def _decorate(self, decorator: ast.expr, own: LocalDef) -> None:
        """Walk through a decorator of the package that is given something of vLLM's: ``@put_on(Class)``."""
        for maker in local_defs(self.state.value(decorator.func)) if isinstance(decorator, ast.Call) else ():
            if not isinstance(decorator, ast.Call) or not isinstance(maker.node, Function):
                continue
            given = arguments(self.state, decorator, maker)
            if not any(any(vllm_names(value)) for value in given.values()):
                continue
            scope = self._helper(maker, given, decorator.lineno)
            for one in statements(maker.node.body) if scope is not None else ():
                name = one.value.id if isinstance(one, ast.Return) and isinstance(one.value, ast.Name) else ""
                for inner in local_defs(scope.names.get(name, ()) if scope is not None else ()):
                    if inner.function is not None and (first := next(parameters(inner.function.args), None)):
                        self._helper(inner, {first[0]: (own,)}, decorator.lineno)

    def function(self, node: Function | ast.Lambda, first: Values = ()) -> LocalDef:
        """A function of the package, its body left for later; ``first`` is what its first parameter is known to be."""
        state = self.state
        given = {name: state.value(default) for name, default in parameters(node.args)}
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            given[one.arg] = state.annotated(one.annotation) or given[one.arg]
        if first:
            given[next(iter(given))] = first
        own = LocalDef(state.file, node, state.scope, given)
        inner = own.inside = Scope("function", state.scope)
        inner.method_of = self.classes[-1] if state.scope.kind == "class" and self.classes else None
        if inner.method_of is not None and (bound := _receiver(node)):
            given[bound] = (Receiver(inner.method_of),)
        inner.names.update(dict.fromkeys(local_names(node), ()) | given)
        place = _DefinitionSite(inner, state.owner, state.conditions, state.called_at, state.body_file)
        self._later.append((own, functools.partial(self._run, own, place)))
        return own

    def _run(self, own: LocalDef, place: _DefinitionSite) -> None:
        state = self.state
        state.scope, state.owner, state.conditions = place.scope, place.owner, place.conditions
        state.called_at, state.body_file = place.called_at, place.file
        state.caught, state.alternative, state.attempts = frozenset(), False, ()
        if isinstance(own.node, ast.Lambda):
            self.expressions.visit(own.node.body)
        elif isinstance(own.node, Function):
            state.owner = (*place.owner, own.node.name)
            self.block(own.node.body)
            if place.scope.method_of is not None and any(upstream(place.scope.method_of)):
                # While its body is at hand: what an override leans on will be asked for.
                body_contents(own.node)
        self._attempts.clear()

    def _helper(self, own: LocalDef, given: dict[str, Values], line: int) -> Scope | None:
        """Walk through a function once more, with what a call gives it; what it changes counts as changed there."""
        state = self.state
        if not isinstance(own.node, Function) or len(state.called_at) >= _NESTED:
            return None
        inner = Scope("function", own.scope)
        inner.names.update({**dict.fromkeys(local_names(own.node), ()), **own.defaults, **given})
        before = state.called_at, state.body_file
        state.called_at, state.body_file = (*state.called_at, line), own.file
        with state.within(inner):
            self.block(own.node.body)
        state.called_at, state.body_file = before
        return inner

    def branches(self, *arms: Callable[[], None]) -> None:
        """Walk through alternatives; afterwards a name stands for what any of them made of it."""
        scope = self.state.scope
        before = scope.names
        merged: dict[str, Values] = {}
        for arm in arms:
            scope.names = dict(before)
            arm()
            for name, value in scope.names.items():
                other = merged.setdefault(name, value)
                if other is not value:
                    merged[name] = union(other, value)
        scope.names = merged

    def _if(self, node: ast.If) -> None:
        if guards.for_type_checkers(node.test):
            for name in local_names(node):
                self.state.scope.bind(name, ())
            self._declare(node)
            self.block(node.orelse)
            return
        self.expressions.visit(node.test)
        found = self._test(node.test, other=node.orelse)
        otherwise = self._test(node.test, wanted=False, other=node.body)
        self.branches(
            lambda: self._arm(found, node.body, compared(self.state, node.test)),
            lambda: self._arm(otherwise, node.orelse),
        )

    def _arm(
        self, condition: Condition | None, body: Sequence[ast.stmt], copies: Mapping[AttributeSpelling, Values] = _NONE
    ) -> None:
        """Walk through statements behind a test; ``copies`` are the attributes that it has found to be copies."""
        state = self.state
        if condition is not None and body:
            state.found.branches.append((condition, body[0].lineno, body[-1].end_lineno or body[-1].lineno))
        if condition is None and not copies:
            self.block(body)
            return
        before = state.copies
        state.copies = {**before, **copies}
        with state.behind(condition):
            self.block(body)
        state.copies = before

    def _declare(self, node: ast.If) -> None:
        """Remember what is imported for type checkers, for the annotations that name it."""
        for one in node.body:
            if isinstance(one, ast.ImportFrom):
                module = absolute(one, self.state.file.name, self.state.file.is_package)
                for alias in one.names:
                    self.state.scope.declared[alias.asname or alias.name] = (Name(module, alias.name),)
            elif isinstance(one, ast.Import):
                for alias in one.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self.state.scope.declared[name] = (Name(alias.name if alias.asname else name),)

    def _try(self, node: ast.Try | ast.TryStar) -> None:
        attempt = self._attempts[node] = TryBody(opaque=_is_opaque(node.body, self.state.file))
        self.branches(
            lambda: self._tried(node, attempt),
            *(functools.partial(self._handled, handler, attempt) for handler in node.handlers),
        )
        self.block(node.finalbody)

    def _tried(self, node: ast.Try | ast.TryStar, attempt: TryBody) -> None:
        state = self.state
        handlers = [one for one in node.handlers if guards.handles_absence(self.state, one)]
        alternative = not all(guards.does_nothing(one.body) for one in handlers)
        with state.catching(guards.caught_by(state, node), attempt, alternative=alternative):
            self.block(node.body)
        with state.behind(TryCondition(attempt, failed=False, alternative=alternative) if handlers else None):
            self.block(node.orelse)

    def _handled(self, handler: ast.ExceptHandler, attempt: TryBody) -> None:
        if handler.name:
            self.state.scope.bind(handler.name, ())
        absent = guards.handles_absence(self.state, handler)
        with self.state.behind(TryCondition(attempt, failed=True, alternative=True) if absent else None):
            self.block(handler.body)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.expressions.visit(item.context_expr)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, None, ())
        with self.state.catching(guards.suppressed_by(self.state, node), alternative=False):
            self.block(node.body)

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        self.expressions.visit(node.iter)
        items = items_of(self.state.value(node.iter))
        if not any(items) or len(items) > _UNROLLED:
            items = [()]
        self.branches(lambda: None, *(functools.partial(self._turn, node, item) for item in items))
        self.block(node.orelse)

    def _turn(self, node: ast.For | ast.AsyncFor, item: Values) -> None:
        self.assign(node.target, None, item)
        self.block(node.body)

    def _while(self, node: ast.While) -> None:
        self.expressions.visit(node.test)
        with self.state.behind(self._test(node.test)):
            self.branches(lambda: None, lambda: self.block(node.body))
        self.block(node.orelse)

    def _match(self, node: ast.Match) -> None:
        self.expressions.visit(node.subject)
        with self.state.behind(UnknownCondition() if self.state.asks(node.subject) else None):
            self.branches(lambda: None, *(functools.partial(self.block, case.body) for case in node.cases))

    def _global(self, node: ast.Global) -> None:
        self._send(node.names, self.state.scope.module())

    def _nonlocal(self, node: ast.Nonlocal) -> None:
        if self.state.scope.parent is not None:
            self._send(node.names, self.state.scope.parent)

    def _send(self, names: Sequence[str], scope: Scope) -> None:
        for name in names:
            self.state.scope.names.pop(name, None)
            self.state.scope.elsewhere[name] = scope


_STATEMENTS: Final[Mapping[type[ast.stmt], Callable[..., None]]] = {
    ast.Import: Walker._import,
    ast.ImportFrom: Walker._import_from,
    ast.Assign: Walker._assign,
    ast.AnnAssign: Walker._annotated,
    ast.AugAssign: Walker._augmented,
    ast.Delete: Walker._delete,
    ast.FunctionDef: Walker._define,
    ast.AsyncFunctionDef: Walker._define,
    syntax.FunctionDef: Walker._define,
    syntax.AsyncFunctionDef: Walker._define,
    ast.ClassDef: _class_statement,
    ast.If: Walker._if,
    ast.Try: Walker._try,
    ast.TryStar: Walker._try,
    ast.With: Walker._with,
    ast.AsyncWith: Walker._with,
    ast.For: Walker._for,
    ast.AsyncFor: Walker._for,
    ast.While: Walker._while,
    ast.Match: Walker._match,
    ast.Global: Walker._global,
    ast.Nonlocal: Walker._nonlocal,
}
"""What walks through each kind of statement; others consist of expressions."""


def _is_opaque(body: Sequence[ast.stmt], file: SourceFile) -> bool:
    """Whether something in the body of a ``try`` may fail that is no absent name of vLLM's."""
    own = file.name.partition(".")[0]
    for node in (one for statement in body for one in ast.walk(statement)):
        if isinstance(node, ast.Call | ast.Subscript | ast.Await | ast.Raise | ast.BinOp):
            return True
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [absolute(node, file.name, file.is_package)]
        if any(name.partition(".")[0] not in (TOP, own) for name in names):
            return True
    return False


def _receiver(node: Function | ast.Lambda) -> str:
    """The parameter that is the object; empty where a method is called on its class, or on nothing."""
    if isinstance(node, ast.Lambda) or not (names := [*node.args.posonlyargs, *node.args.args]):
        return ""
    marks = {dotted(one).rpartition(".")[2] for one in node.decorator_list}
    return "" if marks & {"staticmethod", "classmethod"} or node.name == "__new__" else names[0].arg


def _imported_module(state: WalkState, node: Function) -> Values:
    """The module that a function decorated with wrapt's ``when_imported`` is called with."""
    for one in node.decorator_list:
        if isinstance(one, ast.Call) and one.args and state.dotted(one.func).endswith(".when_imported"):
            return tuple(Name(text) for text in texts_in(state.value(one.args[0])))
    return ()
