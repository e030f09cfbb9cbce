"""What a patch changes: a class or a module, named as an object or as a string that is resolved when it is loaded."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal, TypeGuard

from vllm_graft.errors import DeclarationError, TargetError, nearest

Owner = type | ModuleType
"""What attributes are set on."""

Readiness = Literal["ready", "importing", "absent"]


@dataclass(frozen=True, slots=True)
class Target:
    """A class or module: the module's name, the qualified name within it, and the object where one was given."""

    module: str
    qualname: str = ""
    given: Owner | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}" if self.qualname else self.module

    @property
    def is_class(self) -> bool:
        """Whether a class is meant; a name without a colon is a module."""
        return bool(self.qualname)

    def inside(self, attribute: str) -> str:
        """The qualified name of an attribute within the module."""
        return f"{self.qualname}.{attribute}" if self.is_class else attribute

    @property
    def short(self) -> str:
        """The last part of the name, for titles."""
        return (self.qualname or self.module).rpartition(".")[2]


def target_of(named: object) -> Target:
    """The target that stands between the brackets of ``VLLMPatch[...]``."""
    if isinstance(named, str):
        return _parsed(named)
    if isinstance(named, type):
        return Target(named.__module__, named.__qualname__, named)
    if isinstance(named, ModuleType):
        return Target(named.__name__, "", named)
    raise DeclarationError(
        f"{type(named).__name__} {getattr(named, '__name__', named)!r} cannot be a target",
        where="VLLMPatch[...]",
        fix='name a class, a module, or a string such as "pkg.module:Class"; a function is patched through its module',
    )


def _parsed(text: str) -> Target:
    module, colon, qualname = text.partition(":")
    parts = module.split(".") + (qualname.split(".") if colon else [])
    if not all(part.isidentifier() for part in parts):
        raise DeclarationError(
            f"{text!r} is not a target",
            where="VLLMPatch[...]",
            fix='write "pkg.module:Class", "pkg.module:Outer.Inner", or "pkg.module" for a module',
        )
    return Target(module, qualname)


def readiness(target: Target) -> Readiness:
    """Whether the target's module has run its body, is running it, or has not been imported."""
    if target.given is not None:
        return "ready"
    module = sys.modules.get(target.module)
    if module is None:
        return "absent"
    return "importing" if getattr(getattr(module, "__spec__", None), "_initializing", False) else "ready"


def resolved(target: Target, where: str) -> Owner:
    """The class or module itself; its module must have been imported."""
    if target.given is not None:
        return target.given
    owner: object = sys.modules[target.module]
    done: list[str] = []
    for part in target.qualname.split(".") if target.is_class else ():
        try:
            owner = getattr(owner, part)
        except AttributeError:
            raise missing_name(target, where, done, part, dir(owner)) from None
        done.append(part)
    if target.is_class and not isinstance(owner, type):
        raise not_a_class(target, where, type(owner).__name__, done)
    assert _is_owner(owner)
    return owner


def missing_name(target: Target, where: str, done: Sequence[str], part: str, names: Sequence[str]) -> TargetError:
    """The error where a module or class has no ``part``; ``names`` are those that it has."""
    moved = _moved(target.module, part) if not done else ""
    return TargetError(
        f"there is no {part!r} in {_spelled(target.module, done)}{moved or nearest(part, _public(names))}",
        where=where,
        fix="compare the target with the installed vLLM: it may have been renamed or moved",
    )


def not_a_class(target: Target, where: str, kind: str, done: Sequence[str]) -> TargetError:
    """The error where the target is neither a class nor a module."""
    return TargetError(
        f"it is a {kind}, and only classes and modules can be patched",
        where=where,
        fix=f'target the owner, "{_spelled(target.module, done[:-1])}", and define {done[-1]!r} in the patch',
    )


def _is_owner(value: object) -> TypeGuard[Owner]:
    return isinstance(value, type) or hasattr(value, "__dict__")


def _spelled(module: str, parts: Sequence[str]) -> str:
    return f"{module}:{'.'.join(parts)}" if parts else module


def _public(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith("__")]


def owner_now(target: Target, where: str, known: Places) -> Owner | None:
    """The target, or None where its module has yet to be imported; TargetError where it never can be."""
    if readiness(target) == "ready":
        return resolved(target, where)
    must_exist(target, where, known)
    return None


Places = dict[str, Sequence[str] | None]
"""Where the submodules of packages lie, as far as somebody has looked."""


def must_exist(target: Target, where: str, known: Places) -> None:
    """Raise TargetError unless the module can be found, by looking on disk: no package is imported for it.

    ``known`` keeps what was found, for others that are looked for at the same time.
    """
    parts = target.module.split(".")
    path = _search_path(parts[0], None, known)
    if path is None:
        raise TargetError(
            f"there is no module {parts[0]!r} in this environment",
            where=where,
            fix="install it, or correct the target",
        )
    for done in range(1, len(parts)):
        found = _search_path(".".join(parts[: done + 1]), path, known)
        if found is None:
            raise _missing(where, target, ".".join(parts[:done]), parts[done], path)
        path = found


def _search_path(name: str, path: Sequence[str] | None, known: Places) -> Sequence[str] | None:
    """Where the submodules of ``name`` lie: empty for a plain module, None where there is no such module."""
    if name not in known:
        known[name] = _looked_up(name, path)
    return known[name]


def _looked_up(name: str, path: Sequence[str] | None) -> Sequence[str] | None:
    loaded = sys.modules.get(name)
    if loaded is not None:
        return list(getattr(loaded, "__path__", ()))
    spec = importlib.util.find_spec(name) if path is None else importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None:
        return None
    return list(spec.submodule_search_locations or ())


def _moved(module: str, name: str) -> str:
    """Where a name is defined now, as the end of a sentence; empty where it is nowhere."""
    from vllm_graft.patching.upstream.moved import moved_to

    places = moved_to(module, name)
    return f", and {name!r} is defined in {' and '.join(places)}" if places else ""


def _missing(where: str, target: Target, package: str, missing: str, path: Sequence[str]) -> TargetError:
    import pkgutil

    beside = [module.name for module in pkgutil.iter_modules(path)]
    fix = "compare the target with the installed vLLM: it may have been renamed or moved"
    if missing[:1].isupper():
        fix = f'write "{package}:{missing}" if {missing!r} is a class: a colon stands before it'
    moved = _moved(target.module, target.qualname.partition(".")[0]) if target.is_class else ""
    hint = moved or (nearest(missing, beside) if beside else "")
    return TargetError(f"there is no module {missing!r} in {package!r}{hint}", where=where, fix=fix)
