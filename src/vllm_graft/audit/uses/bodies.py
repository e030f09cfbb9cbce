"""The dependencies of a use's body besides the name itself: attributes of the object, keywords of what it calls."""

from __future__ import annotations

import ast
import re
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from vllm_graft.audit.model import Use, position
from vllm_graft.audit.uses.syntax import CHILDLESS, children, first_parameter, nodes
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted

# The usual names of an original that a patch has saved.
_ORIGINAL: Final = re.compile(r"(^|_)(orig|origin|original|call|wrapped|old|prev|previous|upstream|super)(_|$)")


# The attribute of a syntax tree that keeps what its function holds.
_KNOWN: Final = "graft_contents"


@dataclass(frozen=True, slots=True)
class _BodyContents:
    """The attributes and keywords in one function, each with its position.

    read:      the attributes that it reads from its first parameter, other than where a handler takes their absence
    stored:    those that it sets there, in no function inside that has a parameter of that name
    asked:     those that it asks for by ``hasattr`` and the like
    set:       those that it sets there, functions inside included
    passed:    the keywords that it gives to what was there before: to ``super()``, with the method's name, or by a name
               that says so
    called:    of a class method: the attributes that it calls on its class, in no ``try`` that has a handler
    """

    read: tuple[tuple[str, int], ...]
    stored: frozenset[str]
    asked: frozenset[str]
    set: frozenset[str]
    passed: tuple[tuple[str, str, int], ...]
    called: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class BodyDependencies:
    """The dependencies of a body, each with its first position.

    attributes:  what it reads from the object it is given, without what the package itself puts there
    keywords:    what it passes by name to the function that it wraps or overrides
    """

    attributes: Mapping[str, int] = field(default_factory=dict)
    keywords: Mapping[str, int] = field(default_factory=dict)


def body_dependencies(use: Use) -> BodyDependencies:
    """Return what the body of a use depends on; empty if there is no body."""
    if use.body is None:
        return BodyDependencies()
    held = body_contents(use.body)
    marks = {dotted(one) for one in use.body.decorator_list} if isinstance(use.body, Function) else set()
    read = held.called if "classmethod" in marks else () if "staticmethod" in marks else held.read
    attributes = _first_places(_attributes(use, held, read)) if use.container else {}
    passed = ((word, place) for name, word, place in held.passed if name in ("", use.attribute))
    return BodyDependencies(attributes, _first_places(passed))


def is_class_method(body: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> bool:
    """Return whether a function gets its class instead of an object."""
    return isinstance(body, Function) and any(dotted(one) == "classmethod" for one in body.decorator_list)


def body_contents(body: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> _BodyContents:
    """Search a function once: several rules need the result, and a long function takes milliseconds."""
    known: _BodyContents | None = body.__dict__.get(_KNOWN)
    if known is not None:
        return known
    first = first_parameter(body)
    read: list[tuple[str, int]] = []
    passed: list[tuple[str, str, int]] = []
    stored, asked, assigned = set[str](), set[str](), set[str]()
    below: dict[ast.AST, list[ast.AST]] = {}
    tolerated: set[ast.AST] = set()
    for node in _same_receiver(body, first, below):
        if isinstance(node, ast.Try | ast.TryStar | ast.With):
            tolerated.update(inner for one in _watched(node) for inner in nodes(one))
        elif isinstance(node, ast.Attribute):
            if _is(node.value, first):
                if isinstance(node.ctx, ast.Load):
                    read += [(node.attr, _position(node))] if node not in tolerated else []
                else:
                    stored.add(node.attr)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and _is(node.args[0], first):
            called, name = dotted(node.func), _text(node.args[1])
            if name is not None and called == "getattr" and len(node.args) == 2:
                read.append((name, _position(node)))
            elif name is not None and called in ("hasattr", "getattr", "setattr"):
                asked.add(name)
    for node in nodes(body, below):
        if isinstance(node, ast.Attribute):
            if first and isinstance(node.ctx, ast.Store) and _is(node.value, first):
                assigned.add(node.attr)
        elif isinstance(node, ast.Call):
            if first and len(node.args) > 1 and _is(node.func, "setattr") and _is(node.args[0], first):
                assigned.update(filter(None, [_text(node.args[1])]))
            if node.keywords and (to := _original(node.func)) is not None:
                passed += [(to, one.arg, _position(one.value)) for one in node.keywords if one.arg]
    on_class = tuple(_called_on_class(body, first)) if is_class_method(body) else ()
    sets = (frozenset(stored), frozenset(asked), frozenset(assigned))
    known = body.__dict__[_KNOWN] = _BodyContents(tuple(read), *sets, tuple(passed), on_class)
    return known


def _first_places(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    places: dict[str, int] = {}
    for name, place in sorted(found, key=lambda pair: pair[1]):
        places.setdefault(name, place)
    return places


def _position(node: ast.expr) -> int:
    return position(node.lineno, node.col_offset)


def _attributes(use: Use, held: _BodyContents, read: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the attributes read from the first parameter, without those that the body tests for beforehand."""
    for name, place in read:
        magic = name.startswith("__") and name.endswith("__")
        own = (
            name in use.own_attributes
            or name in held.stored
            or name in held.asked
            or "__getattr__" in use.own_attributes
        )
        if not own and not magic and not _ORIGINAL.search(name.lower()):
            yield name, place


def _called_on_class(body: ast.AST, first: str) -> Iterator[tuple[str, int]]:
    """Yield what a class method calls on its class; nothing if the variable may hold something else."""
    every = list(nodes(body))
    if any(isinstance(one, ast.Name) and one.id == first and not isinstance(one.ctx, ast.Load) for one in every):
        return
    tries = [one for one in every if isinstance(one, ast.Try | ast.TryStar) and one.handlers]
    caught = {inner for one in tries for statement in one.body for inner in nodes(statement)}
    for node in _same_receiver(body, first, {}):
        called = node.func if isinstance(node, ast.Call) and node not in caught else None
        # A metaclass has methods of its own, such as ``register``.
        if isinstance(called, ast.Attribute) and _is(called.value, first) and not hasattr(ABCMeta, called.attr):
            yield called.attr, _position(called)


def _watched(node: ast.Try | ast.TryStar | ast.With) -> Sequence[ast.stmt]:
    """Return the statements of a block that goes on if an attribute is missing.

    A handler of all exceptions counts if it watches one statement: around more, it is there for other failures.
    """
    if isinstance(node, ast.With):
        calls = (one.context_expr for one in node.items if isinstance(one.context_expr, ast.Call))
        caught = [kind for one in calls if dotted(one.func).rpartition(".")[2] == "suppress" for kind in one.args]
        return node.body if {"AttributeError", "Exception"}.intersection(map(dotted, caught)) else []
    for handler in node.handlers:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        names = {dotted(kind) if kind is not None else "BaseException" for kind in kinds}
        if "AttributeError" in names or (len(node.body) == 1 and names & {"Exception", "BaseException"}):
            return [] if isinstance(handler.body[-1], ast.Raise) else node.body
    return []


def _same_receiver(body: ast.AST, first: str, below: dict[ast.AST, list[ast.AST]]) -> Iterator[ast.AST]:
    """Yield the nodes of a body in which the parameter is the same: nested functions may have one of that name.

    ``below`` is filled with the children of each.
    """
    left = list(below.setdefault(body, children(body)))
    while left:
        node = left.pop()
        yield node
        if type(node) not in CHILDLESS and not (
            isinstance(node, Function | ast.Lambda) and first_parameter(node) == first
        ):
            left += below.setdefault(node, children(node))


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _original(called: ast.expr) -> str | None:
    """Return the method of ``super()`` that is called; empty for ``call``, ``original`` and the like, else None."""
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Call):
        return called.attr if dotted(called.value.func) == "super" else None
    return "" if _ORIGINAL.search(dotted(called).rpartition(".")[2].lower()) else None


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
