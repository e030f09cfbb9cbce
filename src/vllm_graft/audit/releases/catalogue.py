"""The shipped catalogue: every name of vLLM 0.26 to 0.32 with its signature and the fingerprint of its body.

It is one compressed file. A name is stored once for all releases that have it in the same form, so that a release costs
little more than what is new in it. ``make catalogue`` builds it; ``catalogue_format.py`` describes how it is written.
"""

from __future__ import annotations

import ast
import lzma
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from vllm_graft.audit.releases.catalogue_format import CallList, CatalogueContents, CataloguePages, EntryForm, dump
from vllm_graft.audit.releases.outline import CallSite, OutlineEntry, call_sites, entries, mentions, methods
from vllm_graft.audit.releases.release import NOT_OURS, Release, Shape
from vllm_graft.errors import ConfigError
from vllm_graft.files import replace_file
from vllm_graft.sources.finder import Finder, Walk
from vllm_graft.sources.origins import Source
from vllm_graft.sources.scopes import Imported

FILE: Final = Path(__file__).with_name("catalogue.xz")
# The file with vLLM's own calls, beside the catalogue.
_CALLS: Final = "calls.xz"
_FILTERS: Final = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


class Catalogue:
    """Some releases of vLLM, name by name."""

    def __init__(self, pages: CataloguePages) -> None:
        self.pages = pages

    @classmethod
    def shipped(cls) -> Catalogue:
        """Read the catalogue that comes with this package."""
        return cls.read(FILE)

    @classmethod
    def read(cls, path: Path) -> Catalogue:
        """Read the catalogue in a file; ConfigError where it is none."""
        try:
            return cls(CataloguePages(lzma.decompress(path.read_bytes()).decode(), path.with_name(_CALLS)))
        except (OSError, lzma.LZMAError, ValueError) as error:
            raise ConfigError(
                f"the catalogue of vLLM's releases cannot be read: {error}",
                where=str(path),
                fix="install vllm-graft again, or build it with `make catalogue`",
            ) from error

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases it knows, oldest first."""
        return self.pages.releases

    def release(self, version: str) -> CatalogueRelease:
        """Return one release that it knows."""
        return CatalogueRelease(version, self.pages, 1 << self.releases.index(version))


class CatalogueRelease(Release):
    """One release of a catalogue; ``bit`` is its place in the masks of the catalogue."""

    def __init__(self, version: str, pages: CataloguePages, bit: int) -> None:
        self.version = version
        self._pages = pages
        self._bit = bit
        self._modules: dict[str, CatalogueModule | None] = {}
        self._definers: dict[str, list[str]] = {}
        super().__init__(Walk(self._module, CatalogueModule.item, CatalogueItem.inside, lambda item: item.module))

    def _module_names(self, module: str) -> Iterable[str] | None:
        here = self._module(module)
        return [name for name in here.entries if "." not in name] if here is not None else None

    def _entry(self, item: CatalogueItem) -> OutlineEntry:
        return item.entry

    def _names(self, item: CatalogueItem) -> Iterator[str]:
        start = f"{item.qualname}."
        for name in item.module.entries:
            if name.startswith(start):
                yield name[len(start) :].partition(".")[0]

    def definers(self, method: str) -> list[str]:
        """Return every class that defines a method, as "module:Class"."""
        if method not in self._definers:
            self._definers[method] = self._pages.definers(method, self._bit)
        return self._definers[method]

    def calls(self, method: str) -> list[CallSite]:
        """Return vLLM's own calls of a method that show what they pass; empty where they are not known."""
        return self._pages.call_list.of(method, self.version)

    def elsewhere(self, name: str) -> Collection[Shape]:
        """Return every function or class of this name at the top level of a module."""
        modules = (self._module(each) for each in self._pages.defining(name))
        items = (module.item(name) for module in modules if module is not None)
        return [self._shape_of(item) for item in items if item is not None]

    def unmentioned(self, names: Collection[str]) -> frozenset[str]:
        """Return the names that no code mentions apart from their definitions."""
        return frozenset(name for name in names if self._pages.unmentioned.get(name, 0) & self._bit)

    def _module(self, name: str) -> CatalogueModule | None:
        if name not in self._modules:
            here = self._pages.mask(name) & self._bit
            self._modules[name] = CatalogueModule(name, self._entries(name)) if here else None
        return self._modules[name]

    def _entries(self, module: str) -> dict[str, tuple[OutlineEntry, ...]]:
        return {
            # Most names have one form, and the releases share the tuple of it.
            name: forms[0].alone if len(forms) == 1 else tuple(form.entry for form in forms if form.mask & self._bit)
            for name, forms in self._pages.names(module).items()
            if any(form.mask & self._bit for form in forms)
        }


@dataclass(frozen=True, slots=True, eq=False)
class CatalogueModule:
    """One module of a release."""

    name: str
    entries: dict[str, tuple[OutlineEntry, ...]] = field(repr=False)

    @property
    def stars(self) -> list[str]:
        """The modules that it imports all names from."""
        return [found.module for found in self.imports("*")]

    def item(self, attribute: str) -> CatalogueItem | None:
        """Return a name that the module itself defines."""
        found = [entry for entry in self.entries.get(attribute, ()) if entry.kind != "import"]
        return CatalogueItem(self, attribute, found[0]) if found else None

    def imports(self, attribute: str) -> Iterator[Imported]:
        """Yield what its import statements bind a name to."""
        for entry in self.entries.get(attribute, ()):
            for bound in entry.first if entry.kind == "import" else ():
                module, _, name = bound.partition(":")
                yield Imported(module, name)


@dataclass(frozen=True, slots=True)
class CatalogueItem:
    """One definition of a release."""

    module: CatalogueModule
    qualname: str
    entry: OutlineEntry

    @property
    def bases(self) -> tuple[str, ...]:
        """The expressions that a class names its bases by."""
        return self.entry.first if self.entry.kind == "class" else ()

    def inside(self, attribute: str) -> CatalogueItem | None:
        """Return a name that a class itself defines."""
        return self.module.item(f"{self.qualname}.{attribute}") if self.entry.kind == "class" else None


class CatalogueBuilder:
    """A catalogue in the making: an existing one, if any, and the releases that are added."""

    def __init__(self, path: Path | None = None) -> None:
        pages = Catalogue.read(path).pages if path is not None else None
        self._contents = pages.contents() if pages is not None else CatalogueContents()
        self._calls = pages.call_list if pages is not None else CallList()

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases that are in it so far."""
        return tuple(self._contents.releases)

    def add(self, version: str, source: Source, say: Callable[[int, int], None] = lambda done, all_: None) -> None:
        """Read a whole release, newer than all that are in it; ``say`` is called with its progress."""
        contents = self._contents
        contents.releases.append(version)
        bit = 1 << (len(contents.releases) - 1)
        finder, words, defined = Finder(source), Counter[str](), set[str]()
        names = sorted(name for name in source.modules() if not name.startswith(NOT_OURS))
        calls, called = list[tuple[str, CallSite]](), set[str]()
        for number, name in enumerate(names):
            module = finder.module(name)
            say(number + 1, len(names))
            if module is None:
                continue
            words.update(mentions(module.file.text))
            tree = ast.parse(module.file.text)
            calls += call_sites(tree, name)
            called.update(methods(tree))
            contents.modules[name] = contents.modules.get(name, 0) | bit
            for qualname, entry in entries(module):
                self._enter(name, qualname, EntryForm(bit, entry))
                if entry.kind != "import":
                    defined.add(qualname.rpartition(".")[2])
        self._calls.add(version, calls, called)
        for word in defined:
            if words[word] <= 0:
                contents.unmentioned[word] = contents.unmentioned.get(word, 0) | bit

    def _enter(self, module: str, qualname: str, form: EntryForm) -> None:
        forms = self._contents.names.setdefault(module, {}).setdefault(qualname, [])
        for number, known in enumerate(forms):
            if known.entry == form.entry:
                forms[number] = EntryForm(known.mask | form.mask, known.entry)
                return
        forms.append(form)

    def write(self, path: Path) -> None:
        """Write it as a whole or not at all; the same releases give the same bytes."""
        packed = lzma.compress(self.text.encode(), format=lzma.FORMAT_XZ, filters=_FILTERS)
        replace_file(path, packed)
        self._calls.write(path.with_name(_CALLS))

    @cached_property
    def text(self) -> str:
        """The catalogue before compression."""
        return dump(self._contents)
