"""Walks through expressions: names of vLLM that are mentioned, modules imported by a call, things put there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from vllm_graft.audit.model import Condition
from vllm_graft.audit.uses import guards
from vllm_graft.audit.uses.calls import putting
from vllm_graft.audit.uses.conditions import Holds
from vllm_graft.audit.uses.helpers import helpers
from vllm_graft.audit.uses.resolve import GETTERS, IMPORTERS, dotted_of, guessed, is_class, items_of
from vllm_graft.audit.uses.state import State
from vllm_graft.audit.uses.values import TOP, Name, Object, Own, Scope, Self, Values, joined, names_of, texts_of

_LEAVES: Final = frozenset({ast.Constant, ast.Load, ast.Store, ast.Del})
"""Nodes that hold nothing to look at, and are most of a tree."""

_Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


class Functions(Protocol):
    """What makes a function of a lambda, and walks through it later."""

    def __call__(self, node: ast.Lambda, /) -> Own:
        """The function that the node defines."""
        ...


class Expressions:
    """The expressions of one file; ``helper`` walks through a function of the package that changes what it is given."""

    def __init__(
        self, state: State, function: Functions, helper: Callable[[Own, dict[str, Values], int], object]
    ) -> None:
        self.state = state
        self._function = function
        self._helper = helper

    def visit(self, node: ast.AST | None) -> None:
        """Walk through an expression, or a statement that consists of expressions."""
        way = _WAYS.get(type(node)) if node is not None else None
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
            for name in names_of(self.state.scope.find(node.id) or ()):
                self.state.found.passed.add(self.state.normal(name))

    def _attribute(self, node: ast.Attribute, *, called: bool = False) -> None:
        inner: ast.expr = node
        parts: list[str] = []
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        held = self.state.value(inner)
        for name in names_of(held):
            self._chain(name, parts, node.lineno, called=called)
        for one in held:
            if isinstance(one, Object) and len(held) == 1:
                self.state.read(one, parts, node.lineno)
        if all(isinstance(one, Self) for one in held) and isinstance(node.ctx, ast.Load):
            self._guess(node, parts)
        if not isinstance(inner, ast.Name):
            self.visit(inner)

    def _guess(self, node: ast.Attribute, parts: Sequence[str]) -> None:
        """Of ``anything.model_config.x`` the name alone says what ``x`` is read from."""
        for place, part in enumerate(parts[:-1]):
            for one in guessed(part):
                if isinstance(one, Object):
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
            for base in names_of(self.state.value(node.args[0])):
                for text in texts_of(self.state.value(node.args[1])):
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
            for name in names_of(self.state.value(node)):
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
        return Holds(node, state.scope, state.resolver, wanted)

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
            item = joined(*items_of(self.state.value(one.iter)))
            for name in ast.walk(one.target):
                if isinstance(name, ast.Name):
                    scope.names[name.id] = item if name is one.target else ()
        tests = [test for one in node.generators for test in one.ifs]
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        with self.state.within(scope), self.state.behind(*map(self._test, tests)):
            for part in (*tests, *parts):
                self.visit(part)


_WAYS: Final[Mapping[type[ast.AST], Callable[..., None]]] = {
    ast.Name: Expressions._name,
    ast.Attribute: Expressions._attribute,
    ast.Call: Expressions._call,
    ast.Subscript: Expressions._subscript,
    ast.Lambda: Expressions._lambda,
    ast.NamedExpr: Expressions._named,
    ast.IfExp: Expressions._if,
    ast.BoolOp: Expressions._both,
    ast.ListComp: Expressions._comprehension,
    ast.SetComp: Expressions._comprehension,
    ast.GeneratorExp: Expressions._comprehension,
    ast.DictComp: Expressions._comprehension,
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
