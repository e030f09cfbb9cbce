"""What the catalogue keeps of a module: each name with its kind, signature and body, each class with its attributes.

Of a class it also keeps how its constructor comes about: whether a decorator writes it, and from which fields.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vllm_graft.audit.releases.fields import DATACLASS, class_marks, fields, function_marks
from vllm_graft.audit.releases.shape import BODY
from vllm_graft.sources.fingerprint import Fingerprint, Function, signature
from vllm_graft.sources.modules import ScopeEntry as Place
from vllm_graft.sources.modules import SourceModule as ReadModule
from vllm_graft.sources.scopes import dotted

_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_DEFINED: Final = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)

UNNAMED: Final = "?"
"""Stands for a base that is no name, such as what a function gives back."""

ELSEWHERE: Final = "-"
"""Stands for every module of another package."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name.

    kind:   what it is, or "import"
    first:  the signature; of a class its bases; of an import what it is bound to
    second: the body's fingerprint; of a class the attributes that its methods set
    marks:  letters; of a function ``ABSTRACT`` and ``OPAQUE``, of a class those of ``fields.py``
    fields: of a class: what it annotates, in order, as ``fields.py`` writes it
    """

    kind: str
    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    marks: str = ""
    fields: tuple[str, ...] = ()


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
    yield place.qualname, entry(place)
    for name in place.module.class_scope(cls):
        inner = place.inside(name)
        if inner is not None:
            yield from _of(inner)


def entry(place: Place) -> Entry:
    """One class, function or value."""
    cls = place.cls
    if cls is not None:
        marks = class_marks(cls, place.module, alone=len(place.nodes) == 1)
        bases = tuple(base or UNNAMED for base in place.bases)
        # A named tuple or struct shows by its bases, which may be in another module.
        listed = fields(cls) if DATACLASS in marks or bases else ()
        return Entry("class", bases, tuple(sorted(set_on_self(cls))), marks, listed)
    if place.kind == "value":
        return Entry("value")
    marks = function_marks(place.nodes)
    return Entry(place.kind, signature(place.nodes), (Fingerprint.of(place.nodes).body[:BODY],), marks)


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
            elif isinstance(node, ast.Call):
                found.update(_set_by_call(node, first))
    return found


def _set_by_call(node: ast.Call, first: str) -> Iterator[str]:
    """``self.register_buffer("name", ...)`` of a torch module, and ``setattr(self, "name", ...)``."""
    called = dotted(node.func)
    registers = {f"{first}.register_{what}" for what in ("buffer", "parameter", "module")} | {f"{first}.add_module"}
    if called in registers:
        given = node.args[:1]
    elif called == "setattr" and node.args and dotted(node.args[0]) == first:
        given = node.args[1:2]
    else:
        return
    yield from (one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str))


def mentions(text: str) -> Counter[str]:
    """How often each word stands in a text, where it is not being defined: in code, strings and comments alike."""
    words = Counter(_WORD.findall(text))
    words.subtract(_DEFINED.findall(text))
    return words
