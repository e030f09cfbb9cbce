"""Class statements: subclasses of vLLM's classes, patches, and everything else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_graft.audit.model import Guard
from vllm_graft.audit.uses import patches
from vllm_graft.audit.uses.state import Subclass
from vllm_graft.audit.uses.targets import attributes
from vllm_graft.audit.uses.values import Name, Own, Scope, Values, joined, names_of, owns_of

if TYPE_CHECKING:
    from vllm_graft.audit.uses.walk import Walker


@dataclass(frozen=True, slots=True)
class Member:
    """What a class body binds: a function, or the value of an assignment."""

    name: str
    line: int
    value: Values
    expr: ast.expr | None
    guard: Guard

    @property
    def function(self) -> Own | None:
        """The function that a ``def`` of the body defines."""
        return next(owns_of(self.value), None) if self.expr is None else None


def walk(walker: Walker, node: ast.ClassDef) -> None:
    """Walk through a class statement."""
    state = walker.state
    _head(walker, node)
    bases = tuple(state.value(_bare(base)) for base in node.bases)
    inner = Scope("class", state.scope)
    own = Own(state.file, node, state.scope, inside=inner, bases=bases)
    walker.members.append([])
    walker.classes.append(own)
    with state.within(inner, node.name):
        walker.block(node.body)
        members = walker.members.pop()
    walker.classes.pop()
    state.scope.bind(node.name, (own,))
    targets = joined(*(patches.targets(state, base) for base in node.bases))
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
        if any(names_of(state.value(_bare(base)))):
            if isinstance(base, ast.Subscript):
                walker.expressions.visit(base.slice)
        else:
            walker.expressions.visit(base)


def _bare(base: ast.expr) -> ast.expr:
    """Of ``Base[T]`` the ``Base``."""
    return base.value if isinstance(base, ast.Subscript) else base


def _subclass(walker: Walker, own: Own, members: list[Member]) -> None:
    state = walker.state
    methods: dict[str, tuple[Own, int, Guard]] = {}
    for member in members:
        # ``step = traced`` overrides as a ``def`` does.
        held = next((one for one in owns_of(member.value) if one.function is not None), None)
        if held is not None:
            methods.setdefault(member.name, (held, member.line, member.guard))
    assert isinstance(own.node, ast.ClassDef)
    for target, base in {state.normal(name): base for name, base in upstream(own)}.items():
        names = [state.normal(one) for one in names_of(base)]
        state.found.subclasses.append(
            Subclass(
                cls=own,
                target=target,
                line=own.node.lineno,
                owner=".".join((*state.owner, own.node.name)),
                guard=state.guard,
                alternatives=tuple(one for one in names if one != target),
                fallback=any(isinstance(one, Own) or (isinstance(one, Name) and not one.is_vllm) for one in base),
                methods=methods,
            )
        )


def upstream(cls: Own, seen: tuple[Own, ...] = ()) -> Iterator[tuple[Name, Values]]:
    """The classes of vLLM that a class derives from, each with all that its base can be."""
    for base in cls.bases:
        yield from ((name, base) for name in names_of(base))
        for own in owns_of(base):
            if own not in seen:
                yield from upstream(own, (*seen, cls))


def _decorated(walker: Walker, node: ast.ClassDef, members: list[Member]) -> None:
    """``@gorilla.patches(Target)``: every function of the body goes to the target."""
    state = walker.state
    for one in node.decorator_list:
        if isinstance(one, ast.Call) and one.args and state.dotted(one.func) == "gorilla.patches":
            for member in members:
                if member.function is not None:
                    state.put(
                        attributes(state.value(one.args[0]), [member.name]), member.line, value=(member.function,)
                    )
