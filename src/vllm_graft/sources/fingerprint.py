"""A fingerprint of a definition: one hash of its signature and one of its body.

It hashes the syntax tree in a form on which every CPython from 3.10 on agrees. Comments, docstrings, annotations, line
breaks and the definition's own name do not count. Decorators and default values count as body; the signature has
names, kinds, and whether there is a default.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

Function = ast.FunctionDef | ast.AsyncFunctionDef

_UNCOUNTED: Final = frozenset({"annotation", "ctx", "kind", "returns", "type_comment", "type_params"})
_PREFIXES: Final = ("kw ", "/", "**", "*")
_TEXT: Final = re.compile(r"s:([0-9a-f]{16}) b:([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The hashes of a definition: equal for equal code, whatever its comments and position in the file."""

    signature: str
    body: str

    def __str__(self) -> str:
        return f"s:{self.signature} b:{self.body}"

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Read a fingerprint that ``str`` wrote, or raise ValueError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a fingerprint")
        return cls(match[1], match[2])

    @classmethod
    def of(cls, nodes: Sequence[ast.AST]) -> Fingerprint:
        """Compute the fingerprint of a definition: one node, or several for a property or the branches of an ``if``."""
        parts: list[object] = []
        for node in nodes:
            if isinstance(node, Function):
                defaults = [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]
                parts += [node.decorator_list, defaults, _statements(node.body)]
            elif isinstance(node, ast.ClassDef):
                parts += [[*node.decorator_list, *node.bases, *node.keywords], _statements(node.body)]
            else:
                parts.append(node.value if isinstance(node, ast.Assign | ast.AnnAssign) else node)
        return cls(_hash(signature(nodes)), _hash(text for part in parts for text in _tree(part)))


def signature(nodes: Sequence[ast.AST]) -> tuple[str, ...]:
    """Return the tokens of a definition's signature: its kind, then its parameters in order.

    "/name" takes its argument by place alone, "kw name" by name alone; a "=" at the end says that there is a default.
    """
    found: list[str] = []
    for node in nodes:
        found.append(type(node).__name__ if isinstance(node, Function | ast.ClassDef) else "value")
        if isinstance(node, Function):
            found += parameters(node.args)
    return tuple(found)


def _hash(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def parameters(taken: ast.arguments) -> Iterator[str]:
    """Yield the parameters of a function as ``signature`` writes them."""
    for prefix, name, default in each_parameter(taken):
        yield f"{prefix}{name}{'=' if default is not None else ''}"


def each_parameter(taken: ast.arguments) -> Iterator[tuple[str, str, ast.expr | None]]:
    """Yield the parameters of a function in order: the prefix of its kind, its name, its default."""
    positional = [*taken.posonlyargs, *taken.args]
    without = [None] * (len(positional) - len(taken.defaults))
    for place, (argument, default) in enumerate(zip(positional, [*without, *taken.defaults], strict=True)):
        yield "/" if place < len(taken.posonlyargs) else "", argument.arg, default
    if taken.vararg is not None:
        yield "*", taken.vararg.arg, None
    for argument, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
        yield "kw ", argument.arg, default
    if taken.kwarg is not None:
        yield "**", taken.kwarg.arg, None


@dataclass(frozen=True, slots=True)
class ParameterToken:
    """A token of a signature: the prefix of its kind as in ``each_parameter``, its name, whether there is a default."""

    prefix: str
    name: str
    has_default: bool

    @property
    def rest(self) -> str:
        """``*`` or ``**`` where it takes any number of arguments; else empty."""
        return self.prefix if self.prefix in ("*", "**") else ""


@cache
def parse_parameter(token: str) -> ParameterToken:
    """Read a parameter that ``parameters`` wrote."""
    prefix = next((one for one in _PREFIXES if token.startswith(one)), "")
    return ParameterToken(prefix, token.removeprefix(prefix).removesuffix("="), token.endswith("="))


def _tree(value: object) -> Iterator[str]:
    """Write a syntax tree, without parts that are empty: releases of Python write those differently."""
    if isinstance(value, list):
        yield "["
        for one in value:
            yield from _tree(one)
        yield "]"
    elif isinstance(value, ast.AST):
        if isinstance(value, ast.AnnAssign) and value.value is not None:
            # An assignment with an annotation counts as one without.
            value = ast.Assign(targets=[value.target], value=value.value)
        yield f"{type(value).__name__}("
        for name in value._fields:
            part = getattr(value, name, None)
            if name in _UNCOUNTED or part is None or part == []:
                continue
            if name == "body" and isinstance(part, list):
                part = _statements(part, documented=isinstance(value, Function | ast.ClassDef))
            elif name == "values" and isinstance(value, ast.JoinedStr):
                # CPython 3.12.1 has empty constants in the format of a placeholder where others have none.
                part = [one for one in value.values if not (isinstance(one, ast.Constant) and one.value == "")]
            yield name
            yield from _tree(part)
        yield ")"
    else:
        yield repr(value)


def _statements(body: Sequence[ast.AST], *, documented: bool = True) -> list[ast.AST]:
    """Return the statements of a body without its docstring and without declarations that only annotate."""
    kept = [one for one in body if not (isinstance(one, ast.AnnAssign) and one.value is None)]
    first = kept[0] if kept and documented else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return kept[1:]
    return kept
