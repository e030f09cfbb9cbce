"""A package as it is read: its files walked in the order of their imports, and names followed from one to the other."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final

from vllm_graft.audit.model import Condition, Use, UseGuard
from vllm_graft.audit.uses import guards, patches
from vllm_graft.audit.uses.bodies import body_contents, is_class_method
from vllm_graft.audit.uses.classes import ClassHierarchy, OwnAttributes
from vllm_graft.audit.uses.guards import AnyCondition
from vllm_graft.audit.uses.patches import Locks
from vllm_graft.audit.uses.resolver import VERBS, PackageModules, Resolver
from vllm_graft.audit.uses.source_file import SourceFile, upwards
from vllm_graft.audit.uses.syntax import BodyBudget, first_line
from vllm_graft.audit.uses.values import (
    TOP,
    ConditionValue,
    FlagValue,
    Instance,
    LocalDef,
    MappingValue,
    Name,
    Scope,
    SequenceValue,
    TextValue,
    Value,
    Values,
    local_defs,
    upstream,
    vllm_names,
)
from vllm_graft.audit.uses.walk_state import FileUses, WalkState
from vllm_graft.audit.uses.walker import Walker
from vllm_graft.findings import Finding
from vllm_graft.patching.functions import kind_in_source
from vllm_graft.sources.fingerprint import Function

# Methods of Python's own naming that upstream's classes define for their users.
_PUBLIC_SPECIAL: Final = frozenset({"__init__", "__call__", "__post_init__", "__new__"})
# The most files that a name is followed through before it is given up.
_DEEP: Final = 20
# The lines of functions whose syntax trees are held until they are walked: about 80 MB.
_HELD_LINES: Final = 60_000

# Parts words by spaces: together with ``split`` this takes a third of the time of a regular expression.
_APART: Final = str.maketrans({chr(code): " " for code in range(128) if not (chr(code).isalnum() or chr(code) == "_")})
# Words that always call for a walk: vLLM itself, and ways to a module by its text.
_TELLING: Final = frozenset({TOP, "import_module", "__import__", "resolve_name", "TYPE_CHECKING"})
# ``sys.modules``, which calls for a walk, too.
_MODULES: Final = re.compile(r"\.\s*modules\b(?!\s*\()")
_RELATIVE: Final = re.compile(r"\bfrom[\s\\]+\.")
# The functions that a test for a name is written with.
_ASKING: Final = frozenset({"hasattr", "getattr", "find_spec", "signature", "getfullargspec"})

ReadingProgress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


class PackageReader:
    """Reads the files of one package for its uses of vLLM."""

    def __init__(self, name: str, files: list[SourceFile], progress: ReadingProgress | None = None) -> None:
        self.name = name
        self._progress = progress or (lambda done, total: None)
        self.locks = Locks()
        self.unread: list[Finding] = []
        self.files = [file for file in files if self._opens(file)]
        budget = BodyBudget(_HELD_LINES)
        for file in self.files:
            file.body_budget = budget
        self._resolver = Resolver(self)
        self._walkers: dict[SourceFile, Walker | None] = {}
        self._deep = 0
        self._following: set[Name] = set()
        self._places: dict[Name, tuple[SourceFile, list[str]] | None] = {}
        self._modules: dict[str, SourceFile] = {}
        for file in self.files:
            for module in (file.module, file.name):
                self._modules.setdefault(module, file)
        self.tops = frozenset(name.partition(".")[0] for name in self._modules)
        self._packages = frozenset(above for name in self._modules for above in upwards(name))

    def is_module(self, name: str) -> bool:
        """Return whether a name is one of the package's modules, or of the packages above them."""
        return name in self._packages

    def uses(self) -> Iterator[Use]:
        """Yield every use of vLLM, in the order of files and lines."""
        founds = self._walk_files()
        own = OwnAttributes(founds)
        guards_of_files = self._guards_of_files(founds)
        branches = {found.file.shown: found.branches for found in founds}
        hierarchy = ClassHierarchy(founds)
        stored = frozenset(name for found in founds for name in found.stored)
        self._resolver.own_names = stored.union(*(one.names for one in self._class_scopes()))
        stored |= {one.target.qualname.rpartition(".")[2] for found in founds for one in found.assignments}
        defined: dict[str, set[tuple[str, ...]]] = {}
        for subclass in (one for found in founds for one in found.subclasses):
            names = own.of_class(subclass.cls)
            defined.setdefault(subclass.target.qualname, set()).update((name,) for name in names)
            if subclass.target.qualname.endswith("Config"):
                stored |= names
        starred = frozenset(name for found in founds for name in found.starred)
        for found in founds:
            uses = [*found.imports(), *self._subclasses(found, own, hierarchy)]
            uses += [*found.calls, *hierarchy.calls(found, own), *hierarchy.constructions(found)]
            uses += found.reads
            # What is declared as a class of vLLM may be of the package's own subclass, which defines more.
            uses = [use for use in uses if not (use.guessed and use.path[-1:] in defined.get(use.qualname, ()))]
            try:
                uses += self._replacements(found, own)
            except RecursionError as error:
                self._refuse(found.file, error)
            # Loops over names, and several ways to one function, pass the same place more than once.
            once = {
                (use.way, use.name, use.line, use.arguments, use.patch and use.patch.releases, use.guard): use
                for use in uses
            }
            guard = guards_of_files.get(found.file, UseGuard())
            for use in sorted(once.values(), key=lambda use: use.line):
                inside = branches.get(use.body_file or use.file, ())
                guessed = use.guessed or Name(use.module, use.qualname.partition(".")[0]) in starred
                owned = stored.intersection(use.path) if use.way == "read" else use.own_attributes
                yield use.but(guard=guard.and_also(use.guard), branches=inside, guessed=guessed, own_attributes=owned)
        for found in founds:
            # Conditions that are not evaluated yet keep the walks alive.
            found.forget()

    def _class_scopes(self) -> Iterator[Scope]:
        """Yield the scopes of the classes that modules define."""
        for walked in self._walkers.values():
            for value in walked.state.scope.module().names.values() if walked is not None else ():
                yield from (own.inside for own in local_defs(value) if own.inside is not None and own.function is None)

    def _guards_of_files(self, founds: list[FileUses]) -> dict[SourceFile, UseGuard]:
        """Return the guards of files that are imported behind tests only: ``if OLD: from . import patch_old``."""
        importing: dict[SourceFile, list[tuple[Condition, ...]]] = {}
        for found in founds:
            for name, guard in found.imported:
                file = self._file(name)
                if file is not None and file is not found.file and not file.is_package:
                    importing.setdefault(file, []).append(guard.conditions)
        tested = {file: list(dict.fromkeys(ways)) for file, ways in importing.items() if all(ways)}
        return {
            file: UseGuard(ways[0] if len(ways) == 1 else (AnyCondition(tuple(ways)),)) for file, ways in tested.items()
        }

    def _file(self, name: str) -> SourceFile | None:
        """Return the file of the module that a name is, or is in."""
        return self._modules.get(name) or self._modules.get(name.rpartition(".")[0])

    def follow(self, name: Name) -> Values | None:
        """Return what a name in one of the package's modules stands for; None for other packages, and for modules.

        It is empty if two modules import the name from each other.
        """
        if name not in self._places:
            self._places[name] = self._place(name)
        place = self._places[name]
        if place is None:
            return None
        if name in self._following:
            return ()
        self._following.add(name)
        try:
            return self._inside(*place)
        finally:
            self._following.discard(name)

    def _place(self, name: Name) -> tuple[SourceFile, list[str]] | None:
        """Return the file that a name is in, and its parts there; None for other packages, and for modules."""
        parts = name.dotted.split(".") if name.module.partition(".")[0] in self.tops else []
        for place in range(len(parts), 0, -1):
            file = self._modules.get(".".join(parts[:place]))
            if file is not None:
                return (file, parts[place:]) if place < len(parts) else None
        return None

    def scope_of(self, module: str) -> Scope | None:
        """Return the names of one of the package's modules that has been walked; None for others."""
        file = self._modules.get(module)
        return file.scope if file is not None and self._walkers.get(file) is not None else None

    def _inside(self, file: SourceFile, parts: list[str]) -> Values:
        if file not in self._walkers and self._deep < _DEEP:
            self._deep += 1
            self._walk(file)
            self._deep -= 1
        scope = file.scope
        value: Values = ()
        if scope is not None:
            value = scope.names[parts[0]] if parts[0] in scope.names else scope.starred(parts[0])
        followed: list[Values] = []
        for one in value:
            again = self.follow(one) if isinstance(one, Name) and self._deep < _DEEP else None
            followed.append((one,) if again is None else again)
        value = tuple(one for held in followed for one in held)
        for part in parts[1:]:
            value = self._resolver.attribute(value, part)
        return value

    def _walk_files(self) -> list[FileUses]:
        """Walk every file that mentions vLLM, or something of the package that does."""
        total = 2 * len(self.files)
        for number, file in enumerate(self.files):
            self._progress(number, total)
            # After those of the package that it imports, without a recursion as deep as their chain.
            left = [(file, False)]
            seen: set[SourceFile] = set()
            while left:
                one, ready = left.pop()
                if ready:
                    self._walk(one)
                elif one not in seen and one not in self._walkers and one.names_vllm:
                    seen.add(one)
                    left.append((one, True))
                    with suppress(SyntaxError, ValueError, RecursionError):
                        imported = (self._modules.get(name) for name in sorted(one.imports))
                        left += [(each, False) for each in imported if each is not None]
        more = True
        while more:
            # The last part of the name of every module with something from vLLM, or derived from it.
            carriers: set[bytes] = set()
            for file, walked in self._walkers.items():
                scope = walked.state.scope.module() if walked is not None else Scope("module")
                values = tuple(one for value in scope.names.values() for one in value)
                if scope.stars or any(vllm_names(values)) or any(any(upstream(own)) for own in local_defs(values)):
                    carriers.add((file.path.parent.name if file.is_package else file.path.stem).encode())
            # Files that do not mention vLLM may reach it through a module that does.
            unwalked = [file for file in self.files if file not in self._walkers]
            dependents = [file for file in unwalked if not carriers.isdisjoint(file.words_of_imports)]
            for file in dependents:
                self._walk(file)
            more = bool(dependents)
        relevance = _Relevance(self)
        walkers = [walker for file in self.files if (walker := self._walkers.get(file)) is not None]
        # In the order of imports: what a base class sets on its objects is known before its subclasses are walked.
        ordered = [walker for walker in self._walkers.values() if walker is not None]
        for number, walker in enumerate(ordered, total - len(walkers)):
            self._progress(number, total)
            try:
                walker.functions(relevance.concerns, self._refuse)
            except RecursionError as error:
                self._refuse(walker.state.file, error)
        self._progress(total, total)
        return [walker.state.found for walker in walkers]

    def _walk(self, file: SourceFile) -> None:
        if file in self._walkers:
            return
        self._walkers[file] = None
        try:
            file.scope = Scope("module")
            walker = Walker(WalkState(file, self._resolver, file.scope))
            walker.top_level()
        except (SyntaxError, ValueError, RecursionError) as error:
            self._refuse(file, error)
            return
        self._walkers[file] = walker

    def _opens(self, file: SourceFile) -> bool:
        try:
            # Asked of every file later, and stored: so it is read once for both.
            return file.names_vllm is not None
        except OSError as error:
            self._refuse(file, error)
            return False

    def _refuse(self, file: SourceFile, error: Exception) -> None:
        line = error.lineno if isinstance(error, SyntaxError) else None
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        what = f"a file cannot be read, so its uses of vLLM are not known: {said}"
        where = f"{file.shown}:{line}" if line else file.shown
        fix = "correct the file, or read it with the release of Python that it is written for"
        self.unread.append(Finding("P220", "error", self.name, what, where, fix))

    def _replacements(self, found: FileUses, own: OwnAttributes) -> Iterator[Use]:
        for one in found.assignments:
            if one.patch is not None:
                hook = f"{one.target.module}:{one.target.qualname}"
                one.patch = replace(one.patch, reviewed=self.locks.reviewed(found.file, one.patch.name, hook))
            use = patches.use_of(one, found, self._resolver)
            if use.patch is not None and isinstance(use.body, Function):
                kind = kind_in_source(use.body, frozenset(patches.MARKS))
                use = replace(use, patch=replace(use.patch, function=kind))
            yield replace(use, own_attributes=own.of_target(one.target) | (_called_on_class(use.body) & own.anywhere))

    def _subclasses(self, found: FileUses, own: OwnAttributes, hierarchy: ClassHierarchy) -> Iterator[Use]:
        for one in found.subclasses:
            whole = Use(
                way="subclass",
                module=one.target.module,
                qualname=one.target.qualname,
                file=found.file.shown,
                line=one.line,
                owner=one.owner,
                guard=one.guard,
                alternatives=tuple((name.module, name.qualname) for name in one.alternatives),
                fallback=one.fallback,
                source=patches.source(one.cls),
                own_attributes=own.of_class(one.cls) | own.of_target(one.target.inside("")),
                instantiated=hierarchy.is_concrete(one.cls),
                has_other_bases=not hierarchy.is_sealed(one.cls, choices=True),
                # The package itself decides on the arguments of what it instantiates.
                constructed_here=one.cls in hierarchy.made,
                # The other classes of vLLM that it derives from may define abstract methods.
                owners=tuple((name.module, name.qualname) for name in hierarchy.targets[one.cls] if name != one.target),
            )
            yield whole
            for name, (method, line, guard) in one.methods.items():
                if name in _PUBLIC_SPECIAL or not (name.startswith("__") and name.endswith("__")):
                    method.complete()
                    override = whole.but(
                        way="override",
                        qualname=f"{whole.qualname}.{name}".strip("."),
                        line=line,
                        guard=whole.guard.and_also(guard),
                        alternatives=tuple(
                            (module, f"{qualname}.{name}".strip(".")) for module, qualname in whole.alternatives
                        ),
                        instantiated=False,
                        owners=(),
                        body=method.function,
                        body_file=method.file.shown,
                        source=patches.source(method),
                    )
                    if called := _called_on_class(override.body):
                        # ``cls`` may be a class that derives from this one, and has the name from anywhere.
                        given = called & own.anywhere if hierarchy.is_sealed_below(one.cls) else called
                        override = replace(override, own_attributes=override.own_attributes | given)
                    yield override


def _called_on_class(body: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None) -> frozenset[str]:
    """Return the attributes that a class method calls on its class; empty for any other function."""
    if body is None or not is_class_method(body):
        return frozenset()
    return frozenset(name for name, _ in body_contents(body).called)


def _stored_attributes(cls: LocalDef, deep: int = 4) -> set[str]:
    """Return the attributes of a class and its bases that hold tests or instances so far, or return instances."""
    found = {*cls.inside.tests, *cls.inside.instances} if cls.inside is not None else set()
    members = cls.inside.names.items() if cls.inside is not None else ()
    found.update(name for name, value in members if any(own.result for own in local_defs(value)))
    return found.union(*(_stored_attributes(own, deep - 1) for own in cls.own_bases if deep))


def _asks(text: str, words: Collection[str]) -> bool:
    """Return whether a text may test for a name or a version."""
    return not _ASKING.isdisjoint(words) or "version" in text.lower()


class _Relevance:
    """Decides by their words alone which functions of a package are walked: most of a large package's need no walk.

    A walk through a function notes names, calls and objects of vLLM, and classes that derive from its own. None of them
    can come up if no word of the function leads to one: not through an import, not through a name of its module, not
    as a string, and not by the names that configurations usually have.
    """

    def __init__(self, package: PackageModules) -> None:
        self._package = package
        self._known: dict[tuple[Scope, str], tuple[bool, bool]] = {}

    def concerns(self, own: LocalDef) -> bool:
        """Return whether a walk through a function's body could find anything of vLLM."""
        node = own.node
        assert isinstance(node, Function)
        cls = own.inside.method_of if own.inside is not None else None
        if (cls is not None and any(upstream(cls))) or own.scope.module().stars:
            return True
        text = own.file.cut(first_line(node), node.end_lineno or node.lineno)
        words = set(text.translate(_APART).split())
        if cls is not None and not words.isdisjoint(_stored_attributes(cls)):
            return True
        # A configuration is recognized by the usual names of its variables.
        is_config = "_config" in text and any(word.endswith("_config") and not word.startswith(VERBS) for word in words)
        if is_config or not words.isdisjoint(_TELLING):
            return True
        # A class or function inside may be returned.
        if node.__dict__["opens"] or ("modules" in words and _MODULES.search(text)):
            return True
        if "import" in words and (not words.isdisjoint(self._package.tops) or _RELATIVE.search(text)):
            return True
        # A short function may be a test of the version, which others ask.
        short = (node.end_lineno or node.lineno) - node.lineno <= guards.SHORT
        if short and _asks(text, words):
            return True
        module = own.scope.module()
        for word in {*(module.names.keys() & words), *(module.declared.keys() & words)}:
            key = module, word
            if key not in self._known:
                # A name that is only for type checkers stands for nothing elsewhere.
                value = (*module.names.get(word, ()), *module.declared.get(word, ()))
                self._known[key] = any(self._leads(one, ()) for one in value), any(map(self._may_test, value))
            leads, tests = self._known[key]
            if leads or (short and tests):
                return True
        return False

    def _leads(self, one: Value, seen: tuple[LocalDef, ...]) -> bool:
        """Return whether a value is something from vLLM, holds it, or is a module that may."""
        inner: Iterable[Values] = ()
        if isinstance(one, Name):
            found = None if one.is_vllm else self._package.follow(one)
            if found is None:
                return one.is_vllm or self._package.is_module(one.dotted)
            for other in found:
                if isinstance(other, Name) and (other.is_vllm or self._package.is_module(other.dotted)):
                    return True
            inner = [tuple(other for other in found if not isinstance(other, Name))]
        elif isinstance(one, Instance) or (isinstance(one, LocalDef) and one.result):
            return True
        elif isinstance(one, TextValue):
            return TOP in one.text
        elif isinstance(one, SequenceValue):
            inner = one.items
        elif isinstance(one, MappingValue):
            inner = (held for pair in one.pairs for held in pair)
        elif isinstance(one, LocalDef) and one.function is None and one not in seen:
            if any(upstream(one)):
                return True
            inner = (*(one.inside.names.values() if one.inside is not None else ()), *one.bases)
            seen = (*seen, one)
        return any(self._leads(other, seen) for value in inner for other in value)

    def _may_test(self, value: Value) -> bool:
        """Return whether a value is the outcome of a test, or a short function that may test."""
        for one in self._package.follow(value) or () if isinstance(value, Name) else (value,):
            if isinstance(one, ConditionValue | FlagValue):
                return True
            node = one.node if isinstance(one, LocalDef) else None
            last = node.end_lineno or node.lineno if node is not None else 0
            if isinstance(one, LocalDef) and isinstance(node, Function) and last - node.lineno <= guards.SHORT:
                text = one.file.cut(node.lineno, last)
                words = set(text.translate(_APART).split())
                names = one.scope.module().names
                held = (each for word in names.keys() & words for each in names[word])
                if _asks(text, words) or any(isinstance(each, (ConditionValue, FlagValue)) for each in held):
                    return True
        return False
