"""What an entry point's object is, found by reading its module and those that its bases come from. Nothing is imported.

What stands in several branches counts side by side: a class whose base is imported under ``try`` and set to ``object``
under ``except`` has both, because which of them runs is known at run time only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final, Literal

from vllm_graft.doctor import modules
from vllm_graft.doctor.packages import Entry
from vllm_graft.patching.upstream.finder import Finder, Place, ReadModule
from vllm_graft.patching.upstream.fingerprint import Function
from vllm_graft.patching.upstream.scopes import dotted, imported
from vllm_graft.patching.upstream.sources import File

Kind = Literal["class", "function", "value", "unknown"]
Answer = Literal["yes", "no", "unknown"]
Method = ast.FunctionDef | ast.AsyncFunctionDef

_FOREIGN: Final = frozenset(
    {*sys.stdlib_module_names, "builtins", "numpy", "pydantic", "torch", "transformers", "triton"}
)
"""Packages whose classes derive from nothing of vLLM's: they are not read."""

_MARKERS: Final = frozenset(
    {"builtins:object", "abc:ABC", "typing:Generic", "typing:Protocol", "typing_extensions:Protocol"}
)
"""Bases without members of their own."""

_DEEP: Final = 24
"""How many re-exports are followed before it is taken for a circle."""


@dataclass(frozen=True, slots=True)
class Thing:
    """What a name stands for.

    name:   where it is defined, as ``module:Name``; as it was asked for where that is not found
    kind:   class, function, value, or unknown where reading does not find it
    bases:  every class above a class that can be found, the nearest first, as ``module:Name``
    whole:  whether all of them could be followed to their end
    """

    name: str
    kind: Kind
    bases: tuple[str, ...] = ()
    whole: bool = True


class Reading:
    """Reads the modules of an environment, each once."""

    def __init__(self, path: Iterable[str], root: Path | None) -> None:
        self._finder = Finder(Environment(tuple(path), root))
        self._things: dict[str, Thing] = {}

    def thing(self, what: Entry | str) -> Thing:
        """What an entry point, ``module:Name`` or ``module.Name`` stands for."""
        module, qualname = _split(what)
        name = f"{module}:{qualname}"
        if name not in self._things:
            self._things[name] = self._look_up(module, qualname)
        return self._things[name]

    def is_a(self, what: Entry | str, ancestor: str) -> Answer:
        """Whether a class is, or derives from, another; what is no class derives from nothing."""
        thing = self.thing(what)
        if thing.kind == "function":
            return "no"
        if thing.kind != "class":
            return "unknown"
        wanted = {self.thing(ancestor).name, ":".join(_split(ancestor))}
        if any(_same(name, one) for name in (thing.name, *thing.bases) for one in wanted):
            return "yes"
        return "no" if thing.whole else "unknown"

    def lineage(self, what: Entry | str) -> tuple[Place, ...] | None:
        """A class and every class above it, in the order of its MRO; None where one, or what decorates it, is unknown.

        Bases that only mark a class, such as ``ABC``, are left out: they define nothing that a caller looks for.
        """
        found = self._meanings(*_split(what))
        return self._mro(found[0], _DEEP) if len(found) == 1 and isinstance(found[0], Place) else None

    def _mro(self, place: Place, deep: int) -> tuple[Place, ...] | None:
        if not deep or place.cls is None or len(place.nodes) > 1 or place.cls.decorator_list:
            return None
        above: list[tuple[Place, ...]] = []
        for base in place.cls.bases:
            named = dotted(base.value if isinstance(base, ast.Subscript) else base)
            meanings = self._expression(place.module, named, _DEEP) if named else []
            meaning = meanings[0] if len(meanings) == 1 else ""
            if isinstance(meaning, str) and meaning in _MARKERS:
                continue
            line = self._mro(meaning, deep - 1) if isinstance(meaning, Place) else None
            if line is None:
                return None
            above.append(line)
        merged = _merge([*above, tuple(line[0] for line in above)])
        return None if merged is None else (place, *merged)

    def mentions(self, what: Entry | str, word: str) -> bool:
        """Whether the text of the module that a name stands in has a word in it."""
        module = self._finder.source.read(_split(what)[0])
        return module is not None and word in module.text

    def _look_up(self, module: str, qualname: str) -> Thing:
        places = [found for found in self._meanings(module, qualname) if isinstance(found, Place)]
        classes = [place for place in places if place.cls is not None]
        if classes:
            bases, whole = self._above(classes)
            return Thing(_name(classes[0]), "class", tuple(bases), whole)
        if not places:
            return Thing(f"{module}:{qualname}", "unknown")
        kind: Kind = "function" if isinstance(places[0].nodes[-1], Function) else "value"
        return Thing(_name(places[0]), kind)

    def _above(self, classes: list[Place]) -> tuple[list[str], bool]:
        """The names of all classes above some, and whether nothing stayed in the dark."""
        names: dict[str, None] = {}
        whole = True
        line = list(classes)
        for place in line:
            for base in place.bases:
                for found in self._expression(place.module, base, _DEEP) if base else [""]:
                    if isinstance(found, Place) and found.cls is not None:
                        line += [found] if _name(found) not in names else []
                        names[_name(found)] = None
                    elif isinstance(found, str) and found:
                        names[found] = None
                        whole = whole and _is_foreign(found)
                    else:
                        whole = False
        return list(names), whole

    def _meanings(self, module: str, qualname: str, deep: int = _DEEP) -> list[Place | str]:
        """All that a name in a module may stand for: a definition, or the name where the way there is not readable."""
        first, _, rest = qualname.partition(".")
        unread = f"{module}:{qualname}"
        read = None if _is_foreign(unread) or not deep else self._finder.module(module)
        if read is None:
            return [unread]
        found = list(self._bound(read, first, deep))
        if not found:
            found = [each for star in read.stars for each in self._meanings(star, first, deep - 1)]
            found = [each for each in found if isinstance(each, Place)]
        for part in rest.split(".") if rest else ():
            inside = [each.inside(part) for each in found if isinstance(each, Place)]
            found = [each for each in inside if each is not None]
        return found or [unread]

    def _bound(self, read: ReadModule, name: str, deep: int) -> Iterator[Place | str]:
        for node in read.scope.get(name, []):
            origin = imported(node, name, read.name, read.file.is_package)
            alias = dotted(node.value) if isinstance(node, ast.Assign) else ""
            if origin is not None and origin.name:
                yield from self._meanings(origin.module, origin.name, deep - 1)
            elif origin is not None:
                yield f"{origin.module}:"
            elif alias:
                yield from self._expression(read, alias, deep - 1)
            else:
                yield Place(read, name, [node])

    def _expression(self, read: ReadModule, name: str, deep: int) -> list[Place | str]:
        """What a base's expression may stand for: a plain name, or one of a module or class with a name in it."""
        first, _, rest = name.partition(".")
        if first not in read.scope and not read.stars:
            return [f"builtins:{name}"]
        for origin in read.imports(first) if rest else ():
            inner = f"{origin.module}.{origin.name}" if origin.name else origin.module
            middle, _, last = rest.rpartition(".")
            return self._meanings(".".join(part for part in (inner, middle) if part), last, deep)
        return self._meanings(read.name, name, deep)


class Environment:
    """The modules of a path; those of vLLM from the folder it is known to lie in."""

    def __init__(self, path: tuple[str, ...], root: Path | None) -> None:
        self.path = path
        self.root = root

    @property
    def version(self) -> str:
        """Nobody asks for it here."""
        return ""

    def modules(self) -> list[str]:
        """Nobody asks for them here."""
        return []

    def read(self, module: str) -> File | None:
        """A module's file."""
        own = [str(self.root.parent)] if self.root is not None and module.partition(".")[0] == "vllm" else None
        spec = modules.locate(module, own or self.path)
        text = modules.text_of(spec) if isinstance(spec, ModuleSpec) else None
        if not isinstance(spec, ModuleSpec) or text is None:
            return None
        return File(spec.origin or module, text, spec.submodule_search_locations is not None)


def methods_of(lineage: Iterable[Place]) -> dict[str, Method | None]:
    """What each name of a class stands for, by the first class that binds it; None where that is no plain method.

    ``record = _noop`` defines a method as well as ``def`` does; what it takes is not known.
    """
    found: dict[str, Method | None] = {}
    for place in lineage:
        scope = place.module.class_scope(place.cls) if place.cls is not None else {}
        for name, nodes in scope.items():
            bound = [node for node in nodes if not (isinstance(node, ast.AnnAssign) and node.value is None)]
            if bound:
                only = bound[0] if len(bound) == 1 else None
                found.setdefault(name, only if isinstance(only, Method) else None)
    return found


def _merge(lines: Sequence[Sequence[Place]]) -> list[Place] | None:
    """The C3 order of several classes' lines; None where Python would refuse the class."""
    left = [list(line) for line in lines if line]
    merged: list[Place] = []
    while left:
        tails = [one for line in left for one in line[1:]]
        head = next((line[0] for line in left if line[0] not in tails), None)
        if head is None:
            return None
        merged.append(head)
        left = [rest for line in left if (rest := [one for one in line if one != head])]
    return merged


def is_abstract(method: Method | None) -> bool:
    """Whether a method is marked as abstract."""
    marks = method.decorator_list if method is not None else []
    return any(dotted(mark).rpartition(".")[2] == "abstractmethod" for mark in marks)


def listed(names: Sequence[str]) -> str:
    """Names for a sentence: one, or several with "and" before the last."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _split(what: Entry | str) -> tuple[str, str]:
    if isinstance(what, Entry):
        return what.module, what.attribute
    module, colon, qualname = what.strip().partition(":")
    if not colon:
        module, _, qualname = what.strip().rpartition(".")
    return module, qualname


def _name(place: Place) -> str:
    return f"{place.module.name}:{place.qualname}"


def _is_foreign(name: str) -> bool:
    return name.partition(":")[0].partition(".")[0] in _FOREIGN


def _same(name: str, wanted: str) -> bool:
    """Whether two names are one class; a package that could not be read may re-export what lies in it."""
    module, _, qualname = name.partition(":")
    home, _, target = wanted.partition(":")
    return qualname == target and (module == home or home.startswith(f"{module}."))
