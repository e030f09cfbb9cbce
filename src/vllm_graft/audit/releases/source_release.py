"""A release read from its sources: the installed vLLM, a folder, a wheel, or a wheel on the package index."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable
from functools import cached_property

from vllm_graft.audit.releases.outline import CallSite, OutlineEntry, call_sites, entry
from vllm_graft.audit.releases.release import METHODS, Release, Shape
from vllm_graft.sources.finder import Finder
from vllm_graft.sources.modules import Definition, ScopeEntry, SourceModule
from vllm_graft.sources.origins import Source


class SourceRelease(Release):
    """One release whose modules can be read."""

    def __init__(self, source: Source, version: str = "") -> None:
        self.source = source
        self.version = version or source.version
        # An installed torch belongs to no release.
        self._finder = Finder(source, within="vllm")
        self._entries: dict[int, tuple[ScopeEntry, OutlineEntry]] = {}
        self._calls: dict[str, list[tuple[str, CallSite]]] = {}
        super().__init__(self._finder.walk)

    def _module_names(self, module: str) -> Iterable[str] | None:
        here = self._finder.module(module)
        return here.scope if here is not None else None

    def _entry(self, item: ScopeEntry) -> OutlineEntry:
        # The place is kept beside its outline, so that no other node gets its id.
        key = id(item.nodes[-1])
        if key not in self._entries:
            self._entries[key] = item, entry(item)
        return self._entries[key][1]

    def _names(self, item: ScopeEntry) -> Iterable[str]:
        return item.module.class_scope(item.cls) if item.cls is not None else ()

    def definition(self, module: str, qualname: str) -> Definition | None:
        """Return a name with its text."""
        return self._finder.find(module, qualname)

    def definers(self, method: str) -> list[str]:
        """Return every class that defines a method, as "module:Class"."""
        found: list[str] = []
        for module in self._modules_with(r"^[ \t]+(?:async )?def ", method):
            left = [place for name in module.scope if (place := module.place(name)) is not None]
            for place in left:
                if place.cls is not None:
                    inner = place.inside(method)
                    if inner is not None and inner.kind in METHODS:
                        found.append(f"{module.name}:{place.qualname}")
                    # Classes inside come after all around them.
                    nested = (place.inside(name) for name in module.class_scope(place.cls))
                    left += [one for one in nested if one is not None]
        return found

    def calls(self, method: str) -> list[CallSite]:
        """Return vLLM's own calls of a method that show what they pass."""
        found: list[CallSite] = []
        for name, text in self._texts.items():
            if f".{method}(" in text:
                if name not in self._calls:
                    self._calls[name] = list(call_sites(ast.parse(text), name))
                found += [call for called, call in self._calls[name] if called == method]
        return list(dict.fromkeys(found))

    def elsewhere(self, name: str) -> Collection[Shape]:
        """Return every function or class of this name at the top level of a module."""
        modules = self._modules_with(r"^(?:async )?(?:def|class) ", name)
        places = (module.place(name) for module in modules)
        return [self._shape_of(place) for place in places if place is not None]

    def unmentioned(self, names: Collection[str]) -> frozenset[str]:
        """Return the names that no code mentions apart from their definitions."""
        if not names:
            return frozenset()
        words = "|".join(sorted(map(re.escape, names)))
        mentioned = re.compile(rf"(?<!def )(?<!class )\b(?:{words})\b")
        left = set(names)
        for text in self._texts.values():
            left -= set(mentioned.findall(text)) if left else set()
        return frozenset(left)

    def _modules_with(self, before: str, name: str) -> list[SourceModule]:
        """Return the modules with a line that defines a name; ``before`` is the pattern up to the name."""
        line = re.compile(rf"{before}{re.escape(name)}\b", re.MULTILINE)
        # The plain test comes first: it is much faster than the pattern, and most modules do not have the name.
        having = [each for each, text in self._texts.items() if name in text and line.search(text)]
        return [module for each in having if (module := self._finder.module(each)) is not None]

    @cached_property
    def _texts(self) -> dict[str, str]:
        """Every module's text, for searches through the whole release."""
        names = list(self.source.modules())
        fetch(self.source, names)
        files = {name: self.source.read(name) for name in names}
        return {name: file.text for name, file in files.items() if file is not None}


def fetch(source: object, modules: Iterable[str]) -> None:
    """Announce modules to a remote source, so that it downloads them together."""
    ahead = getattr(source, "fetch", None)
    if ahead is not None:
        ahead(modules)
