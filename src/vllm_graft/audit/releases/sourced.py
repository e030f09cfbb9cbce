"""A release read from its source: the installed vLLM, a folder, a wheel, or a wheel on the package index."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property

from vllm_graft.audit.releases.call_sites import CallSite, call_sites
from vllm_graft.audit.releases.classes import BaseRelease, Classes
from vllm_graft.audit.releases.fields import OPAQUE
from vllm_graft.audit.releases.outline import Entry, entry, set_on_self
from vllm_graft.audit.releases.shape import FOREIGN, METHODS, Shape
from vllm_graft.sources.finder import Finder
from vllm_graft.sources.modules import Definition
from vllm_graft.sources.modules import ScopeEntry as Place
from vllm_graft.sources.modules import SourceModule as ReadModule
from vllm_graft.sources.origins import ModuleText as File
from vllm_graft.sources.origins import Source


class Sourced(BaseRelease[ReadModule, Place]):
    """One release whose modules can be read."""

    def __init__(self, source: Source, version: str = "") -> None:
        self.source = source
        self.version = version or source.version
        self._finder = Finder(_Within(source))
        self._entries: dict[int, tuple[Place, Entry]] = {}
        self._calls: dict[str, list[tuple[str, CallSite]]] = {}
        super().__init__(Classes(self._finder.walk, self._entry, Place.inside, _names))

    def shape(self, module: str, qualname: str) -> Shape | None:
        """What a name looks like, or None where it is not there."""
        if not qualname:
            return Shape(module, "", "module") if self._finder.module(module) is not None else None
        found = self._finder.walk.find(module, qualname)
        if found is not None:
            return _shape(found[0], inherited=found[1])
        if inner := self._finder.walk.module_at(module, qualname):
            return Shape(inner, "", "module")
        return Shape(module, qualname, FOREIGN) if self._finder.walk.leads_out(module, qualname) else None

    def definition(self, module: str, qualname: str) -> Definition | None:
        """A name with its text."""
        return self._finder.find(module, qualname)

    def _collect(self, module: str, qualname: str) -> frozenset[str] | None:
        if not qualname:
            here = self._finder.module(module)
            return frozenset(here.scope) if here is not None else None
        found = self._finder.walk.find(module, qualname)
        if found is None or found[0].cls is None:
            return None
        return frozenset(name for place in self._finder.walk.line(found[0]) for name in _attributes(place))

    def definers(self, method: str) -> list[str]:
        """Every class that defines a method, as "module:Class"."""
        line = re.compile(rf"^[ \t]+(?:async )?def {re.escape(method)}\b", re.MULTILINE)
        having = [each for each, text in self._texts.items() if method in text and line.search(text)]
        modules = (self._finder.module(each) for each in having)
        places = [place for module in modules if module is not None for place in _classes(module)]
        inside = ((place, place.inside(method)) for place in places)
        return [
            f"{place.module.name}:{place.qualname}"
            for place, inner in inside
            if inner is not None and inner.kind in METHODS
        ]

    def calls(self, method: str) -> list[CallSite]:
        """The calls of a method in vLLM that show what they pass; none where they are not known."""
        found: list[CallSite] = []
        for name, text in self._texts.items():
            if f".{method}(" in text:
                if name not in self._calls:
                    self._calls[name] = list(call_sites(ast.parse(text), name))
                found += [call for called, call in self._calls[name] if called == method]
        return list(dict.fromkeys(found))

    def elsewhere(self, name: str) -> Collection[Shape]:
        """Every function or class of this name at the top level of a module."""
        line = re.compile(rf"^(?:async )?(?:def|class) {re.escape(name)}\b", re.MULTILINE)
        having = [each for each, text in self._texts.items() if name in text and line.search(text)]
        modules = (self._finder.module(each) for each in having)
        places = (module.place(name) for module in modules if module is not None)
        return [_shape(place) for place in places if place is not None]

    def unmentioned(self, names: Collection[str]) -> frozenset[str]:
        """Those of the names that no code mentions, their definitions aside."""
        if not names:
            return frozenset()
        words = "|".join(sorted(map(re.escape, names)))
        mentioned = re.compile(rf"(?<!def )(?<!class )\b(?:{words})\b")
        left = set(names)
        for text in self._texts.values():
            left -= set(mentioned.findall(text)) if left else set()
        return frozenset(left)

    def _class(self, module: str, qualname: str) -> Place | None:
        found = self._finder.walk.find(module, qualname)
        return found[0] if found is not None and found[0].cls is not None else None

    def _entry(self, place: Place) -> Entry:
        key = id(place.nodes[-1])
        if key not in self._entries:
            self._entries[key] = place, entry(place)
        return self._entries[key][1]

    @cached_property
    def _texts(self) -> dict[str, str]:
        """Every module's text: what a search through the whole release needs."""
        names = list(self.source.modules())
        fetch(self.source, names)
        files = {name: self.source.read(name) for name in names}
        return {name: file.text for name, file in files.items() if file is not None}


class _Within:
    """A source without what it would find outside vLLM: an installed torch belongs to no release."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def version(self) -> str:
        return self._source.version

    def read(self, module: str) -> File | None:
        return self._source.read(module) if module.partition(".")[0] == "vllm" else None

    def modules(self) -> Iterable[str]:
        return self._source.modules()


def fetch(source: object, modules: Iterable[str]) -> None:
    """Tell a source that lies elsewhere what will be asked of it, so that it asks once."""
    ahead = getattr(source, "fetch", None)
    if ahead is not None:
        ahead(modules)


def _classes(module: ReadModule) -> Iterator[Place]:
    """Yield the classes of a module, and those inside them."""
    left = [place for name in module.scope if (place := module.place(name)) is not None]
    while left:
        place = left.pop(0)
        if place.cls is not None:
            yield place
            inner = (place.inside(name) for name in module.class_scope(place.cls))
            left += [one for one in inner if one is not None]


def _attributes(place: Place) -> Iterable[str]:
    return [*set_on_self(place.cls), *place.module.class_scope(place.cls)] if place.cls is not None else []


def _names(place: Place) -> Iterable[str]:
    return place.module.class_scope(place.cls) if place.cls is not None else ()


def _shape(place: Place, *, inherited: bool = False) -> Shape:
    if place.cls is not None:
        return Shape(place.module.name, place.qualname, "class", inherited=inherited)
    known = entry(place)
    body = known.second[0] if known.second else ""
    opaque = known.kind != "value" and OPAQUE in known.marks
    return Shape(place.module.name, place.qualname, known.kind, known.first, body, inherited, opaque)
