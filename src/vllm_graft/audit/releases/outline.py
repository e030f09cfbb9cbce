"""What the catalogue keeps of a module: each name with its kind, signature and body, each class with its attributes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vllm_graft.audit.releases.shape import BODY
from vllm_graft.patching.upstream.finder import Place, ReadModule
from vllm_graft.patching.upstream.fingerprint import Fingerprint, Function, signature
from vllm_graft.patching.upstream.scopes import dotted

_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_DEFINED: Final = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)

ELSEWHERE: Final = "-"
"""Stands for every module of another package."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name.

    kind:   what it is, or "import"
    first:  the signature; of a class its bases; of an import what it is bound to
    second: the body's fingerprint; of a class the attributes that its methods set
    """

    kind: str
    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()


def entries(module: ReadModule, *, within: str = "vllm") -> Iterator[tuple[str, Entry]]:
    """Every name of a module, and every name of its classes; of what others define, that it is imported."""
    if stars := tuple(f"{origin}:*" for origin in module.stars if origin.partition(".")[0] == within):
        yield "*", Entry("import", stars)
    for name in module.scope:
        place = module.place(name)
        if place is not None:
            yield from _of(place)
            continue
        bound = tuple(f"{one.module}:{one.name}" for one in module.imports(name))
        if any(one == within or one.startswith((f"{within}.", f"{within}:")) for one in bound):
            yield name, Entry("import", bound)
        elif any(not one.startswith("__future__:") for one in bound):
            yield name, Entry("import", (f"{ELSEWHERE}:{name}",))


def _of(place: Place) -> Iterator[tuple[str, Entry]]:
    cls = place.cls
    if cls is None:
        yield place.qualname, entry(place)
        return
    yield place.qualname, Entry("class", tuple(place.bases), tuple(sorted(set_on_self(cls))))
    for name in place.module.class_scope(cls):
        inner = place.inside(name)
        if inner is not None:
            yield from _of(inner)


def entry(place: Place) -> Entry:
    """One function or value."""
    if place.kind == "value":
        return Entry("value")
    return Entry(place.kind, signature(place.nodes), (Fingerprint.of(place.nodes).body[:BODY],))


def set_on_self(cls: ast.ClassDef) -> set[str]:
    """The attributes that a class's methods set on their first parameter."""
    found: set[str] = set()
    for method in cls.body:
        if not isinstance(method, Function) or not method.args.args:
            continue
        first = method.args.args[0].arg
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == first:
                found.add(node.attr)
    return found


def mentions(text: str) -> Counter[str]:
    """How often each word stands in a text, where it is not being defined: in code, strings and comments alike."""
    words = Counter(_WORD.findall(text))
    words.subtract(_DEFINED.findall(text))
    return words
