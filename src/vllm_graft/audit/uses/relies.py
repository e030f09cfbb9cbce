"""What the body of a use leans on besides the name itself: attributes of the object, keywords of what it calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from vllm_graft.audit.model import Use
from vllm_graft.audit.uses.ownership import first_parameter
from vllm_graft.patching.upstream.fingerprint import Function
from vllm_graft.patching.upstream.scopes import dotted

_ORIGINAL: Final = re.compile(r"(^|_)(orig|origin|original|call|wrapped|old|prev|previous|upstream|super)(_|$)")
"""How what was there before is called where it has been kept."""


_KNOWN: Final = "graft_relied"
"""The attribute of a syntax tree that keeps what its function leans on."""


@dataclass(frozen=True, slots=True)
class Relied:
    """What a body leans on, each with the first line that it stands in.

    attributes:  what it reads from the object it is given, without what the package itself puts there
    keywords:    what it passes by name to the function that it wraps or overrides
    """

    attributes: Mapping[str, int] = field(default_factory=dict)
    keywords: Mapping[str, int] = field(default_factory=dict)


def relies(use: Use) -> Relied:
    """What the body of a use leans on; nothing where reading found no body."""
    if use.body is None:
        return Relied()
    # Several rules ask for it, and a walk through a long function takes milliseconds: kept with the syntax tree.
    known: dict[tuple[str, frozenset[str]], Relied] = use.body.__dict__.setdefault(_KNOWN, {})
    key = use.qualname, use.own
    if key not in known:
        attributes = _first_lines(_attributes(use)) if "." in use.qualname and not _is_static(use.body) else {}
        known[key] = Relied(attributes, _first_lines(_keywords(use.body, use.qualname.rpartition(".")[2])))
    return known[key]


def _first_lines(found: Iterator[tuple[str, int]]) -> dict[str, int]:
    lines: dict[str, int] = {}
    for name, line in sorted(found, key=lambda pair: pair[1]):
        lines.setdefault(name, line)
    return lines


def _attributes(use: Use) -> Iterator[tuple[str, int]]:
    """The attributes read from the first parameter; one that the body asks for beforehand it does not lean on."""
    assert use.body is not None
    first = first_parameter(use.body)
    stored, asked, read = set(use.own), set(), []
    for node in _with_the_same(use.body, first):
        if isinstance(node, ast.Attribute) and _is(node.value, first):
            if isinstance(node.ctx, ast.Load):
                read.append((node.attr, node.lineno))
            else:
                stored.add(node.attr)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and _is(node.args[0], first):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            called = dotted(node.func)
            if not isinstance(name, str):
                continue
            if called == "getattr" and len(node.args) == 2:
                read.append((name, node.lineno))
            elif called in ("hasattr", "getattr", "setattr"):
                asked.add(name)
    for name, line in read:
        magic = name.startswith("__") and name.endswith("__")
        if name not in stored and name not in asked and not magic and not _ORIGINAL.search(name.lower()):
            yield name, line


def _with_the_same(body: ast.AST, first: str) -> Iterator[ast.AST]:
    """The nodes of a body in which the parameter still is what it was: functions inside may have one of that name."""
    left = list(ast.iter_child_nodes(body))
    while left:
        node = left.pop()
        yield node
        if isinstance(node, Function | ast.Lambda) and first_parameter(node) == first:
            continue
        left += ast.iter_child_nodes(node)


def _keywords(body: ast.AST, name: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and _is_original(node.func, name):
            yield from ((one.arg, one.value.lineno) for one in node.keywords if one.arg)


def _is_original(called: ast.expr, name: str) -> bool:
    """Whether a call goes to what was there: ``call``, ``original``, ``self._original_name``, ``super().name``."""
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Call):
        return called.attr == name and dotted(called.value.func) == "super"
    return bool(_ORIGINAL.search(dotted(called).rpartition(".")[2].lower()))


def _is_static(body: ast.AST) -> bool:
    return isinstance(body, Function) and any(
        dotted(one) in ("staticmethod", "classmethod") for one in body.decorator_list
    )


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
