"""Find where a name is defined by reading: through re-exports, star imports and base classes.

``Walk`` goes that way over any record of modules that has the names each binds: syntax trees, or the catalogue of a
release that the audit ships.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, Protocol, Self, TypeVar

from vllm_graft.sources.modules import Definition, ScopeEntry, SourceModule, read_module
from vllm_graft.sources.origins import Source, package_files
from vllm_graft.sources.scopes import Imported, Namespace, absolute

# The longest chain of re-exports and bases; a longer one is taken for a circle.
_DEEP: Final = 24


class NamedDefinition(Protocol):
    """One definition: a function, a class, a value."""

    @property
    def module(self) -> ModuleNames[Self]:
        """The module that it stands in."""

    @property
    def qualname(self) -> str:
        """Its name in the module."""

    @property
    def bases(self) -> Sequence[str]:
        """The expressions by which a class names its bases; none for what is not a class."""

    def inside(self, attribute: str) -> Self | None:
        """Return a name that a class itself defines."""


ItemT = TypeVar("ItemT", bound=NamedDefinition)
ItemT_co = TypeVar("ItemT_co", bound=NamedDefinition, covariant=True)


class ModuleNames(Protocol[ItemT_co]):
    """One module: the names it defines, and those it imports."""

    @property
    def name(self) -> str:
        """Its dotted name."""

    @property
    def stars(self) -> Sequence[str]:
        """The modules of its star imports."""

    def place(self, attribute: str) -> ItemT_co | None:
        """Return a name that the module itself defines."""

    def imports(self, attribute: str) -> Iterable[Imported]:
        """Return what its import statements bind a name to."""


class Walk(Generic[ItemT]):
    """Finds names in a set of modules; ``module`` loads one of them by its name."""

    def __init__(self, module: Callable[[str], ModuleNames[ItemT] | None]) -> None:
        self._module = module

    def find(self, module: str, qualname: str) -> tuple[ItemT, bool] | None:
        """Return the definition of a name such as "Class.method", and whether a base class has it instead."""
        first, *rest = qualname.split(".")
        item = self._in_module(module, first, _DEEP)
        inherited = False
        for part in rest:
            if item is None:
                return None
            found = self._in_class(item, part, _DEEP)
            inherited = inherited or (found is not None and found.qualname != f"{item.qualname}.{part}")
            item = found
        return (item, inherited) if item is not None else None

    def module_at(self, module: str, attribute: str, deep: int = _DEEP) -> str:
        """Return the module that a name stands for, as after ``from vllm import envs``; empty if it is not a module."""
        found = self._module(module)
        for one in found.imports(attribute) if found is not None and deep else ():
            inner = f"{one.module}.{one.name}" if one.name else one.module
            if self._module(inner) is not None:
                return inner
            if one.name and (further := self.module_at(one.module, one.name, deep - 1)):
                return further
        return ""

    def leads_out(self, module: str, attribute: str, deep: int = _DEEP) -> bool:
        """Return whether a module imports a name from an unknown module, itself or through a module it imports."""
        found = self._module(module)
        if found is None or not deep:
            return False
        return any(
            self._module(one.module) is None or bool(one.name and self.leads_out(one.module, one.name, deep - 1))
            for one in found.imports(attribute)
            if one.module != "__future__"
        ) or any(self.leads_out(origin, attribute, deep - 1) for origin in found.stars)

    def line(self, item: ItemT) -> list[ItemT]:
        """Return a class and all classes above it that can be found, the nearest first."""
        found = [item]
        for one in found:
            above = [self.base(one.module, name) for name in one.bases]
            found += [each for each in above if each is not None and each not in found and len(found) < _DEEP]
        return found

    def bases(self, item: ItemT) -> list[ItemT | str]:
        """Return the bases of a class in order: the class if it can be found, else the expression that names it."""
        return [self.base(item.module, name) or name or "?" for name in item.bases]

    def base(self, module: ModuleNames[ItemT], name: str, deep: int = _DEEP) -> ItemT | None:
        """Return the class that a base's expression, ``Class`` or ``module.Class``, stands for in a module."""
        first, *rest = name.split(".") if name else [""]
        for found in module.imports(first) if rest else ():
            inner = f"{found.module}.{found.name}" if found.name else found.module
            return self._in_module(".".join([inner, *rest[:-1]]), rest[-1], deep)
        item = self._in_module(module.name, first, deep) if first else None
        for part in rest:
            item = self._in_class(item, part, deep) if item is not None else None
        return item

    def _in_module(self, name: str, attribute: str, deep: int) -> ItemT | None:
        module = self._module(name)
        if module is None or not deep:
            return None
        own = module.place(attribute)
        if own is not None:
            return own
        for found in module.imports(attribute):
            # Of imports in the branches of a ``try``, one may lead to what cannot be read.
            if found.name and (item := self._in_module(found.module, found.name, deep - 1)) is not None:
                return item
        for origin in module.stars:
            if (item := self._in_module(origin, attribute, deep - 1)) is not None:
                return item
        return None

    def _in_class(self, item: ItemT, attribute: str, deep: int) -> ItemT | None:
        """Return an attribute of a class: its own, or that of the first base that has one."""
        if not deep:
            return None
        own = item.inside(attribute)
        if own is not None:
            return own
        for base in item.bases:
            above = self.base(item.module, base, deep - 1)
            if above is not None and (found := self._in_class(above, attribute, deep - 1)) is not None:
                return found
        return None


def find(source: Source, module: str, qualname: str) -> Definition | None:
    """Return the definition of ``qualname`` in ``module``, or None if reading does not find one."""
    return Finder(source).find(module, qualname)


class Finder:
    """Finds names in one source, ``within`` one of its packages, and reads each file once."""

    def __init__(self, source: Source, *, within: str = "") -> None:
        self.source = source
        self._within = within
        self._modules: dict[str, SourceModule | None] = {}
        self.walk = Walk[ScopeEntry](self.module)

    def find(self, module: str, qualname: str) -> Definition | None:
        """Return the definition of ``qualname``, such as "function" or "Class.method", in ``module``."""
        found = self.walk.find(module, qualname)
        return found[0].definition(found[1]) if found is not None else None

    def module(self, name: str) -> SourceModule | None:
        """Return one module, or None if there is none that can be parsed."""
        if name not in self._modules:
            outside = self._within and name.partition(".")[0] != self._within
            file = self.source.read(name) if not outside else None
            try:
                self._modules[name] = SourceModule(name, file) if file is not None else None
            except (SyntaxError, ValueError):
                self._modules[name] = None
        return self._modules[name]


_IMPORTS_FOLLOWED: Final = 8


def find_certain(module: SourceModule, name: str, path: Sequence[str]) -> tuple[SourceModule, ast.AST] | None:
    """Return the one statement that makes an object, through imports and aliases; None if reading is not certain.

    ``Finder`` returns what a name probably is; this refuses what a branch, a star import or code may change.
    """
    for _ in range(_IMPORTS_FOLLOWED):
        first, _dot, rest = name.partition(".")
        node = module.namespace.only(first)
        if rest and isinstance(node, ast.ClassDef):
            inner = Namespace(node).only(rest)
            return (module, inner) if inner is not None else None
        if rest:
            origin = next(iter(module.imports(first)), None) if isinstance(node, ast.Import | ast.ImportFrom) else None
            found = read_module(f"{origin.module}.{origin.name}".strip("."), path) if origin is not None else None
            if not isinstance(found, SourceModule):
                return None
            module, name = found, rest
        elif isinstance(node, ast.ImportFrom):
            (name,) = (alias.name for alias in node.names if (alias.asname or alias.name) == name)
            found = read_module(absolute(node, module.name, module.file.is_package), path)
            if not isinstance(found, SourceModule):
                return None
            if found.file.is_package and name not in found.namespace.bound:
                return None
            module = found
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            name = node.value.id
        else:
            return (module, node) if node is not None else None
    return None


_MAX_PLACES: Final = 3


def moved_to(module: str, name: str) -> list[str]:
    """Return where the installed package of ``module`` defines a class or function ``name``, three places at most."""
    found: list[str] = []
    # Bytes are searched: parsing the 2,600 files of vLLM 0.32 takes seven seconds.
    defined = re.compile(rf"^(?:class|def|async def) {re.escape(name)}\b".encode(), re.MULTILINE)
    for each, file in package_files(module.partition(".")[0]):
        if len(found) < _MAX_PLACES and name.encode() in (data := file.read_bytes()) and defined.search(data):
            found.append(f"{each}:{name}")
    return found
