"""How the catalogue is written: lines of text, module by module, and the bodies' fingerprints at the end.

::

    catalogue 3 0.26.0 0.27.1 0.28.0                the format of what follows, and the releases
    ~ pad_for_cudagraph other|6                     names that nothing mentions, in the releases 2 + 4
    @vllm.v1.core.sched.scheduler 7 812             a module, its releases, and the number of bodies before its own
    =vllm.v1.request Request RequestStatus=Status   its imports, as "name" or "name=name in that module"
    =- time torch                                   its imports from other packages
    cScheduler SchedulerInterface;running waiting   a class, its bases, and the attributes that its methods set on self
    cRequest ;;d name size=                         its marks and its fields, where these generate its constructor
    >Scheduler                                      the lines after this one are in this class
    fschedule self,throttle_prefills=|6             a function and its parameters, in the releases 2 + 4
    Fload? self                                     abstract: a capital; "?": a decorator that may change it
    fstream* self                                   a generator; "&" and "~" stand for the marks of those names, too
    f+ self|1                                       another form of the same name
    c+ SchedulerInterface;-waiting|1                of a class: attributes more or less than in the form before

The releases of a line are left out where they are those of the module. A body is six characters, in the order of the
lines that have one.

vLLM's calls of its own methods are in a second file, which is read only where an override does not accept all that
upstream's signature allows::

    calls 1 0.26.0 0.27.1                     the format of what follows, and the releases
    load_model 0 0,eep_scale_up               a method, and the calls of it: arguments by position, then keywords
    step 1@2 1@5,now|2                        "@2": on ``self``, in the third class of the list; "|2": in which releases
    >vllm.v1.engine.core:EngineCore           the list of classes
"""

from __future__ import annotations

import base64
import functools
import lzma
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from vllm_graft.audit.model import Arguments
from vllm_graft.audit.releases.outline import (
    ABSTRACT,
    GENERATOR,
    MANAGER,
    OPAQUE,
    WRAPPED,
    CallSite,
    OutlineEntry,
)
from vllm_graft.files import replace_file

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
FORMAT: Final = "3"
"""Changes with what is kept and how. Another one is refused, because what it lacks would pass for unchanged."""


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


class CataloguePages:
    """A catalogue's text; a module is parsed on first use."""

    def __init__(self, text: str, calls: Path | None = None) -> None:
        self._calls = calls
        head, *pages = text.split("\n@")
        first, *rest = head.split("\n")
        name, form, *releases = [*first.split(" "), ""]
        if name == "releases" or (name == _HEAD and form != FORMAT):
            form = "1" if name == "releases" else form
            raise ValueError(f"it is written in form {form}, and this vllm-graft reads form {FORMAT}")
        if name != _HEAD:
            raise ValueError("it does not begin with its releases")
        self.releases = tuple(filter(None, releases))
        self._unmentioned = [line[2:] for line in rest if line.startswith("~ ")]
        *pages, last = pages
        last, _, self._bodies = last.partition("\n#")
        self._pages = {page.partition(" ")[0]: page for page in [*pages, last]}
        self._read: dict[str, Forms] = {}

    @property
    def modules(self) -> Sequence[str]:
        """Every module of any release."""
        return list(self._pages)

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

    def defining(self, name: str) -> Iterator[str]:
        """Yield the modules that define a function or a class of this name at their top level, in any release."""
        yield from self._definitions.get(name, ())

    @cached_property
    def _definitions(self) -> dict[str, list[str]]:
        """The modules that define each function and class, for all names at once: a page is long, and is read once."""
        found: dict[str, list[str]] = {}
        for module, page in self._pages.items():
            for name in dict.fromkeys(_DEFINITION.findall(page.partition("\n>")[0])):
                found.setdefault(name, []).append(module)
        return found

    @cached_property
    def call_list(self) -> CallList:
        """vLLM's calls of its own methods; empty where their file is missing."""
        return CallList.read(self._calls) if self._calls is not None else CallList()

    def definers(self, method: str, bit: int) -> list[str]:
        """Return every class that defines a method in a release, as "module:Class", without parsing pages."""
        modules = (module for module in self._with_method.get(method, ()) if self.mask(module) & bit)
        return [f"{module}:{cls}" for module in modules for cls in _classes_with(self._pages[module], method, bit)]

    @cached_property
    def _with_method(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for module, page in self._pages.items():
            for name in dict.fromkeys(_METHOD.findall(page.partition("\n>")[2])):
                found.setdefault(name, []).append(module)
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


def _classes_with(page: str, method: str, bit: int) -> Iterator[str]:
    """Yield the classes on a page whose first form of a name in a release is a method."""
    head, *lines = page.split("\n")
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
                if text[0] in _CALLED:
                    yield inside


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
            for name, entry in _imports(text):
                found.setdefault(name, []).append(EntryForm(int(own or mask), entry))
        elif letter:
            name, _, first = text.partition(" ")
            bare = name.rstrip(_MARKS)
            name, marks = bare, name[len(bare) :]
            last = last if name == "+" else inside + name
            body = bodies[place : place + _BODY] if letter in _WITH_BODY else ""
            place += len(body)
            forms = found.setdefault(last, [])
            before = forms[-1].entry if name == "+" and letter == "c" and forms[-1].entry.kind == "class" else None
            forms.append(EntryForm(int(own or mask), _entry(letter, first, body, before, marks)))
    return found


def _imports(text: str) -> Iterator[tuple[str, OutlineEntry]]:
    origin, *names = text.split(" ")
    for each in names:
        name, _, there = each.partition("=")
        yield name, OutlineEntry("import", (f"{origin}:{'' if there == '.' else there or name}",))


def _entry(letter: str, first: str, body: str, before: OutlineEntry | None, marks: str) -> OutlineEntry:
    if letter == "c":
        bases, _, rest = first.partition(";")
        changes, _, making = rest.partition(";")
        class_marks, _, listed = making.partition(" ")
        words = changes.split()
        less = {word[1:] for word in words if word.startswith("-")}
        more = {word for word in words if not word.startswith("-")}
        attributes = (set(before.second) if before is not None else set()) - less | more
        return OutlineEntry(
            "class",
            tuple(bases.split(",")) if bases else (),
            tuple(sorted(attributes)),
            class_marks,
            tuple(f"kw {word[1:]}" if word.startswith("*") else word for word in listed.split()),
        )
    if letter == "v":
        return OutlineEntry("value")
    signature = _signature(first)
    if letter.isupper():
        marks = ABSTRACT + marks
    return OutlineEntry(_KINDS[letter.lower()], signature, (base64.b64decode(body + "==").hex()[:8],), marks)


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
            letter = LETTERS[entry.kind]
            letter = letter.upper() if letter in _WITH_BODY and ABSTRACT in entry.marks else letter
            marks = "".join(mark for mark in _MARKS if letter in _WITH_BODY and mark in entry.marks)
            yield f"{letter}{'+' if number else short}{marks} {_first(entry, before)}{own}"
            if LETTERS[entry.kind] in _WITH_BODY:
                bodies.append(base64.b64encode(bytes.fromhex(entry.second[0][:8])).decode()[:_BODY])


def _first(entry: OutlineEntry, before: OutlineEntry) -> str:
    if entry.kind == "class":
        had = set(before.second) if before.kind == "class" else set()
        less = [f"-{name}" for name in sorted(had - set(entry.second))]
        changes = " ".join([*less, *(name for name in entry.second if name not in had)])
        listed = [f"*{field.removeprefix('kw ')}" if field.startswith("kw ") else field for field in entry.fields]
        making = " ".join([entry.marks, *listed])
        return f"{','.join(entry.first)};{changes}{';' if making else ''}{making}"
    if entry.kind == "value":
        return ""
    tokens = [_NODES.get(token, token) for token in entry.first]
    # A parameter may be called "value", which is short for something else: then nothing is left out before it.
    plain = tokens[:1] == ["!"] and not "".join(tokens[1:2]).startswith("!")
    return ",".join(tokens[1:] if plain else tokens)


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
        """Return the list in a file; an empty one where there is none."""
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
        for line in lines:
            name, *words = line.split(" ")
            if not line.startswith(">"):
                found.calls[name] = dict(_parse_call(word, owners, every) for word in words)
        return found

    def write(self, path: Path) -> None:
        """Write the list into a file."""
        owners = sorted({call.owner for sites in self.calls.values() for call in sites if call.owner})
        places = {owner: number for number, owner in enumerate(owners)}
        every = (1 << len(self.releases)) - 1
        lines = [f"{_CALLS_HEAD} {' '.join(self.releases)}"]
        for name, sites in sorted(self.calls.items()):
            lines.append(" ".join([name, *sorted(_word(call, mask, places, every) for call, mask in sites.items())]))
        text = "\n".join([*lines, *(f">{owner}" for owner in owners)])
        replace_file(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def _word(call: CallSite, mask: int, places: dict[str, int], every: int) -> str:
    owner = f"@{places[call.owner]}" if call.owner else ""
    passed = ",".join([f"{call.arguments.positional}{owner}", *call.arguments.keywords])
    return passed if mask == every else f"{passed}|{mask}"


def _parse_call(word: str, owners: list[str], every: int) -> tuple[CallSite, int]:
    passed, _, mask = word.partition("|")
    first, *keywords = passed.split(",")
    positional, _, owner = first.partition("@")
    arguments = Arguments(int(positional), tuple(keywords))
    return CallSite(arguments, owners[int(owner)] if owner else ""), int(mask) if mask else every
