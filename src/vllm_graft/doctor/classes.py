"""Class hierarchies read from sources: what an entry point's object is, its bases and its methods.

Branches count side by side: a class whose base is imported under ``try`` and set to ``object`` under ``except`` has
both, because only a run decides between them. That is how one class serves releases of vLLM with and without the
interface of the V2 runner.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from vllm_graft.doctor.environment import EntryPoint
from vllm_graft.sources.finder import Finder
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.modules import ScopeEntry, SourceModule
from vllm_graft.sources.origins import SearchPath
from vllm_graft.sources.scopes import decorators, dotted, imported

ObjectKind = Literal["class", "function", "value", "unknown"]
Derives = Literal["yes", "no", "unknown"]

_FOREIGN: Final = frozenset(
    {*sys.stdlib_module_names, "builtins", "numpy", "pydantic", "torch", "transformers", "triton"}
)
"""Packages whose classes derive from none of vLLM's and are not read: torch alone has 2,300 modules."""

_MARKERS: Final = frozenset(
    {"builtins:object", "abc:ABC", "typing:Generic", "typing:Protocol", "typing_extensions:Protocol"}
)
"""Bases without members of their own."""

_DEEP: Final = 24  # the longest chain of re-exports; a longer one is taken for a circle


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The object that a name stands for.

    name:      where it is defined, as ``module:Name``; the name looked up if that is not found
    kind:      class, function, value, or unknown if reading does not find it
    bases:     every class above a class that can be found, the nearest first, as ``module:Name``
    complete:  whether all bases could be followed to their end
    """

    name: str
    kind: ObjectKind
    bases: tuple[str, ...] = ()
    complete: bool = True


class ClassReader:
    """Reads the class hierarchies of an environment, each module once.

    finder: finds the modules of the environment and of the installed vLLM
    """

    def __init__(self, path: Iterable[str], root: Path | None) -> None:
        self.finder = Finder(SearchPath(tuple(path), root))
        self._known: dict[str, ObjectInfo] = {}

    def look_up(self, what: EntryPoint | str) -> ObjectInfo:
        """Return what an entry point, ``module:Name`` or ``module.Name`` stands for."""
        module, qualname = _split(what)
        name = f"{module}:{qualname}"
        if name in self._known:
            return self._known[name]
        places = [found for found in self._meanings(module, qualname) if isinstance(found, ScopeEntry)]
        classes = [place for place in places if place.cls is not None]
        kind: ObjectKind = "unknown"
        if classes:
            bases, complete = self._above(classes)
            found = ObjectInfo(_name(classes[0]), "class", tuple(bases), complete)
        else:
            if places:
                kind = "function" if isinstance(places[0].nodes[-1], Function) else "value"
            found = ObjectInfo(_name(places[0]) if places else name, kind)
        self._known[name] = found
        return found

    def is_a(self, what: EntryPoint | str, ancestor: str) -> Derives:
        """Return whether a class is, or derives from, another; what is not a class derives from nothing."""
        found = self.look_up(what)
        if found.kind != "class":
            return "no" if found.kind == "function" else "unknown"
        for wanted in {self.look_up(ancestor).name, ":".join(_split(ancestor))}:
            home, _, target = wanted.partition(":")
            for module, _, qualname in (name.partition(":") for name in (found.name, *found.bases)):
                # An unreadable package may re-export a class of its submodules.
                if qualname == target and (module == home or home.startswith(f"{module}.")):
                    return "yes"
        return "no" if found.complete else "unknown"

    def lineage(self, what: EntryPoint | str) -> tuple[ScopeEntry, ...] | None:
        """Return a class and every class above it in MRO order; None if one of them is unknown or decorated.

        Bases that only mark a class, such as ``ABC``, are left out: they define no method that vLLM calls.
        """
        found = self._meanings(*_split(what))
        return self._mro(found[0], _DEEP) if len(found) == 1 and isinstance(found[0], ScopeEntry) else None

    def _mro(self, place: ScopeEntry, deep: int) -> tuple[ScopeEntry, ...] | None:
        if not deep or place.cls is None or len(place.nodes) > 1 or place.cls.decorator_list:
            return None
        above: list[tuple[ScopeEntry, ...]] = []
        for base in place.cls.bases:
            named = dotted(base)
            meanings = self._expression(place.module, named, _DEEP) if named else []
            meaning = meanings[0] if len(meanings) == 1 else ""
            if isinstance(meaning, str) and meaning in _MARKERS:
                continue
            line = self._mro(meaning, deep - 1) if isinstance(meaning, ScopeEntry) else None
            if line is None:
                return None
            above.append(line)
        merged = _merge([*above, tuple(line[0] for line in above)])
        return None if merged is None else (place, *merged)

    def mentions(self, what: EntryPoint | str, word: str) -> bool:
        """Return whether a word stands anywhere in the module of a name."""
        file = self.finder.source.read(_split(what)[0])
        return file is not None and word in file.text

    def _above(self, classes: list[ScopeEntry]) -> tuple[list[str], bool]:
        """Return the names of all classes above some, and whether every one of them was found."""
        names: dict[str, None] = {}
        complete = True
        line = list(classes)
        for place in line:
            for base in place.bases:
                for found in self._expression(place.module, base, _DEEP) if base else [""]:
                    if isinstance(found, ScopeEntry) and found.cls is not None:
                        line += [found] if _name(found) not in names else []
                        names[_name(found)] = None
                    elif isinstance(found, str) and found:
                        names[found] = None
                        complete = complete and _is_foreign(found)
                    else:
                        complete = False
        return list(names), complete

    def _meanings(self, module: str, qualname: str, deep: int = _DEEP) -> list[ScopeEntry | str]:
        """Return all that a name may stand for: definitions, or ``module:Name`` if a module cannot be read."""
        first, _, rest = qualname.partition(".")
        unread = f"{module}:{qualname}"
        read = None if _is_foreign(unread) or not deep else self.finder.module(module)
        if read is None:
            return [unread]
        found = list(self._bound(read, first, deep))
        if not found:
            found = [each for star in read.stars for each in self._meanings(star, first, deep - 1)]
            found = [each for each in found if isinstance(each, ScopeEntry)]
        for part in rest.split(".") if rest else ():
            inside = [each.inside(part) for each in found if isinstance(each, ScopeEntry)]
            found = [each for each in inside if each is not None]
        return found or [unread]

    def _bound(self, read: SourceModule, name: str, deep: int) -> Iterator[ScopeEntry | str]:
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
                yield ScopeEntry(read, name, [node])

    def _expression(self, read: SourceModule, name: str, deep: int) -> list[ScopeEntry | str]:
        """Return all that an expression, ``Class`` or ``module.Class``, may stand for in a module."""
        first, _, rest = name.partition(".")
        if first not in read.scope and not read.stars:
            return [f"builtins:{name}"]
        for origin in read.imports(first) if rest else ():
            inner = f"{origin.module}.{origin.name}" if origin.name else origin.module
            middle, _, last = rest.rpartition(".")
            return self._meanings(".".join(part for part in (inner, middle) if part), last, deep)
        return self._meanings(read.name, name, deep)


def methods_of(lineage: Iterable[ScopeEntry]) -> dict[str, Function | None]:
    """Return each method of a class, from the first class in the MRO that binds its name; None if it is not a ``def``.

    ``record = _noop`` defines a method too, whose parameters are unknown.
    """
    found: dict[str, Function | None] = {}
    for place in lineage:
        scope = place.module.class_scope(place.cls) if place.cls is not None else {}
        for name, nodes in scope.items():
            bound = [node for node in nodes if not (isinstance(node, ast.AnnAssign) and node.value is None)]
            if bound:
                only = bound[0] if len(bound) == 1 else None
                found.setdefault(name, only if isinstance(only, Function) else None)
    return found


def _merge(lines: Sequence[Sequence[ScopeEntry]]) -> list[ScopeEntry] | None:
    """Merge the MROs of several bases by the C3 rule; None if Python would refuse the class."""
    left = [list(line) for line in lines if line]
    merged: list[ScopeEntry] = []
    while left:
        tails = [one for line in left for one in line[1:]]
        head = next((line[0] for line in left if line[0] not in tails), None)
        if head is None:
            return None
        merged.append(head)
        left = [rest for line in left if (rest := [one for one in line if one != head])]
    return merged


def is_abstract(method: Function | None) -> bool:
    """Return whether a method is marked as abstract."""
    return method is not None and "abstractmethod" in decorators(method)


def takes(method: Function, count: int, named: Collection[str] = ()) -> bool:
    """Return whether a method can be called with ``count`` positional arguments after its first, and some by name."""
    args = method.args
    plain = [one.arg for one in (*args.posonlyargs, *args.args)]
    if len(plain) <= count and args.vararg is None:
        return False
    by_name = [*plain[max(count + 1, len(args.posonlyargs)) :], *(one.arg for one in args.kwonlyargs)]
    bare = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    needed = {*plain[count + 1 : len(plain) - len(args.defaults)], *(one.arg for one, value in bare if value is None)}
    return needed <= {*named} and (args.kwarg is not None or {*named} <= {*by_name})


def listed(names: Sequence[str]) -> str:
    """Join names for a sentence, with "and" before the last."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _split(what: EntryPoint | str) -> tuple[str, str]:
    if isinstance(what, EntryPoint):
        return what.module, what.attribute
    module, colon, qualname = what.strip().partition(":")
    if not colon:
        module, _, qualname = what.strip().rpartition(".")
    return module, qualname


def _name(place: ScopeEntry) -> str:
    return f"{place.module.name}:{place.qualname}"


def _is_foreign(name: str) -> bool:
    return name.partition(":")[0].partition(".")[0] in _FOREIGN
