"""Syntax trees: the names that a function binds, and functions whose bodies are parsed on demand.

The trees of a large package do not fit into memory, their outlines do. An outline is a function without its body, which
is parsed again when needed; only the last few bodies are held. Name, parameters, decorators and place stay as they were
parsed, so that an outline can take the place of a function's node.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, cast

from vllm_graft.errors import ConfigError
from vllm_graft.sources.fingerprint import Function

if TYPE_CHECKING:
    from vllm_graft.audit.uses.source_file import SourceFile


# Statements that no other stands in.
_SIMPLE: Final = frozenset(
    {
        ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Raise, ast.Assert, ast.Delete, ast.Import,
        ast.ImportFrom, ast.Pass, ast.Break, ast.Continue, ast.Global, ast.Nonlocal,
    }
)  # fmt: skip


# Nodes without nodes below them but contexts: more than half of a tree, so that skipping them is worth the test.
CHILDLESS: Final = frozenset({ast.Name, ast.Constant, ast.alias})

# Fields with texts, numbers, contexts and operators.
_NO_PARTS: Final = frozenset(
    {
        "arg", "asname", "attr", "conversion", "ctx", "id", "is_async", "kind", "kwd_attrs", "level", "module", "name",
        "op", "ops", "rest", "simple", "tag", "type_comment",
    }
)  # fmt: skip

# Nodes with other things in the fields where others have nodes.
_NO_NODES: Final = frozenset({ast.Constant, ast.MatchSingleton, ast.Global, ast.Nonlocal})


class _PartsByKind(dict[type[ast.AST], tuple[str, ...]]):
    """The fields of each kind of node that have nodes in them."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        named = () if kind in _NO_NODES else kind._fields
        found = self[kind] = tuple(name for name in named if name not in _NO_PARTS)
        return found


PARTS: Final = _PartsByKind()

_NOTHING: Final[Mapping[ast.AST, list[ast.AST]]] = MappingProxyType({})


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
        kind = type(node)
        if kind not in _SIMPLE and (scopes or kind not in _SCOPES):
            for block in blocks(node):
                left += block


def nodes(root: ast.AST, below: Mapping[ast.AST, list[ast.AST]] = _NOTHING) -> Iterator[ast.AST]:
    """Yield a node and all below it in the order of ``ast.walk``, without contexts and operators such as ``Add``.

    ``below`` has the children of some nodes, if they are known already.
    """
    left = [root]
    for node in left:
        yield node
        if type(node) not in CHILDLESS:
            left += below[node] if node in below else children(node)


def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below another in the order of ``ast.iter_child_nodes``, as ``nodes`` does."""
    found: list[ast.AST] = []
    for name in PARTS[type(node)]:
        value = getattr(node, name, None)
        if type(value) is list:
            # A dictionary has no key for ``**other``.
            found += [one for one in value if one is not None] if None in value else value
        elif value is not None:
            found.append(value)
    return found


def blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of statements that stand directly in a statement."""
    if type(node) in _SIMPLE:
        return []
    found: list[list[ast.stmt]] = [
        block for name in ("body", "orelse", "finalbody") if (block := getattr(node, name, None))
    ]
    return found + [part.body for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]


def local_names(node: Function | ast.Lambda | ast.If) -> Set[str]:
    """Return the names that the statements of a body bind, whether or not that has happened yet when they are read."""
    if isinstance(node, ast.Lambda):
        return set()
    known: frozenset[str] | None = node.__dict__.get("locals")
    return known if known is not None else _bound_by(statements(node.body))


def _bound_by(body: Iterable[ast.stmt]) -> set[str]:
    bound: set[str] = set()
    sent: set[str] = set()
    for one in body:
        kind = type(one)
        if kind in _UNBINDING:
            continue
        if name := _variable(one):
            bound.add(name)
        elif kind is ast.Global or kind is ast.Nonlocal:
            sent.update(cast("ast.Global | ast.Nonlocal", one).names)
        else:
            bound.update(_bound(one))
    return bound - sent


def _variable(node: ast.stmt) -> str:
    """Return the variable that a plain assignment sets, as most of them do; empty for other statements."""
    if type(node) is ast.Assign and type(target := node.targets[0]) is ast.Name and len(node.targets) == 1:
        return target.id
    return ""


def returned_names(node: Function) -> tuple[str, ...]:
    """Return the names of the variables that a function returns, not those of the functions in it."""
    known: tuple[str, ...] | None = node.__dict__.get("returned")
    return _returned(statements(node.body)) if known is None else known


def _returned(body: Iterable[ast.stmt]) -> tuple[str, ...]:
    values = (one.value for one in body if type(one) is ast.Return)
    return tuple(value.id for value in values if isinstance(value, ast.Name))


# Statements that bind no name themselves, and are most of all.
_UNBINDING: Final = frozenset(
    {ast.Expr, ast.Return, ast.If, ast.Raise, ast.Assert, ast.While, ast.Pass, ast.Break, ast.Continue, ast.Delete}
)


def _bound(node: ast.stmt) -> Iterator[str]:
    if type(node) in _SCOPES:
        yield cast("Function | ast.ClassDef", node).name
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
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        return [node.target]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [item.optional_vars for item in node.items if item.optional_vars is not None]
    return [case.pattern for case in node.cases] if isinstance(node, ast.Match) else []


# The number of bodies that are cached.
_BODIES: Final = 48


_IMPORTS: Final = frozenset({ast.Import, ast.ImportFrom})
# Statements that may give an attribute a value.
_STORING: Final = frozenset(
    {
        ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor, ast.With, ast.AsyncWith, ast.Delete,
    }
)  # fmt: skip


class Outline:
    """A function without its body, which is parsed on demand.

    file:      the file that the function stands in
    locals:    the names that its body binds
    returned:  the names of variables that its body returns
    opens:     whether a function, a class or ``global`` stands in its body
    """

    __slots__ = ()

    file: SourceFile
    locals: frozenset[str]
    returned: tuple[str, ...]
    opens: bool

    @property
    def body(self) -> list[ast.stmt]:
        """The statements of the function."""
        stated: list[ast.stmt] | None = self.__dict__.get("statements")
        return stated if stated is not None else _whole(cast("Function", self)).body

    @body.setter
    def body(self, body: list[ast.stmt]) -> None:
        self.__dict__["statements"] = body

    def drop_body(self) -> None:
        """Drop the statements, once they have been walked or need no walk."""
        self.__dict__.pop("statements", None)


# A fingerprint counts the name of a node's class.
class FunctionDef(Outline, ast.FunctionDef):
    """The outline of a function."""

    __slots__ = ()


class AsyncFunctionDef(Outline, ast.AsyncFunctionDef):
    """The outline of a coroutine function."""

    __slots__ = ()


# Statements with a scope of their own.
_SCOPES: Final = frozenset({ast.FunctionDef, ast.AsyncFunctionDef, FunctionDef, AsyncFunctionDef, ast.ClassDef})


def parse(text: str) -> ast.Module:
    """Return the syntax tree of a text, without the warnings that a compiler would give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(text)


class BodyBudget:
    """The lines of functions that may still be held from the parse of a file to the walk, for all files together.

    A body that is held need not be parsed again. Only those count that are almost certain to be walked.
    """

    def __init__(self, lines: int = 0) -> None:
        self._left = lines

    def covers(self, node: Function, file: SourceFile) -> bool:
        """Return whether the body of a function is to be held, and take its lines from the budget."""
        first, last = first_line(node), node.end_lineno or node.lineno
        lines = last - first + 1
        if lines > self._left:
            return False
        text = file.cut(first, last)
        if "vllm" not in text and "_config" not in text:
            return False
        self._left -= lines
        return True


def outline(
    tree: ast.Module, file: SourceFile, budget: BodyBudget
) -> tuple[list[Function], frozenset[str], list[ast.Import | ast.ImportFrom]]:
    """Take the bodies of functions out of a tree, but for those that the budget covers.

    Return the outlines of its functions, the attributes that their bodies set, and all import statements of the file.
    """
    functions: list[Function] = []
    stored: set[str] = set()
    imports: list[ast.Import | ast.ImportFrom] = []
    left: list[list[ast.stmt]] = [tree.body]
    while left:
        block = left.pop()
        for place, node in enumerate(block):
            if isinstance(node, Function):
                own = list(statements(node.body))
                inside = [cast("Function | ast.ClassDef", one).body for one in own if type(one) in _SCOPES]
                for one in (*own, *(deep for body in inside for deep in statements(body, scopes=True))):
                    kind = type(one)
                    if kind in _STORING:
                        if not _variable(one):
                            stored.update(_stored(one))
                    elif kind in _IMPORTS:
                        imports.append(cast("ast.Import | ast.ImportFrom", one))
                shell = FunctionDef if isinstance(node, ast.FunctionDef) else AsyncFunctionDef
                found: Function = shell(name=node.name, args=node.args, body=[], decorator_list=[])
                found.__dict__ = {name: value for name, value in node.__dict__.items() if name != "body"}
                if budget.covers(node, file):
                    found.body = node.body
                opens = bool(inside) or any(type(one) is ast.Global for one in own)
                found.__dict__.update(file=file, locals=frozenset(_bound_by(own)), returned=_returned(own), opens=opens)
                block[place] = found
                functions.append(cast("Function", block[place]))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports.append(node)
            else:
                left += blocks(node)
    return functions, frozenset(stored), imports


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
    """Yield the attributes that a statement sets, as a walk records them: incrementing a counter does not count."""
    left = list(_targets(node))
    if isinstance(node, ast.Delete):
        left = [one for one in node.targets if isinstance(one, ast.Attribute)]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        counted = isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant)
        left = [] if node.value is None or counted else left
    while left:
        one = left.pop()
        if isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.Tuple | ast.List):
            left += one.elts
        elif isinstance(one, ast.Starred):
            left.append(one.value)


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
    # After a string of as many lines, which costs a parser less than empty ones, every node has its line at once.
    lines = "\n" * (first - 2)
    before = f"if '''{lines}''':\n" if indented else f"'''{lines}'''\n" if first > 1 else ""
    try:
        (found,) = parse(before + text).body[-1:]
        if isinstance(found, ast.If):
            (found,) = found.body
    except (SyntaxError, ValueError):
        found = None
    if not isinstance(found, Function) or (found.name, found.lineno) != (node.name, node.lineno):
        raise ConfigError("the file has changed while it was read", where=file.shown, fix="run the command again")
    return found
