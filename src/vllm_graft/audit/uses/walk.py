"""Walks through a file statement by statement, with scopes, branches and guards as Python has them.

Function bodies come last, when everything around them has its final value, as they do when the package runs.
"""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from vllm_graft.audit.model import Condition, Guard
from vllm_graft.audit.uses import classes, guards, outlines
from vllm_graft.audit.uses.calls import decorating
from vllm_graft.audit.uses.conditions import Attempt, Holds, Tried, Unsure
from vllm_graft.audit.uses.expressions import Expressions
from vllm_graft.audit.uses.files import SourceFile
from vllm_graft.audit.uses.helpers import arguments
from vllm_graft.audit.uses.locals import local_names, parameters, statements
from vllm_graft.audit.uses.relevance import Relevance
from vllm_graft.audit.uses.relies import contents
from vllm_graft.audit.uses.resolve import items_of
from vllm_graft.audit.uses.state import State
from vllm_graft.audit.uses.sweeps import Place, compared
from vllm_graft.audit.uses.targets import keep, put_on
from vllm_graft.audit.uses.values import (
    TOP,
    Flag,
    Name,
    Object,
    Own,
    Scope,
    Self,
    Test,
    Values,
    joined,
    names_of,
    owns_of,
    texts_of,
)
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import absolute, dotted

_UNROLLED: Final = 64
"""The longest list of names that a loop is followed through, one by one."""

_TESTS: Final = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Call)
"""Expressions whose outcome may be kept under a name, to be tested later."""

_NONE: Final[Mapping[Place, Values]] = MappingProxyType({})

_LEAVING: Final = frozenset({ast.If, ast.Try, ast.TryStar})
"""Statements that may keep those after them from running."""

_NESTED: Final = 3
"""How many functions deep a change is followed from the call that asks for it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a function was defined, for the walk through its body: the state of that time."""

    scope: Scope
    owner: tuple[str, ...]
    conditions: tuple[Condition, ...]
    called_at: tuple[int, ...]
    file: SourceFile


class Walker:
    """One walk through one file."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.members: list[list[classes.Member]] = []
        self.classes: list[Own] = []
        self._later: deque[tuple[Own, Callable[[], None]]] = deque()
        self._attempts: dict[ast.stmt, Attempt] = {}
        self.expressions = Expressions(state, self.function, self._helper)

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
            if not outlines.is_outline(own.node) or relevance.concerns(own):
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
            way = _WAYS.get(type(node))
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
                return Tried(self._attempts[node], failed=False, alternative=alternative)
        return None

    def _test(self, test: ast.expr, *, wanted: bool = True, other: Sequence[ast.stmt] = ()) -> Condition | None:
        """The condition, if it asks for vLLM's version or a name; ``other`` is what runs where it does not hold."""
        state = self.state
        if not state.asks(test):
            return None
        return Holds(test, state.scope, state.resolver, wanted, alternative=not guards.does_nothing(other))

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
            tried = tuple(Tried(attempt, failed=False) for attempt in state.attempts)
            conditions = (*state.conditions, *tried)
            return (Flag(node.value, Guard(conditions)),) if conditions else ()
        found = state.value(node)
        if not found and isinstance(node, _TESTS) and state.asks(node):
            return (Test(node, state.scope),)
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
        if all(isinstance(one, Object) and one.guessed for one in known):
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
                self.members[-1].append(classes.Member(target.id, target.lineno, value, expr, self.state.guard))
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
        holders = [one.cls for one in self.state.value(target.value) if isinstance(one, Self)]
        kept = bool(value) and all(isinstance(one, Test) and self._asks_vllm(one.node) for one in value)
        for cls in holders:
            if cls.inside is not None and (kept or target.attr in cls.inside.tests):
                cls.inside.tests[target.attr] = joined(cls.inside.tests.get(target.attr, ()), value) if kept else ()

    def _asks_vllm(self, test: ast.expr) -> bool:
        """Whether a test asks vLLM itself; what an object has, such as a request, is another matter."""
        calls = [one for one in ast.walk(test) if isinstance(one, ast.Call) and one.args]
        asking = [one for one in calls if dotted(one.func) in ("hasattr", "getattr")]
        return all(any(names_of(self.state.value(one.args[0]))) for one in asking)

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
            self.members[-1].append(classes.Member(node.name, node.lineno, (own,), None, state.guard))

    def _decorate(self, decorator: ast.expr, own: Own) -> None:
        """Walk through a decorator of the package that is given something of vLLM's: ``@put_on(Class)``."""
        for maker in owns_of(self.state.value(decorator.func)) if isinstance(decorator, ast.Call) else ():
            if not isinstance(decorator, ast.Call) or not isinstance(maker.node, Function):
                continue
            given = arguments(self.state, decorator, maker)
            if not any(any(names_of(value)) for value in given.values()):
                continue
            scope = self._helper(maker, given, decorator.lineno)
            for one in statements(maker.node.body) if scope is not None else ():
                name = one.value.id if isinstance(one, ast.Return) and isinstance(one.value, ast.Name) else ""
                for inner in owns_of(scope.names.get(name, ()) if scope is not None else ()):
                    if inner.function is not None and (first := next(parameters(inner.function.args), None)):
                        self._helper(inner, {first[0]: (own,)}, decorator.lineno)

    def function(self, node: Function | ast.Lambda, first: Values = ()) -> Own:
        """A function of the package, its body left for later; ``first`` is what its first parameter is known to be."""
        state = self.state
        given = {name: state.value(default) for name, default in parameters(node.args)}
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            given[one.arg] = state.annotated(one.annotation) or given[one.arg]
        if first:
            given[next(iter(given))] = first
        own = Own(state.file, node, state.scope, given)
        inner = own.inside = Scope("function", state.scope)
        inner.method_of = self.classes[-1] if state.scope.kind == "class" and self.classes else None
        if inner.method_of is not None and (bound := _receiver(node)):
            given[bound] = (Self(inner.method_of),)
        inner.names.update(dict.fromkeys(local_names(node), ()) | given)
        place = _Place(inner, state.owner, state.conditions, state.called_at, state.body_file)
        self._later.append((own, functools.partial(self._run, own, place)))
        return own

    def _run(self, own: Own, place: _Place) -> None:
        state = self.state
        state.scope, state.owner, state.conditions = place.scope, place.owner, place.conditions
        state.called_at, state.body_file = place.called_at, place.file
        state.caught, state.alternative, state.attempts = frozenset(), False, ()
        if isinstance(own.node, ast.Lambda):
            self.expressions.visit(own.node.body)
        elif isinstance(own.node, Function):
            state.owner = (*place.owner, own.node.name)
            self.block(own.node.body)
            if place.scope.method_of is not None and any(classes.upstream(place.scope.method_of)):
                # While its body is at hand: what an override leans on will be asked for.
                contents(own.node)
        self._attempts.clear()

    def _helper(self, own: Own, given: dict[str, Values], line: int) -> Scope | None:
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
                    merged[name] = joined(other, value)
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
        self, condition: Condition | None, body: Sequence[ast.stmt], copies: Mapping[Place, Values] = _NONE
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
        attempt = self._attempts[node] = Attempt(opaque=_is_opaque(node.body, self.state.file))
        self.branches(
            lambda: self._tried(node, attempt),
            *(functools.partial(self._handled, handler, attempt) for handler in node.handlers),
        )
        self.block(node.finalbody)

    def _tried(self, node: ast.Try | ast.TryStar, attempt: Attempt) -> None:
        state = self.state
        handlers = [one for one in node.handlers if guards.handles_absence(self.state, one)]
        alternative = not all(guards.does_nothing(one.body) for one in handlers)
        with state.catching(guards.caught_by(state, node), attempt, alternative=alternative):
            self.block(node.body)
        with state.behind(Tried(attempt, failed=False, alternative=alternative) if handlers else None):
            self.block(node.orelse)

    def _handled(self, handler: ast.ExceptHandler, attempt: Attempt) -> None:
        if handler.name:
            self.state.scope.bind(handler.name, ())
        absent = guards.handles_absence(self.state, handler)
        with self.state.behind(Tried(attempt, failed=True, alternative=True) if absent else None):
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
        with self.state.behind(Unsure() if self.state.asks(node.subject) else None):
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


_WAYS: Final[Mapping[type[ast.stmt], Callable[..., None]]] = {
    ast.Import: Walker._import,
    ast.ImportFrom: Walker._import_from,
    ast.Assign: Walker._assign,
    ast.AnnAssign: Walker._annotated,
    ast.AugAssign: Walker._augmented,
    ast.Delete: Walker._delete,
    ast.FunctionDef: Walker._define,
    ast.AsyncFunctionDef: Walker._define,
    outlines.FunctionDef: Walker._define,
    outlines.AsyncFunctionDef: Walker._define,
    ast.ClassDef: classes.walk,
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


def _imported_module(state: State, node: Function) -> Values:
    """The module that a function decorated with wrapt's ``when_imported`` is called with."""
    for one in node.decorator_list:
        if isinstance(one, ast.Call) and one.args and state.dotted(one.func).endswith(".when_imported"):
            return tuple(Name(text) for text in texts_of(state.value(one.args[0])))
    return ()
