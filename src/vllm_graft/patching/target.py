"""The class or module that a patch changes: parse its name, find it, and notice when its module is imported.

A target is named as an object or as a string, which is resolved when its module is loaded. ``ImportWatch`` notices that
a module of an exact name has run its body, before its importer sees it: a finder at the head of ``sys.meta_path`` asks
the finders behind it for the module and hooks its loader's ``exec_module``. Names copied by ``from module import name``
are thus taken from the patched module; an importer that took them while the module was still running, as circular
imports do, keeps the unpatched ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final, Literal, cast

from vllm_graft.errors import DeclarationError, TargetError, nearest
from vllm_graft.sources.locate import find_in, find_spec

Owner = type | ModuleType
"""The object whose attributes are set: a class or a module."""

Readiness = Literal["ready", "importing", "absent"]

_INSPECT_VLLM: Final = "compare the target with the installed vLLM: it may have been renamed or moved"


@dataclass(frozen=True, slots=True)
class Target:
    """A class or module: the module's name, the qualified name within it, and the object if one was given."""

    module: str
    qualname: str = ""
    given: Owner | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}" if self.qualname else self.module

    @property
    def is_class(self) -> bool:
        """True if a class is meant; a name without a colon is a module."""
        return bool(self.qualname)

    def inside(self, attribute: str) -> str:
        """The qualified name of an attribute within the module."""
        return f"{self.qualname}.{attribute}" if self.is_class else attribute

    @property
    def short(self) -> str:
        """The last part of the name, for titles."""
        return (self.qualname or self.module).rpartition(".")[2]


def target_of(named: object) -> Target:
    """Return the target that the brackets of ``VLLMPatch[...]`` name."""
    if isinstance(named, str):
        module, colon, qualname = named.partition(":")
        parts = module.split(".") + (qualname.split(".") if colon else [])
        if all(part.isidentifier() for part in parts):
            return Target(module, qualname)
        what = f"{named!r} is not a target"
        fix = 'write "pkg.module:Class", "pkg.module:Outer.Inner", or "pkg.module" for a module'
        raise DeclarationError(what, where="VLLMPatch[...]", fix=fix)
    if isinstance(named, type):
        return Target(named.__module__, named.__qualname__, named)
    if isinstance(named, ModuleType):
        return Target(named.__name__, "", named)
    what = f"{type(named).__name__} {getattr(named, '__name__', named)!r} cannot be a target"
    fix = 'name a class, a module, or a string such as "pkg.module:Class"; a function is patched through its module'
    raise DeclarationError(what, where="VLLMPatch[...]", fix=fix)


def readiness(target: Target) -> Readiness:
    """Return whether the target's module has run its body, is running it, or has not been imported."""
    if target.given is not None:
        return "ready"
    module = sys.modules.get(target.module)
    if module is None:
        return "absent"
    # The import system keeps a running module's spec marked; circular imports find such modules in sys.modules.
    return "importing" if getattr(getattr(module, "__spec__", None), "_initializing", False) else "ready"


def resolve_target(target: Target, where: str) -> Owner:
    """Return the class or module itself; its module must have been imported."""
    if target.given is not None:
        return target.given
    owner: object = sys.modules[target.module]
    done: list[str] = []
    for part in target.qualname.split(".") if target.is_class else ():
        try:
            owner = getattr(owner, part)
        except AttributeError:
            raise refuse_missing_name(target, where, done, part, dir(owner)) from None
        done.append(part)
    if target.is_class and not isinstance(owner, type):
        raise refuse_non_class(target, where, type(owner).__name__, done)
    return cast(Owner, owner)


def refuse_missing_name(
    target: Target, where: str, done: Sequence[str], part: str, names: Sequence[str]
) -> TargetError:
    """Build the error for a module or class without ``part``; ``names`` are those it has."""
    moved = _describe_move(target.module, part) if not done else ""
    public = [name for name in names if not name.startswith("__")]
    what = f"there is no {part!r} in {_spell(target.module, done)}{moved or nearest(part, public)}"
    return TargetError(what, where=where, fix=_INSPECT_VLLM)


def refuse_non_class(target: Target, where: str, kind: str, done: Sequence[str]) -> TargetError:
    """Build the error for a target that is neither a class nor a module."""
    fix = f'target the owner, "{_spell(target.module, done[:-1])}", and define {done[-1]!r} in the patch'
    return TargetError(f"it is a {kind}, but only classes and modules can be patched", where=where, fix=fix)


def _spell(module: str, parts: Sequence[str]) -> str:
    return f"{module}:{'.'.join(parts)}" if parts else module


def find_target(target: Target, where: str, known: SearchPaths) -> Owner | None:
    """Return the target, or None while its module is not imported; raise TargetError if it never can be."""
    if readiness(target) == "ready":
        return resolve_target(target, where)
    check_exists(target, where, known)
    return None


SearchPaths = dict[str, Sequence[str] | None]
"""The folders with the submodules of each package that was looked up; None for a module that does not exist."""


def check_exists(target: Target, where: str, known: SearchPaths) -> None:
    """Raise TargetError unless the module is found on disk; no package is imported for it.

    ``known`` caches the folders between targets that are checked together.
    """
    parts = target.module.split(".")
    path = _search_path(parts[0], None, known)
    if path is None:
        what = f"there is no module {parts[0]!r} in this environment"
        raise TargetError(what, where=where, fix="install it, or correct the target")
    for done in range(1, len(parts)):
        found = _search_path(".".join(parts[: done + 1]), path, known)
        if found is None:
            import pkgutil

            package, missing = ".".join(parts[:done]), parts[done]
            beside = [module.name for module in pkgutil.iter_modules(path)]
            fix = _INSPECT_VLLM
            if missing[:1].isupper():
                fix = f'write "{package}:{missing}" if {missing!r} is a class: a colon stands before it'
            moved = _describe_move(target.module, target.qualname.partition(".")[0]) if target.is_class else ""
            hint = moved or (nearest(missing, beside) if beside else "")
            raise TargetError(f"there is no module {missing!r} in {package!r}{hint}", where=where, fix=fix)
        path = found


def _search_path(name: str, path: Sequence[str] | None, known: SearchPaths) -> Sequence[str] | None:
    """Return the folders with the submodules of ``name``: empty for a plain module, None if there is none."""
    if name not in known:
        loaded = sys.modules.get(name)
        if loaded is not None:
            known[name] = list(getattr(loaded, "__path__", ()))
        else:
            spec = find_spec(name) if path is None else find_in(name, path)
            known[name] = None if spec is None else list(spec.submodule_search_locations or ())
    return known[name]


def _describe_move(module: str, name: str) -> str:
    """Say where a name is defined now, as the end of a sentence; empty if it is nowhere."""
    from vllm_graft.sources.finder import moved_to

    places = moved_to(module, name)
    return f", and {name!r} is defined in {' and '.join(places)}" if places else ""


Notice = Callable[[str], None]


class ImportWatch(MetaPathFinder):
    """Calls ``before`` and ``after`` around the body of each watched module, at a reload too.

    An exception in ``after`` fails the import.
    """

    def __init__(self, before: Notice, after: Notice) -> None:
        self._before = before
        self._after = after
        self._names: frozenset[str] = frozenset()

    def watch(self, names: frozenset[str]) -> None:
        """Watch exactly these modules; the finder is registered only while there are any."""
        self._names = names
        if names and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        elif not names and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the finders behind this one make of a watched name."""
        if fullname not in self._names or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find else None
            if isinstance(spec, ModuleSpec):
                self._hook(spec)
                return spec
        return None

    def _hook(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # A loader may serve several modules, as that of a zip file does.
            if module.__name__ != spec.name:
                run(module)
                return
            vars(loader).pop("exec_module", None)
            self._before(spec.name)
            run(module)
            self._after(spec.name)

        if isinstance(loader, type):
            raise TargetError(f"the module {spec.name!r} is built into Python", fix="import it before the patch")
        loader.exec_module = exec_module  # type: ignore[method-assign]

    def await_end(self, module: ModuleType) -> None:
        """Call ``after`` when the body of a module that is running now has ended."""
        spec = module.__spec__
        if spec is None or "_graft_ended" in vars(spec):
            return
        plain = type(spec)
        after = self._after

        class RunningSpec(plain):  # type: ignore[misc, valid-type]
            """A spec that notices the import system's last act on a module: setting ``_initializing`` to False."""

            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, value)
                if name != "_initializing" or value:
                    return
                self.__class__ = plain  # type: ignore[assignment]
                del self._graft_ended
                if sys.modules.get(self.name) is module:
                    try:
                        after(self.name)
                    except BaseException:
                        # As the import system does with a module whose body raises: the next import must not find it.
                        sys.modules.pop(self.name, None)
                        raise

        setattr(spec, "_graft_ended", False)  # noqa: B010 - specs have no such attribute for a type checker
        spec.__class__ = RunningSpec
