"""Functions without their bodies: of a large package the outlines fit into memory, its syntax trees do not.

A body is parsed again when it is asked for, and only the last few are kept. Everything else of a function (its name,
parameters, decorators and place) stays as it was parsed, so that an outline stands wherever a function's node does.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from vllm_graft.audit.uses.locals import blocks, local_names, statements
from vllm_graft.errors import ConfigError
from vllm_graft.sources.fingerprint import Function

if TYPE_CHECKING:
    from vllm_graft.audit.uses.files import SourceFile

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
    """What both kinds of outlines share: a body that is parsed when it is asked for.

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
    """The syntax tree of a text, without the warnings that a compiler would give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(text)


@dataclass(frozen=True, slots=True)
class Outlined:
    """What was in the bodies of a file's functions: attributes that they set, and import statements, all of the file's.

    functions:  the outlines
    """

    functions: list[Function]
    stored: frozenset[str]
    imports: list[ast.Import | ast.ImportFrom]


def outline(tree: ast.Module, file: SourceFile) -> Outlined:
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
                block[place] = _outlined(node, file)
                functions.append(cast("Function", block[place]))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports.append(node)
            else:
                left += blocks(node)
    return Outlined(functions, frozenset(stored), imports)


def _outlined(node: Function, file: SourceFile) -> Function:
    kind = FunctionDef if isinstance(node, ast.FunctionDef) else AsyncFunctionDef
    found: Function = kind(name=node.name, args=node.args, body=[], decorator_list=[])
    found.__dict__ = {name: value for name, value in node.__dict__.items() if name != "body"}
    found.__dict__.update(file=file, locals=frozenset(local_names(node)))
    return found


def slim(functions: Iterable[Function]) -> None:
    """Let go of what only their definition needs: annotations, and the names that their bodies bind."""
    for node in functions:
        node.returns = None
        node.__dict__.pop("locals", None)
        taken = node.args
        for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg):
            if one is not None:
                one.__dict__ = {"arg": one.arg, "annotation": None, "lineno": one.lineno}


def _stored(node: ast.stmt) -> Iterator[str]:
    """The attributes that a statement gives a value, as a walk notes them: a counter that goes up is none."""
    targets: Sequence[ast.expr | None] = ()
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target] if node.value is not None else []
    elif isinstance(node, ast.AugAssign):
        targets = [node.target] if not isinstance(node.value, ast.Constant) else []
    elif isinstance(node, ast.For | ast.AsyncFor):
        targets = [node.target]
    elif isinstance(node, ast.With | ast.AsyncWith):
        targets = [item.optional_vars for item in node.items]
    elif isinstance(node, ast.Delete):
        targets = [one for one in node.targets if isinstance(one, ast.Attribute)]
    left = list(targets)
    while left:
        one = left.pop()
        if isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.Tuple | ast.List):
            left += one.elts
        elif isinstance(one, ast.Starred):
            left.append(one.value)


def is_outline(node: ast.AST) -> bool:
    """Whether a node stands for a function whose body is parsed when it is asked for."""
    return isinstance(node, Outline)


def first_line(node: Function | ast.ClassDef) -> int:
    """The line that a definition begins with, decorators included."""
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def whole(node: Function) -> Function:
    """A function with all that it has: an outline parsed again."""
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
