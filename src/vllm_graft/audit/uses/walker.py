"""Walk through a file statement by statement, with scopes, branches and guards as Python has them.

Function bodies come last, when everything around them has its final value, as they do when the package runs.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, cast

from vllm_graft.audit.model import Condition, UseGuard, position
from vllm_graft.audit.uses import guards, patches, syntax
from vllm_graft.audit.uses.bodies import body_contents
from vllm_graft.audit.uses.guards import ExpressionCondition, TryBody, TryCondition, UnknownCondition
from vllm_graft.audit.uses.patches import record_assignment
from vllm_graft.audit.uses.resolver import GETTERS, IMPORTERS, dotted_of, guessed, is_class, loop_items
from vllm_graft.audit.uses.source_file import SourceFile
from vllm_graft.audit.uses.syntax import local_names, parameters, statements
from vllm_graft.audit.uses.values import (
    TOP,
    ConditionValue,
    FlagValue,
    Instance,
    LocalDef,
    Name,
    OfClass,
    ParentMethods,
    Receiver,
    ReceiverClass,
    Scope,
    Values,
    local_defs,
    texts_in,
    union,
    upstream,
    vllm_names,
)
from vllm_graft.audit.uses.walk_state import AttributeSpelling, ClassMember, Subclass, WalkState
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import absolute, dotted

# The longest sequence of names that a loop is followed through, one by one.
_UNROLLED: Final = 64
# The most functions that a change is followed through from the call that causes it.
_NESTED: Final = 3
# Expressions whose outcome may be stored in a variable and tested later.
_TESTS: Final = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Call)
# Expressions that may take a part of a version: ``Version(vllm.__version__).release[:2]``.
_PARTS: Final = (ast.Attribute, ast.Subscript)
# Expressions that may hold the names that something has, to be tested later: ``signature(function).parameters``.
_CONTAINERS: Final = (ast.Attribute, ast.SetComp, ast.ListComp)
# Statements that may keep those after them from running.
_LEAVING: Final = frozenset({ast.If, ast.Try, ast.TryStar, ast.Assert})
_SIGNATURES: Final = frozenset({"inspect.signature", "inspect.getfullargspec"})

_NO_COPIES: Final[Mapping[AttributeSpelling, Values]] = MappingProxyType({})


class Walker:
    """One walk through one file."""

    def __init__(self, state: WalkState) -> None:
        self.state = state
        self._members: list[list[ClassMember]] = []
        self._classes: list[LocalDef] = []
        self._later: deque[tuple[LocalDef, Callable[[], None]]] = deque()
        self._tries: dict[ast.stmt, TryBody] = {}

    def top_level(self) -> None:
        """Walk through the statements of the module itself."""
        self._block(self.state.file.tree.body)
        self.state.file.forget_tree()
        self._tries.clear()

    def functions(self, concerns: Callable[[LocalDef], bool], refuse: Callable[[SourceFile, Exception], None]) -> None:
        """Walk through the bodies of functions, nested ones included; those that do not concern vLLM are deferred.

        RecursionError if one is too deep; a deferred one is passed to ``refuse`` instead.
        """

        def catch_up(walk: Callable[[], None]) -> None:
            try:
                walk()
                while self._later:
                    self._later.popleft()[1]()
            except RecursionError as error:
                refuse(self.state.file, error)

        self.state.found.stored.update(self.state.file.stored)
        # Constructors first: they show what the attributes hold that other methods read.
        self._later = deque(sorted(self._later, key=lambda later: getattr(later[0].node, "name", "") != "__init__"))
        while self._later:
            own, walk = self._later.popleft()
            if not isinstance(own.node, syntax.Outline) or concerns(own):
                walk()
            else:
                own.unwalked = functools.partial(catch_up, walk)
            if isinstance(own.node, syntax.Outline):
                own.node.drop_body()
        self.state.asked.clear()

    # Statements.

    def _block(self, body: Sequence[ast.stmt]) -> None:
        """Walk through statements that run one after the other."""
        for place, node in enumerate(body):
            self._visit(node)
            if type(node) in _LEAVING and (after := self._after(node)) is not None:
                self._arm(after, body[place + 1 :])
                return

    def _after(self, node: ast.stmt) -> Condition | None:
        """Return the condition for the statements after one to run, if it may leave the function or the loop."""
        if isinstance(node, ast.If) and guards.leaves(node.body):
            return self._test(node.test, wanted=False, other=node.body)
        if isinstance(node, ast.If) and guards.leaves(node.orelse):
            return self._test(node.test, other=node.orelse)
        if isinstance(node, ast.Assert):
            return self._test(node.test)
        if isinstance(node, ast.Try | ast.TryStar) and node in self._tries:
            handlers = [one for one in node.handlers if guards.handles_absence(self.state, one)]
            if handlers and all(guards.leaves(one.body) for one in handlers):
                alternative = not all(guards.does_nothing(one.body) for one in handlers)
                return TryCondition(self._tries[node], failed=False, alternative=alternative)
        return None

    def _test(self, test: ast.expr, *, wanted: bool = True, other: Sequence[ast.stmt] = ()) -> Condition | None:
        """Return a condition if it asks for vLLM's version or a name; ``other`` runs if it does not hold."""
        state = self.state
        never = wanted and isinstance(test, ast.Constant) and not test.value
        if not never and not state.asks(test):
            return None
        alternative = not guards.does_nothing(other)
        return ExpressionCondition(test, state.scope, state.resolver, wanted, alternative)

    def _visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._record_import(Name(alias.name), alias.lineno)
            name = alias.asname or alias.name.partition(".")[0]
            self.state.scope.bind(name, (Name(alias.name if alias.asname else name),))

    def _visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        scope = self.state.scope
        module = absolute(node, self.state.file.name, self.state.file.is_package)
        there = self.state.resolver.modules.scope_of(module)
        for alias in node.names:
            name = Name(module, "" if alias.name == "*" else alias.name)
            self._record_import(name, alias.lineno)
            if name.qualname:
                scope.bind(alias.asname or alias.name, (name,))
                self._mention_starred(there, alias.name, alias.lineno)
            elif module.partition(".")[0] == TOP:
                # Only a release can tell which names a module of vLLM has.
                scope.stars.append(module)
            elif there is None:
                scope.foreign_star = True
            else:
                listed = [text for item in loop_items(there.names.get("__all__", ())) for text in texts_in(item)]
                for starred in listed or [each for each in there.names if not each.startswith("_")]:
                    if starred in there.names:
                        scope.bind(starred, (Name(module, starred),))
                scope.stars += there.stars
                scope.foreign_star = scope.foreign_star or there.foreign_star

    def _mention_starred(self, module: Scope | None, name: str, line: int) -> None:
        """Record a name that a star import of a module may bind to vLLM's: it is missing where it is used."""
        if module is None or not module.stars or name in module.names:
            return
        found = module.starred(name)
        for one in vllm_names(found):
            self.state.mention(one, line)
            self.state.found.starred[one] = tuple(other for other in vllm_names(found) if other != one)

    def _record_import(self, name: Name, line: int) -> None:
        """Record a use of vLLM, or of a module of the package that may be there for some releases only."""
        self.state.mention(name, line, by=guards.IMPORT)
        if not name.is_vllm:
            self.state.found.imported.append((name.dotted, self.state.guard))

    def _visit_Assign(self, node: ast.Assign) -> None:
        self._alias(node.value)
        for target in node.targets:
            self._assign_to(target, node.value, self._value(node.value))

    def _value(self, node: ast.expr) -> Values:
        """Return what an expression stands for; the outcome of a test, and a flag set behind one, as such."""
        state = self.state
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool)):
            tried = tuple(TryCondition(body, failed=False) for body in state.tries)
            conditions = (*state.conditions, *tried)
            return (FlagValue(node.value, UseGuard(conditions)),) if conditions else ()
        found = state.value(node)
        if not found and isinstance(node, _TESTS) and state.asks(node):
            return (ConditionValue(node, state.scope),)
        if not found and isinstance(node, _PARTS) and guards.holds_version(node, state.scope):
            return (ConditionValue(node, state.scope),)
        if not found and isinstance(node, _CONTAINERS) and guards.members_of(node, state.resolver, state.scope):
            return (ConditionValue(node, state.scope),)
        return found

    def _visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        state, target, scope = self.state, node.target, self.state.scope
        if scope.kind != "function":
            # Python does not evaluate those of local variables.
            self._visit(node.annotation)
        if node.value is not None:
            self._alias(node.value)
            value = self._value(node.value)
            if all(isinstance(one, Instance) and one.guessed for one in value):
                # The annotation knows better than the variable's name.
                value = state.annotated(node.annotation) or value
            self._assign_to(target, node.value, value)
        elif isinstance(target, ast.Name) and scope.kind == "function":
            scope.bind(target.id, state.annotated(node.annotation))
        # An attribute of the package's objects may be annotated with a class of vLLM.
        if promised := state.resolver.declared(node.annotation, scope):
            if isinstance(target, ast.Name) and scope.kind == "class":
                scope.instances[target.id] = promised
            elif isinstance(target, ast.Attribute):
                for one in state.value(target.value):
                    if isinstance(one, Receiver) and one.cls.inside is not None:
                        one.cls.inside.instances[target.attr] = promised

    def _visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._visit(node.value)
        # A counter that goes up does not change vLLM's code.
        if not isinstance(node.value, ast.Constant) or isinstance(node.target, ast.Name):
            self._assign_to(node.target, None, ())

    def _assign_to(self, target: ast.expr, expr: ast.expr | None, value: Values) -> None:
        """Give a value to the left side of an assignment."""
        state = self.state
        if isinstance(target, ast.Name):
            state.scope.bind(target.id, value)
            if state.scope.kind == "class" and self._members:
                patches.remember_original(state, target.id, value)
                self._members[-1].append(ClassMember(target.id, target.lineno, value, expr, state.guard))
        elif isinstance(target, ast.Starred):
            self._assign_to(target.value, None, ())
        elif isinstance(target, ast.Tuple | ast.List):
            parts: list[tuple[ast.expr | None, Values]] = [(None, item) for item in loop_items(value)]
            if isinstance(expr, ast.Tuple | ast.List) and len(expr.elts) == len(target.elts):
                parts = [(one, state.value(one)) for one in expr.elts]
            if len(parts) != len(target.elts):
                parts = [(None, held) for held in self._version_parts(target.elts, expr)]
            for part, (inner, held) in zip(target.elts, parts, strict=True):
                self._assign_to(part, inner, held)
        else:
            if isinstance(target, ast.Attribute):
                self._store_on_object(target, expr, value)
            if not record_assignment(state, target, expr, value):
                self._below(target)

    def _version_parts(self, targets: Sequence[ast.expr], expr: ast.expr | None) -> list[Values]:
        """Return what each target gets of vLLM's version: ``major, minor, *_ = vllm.__version__.split(".")``.

        Or of what a function of the package says of vLLM: ``available, version = find_package("vllm")``.
        """
        state = self.state
        if expr is None or not (guards.holds_version(expr, state.scope) or guards.looks_up_vllm(expr)):
            return [()] * len(targets)
        star = next((place for place, one in enumerate(targets) if isinstance(one, ast.Starred)), len(targets))
        found: list[Values] = []
        for place in range(len(targets)):
            index = ast.Constant(place if place < star else place - len(targets))
            part = ast.copy_location(ast.Subscript(expr, ast.copy_location(index, expr)), expr)
            found.append((ConditionValue(part, state.scope),) if place != star else ())
        return found

    def _store_on_object(self, target: ast.Attribute, expr: ast.expr | None, value: Values) -> None:
        """Store what a method sets on its object: an instance of a vLLM class, or a test: ``hasattr(vllm, "x")``."""
        state = self.state
        bodies = [one.cls.inside for one in state.value(target.value) if isinstance(one, Receiver)]
        held = value[0] if len(value) == 1 else None
        if bodies and isinstance(held, Instance) and not held.guessed:
            if isinstance(expr, ast.Name | ast.Attribute | ast.Await):
                held = replace(held, declared=True)
            elif not isinstance(expr, ast.Call) or len(state.value(expr.func)) != 1:
                # A class that is imported from one of two places may be the other one.
                held = None
            for body in bodies if held is not None else ():
                if body is not None and held is not None:
                    body.instances.setdefault(target.attr, (held,))

        def asks_vllm(test: ast.expr) -> bool:
            """Return whether a test asks vLLM itself, and not what an object such as a request has."""
            calls = [one for one in ast.walk(test) if isinstance(one, ast.Call) and one.args]
            asking = [one for one in calls if dotted(one.func) in ("hasattr", "getattr")]
            return all(any(vllm_names(state.value(one.args[0]))) for one in asking)

        is_test = bool(value) and all(isinstance(one, ConditionValue) and asks_vllm(one.node) for one in value)
        for body in bodies:
            if body is not None and (is_test or target.attr in body.tests):
                body.tests[target.attr] = union(body.tests.get(target.attr, ()), value) if is_test else ()

    def _visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if not record_assignment(self.state, target, None, (), way="delete"):
                self._below(target)

    def _visit_FunctionDef(self, node: Function) -> None:
        state = self.state
        self._visit(node.args)
        self._visit(node.returns)
        # wrapt calls a function decorated with ``when_imported`` with the module.
        importing = (
            one.args[0]
            for one in node.decorator_list
            if isinstance(one, ast.Call) and one.args and state.dotted(one.func).endswith(".when_imported")
        )
        own = self._function(node, tuple(Name(text) for text in texts_in(state.value(next(importing, None)))))
        for decorator in node.decorator_list:
            if patches.record_decorator(state, decorator, own):
                continue
            self._visit(decorator)
            # A decorator of the package may get something from vLLM: ``@put_on(Class)``.
            for maker in local_defs(state.value(decorator.func)) if isinstance(decorator, ast.Call) else ():
                given = patches.arguments(state, cast("ast.Call", decorator), maker)
                if not isinstance(maker.node, Function) or not any(any(vllm_names(value)) for value in given.values()):
                    continue
                scope = self._walk_call(maker, given, decorator.lineno)
                for one in statements(maker.node.body) if scope is not None else ():
                    name = one.value.id if isinstance(one, ast.Return) and isinstance(one.value, ast.Name) else ""
                    for inner in local_defs(scope.names.get(name, ()) if scope is not None else ()):
                        if inner.function is not None and (first := next(parameters(inner.function.args), None)):
                            self._walk_call(inner, {first[0]: (own,)}, decorator.lineno)
        state.scope.bind(node.name, (own,))
        if state.scope.kind == "class" and self._members:
            self._members[-1].append(ClassMember(node.name, node.lineno, (own,), None, state.guard))

    def _function(self, node: Function | ast.Lambda, first: Values = ()) -> LocalDef:
        """Define a function of the package, its body left for later; ``first`` is its first parameter's value."""
        state = self.state
        given = {name: state.value(default) for name, default in parameters(node.args)}
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if one.annotation is not None:
                given[one.arg] = state.annotated(one.annotation) or given[one.arg]
        if first:
            given[next(iter(given))] = first
        result = state.resolver.declared(node.returns, state.scope) if isinstance(node, Function) else ()
        own = LocalDef(state.file, node, state.scope, given, result)
        inner = own.inside = Scope("function", state.scope)
        inner.method_of = self._classes[-1] if state.scope.kind == "class" and self._classes else None
        if inner.method_of is not None and (bound := _receiver(node)):
            given[bound] = (Receiver(inner.method_of),)
        elif inner.method_of is not None and (bound := _receiver(node, mark="classmethod")):
            given[bound] = (ReceiverClass(inner.method_of),)
        inner.names.update(dict.fromkeys(local_names(node), ()) | given)
        around = {name: getattr(state, name) for name in ("owner", "conditions", "called_at", "body_file")}
        self._later.append((own, functools.partial(self._walk_body, own, {"scope": inner, **around})))
        return own

    def _walk_body(self, own: LocalDef, site: Mapping[str, object]) -> None:
        """Walk through a body with the state of the place where the function was defined."""
        state = self.state
        vars(state).update(site, caught=frozenset(), alternative=False, tries=())
        if isinstance(own.node, ast.Lambda):
            self._visit(own.node.body)
        elif isinstance(own.node, Function):
            state.owner = (*state.owner, own.node.name)
            self._block(own.node.body)
            cls = own.inside.method_of if own.inside is not None else None
            if cls is not None and any(upstream(cls)):
                # While its body is parsed: the verdict on an override will ask for its dependencies.
                body_contents(own.node)
        self._tries.clear()

    def _walk_call(self, own: LocalDef, given: dict[str, Values], line: int) -> Scope | None:
        """Walk through a function again with the arguments of a call; its changes count as made by the call."""
        state = self.state
        if not isinstance(own.node, Function) or len(state.called_at) >= _NESTED:
            return None
        inner = Scope("function", own.scope)
        inner.names.update({**dict.fromkeys(local_names(own.node), ()), **own.defaults, **given})
        with state.within(inner), state.temporarily(called_at=(*state.called_at, line), body_file=own.file):
            self._block(own.node.body)
        return inner

    def _visit_ClassDef(self, node: ast.ClassDef) -> None:
        state = self.state
        for one in (*node.decorator_list, *(keyword.value for keyword in node.keywords)):
            self._visit(one)
        bare = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        for base, plain in zip(node.bases, bare, strict=True):
            # A base class from vLLM makes a subclass or a patch, not just a mention.
            if patches.patch_targets(state, base):
                continue
            if not any(vllm_names(state.value(plain))):
                self._visit(base)
            elif isinstance(base, ast.Subscript):
                self._visit(base.slice)
        inner = Scope("class", state.scope)
        own = LocalDef(state.file, node, state.scope, inside=inner, bases=tuple(map(state.value, bare)))
        self._members.append([])
        self._classes.append(own)
        with state.within(inner, node.name):
            self._block(node.body)
        members = self._members.pop()
        self._classes.pop()
        state.scope.bind(node.name, (own,))
        targets = union(*(patches.patch_targets(state, base) for base in node.bases))
        if targets:
            patches.record_patch_class(state, node, targets, members)
        else:
            methods: dict[str, tuple[LocalDef, int, UseGuard]] = {}
            for member in members:
                # ``step = traced`` overrides as a ``def`` does.
                held = next((one for one in local_defs(member.value) if one.function is not None), None)
                if held is not None:
                    methods.setdefault(member.name, (held, member.line, member.guard))
            owner = ".".join((*state.owner, node.name))
            for target, found in {state.normal(name): base for name, base in upstream(own)}.items():
                others = tuple(one for one in map(state.normal, vllm_names(found)) if one != target)
                fallback = any(local_defs(found)) or any(isinstance(one, Name) and not one.is_vllm for one in found)
                state.found.subclasses.append(
                    Subclass(own, target, node.lineno, owner, state.guard, others, fallback, methods)
                )
        for one in node.decorator_list:
            # ``@gorilla.patches(Target)``: every function of the body goes to the target.
            if isinstance(one, ast.Call) and one.args and state.dotted(one.func) == "gorilla.patches":
                for member in members:
                    if member.function is not None:
                        attribute = patches.attributes(state.value(one.args[0]), [member.name])
                        state.assign(attribute, member.line, value=(member.function,))

    def _branches(self, *arms: Callable[[], None]) -> None:
        """Walk through alternatives; afterwards a name stands for its value in any of them."""
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

    def _visit_If(self, node: ast.If) -> None:
        if dotted(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            for name in local_names(node):
                self.state.scope.bind(name, ())
            declared = self.state.scope.declared
            for one in node.body:
                if isinstance(one, ast.ImportFrom):
                    module = absolute(one, self.state.file.name, self.state.file.is_package)
                    for alias in one.names:
                        declared[alias.asname or alias.name] = (Name(module, alias.name),)
                elif isinstance(one, ast.Import):
                    for alias in one.names:
                        name = alias.asname or alias.name.partition(".")[0]
                        declared[name] = (Name(alias.name if alias.asname else name),)
            self._block(node.orelse)
            return
        self._visit(node.test)
        found = self._test(node.test, other=node.orelse)
        otherwise = self._test(node.test, wanted=False, other=node.body) if found is not None else None

        def body() -> None:
            """Walk through the body, in which ``isinstance(variable, Class)`` shows what a variable is."""
            state, test, name = self.state, node.test, ""
            promised: Values = ()
            if isinstance(test, ast.Call) and dotted(test.func) == "isinstance" and len(test.args) == 2:
                name = test.args[0].id if isinstance(test.args[0], ast.Name) else ""
                promised = state.resolver.declared(test.args[1], state.scope) if name in state.scope.names else ()
            before = state.scope.names.get(name, ())
            if promised:
                state.scope.names[name] = promised
            self._arm(found, node.body, patches.compared_copies(state, test))
            if promised and state.scope.names.get(name) == promised:
                state.scope.names[name] = before

        self._branches(body, lambda: self._arm(otherwise, node.orelse))

    def _arm(
        self,
        condition: Condition | None,
        body: Sequence[ast.stmt],
        copies: Mapping[AttributeSpelling, Values] = _NO_COPIES,
    ) -> None:
        """Walk through statements behind a test; ``copies`` are the attributes that it found to be copies."""
        state = self.state
        if condition is not None and body:
            after = (body[-1].end_lineno or body[-1].lineno) + 1
            state.found.branches.append((condition, position(body[0].lineno, 0), position(after, 0) - 1))
        if condition is None and not copies:
            self._block(body)
            return
        with state.behind(condition), state.temporarily(copies={**state.copies, **copies}):
            self._block(body)

    def _visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        state = self.state
        tried = self._tries[node] = TryBody(_is_opaque(node.body, state.file), guards.caught_by(state, node))
        absent = [one for one in node.handlers if guards.handles_absence(state, one)]

        def body() -> None:
            alternative = not all(guards.does_nothing(one.body) for one in absent)
            with state.catching(tried.caught, tried, alternative=alternative):
                self._block(node.body)
            with state.behind(TryCondition(tried, failed=False, alternative=alternative) if absent else None):
                self._block(node.orelse)

        def handle(handler: ast.ExceptHandler) -> None:
            if handler.name:
                state.scope.bind(handler.name, ())
            with state.behind(TryCondition(tried, failed=True, alternative=True) if handler in absent else None):
                self._block(handler.body)

        self._branches(body, *(functools.partial(handle, handler) for handler in node.handlers))
        self._block(node.finalbody)

    def _visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self._visit(item.context_expr)
            if item.optional_vars is not None:
                self._assign_to(item.optional_vars, None, ())
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        suppressed = [one for call in calls if dotted(call.func).rpartition(".")[2] == "suppress" for one in call.args]
        caught = frozenset[str]().union(*(guards.caught_kinds(self.state, one) for one in suppressed))
        body = TryBody(_is_opaque(node.body, self.state.file), caught) if caught else None
        with self.state.catching(caught, body, alternative=False):
            self._block(node.body)

    def _visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._visit(node.iter)
        items = loop_items(self.state.value(node.iter))
        if not any(items) or len(items) > _UNROLLED:
            items = [()]

        def turn(item: Values) -> None:
            self._assign_to(node.target, None, item)
            self._block(node.body)

        self._branches(lambda: None, *(functools.partial(turn, item) for item in items))
        self._block(node.orelse)

    def _visit_While(self, node: ast.While) -> None:
        self._visit(node.test)
        with self.state.behind(self._test(node.test)):
            self._branches(lambda: None, lambda: self._block(node.body))
        self._block(node.orelse)

    def _visit_Match(self, node: ast.Match) -> None:
        self._visit(node.subject)
        with self.state.behind(UnknownCondition() if self.state.asks(node.subject) else None):
            self._branches(lambda: None, *(functools.partial(self._block, case.body) for case in node.cases))

    def _visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        scope = self.state.scope
        target = scope.module() if isinstance(node, ast.Global) else scope.parent
        if target is not None:
            for name in node.names:
                scope.names.pop(name, None)
                scope.elsewhere[name] = target

    # Expressions.

    def _visit(self, node: ast.AST | None) -> None:
        """Walk through a statement or an expression."""
        if node is not None:
            _WAYS[type(node)](self, node)

    def _below(self, node: ast.AST) -> None:
        """Walk through the parts of a node, not the node itself."""
        # As ast.iter_child_nodes, at a fraction of the price: most of the time is spent here.
        for name in syntax.PARTS[type(node)]:
            value = getattr(node, name, None)
            for one in value if type(value) is list else (value,):
                # A dictionary has no key for ``**other``.
                if one is not None and type(one) is not ast.Constant:
                    _WAYS[type(one)](self, one)

    def _alias(self, node: ast.expr) -> None:
        """Walk through the value of a variable; calls of a function under another name are still in sight."""
        if isinstance(node, ast.Attribute):
            self._visit_Attribute(node, called=True)
            self._take_from_parent(node)
        elif isinstance(node, ast.Name):
            self._find(node)
        else:
            self._visit(node)

    def _visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            for name in self._find(node) or ():
                if isinstance(name, Name) and name.is_vllm:
                    self.state.found.passed.add(self.state.normal(name))

    def _find(self, node: ast.Name) -> Values | None:
        """Look a name up, and record it if only a star import can bind it."""
        found = self.state.scope.find(node.id)
        if found is None:
            self._mention_starred(self.state.scope.module(), node.id, node.lineno)
        return found

    def _visit_Attribute(self, node: ast.Attribute, *, called: bool = False) -> None:
        inner: ast.expr = node
        parts: list[str] = []
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        parts.reverse()
        held = self.state.value(inner)
        if held and type(held[0]) is Name and isinstance(inner, ast.Name):
            self._find(inner)
        names = list(vllm_names(held))
        # If an import fails, a class of the package's own may take its place.
        replaced = len(held) > 1 and any(local_defs(held))
        for name in names:
            others = tuple(one for one in names if one != name) if len(names) > 1 else ()
            self._chain(name, parts, node.lineno, guarded=replaced, called=called, owners=others)
        if len(held) == 1 and isinstance(held[0], Receiver):
            # ``self.config.x``, where a method or an annotation has shown what ``self.config`` is.
            inside = self.state.resolver.attribute(held, parts[0])
            held, parts = (inside, parts[1:]) if any(isinstance(one, Instance) for one in inside) else (held, parts)
        if len(held) == 1 and isinstance(held[0], Instance):
            self.state.read(held[0], parts, node.lineno)
        unknown = all(isinstance(one, OfClass) for one in held)
        if unknown and isinstance(node.ctx, ast.Load):
            # The name alone shows what ``anything.model_config.x`` reads.
            for place, part in enumerate(parts[:-1]):
                if instance := next(iter(guessed(part)), None):
                    self.state.read(instance, parts[place + 1 :], node.lineno)
                    break
        if not called:
            self._take_from_parent(node)
        if not isinstance(inner, ast.Name):
            self._visit(inner)

    def _take_from_parent(self, node: ast.Attribute) -> None:
        """Record a method that is taken from ``super()`` and not called on the spot."""
        for one in self.state.value(node.value) if isinstance(node.value, ast.Call) else ():
            if isinstance(one, ParentMethods):
                self.state.read_above(one.cls, node.attr, node.lineno)

    def _chain(
        self,
        base: Name,
        parts: Sequence[str],
        line: int,
        *,
        guarded: bool = False,
        called: bool = False,
        owners: tuple[Name, ...] = (),
    ) -> None:
        """Record an attribute of a module or of a class; those of an instance are followed no further."""
        start = self.state.normal(base).qualname
        if any(map(_is_capital, start.split("."))):
            has_names = is_class(start)
        else:
            # A lower-case import is a module or an object, which only a release can tell.
            has_names = start != "logger" and not any(part.startswith("__") for part in start.split("."))
        if not has_names or "__dict__" in base.qualname.split("."):
            return
        whole = self.state.normal(Name(base.module, ".".join([*base.qualname.split("."), *parts]).strip(".")))
        rest = whole.qualname.split(".")
        above = base.qualname.split(".") if base.qualname and whole.module == base.module else []
        in_class = any(map(_is_capital, above))
        # Below a module there may be others: only a release can tell ``v1.metrics.loggers`` from an object's attribute.
        modules = (not above and whole.module == TOP) or (not in_class and len(rest) - len(above) > 1)
        defined = _defined(rest[len(above) :], modules=modules, in_class=in_class)
        if defined:
            name = Name(whole.module, ".".join([*above, *defined]))
            self.state.mention(name, line, guarded=guarded, owners=owners)
            if not called:
                self.state.found.passed.add(name)

    def _visit_Call(self, node: ast.Call) -> None:
        state = self.state
        value = state.value(node.func)
        left = patches.record_call(state, node, value)
        if left is not None:
            for one in left:
                self._visit(one)
            return
        called = dotted_of(value)
        if called in IMPORTERS or called == "sys.modules.get":
            for name in state.value(node):
                if isinstance(name, Name):
                    self._record_import(name, node.lineno)
        elif called in GETTERS and len(node.args) > 1:
            for base in vllm_names(state.value(node.args[0])):
                for text in texts_in(state.value(node.args[1])):
                    self._chain(base, [text], node.lineno, guarded=len(node.args) > 2)
            held = state.value(node.args[0]) if called == "builtins.getattr" and len(node.args) == 2 else ()
            if len(held) == 1 and isinstance(held[0], Instance):
                for text in texts_in(state.value(node.args[1])):
                    state.read(held[0], [text], node.lineno)
        state.call(node, value)
        if isinstance(node.func, ast.Attribute):
            self._visit_Attribute(node.func, called=True)
        elif isinstance(node.func, ast.Name):
            self._find(node.func)
        else:
            self._visit(node.func)
        # Asking for the parameters of a function does not pass it on.
        visit = self._alias if called in _SIGNATURES else self._visit
        for argument in node.args:
            visit(argument)
        for keyword in node.keywords:
            visit(keyword.value)
        for own, given in patches.patching_functions(state, node, value) if value else ():
            self._walk_call(own, given, node.lineno)

    def _visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Load) and self.state.dotted(node.value).endswith(("sys.modules", ".__dict__")):
            for name in vllm_names(self.state.value(node)):
                # A handler around it may be for KeyError.
                self.state.mention(name, node.lineno, guarded=bool(self.state.tries))
        self._below(node)

    def _visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit(node.args)
        self.state.resolver.lambdas[node] = self._function(node)

    def _visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._visit(node.value)
        self.state.scope.bind(node.target.id, self._value(node.value))

    def _visit_IfExp(self, node: ast.IfExp) -> None:
        self._visit(node.test)
        for wanted, arm in ((True, node.body), (False, node.orelse)):
            condition = self._test(node.test, wanted=wanted)
            self._branch(condition, arm)
            with self.state.behind(condition):
                self._visit(arm)

    def _visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Walk through ``and`` and ``or``: each value is evaluated only if those before it let it."""
        before: list[Condition | None] = []
        for one in node.values:
            for condition in before:
                self._branch(condition, one)
            with self.state.behind(*before):
                self._visit(one)
            before.append(self._test(one, wanted=isinstance(node.op, ast.And)))

    def _branch(self, condition: Condition | None, node: ast.expr) -> None:
        """Record the part of a line, or the lines, of an expression that is evaluated behind a test."""
        if condition is not None:
            last = position(node.end_lineno or node.lineno, node.end_col_offset or node.col_offset) - 1
            self.state.found.branches.append((condition, position(node.lineno, node.col_offset), last))

    def _visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        scope = Scope("function", self.state.scope)
        for one in node.generators:
            self._visit(one.iter)
            item = union(*loop_items(self.state.value(one.iter)))
            for name in ast.walk(one.target):
                if isinstance(name, ast.Name):
                    scope.names[name.id] = item if name is one.target else ()
        tests = [test for one in node.generators for test in one.ifs]
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        with self.state.within(scope), self.state.behind(*map(self._test, tests)):
            for part in (*tests, *parts):
                self._visit(part)

    _visit_AsyncFunctionDef = _visit_FunctionDef
    _visit_TryStar = _visit_Try
    _visit_AsyncWith = _visit_With
    _visit_AsyncFor = _visit_For
    _visit_Nonlocal = _visit_Global
    _visit_SetComp = _visit_GeneratorExp = _visit_DictComp = _visit_ListComp


class _WaysByKind(dict[type[ast.AST], Callable[[Walker, Any], None]]):
    """The method for each kind of node; of other nodes the parts are walked."""

    def __missing__(self, kind: type[ast.AST]) -> Callable[[Walker, Any], None]:
        # By the name of its class: outlines of functions have the names of their nodes.
        way = self[kind] = getattr(Walker, f"_visit_{kind.__name__}", Walker._below)
        return way


_WAYS: Final = _WaysByKind()


def _is_opaque(body: Sequence[ast.stmt], file: SourceFile) -> bool:
    """Return whether the body of a ``try`` may fail for another reason than a missing name of vLLM."""
    own = file.name.partition(".")[0]
    for node in (one for statement in body for one in ast.walk(statement)):
        if isinstance(node, ast.Call | ast.Subscript | ast.Await | ast.Raise | ast.BinOp):
            return True
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [absolute(node, file.name, file.is_package)]
        tops = {name.partition(".")[0] for name in names} - {TOP, own}
        if not tops <= sys.stdlib_module_names:
            return True
    return False


def _receiver(node: Function | ast.Lambda, mark: str = "") -> str:
    """Return the parameter that is the object, or with "classmethod" the class; empty if there is none."""
    if isinstance(node, ast.Lambda) or not (names := [*node.args.posonlyargs, *node.args.args]):
        return ""
    marks = {dotted(one).rpartition(".")[2] for one in node.decorator_list} & {"staticmethod", "classmethod"}
    return "" if marks != ({mark} if mark else set()) or node.name == "__new__" else names[0].arg


def _is_capital(part: str) -> bool:
    return part.lstrip("_")[:1].isupper()


def _defined(parts: Sequence[str], *, modules: bool, in_class: bool = False) -> list[str]:
    """Return as much of a chain of attributes as a source can define: ``Enum.MEMBER.value`` ends at the member.

    A function or a value ends it, unless ``modules`` says that there may be modules before them. Attributes of every
    object, such as ``__name__``, are defined nowhere.
    """
    found: list[str] = []
    for part in parts:
        if not part or (part.startswith("__") and part.endswith("__")):
            break
        found.append(part)
        capital = _is_capital(part)
        constant = part.isupper() and (in_class or "_" in part)
        if constant or (not capital and (in_class or not modules)):
            break
        in_class = in_class or capital
    return found
