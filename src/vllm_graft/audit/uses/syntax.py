"""Syntax trees: the names that a function binds, and functions whose bodies are parsed on demand.

The trees of a large package do not fit into memory, their outlines do. An outline is a function without its body, which
is parsed again when needed; only the last few bodies are held. Name, parameters, decorators and place stay as they were
parsed, so that an outline can take the place of a function's node.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from vllm_graft.errors import ConfigError
from vllm_graft.sources.fingerprint import Function

if TYPE_CHECKING:
    from vllm_graft.audit.uses.source_file import SourceFile


_SIMPLE: Final = frozenset(
    {
        ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Raise, ast.Assert, ast.Delete, ast.Import,
        ast.ImportFrom, ast.Pass, ast.Break, ast.Continue, ast.Global, ast.Nonlocal,
    }
)  # fmt: skip
"""Statements that no other stands in."""


CHILDLESS: Final = frozenset({ast.Name, ast.Constant, ast.alias})
"""Nodes without nodes below them but contexts: more than half of a tree, so that skipping them is worth the test."""


def parameters(args: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield every parameter in order, with its default."""
    positional = [*args.posonlyargs, *args.args]
    without = len(positional) - len(args.defaults)
    yield from zip((one.arg for one in positional), [None] * without + list(args.defaults), strict=True)
    yield from zip((one.arg for one in args.kwonlyargs), args.kw_defaults, strict=True)
    yield from ((one.arg, None) for one in (args.vararg, args.kwarg) if one is not None)


def first_parameter(node: Function | ast.Lambda) -> str:
    """Return the parameter that is the object: the first, or wrapt's ``instance``."""
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    if names[:2] == ["wrapped", "instance"]:
        return "instance"
    return names[0] if names else ""


def statements(body: Sequence[ast.stmt], *, scopes: bool = False) -> Iterator[ast.stmt]:
    """Yield the statements of a body and those inside them; inside functions and classes only with ``scopes``."""
    left = list(body)
    while left:
        node = left.pop()
        yield node
        if type(node) not in _SIMPLE and (scopes or not isinstance(node, Function | ast.ClassDef)):
            for block in blocks(node):
                left += block


def nodes(root: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it in the order of ``ast.walk``, without contexts such as ``Load``."""
    left = [root]
    for node in left:
        yield node
        if type(node) not in CHILDLESS:
            left += children(node)


def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below another as ``ast.iter_child_nodes`` does, without contexts such as ``Load``."""
    found: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            found.append(value)
    return found


def blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of statements that stand directly in a statement."""
    found: list[list[ast.stmt]] = [
        block for name in ("body", "orelse", "finalbody") if (block := getattr(node, name, None))
    ]
    return found + [part.body for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]


def local_names(node: Function | ast.Lambda | ast.If) -> set[str]:
    """Return the names that the statements of a body bind, whether or not that has happened yet when they are read."""
    if isinstance(node, ast.Lambda):
        return set()
    known: frozenset[str] | None = node.__dict__.get("locals")
    if known is not None:
        return set(known)
    bound: set[str] = set()
    sent: set[str] = set()
    for one in statements(node.body):
        if isinstance(one, ast.Global | ast.Nonlocal):
            sent.update(one.names)
        elif type(one) not in _UNBINDING:
            bound.update(_bound(one))
    return bound - sent


_UNBINDING: Final = frozenset(
    {ast.Expr, ast.Return, ast.If, ast.Raise, ast.Assert, ast.While, ast.Pass, ast.Break, ast.Continue, ast.Delete}
)
"""Statements that bind no name themselves, and are most of all."""


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Try | ast.TryStar):
        yield from (handler.name for handler in node.handlers if handler.name)
    for target in _targets(node):
        if isinstance(target, ast.Name):
            yield target.id
            continue
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            continue
        for one in nodes(target):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                yield one.id
            elif isinstance(one, ast.MatchAs | ast.MatchStar) and one.name:
                yield one.name


def _targets(node: ast.stmt) -> Sequence[ast.AST]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        return [node.target]
    if isinstance(node, ast.With | ast.AsyncWith):
        return [item.optional_vars for item in node.items if item.optional_vars is not None]
    return [case.pattern for case in node.cases] if isinstance(node, ast.Match) else []


_BODIES: Final = 48
"""How many bodies are kept."""


_IMPORTS: Final = frozenset({ast.Import, ast.ImportFrom})
_STORING: Final = frozenset(
    {
        ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor, ast.With, ast.AsyncWith, ast.Delete,
    }
)  # fmt: skip
"""Statements that may give an attribute a value."""


class Outline:
    """A function without its body, which is parsed on demand.

    file:    the file that the function stands in
    locals:  the names that its body binds
    """

    __slots__ = ()

    file: SourceFile
    locals: frozenset[str]

    @property
    def body(self) -> list[ast.stmt]:
        """The statements of the function."""
        stated: list[ast.stmt] | None = self.__dict__.get("statements")
        return stated if stated is not None else _whole(cast("Function", self)).body

    @body.setter
    def body(self, body: list[ast.stmt]) -> None:
        self.__dict__["statements"] = body


# A fingerprint counts the name of a node's class.
class FunctionDef(Outline, ast.FunctionDef):
    """The outline of a function."""

    __slots__ = ()


class AsyncFunctionDef(Outline, ast.AsyncFunctionDef):
    """The outline of a coroutine function."""

    __slots__ = ()


def parse(text: str) -> ast.Module:
    """Return the syntax tree of a text, without the warnings that a compiler would give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(text)


@dataclass(frozen=True, slots=True)
class FileOutline:
    """A file's functions, the attributes that their bodies set, and all import statements of the file.

    functions:  the outlines
    """

    functions: list[Function]
    stored: frozenset[str]
    imports: list[ast.Import | ast.ImportFrom]


def outline(tree: ast.Module, file: SourceFile) -> FileOutline:
    """Take the bodies of functions out of a tree."""
    functions: list[Function] = []
    stored: set[str] = set()
    imports: list[ast.Import | ast.ImportFrom] = []
    left: list[list[ast.stmt]] = [tree.body]
    while left:
        block = left.pop()
        for place, node in enumerate(block):
            if isinstance(node, Function):
                for one in statements(node.body, scopes=True):
                    if type(one) in _IMPORTS:
                        imports.append(cast("ast.Import | ast.ImportFrom", one))
                    elif type(one) in _STORING:
                        stored.update(_stored(one))
                block[place] = _outline_of(node, file)
                functions.append(cast("Function", block[place]))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports.append(node)
            else:
                left += blocks(node)
    return FileOutline(functions, frozenset(stored), imports)


def _outline_of(node: Function, file: SourceFile) -> Function:
    kind = FunctionDef if isinstance(node, ast.FunctionDef) else AsyncFunctionDef
    found: Function = kind(name=node.name, args=node.args, body=[], decorator_list=[])
    found.__dict__ = {name: value for name, value in node.__dict__.items() if name != "body"}
    found.__dict__.update(file=file, locals=frozenset(local_names(node)))
    return found


def drop_definition_details(functions: Iterable[Function]) -> None:
    """Drop what only the definition of functions needs: annotations, and the names that their bodies bind."""
    for node in functions:
        node.returns = None
        node.__dict__.pop("locals", None)
        taken = node.args
        for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg):
            if one is not None:
                one.__dict__ = {"arg": one.arg, "annotation": None, "lineno": one.lineno}


def _stored(node: ast.stmt) -> Iterator[str]:
    """Yield the attributes that a statement sets, as a walk records them: a counter that goes up is none."""
    left = list(_targets(node))
    if isinstance(node, ast.Delete):
        left = [one for one in node.targets if isinstance(one, ast.Attribute)]
    elif isinstance(node, ast.AnnAssign) and node.value is None:
        left = []
    elif isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant):
        left = []
    while left:
        one = left.pop()
        if isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.Tuple | ast.List):
            left += one.elts
        elif isinstance(one, ast.Starred):
            left.append(one.value)


def is_outline(node: ast.AST) -> bool:
    """Return whether a node is a function whose body is parsed on demand."""
    return isinstance(node, Outline)


def first_line(node: Function | ast.ClassDef) -> int:
    """Return the line that a definition begins with, decorators included."""
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def whole(node: Function) -> Function:
    """Return a function with its body: an outline is parsed again."""
    return _whole(node) if isinstance(node, Outline) and "statements" not in node.__dict__ else node


@functools.lru_cache(maxsize=_BODIES)
def _whole(node: Function) -> Function:
    """Parse a function again, with the lines and columns that it has in its file."""
    file: SourceFile = node.__dict__["file"]
    first = first_line(node)
    text = file.cut(first, node.end_lineno or first)
    indented = text[:1].isspace()
    # Empty lines are a parser's cheapest, and every node has its line at once.
    before = "\n" * (first - 2) + "if 1:\n" if indented else "\n" * (first - 1)
    try:
        (found,) = parse(before + text).body
        if isinstance(found, ast.If):
            (found,) = found.body
    except (SyntaxError, ValueError):
        found = None
    if not isinstance(found, Function) or (found.name, found.lineno) != (node.name, node.lineno):
        raise ConfigError("the file has changed while it was read", where=file.shown, fix="run the command again")
    return found
