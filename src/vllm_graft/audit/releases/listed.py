"""A release as the catalogue has it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from vllm_graft.audit.releases.call_sites import CallSite
from vllm_graft.audit.releases.classes import BaseRelease, Classes
from vllm_graft.audit.releases.fields import OPAQUE
from vllm_graft.audit.releases.outline import Entry
from vllm_graft.audit.releases.shape import FOREIGN, Shape
from vllm_graft.audit.releases.written import Pages
from vllm_graft.sources.scopes import Imported
from vllm_graft.sources.walk import Walk


class Listed(BaseRelease["ListedModule", "ListedItem"]):
    """One release of a catalogue."""

    def __init__(self, version: str, pages: Pages, bit: int) -> None:
        self.version = version
        self._pages = pages
        self._bit = bit
        self._modules: dict[str, ListedModule | None] = {}
        self._shapes: dict[tuple[str, str], Shape | None] = {}
        self._walk = Walk(self._module, ListedModule.item, ListedItem.inside, lambda item: item.module)
        super().__init__(Classes(self._walk, lambda item: item.entry, ListedItem.inside, ListedItem.names))

    def shape(self, module: str, qualname: str) -> Shape | None:
        """What a name looks like, or None where it is not there."""
        key = module, qualname
        if key not in self._shapes:
            self._shapes[key] = self._shape(module, qualname)
        return self._shapes[key]

    def _shape(self, module: str, qualname: str) -> Shape | None:
        if not qualname:
            return Shape(module, "", "module") if self._module(module) is not None else None
        found = self._walk.find(module, qualname)
        if found is not None:
            return found[0].shape(inherited=found[1])
        if inner := self._walk.module_at(module, qualname):
            return Shape(inner, "", "module")
        return Shape(module, qualname, FOREIGN) if self._walk.leads_out(module, qualname) else None

    def _collect(self, module: str, qualname: str) -> frozenset[str] | None:
        if not qualname:
            here = self._module(module)
            return frozenset(name for name in here.entries if "." not in name) if here is not None else None
        found = self._walk.find(module, qualname)
        if found is None or found[0].entry.kind != "class":
            return None
        return frozenset(name for item in self._walk.line(found[0]) for name in item.attributes())

    def definers(self, method: str) -> list[str]:
        """Every class that defines a method, as "module:Class"."""
        return self._pages.definers(method, self._bit)

    def calls(self, method: str) -> list[CallSite]:
        """The calls of a method in vLLM that show what they pass; none where they are not known."""
        return self._pages.call_list.of(method, self.version)

    def elsewhere(self, name: str) -> Collection[Shape]:
        """Every function or class of this name at the top level of a module."""
        modules = (self._module(each) for each in self._pages.defining(name))
        items = (module.item(name) for module in modules if module is not None)
        return [item.shape() for item in items if item is not None]

    def unmentioned(self, names: Collection[str]) -> frozenset[str]:
        """Those of the names that no code mentions, their definitions aside."""
        return frozenset(name for name in names if self._pages.unmentioned.get(name, 0) & self._bit)

    def _class(self, module: str, qualname: str) -> ListedItem | None:
        found = self._walk.find(module, qualname)
        return found[0] if found is not None and found[0].entry.kind == "class" else None

    def _module(self, name: str) -> ListedModule | None:
        if name not in self._modules:
            here = self._pages.mask(name) & self._bit
            self._modules[name] = ListedModule(name, self._entries(name)) if here else None
        return self._modules[name]

    def _entries(self, module: str) -> dict[str, tuple[Entry, ...]]:
        return {
            # Most names have one form, which the releases share.
            name: forms[0].alone if len(forms) == 1 else tuple(form.entry for form in forms if form.mask & self._bit)
            for name, forms in self._pages.names(module).items()
            if any(form.mask & self._bit for form in forms)
        }


@dataclass(frozen=True, slots=True, eq=False)
class ListedModule:
    """One module of a release."""

    name: str
    entries: dict[str, tuple[Entry, ...]] = field(repr=False)

    @property
    def stars(self) -> list[str]:
        """The modules whose names it takes all of."""
        return [found.module for found in self.imports("*")]

    def item(self, attribute: str) -> ListedItem | None:
        """A name that the module itself defines."""
        found = [entry for entry in self.entries.get(attribute, ()) if entry.kind != "import"]
        return ListedItem(self, attribute, found[0]) if found else None

    def imports(self, attribute: str) -> Iterator[Imported]:
        """What it imports under a name."""
        for entry in self.entries.get(attribute, ()):
            for bound in entry.first if entry.kind == "import" else ():
                module, _, name = bound.partition(":")
                yield Imported(module, name)


@dataclass(frozen=True, slots=True)
class ListedItem:
    """One definition of a release."""

    module: ListedModule
    qualname: str
    entry: Entry

    @property
    def bases(self) -> tuple[str, ...]:
        """How a class names its bases."""
        return self.entry.first if self.entry.kind == "class" else ()

    def inside(self, attribute: str) -> ListedItem | None:
        """A name that a class itself defines."""
        return self.module.item(f"{self.qualname}.{attribute}") if self.entry.kind == "class" else None

    def attributes(self) -> Iterator[str]:
        """What a class itself defines, and what its methods set."""
        yield from self.entry.second
        yield from self.names()

    def names(self) -> Iterator[str]:
        """What the body of a class binds."""
        start = f"{self.qualname}."
        for name in self.module.entries:
            if name.startswith(start):
                yield name[len(start) :].partition(".")[0]

    def shape(self, *, inherited: bool = False) -> Shape:
        """What it looks like."""
        entry = self.entry
        function = entry.kind not in ("class", "value")
        return Shape(
            self.module.name,
            self.qualname,
            entry.kind,
            entry.first if function else (),
            entry.second[0] if function else "",
            inherited,
            function and OPAQUE in entry.marks,
        )
