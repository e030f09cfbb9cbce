"""The shipped catalogue: every name of vLLM 0.26 to 0.32 with its signature and the fingerprint of its body.

It is one compressed file. A name is stored once for all releases that have it in the same form, so that a release costs
little more than what is new in it. ``make catalogue`` builds it: lines of text, module by module, and the bodies'
fingerprints at the end.

::

    catalogue 3 0.26.0 0.27.1 0.28.0                the format of what follows, and the releases
    ~ pad_for_cudagraph other|6                     names that nothing mentions, in the releases 2 + 4
    @vllm.v1.core.sched.scheduler 7 812             a module, its releases, and the number of bodies before its own
    =vllm.v1.request Request RequestStatus=Status   its imports, as "name" or "name=name in that module"
    =- time torch                                   its imports from other packages
    cScheduler SchedulerInterface;running waiting   a class, its bases, and the attributes that its methods set on self
    cRequest ;;d name size=                         its marks and its fields, if these generate its constructor
    >Scheduler                                      the lines after this one are in this class
    fschedule self,throttle_prefills=|6             a function and its parameters, in the releases 2 + 4
    Fload? self                                     abstract: a capital; "?": a decorator that may change it
    fstream* self                                   a generator; "&" and "~" stand for the marks of those names, too
    f+ self|1                                       another form of the same name
    c+ SchedulerInterface;-waiting|1                of a class: attributes more or less than in the form before

The releases of a line are left out if they are those of the module. A body is six characters, in the order of the
lines that have one.

vLLM's calls of its own methods are in a second file, which is read only if an override does not accept all that
upstream's signature allows::

    calls 1 0.26.0 0.27.1                     the format of what follows, and the releases
    load_model 0 0,eep_scale_up               a method, and the calls of it: arguments by position, then keywords
    step 1@2 1@5,now|2                        "@2": on ``self``, in the third class of the list; "|2": in which releases
    >vllm.v1.engine.core:EngineCore           the list of classes
"""

from __future__ import annotations

import ast
import base64
import functools
import lzma
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from vllm_graft.audit.model import Arguments
from vllm_graft.audit.releases import outline
from vllm_graft.audit.releases.outline import ABSTRACT, GENERATOR, MANAGER, OPAQUE, WRAPPED, CallSite, OutlineEntry
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
_CALLS_HEAD: Final = "calls 1"
LETTERS: Final = {
    "function": "f", "classmethod": "k", "staticmethod": "s", "property": "p", "class": "c", "value": "v",
}  # fmt: skip
_KINDS: Final = {letter: kind for kind, letter in LETTERS.items()}
# The marks behind the name of a function, in this order.
_MARKS: Final = OPAQUE + GENERATOR + MANAGER + WRAPPED
# A function or class at the top level of a page.
_DEFINITION: Final = re.compile(rf"^[fFc]([^\W\d]\w*)[{_MARKS}]* ", re.MULTILINE)
# A method of a class.
_METHOD: Final = re.compile(rf"^[fFkKsS]([^\W\d]\w*)[{_MARKS}]* ", re.MULTILINE)
# Functions, class methods and static methods.
_CALLED: Final = frozenset("fksFKS")
_WITH_BODY: Final = frozenset("fkspFKSP")
_NODES: Final = {"FunctionDef": "!", "AsyncFunctionDef": "!a", "ClassDef": "!c", "value": "!v"}
_SHORT: Final = {short: name for name, short in _NODES.items()}
_BODY: Final = 6
_HEAD: Final = "catalogue"
# Changes with what is kept and how. Another one is refused, because what it lacks would pass for unchanged.
FORMAT: Final = "3"


class CatalogueRelease(Release):
    """One release of a catalogue; ``bit`` is its place in the masks of the catalogue."""

    def __init__(self, version: str, catalogue: Catalogue, bit: int) -> None:
        self.version = version
        self._catalogue = catalogue
        self._bit = bit
        self._modules: dict[str, CatalogueModule | None] = {}
        self._definers: dict[str, list[str]] = {}
        super().__init__(Walk[CatalogueItem](self._module))

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
            self._definers[method] = self._catalogue.definers(method, self._bit)
        return self._definers[method]

    def calls(self, method: str) -> list[CallSite]:
        """Return vLLM's own calls of a method that show what they pass; empty if they are not known."""
        return self._catalogue.call_list.of(method, self.version)

    def elsewhere(self, name: str) -> Collection[Shape]:
        """Return every function or class of this name at the top level of a module."""
        modules = (self._module(each) for each in self._catalogue.definitions.get(name, ()))
        items = (module.place(name) for module in modules if module is not None)
        return [self._shape_of(item) for item in items if item is not None]

    def unmentioned(self, names: Collection[str]) -> frozenset[str]:
        """Return the names that no code mentions apart from their definitions."""
        return frozenset(name for name in names if self._catalogue.unmentioned.get(name, 0) & self._bit)

    def _module(self, name: str) -> CatalogueModule | None:
        if name not in self._modules:
            bit, entries = self._bit, dict[str, tuple[OutlineEntry, ...]]()
            here = self._catalogue.mask(name) & bit
            for each, forms in self._catalogue.names(name).items() if here else ():
                # Most names have one form, and the releases share the tuple of it.
                having = forms[0].alone if len(forms) == 1 else tuple(one.entry for one in forms if one.mask & bit)
                if having and (len(forms) > 1 or forms[0].mask & bit):
                    entries[each] = having
            self._modules[name] = CatalogueModule(name, entries) if here else None
        return self._modules[name]


@dataclass(frozen=True, slots=True, eq=False)
class CatalogueModule:
    """One module of a release."""

    name: str
    entries: dict[str, tuple[OutlineEntry, ...]] = field(repr=False)

    @property
    def stars(self) -> list[str]:
        """The modules that it imports all names from."""
        return [found.module for found in self.imports("*")]

    def place(self, attribute: str) -> CatalogueItem | None:
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
        return self.module.place(f"{self.qualname}.{attribute}") if self.entry.kind == "class" else None


class CatalogueBuilder:
    """A catalogue in the making: an existing one, if any, and the releases that are added."""

    def __init__(self, path: Path | None = None) -> None:
        known = Catalogue.read(path) if path is not None else None
        self._contents = known.contents() if known is not None else CatalogueContents()
        self._calls = known.call_list if known is not None else CallList()

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
            words.update(outline.mentions(module.file.text))
            tree = ast.parse(module.file.text)
            calls += outline.call_sites(tree, name)
            called.update(outline.methods(tree))
            contents.modules[name] = contents.modules.get(name, 0) | bit
            for qualname, entry in outline.entries(module):
                forms = contents.names.setdefault(name, {}).setdefault(qualname, [])
                known = next((form for form in forms if form.entry == entry), None)
                if known is not None:
                    forms[forms.index(known)] = EntryForm(known.mask | bit, known.entry)
                else:
                    forms.append(EntryForm(bit, entry))
                if entry.kind != "import":
                    defined.add(qualname.rpartition(".")[2])
        self._calls.add(version, calls, called)
        for word in defined:
            if words[word] <= 0:
                contents.unmentioned[word] = contents.unmentioned.get(word, 0) | bit

    def write(self, path: Path) -> None:
        """Write it as a whole or not at all; the same releases give the same bytes."""
        packed = lzma.compress(self.text.encode(), format=lzma.FORMAT_XZ, filters=_FILTERS)
        replace_file(path, packed)
        self._calls.write(path.with_name(_CALLS))

    @cached_property
    def text(self) -> str:
        """The catalogue before compression."""
        return dump(self._contents)


@dataclass(frozen=True, slots=True)
class EntryForm:
    """One form of a name, and a bit for each release that has it."""

    mask: int
    entry: OutlineEntry
    alone: tuple[OutlineEntry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alone", (self.entry,))


Forms = dict[str, list[EntryForm]]
"""The names of one module, each with its forms."""


@dataclass
class CatalogueContents:
    """The contents of a catalogue."""

    releases: list[str] = field(default_factory=list)
    modules: dict[str, int] = field(default_factory=dict)
    names: dict[str, Forms] = field(default_factory=dict)
    unmentioned: dict[str, int] = field(default_factory=dict)


class Catalogue:
    """Some releases of vLLM, name by name; a module is parsed on first use."""

    def __init__(self, text: str, calls: Path | None = None) -> None:
        self._calls = calls
        head, *pages = text.split("\n@")
        first, *rest = head.split("\n")
        name, form, *releases = [*first.split(" "), ""]
        if name == "releases" or (name == _HEAD and form != FORMAT):
            form = "1" if name == "releases" else form
            raise ValueError(f"it is written in form {form}, but this vllm-graft reads form {FORMAT}")
        if name != _HEAD:
            raise ValueError("it does not begin with its releases")
        self.releases = tuple(filter(None, releases))
        self._unmentioned = [line[2:] for line in rest if line.startswith("~ ")]
        *pages, last = pages
        last, _, self._bodies = last.partition("\n#")
        self._pages = {page.partition(" ")[0]: page for page in [*pages, last]}
        self._read: dict[str, Forms] = {}

    @classmethod
    def shipped(cls) -> Catalogue:
        """Read the catalogue that comes with this package."""
        return cls.read(FILE)

    @classmethod
    def read(cls, path: Path) -> Catalogue:
        """Read the catalogue in a file; ConfigError if it is not a catalogue."""
        try:
            return cls(lzma.decompress(path.read_bytes()).decode(), path.with_name(_CALLS))
        except (OSError, lzma.LZMAError, ValueError) as error:
            raise ConfigError(
                f"the catalogue of vLLM's releases cannot be read: {error}",
                where=str(path),
                fix="install vllm-graft again, or build it with `make catalogue`",
            ) from error

    def release(self, version: str) -> CatalogueRelease:
        """Return one release that it knows."""
        return CatalogueRelease(version, self, 1 << self.releases.index(version))

    def mask(self, module: str) -> int:
        """Return the releases that have a module."""
        page = self._pages.get(module)
        return int(page.split("\n", 1)[0].split(" ")[1]) if page is not None else 0

    def names(self, module: str) -> Forms:
        """Return the names of one module."""
        if module not in self._read:
            page = self._pages.get(module)
            self._read[module] = _parse(page, self._bodies) if page is not None else {}
        return self._read[module]

    @cached_property
    def definitions(self) -> dict[str, list[str]]:
        """The modules that define each function and class at their top level, in any release."""
        return self._modules_by_name(_DEFINITION, 0)

    @cached_property
    def _methods(self) -> dict[str, list[str]]:
        return self._modules_by_name(_METHOD, 2)

    def _modules_by_name(self, pattern: re.Pattern[str], part: int) -> dict[str, list[str]]:
        """Return the modules for all names at once: a page is long, and is read once."""
        found: dict[str, list[str]] = {}
        for module, page in self._pages.items():
            for name in dict.fromkeys(pattern.findall(page.partition("\n>")[part])):
                found.setdefault(name, []).append(module)
        return found

    @cached_property
    def call_list(self) -> CallList:
        """vLLM's calls of its own methods; empty if their file is missing."""
        return CallList.read(self._calls) if self._calls is not None else CallList()

    def definers(self, method: str, bit: int) -> list[str]:
        """Return every class whose first form of a name in a release is a method, as "module:Class"; parses no page."""
        found: list[str] = []
        for module in (module for module in self._methods.get(method, ()) if self.mask(module) & bit):
            head, *lines = self._pages[module].split("\n")
            mask = head.split(" ")[1]
            inside, name, seen = "", "", set[str]()
            for line in lines:
                text, _, own = line.partition("|")
                if text[:1] == ">":
                    inside = text[1:]
                elif text[:1] != "=" and inside:
                    word = text[1:].partition(" ")[0].rstrip(_MARKS)
                    name = name if word == "+" else word
                    if name == method and inside not in seen and int(own or mask) & bit:
                        seen.add(inside)
                        found += [f"{module}:{inside}"] if text[0] in _CALLED else []
        return found

    @cached_property
    def unmentioned(self) -> dict[str, int]:
        """Names that are defined and that nothing mentions, and in which releases."""
        found: dict[str, int] = {}
        for line in self._unmentioned:
            words, _, mask = line.partition("|")
            for word in words.split(" "):
                found[word] = found.get(word, 0) | int(mask)
        return found

    def contents(self) -> CatalogueContents:
        """Return everything, for a catalogue that releases are added to."""
        return CatalogueContents(
            list(self.releases),
            {module: self.mask(module) for module in self._pages},
            {module: {name: list(forms) for name, forms in self.names(module).items()} for module in self._pages},
            dict(self.unmentioned),
        )


def _parse(page: str, bodies: str) -> Forms:
    head, *lines = page.split("\n")
    _, mask, bodies_before = head.split(" ")
    found: Forms = {}
    inside, last, place = "", "", int(bodies_before) * _BODY
    for line in lines:
        text, _, own = line.partition("|")
        letter, text = text[:1], text[1:]
        if letter == ">":
            inside = f"{text}." if text else ""
        elif letter == "=":
            origin, *names = text.split(" ")
            for name, _, there in (each.partition("=") for each in names):
                bound = f"{origin}:{'' if there == '.' else there or name}"
                found.setdefault(name, []).append(EntryForm(int(own or mask), OutlineEntry("import", (bound,))))
        elif letter:
            name, _, first = text.partition(" ")
            bare = name.rstrip(_MARKS)
            last = last if bare == "+" else inside + bare
            forms = found.setdefault(last, [])
            entry = OutlineEntry("value")
            if letter == "c":
                before = forms[-1].entry if bare == "+" and forms[-1].entry.kind == "class" else entry
                entry = _parse_class(first, before)
            elif letter in _WITH_BODY:
                body = base64.b64decode(bodies[place : place + _BODY] + "==").hex()[:8]
                place += _BODY
                marks = (ABSTRACT if letter.isupper() else "") + name[len(bare) :]
                entry = OutlineEntry(_KINDS[letter.lower()], _signature(first), (body,), marks)
            forms.append(EntryForm(int(own or mask), entry))
    return found


def _parse_class(written: str, before: OutlineEntry) -> OutlineEntry:
    bases, _, rest = written.partition(";")
    changes, _, making = rest.partition(";")
    marks, _, listed = making.partition(" ")
    words = changes.split()
    less = {word[1:] for word in words if word.startswith("-")}
    attributes = set(before.second) - less | {word for word in words if not word.startswith("-")}
    fields = tuple(f"kw {word[1:]}" if word.startswith("*") else word for word in listed.split())
    return OutlineEntry("class", tuple(bases.split(",")) if bases else (), tuple(sorted(attributes)), marks, fields)


@functools.lru_cache(maxsize=1 << 15)
def _signature(written: str) -> tuple[str, ...]:
    """Parse the parameters of a function; functions with the same ones share them."""
    tokens = ["!", *written.split(",")] if not written.startswith("!") else written.split(",")
    return tuple(sys.intern(_SHORT.get(token, token)) for token in tokens if token)


def dump(contents: CatalogueContents) -> str:
    """Write the text of a catalogue."""
    lines = [f"{_HEAD} {FORMAT} {' '.join(contents.releases)}"]
    by_mask: dict[int, list[str]] = {}
    for word, mask in sorted(contents.unmentioned.items()):
        by_mask.setdefault(mask, []).append(word)
    lines += [f"~ {' '.join(words)}|{mask}" for mask, words in sorted(by_mask.items())]
    bodies: list[str] = []
    for module, mask in sorted(contents.modules.items()):
        lines.append(f"@{module} {mask} {len(bodies)}")
        lines += _page(contents.names.get(module, {}), mask, bodies)
    return "\n".join([*lines, "#" + "".join(bodies)])


def _page(names: Forms, mask: int, bodies: list[str]) -> Iterator[str]:
    groups: dict[tuple[str, int], list[str]] = {}
    for name, forms in sorted(names.items()):
        for form in forms:
            for bound in form.entry.first if form.entry.kind == "import" else ():
                origin, _, there = bound.partition(":")
                groups.setdefault((origin, form.mask), []).append(name if there == name else f"{name}={there or '.'}")
    for (origin, own_mask), bound_names in sorted(groups.items()):
        yield f"={origin} {' '.join(bound_names)}{'' if own_mask == mask else f'|{own_mask}'}"
    inside = ""
    order = sorted(names, key=lambda name: (name.rpartition(".")[0], name))
    for name in order:
        class_, _, short = name.rpartition(".")
        forms = [form for form in names[name] if form.entry.kind != "import"]
        if forms and class_ != inside:
            inside = class_
            yield f">{inside}"
        for number, form in enumerate(forms):
            entry = form.entry
            own = "" if form.mask == mask else f"|{form.mask}"
            before = forms[number - 1].entry if number else OutlineEntry("value")
            letter, marks, first = LETTERS[entry.kind], "", ""
            if letter == "c":
                had = set(before.second) if before.kind == "class" else set()
                less = [f"-{each}" for each in sorted(had - set(entry.second))]
                changes = " ".join([*less, *(each for each in entry.second if each not in had)])
                listed = [f"*{each.removeprefix('kw ')}" if each.startswith("kw ") else each for each in entry.fields]
                making = " ".join([entry.marks, *listed])
                first = f"{','.join(entry.first)};{changes}{';' if making else ''}{making}"
            elif letter in _WITH_BODY:
                letter = letter.upper() if ABSTRACT in entry.marks else letter
                marks = "".join(mark for mark in _MARKS if mark in entry.marks)
                tokens = [_NODES.get(token, token) for token in entry.first]
                # A parameter may be called "value", which is short for something else: then nothing is left out.
                plain = tokens[:1] == ["!"] and not "".join(tokens[1:2]).startswith("!")
                first = ",".join(tokens[1:] if plain else tokens)
                bodies.append(base64.b64encode(bytes.fromhex(entry.second[0][:8])).decode()[:_BODY])
            yield f"{letter}{'+' if number else short}{marks} {first}{own}"


@dataclass
class CallList:
    """vLLM's calls of its own methods, each with a bit for every release that has it."""

    releases: list[str] = field(default_factory=list)
    calls: dict[str, dict[CallSite, int]] = field(default_factory=dict)

    def add(self, version: str, found: Iterable[tuple[str, CallSite]], defined: Iterable[str]) -> None:
        """Add the calls in a release, as far as its own classes define the methods."""
        self.releases.append(version)
        bit = 1 << (len(self.releases) - 1)
        known = frozenset(name for name in defined if not name.startswith("__"))
        for name, call in found:
            if name in known:
                sites = self.calls.setdefault(name, {})
                sites[call] = sites.get(call, 0) | bit

    def of(self, method: str, version: str) -> list[CallSite]:
        """Return the calls of a method in a release."""
        bit = 1 << self.releases.index(version) if version in self.releases else 0
        return [call for call, mask in self.calls.get(method, {}).items() if mask & bit]

    @classmethod
    def read(cls, path: Path) -> CallList:
        """Return the list in a file; an empty one if there is none."""
        try:
            text = lzma.decompress(path.read_bytes()).decode()
        except (OSError, lzma.LZMAError, ValueError):
            return cls()
        first, *lines = text.split("\n")
        if not first.startswith(f"{_CALLS_HEAD} "):
            return cls()
        owners = [line[1:] for line in lines if line.startswith(">")]
        found = cls(first.split(" ")[2:])
        every = (1 << len(found.releases)) - 1
        for line in (line for line in lines if not line.startswith(">")):
            name, *words = line.split(" ")
            calls = found.calls[name] = {}
            for passed, _, mask in (word.partition("|") for word in words):
                place, *keywords = passed.split(",")
                positional, _, owner = place.partition("@")
                call = CallSite(Arguments(int(positional), tuple(keywords)), owners[int(owner)] if owner else "")
                calls[call] = int(mask) if mask else every
        return found

    def write(self, path: Path) -> None:
        """Write the list into a file."""
        owners = sorted({call.owner for sites in self.calls.values() for call in sites if call.owner})
        places = {owner: number for number, owner in enumerate(owners)}
        every = (1 << len(self.releases)) - 1
        lines = [f"{_CALLS_HEAD} {' '.join(self.releases)}"]
        for name, sites in sorted(self.calls.items()):
            words: list[str] = []
            for call, mask in sites.items():
                owner = f"@{places[call.owner]}" if call.owner else ""
                passed = ",".join([f"{call.arguments.positional}{owner}", *call.arguments.keywords])
                words.append(passed if mask == every else f"{passed}|{mask}")
            lines.append(" ".join([name, *sorted(words)]))
        text = "\n".join([*lines, *(f">{owner}" for owner in owners)])
        replace_file(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
