"""How a patch is written: ``VLLMPatch[Target]`` and its keywords. The marks of its hooks are in ``marks.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeVar, get_args

from vllm_graft.errors import DeclarationError, nearest
from vllm_graft.patching.hooks import Body, Hook, read_body
from vllm_graft.patching.ranges import check_range
from vllm_graft.patching.target import Target, target_of

PROCESSES = frozenset({"frontend", "engine", "worker", "registry"})
"""The kinds of process vLLM starts: the front end, the engine core, workers, and the model-inspection subprocess."""

OnDrift = Literal["ignore", "warn", "refuse"]
"""What is done with a hook whose upstream code nobody has reviewed: nothing, a warning, or a refusal."""

KEYWORDS: Final = (
    "name", "vllm", "why", "upstream", "remove_when", "processes", "models", "after", "conflicts", "on_drift", "locked",
)  # fmt: skip
"""What a patch class may be given."""

F = TypeVar("F")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a patch class says of itself.

    name:         what it is called in configuration, reports and errors
    target:       the class or module it changes
    hooks:        the attributes it changes; one may have several bodies, each for other releases
    vllm:         the releases it is written for, a PEP 440 range; empty for all
    why:          the reason it exists
    upstream:     the issue or pull request it goes back to
    remove_when:  the event that makes it superfluous
    processes:    where it is wanted; the engine takes no notice, whoever applies it decides
    models:       the models it is for, globs as in a profile; none for all. As with processes, a plan decides
    after:        patches over which its layers lie, wherever both stand on one attribute
    conflicts:    patches it cannot run beside: names, globs, or "package:name"
    on_drift:     see ``OnDrift``; None refuses a replacement and warns of a wrap whose signature is still the same
    locked:       whether it has a lock, so that it is refused where the lock is missing
    defined_in:   module and qualified name of the class
    """

    name: str
    target: Target
    hooks: tuple[Hook, ...]
    vllm: str
    why: str
    upstream: str
    remove_when: str
    processes: frozenset[str]
    models: tuple[str, ...]
    after: tuple[str, ...]
    conflicts: tuple[str, ...]
    on_drift: OnDrift | None
    locked: bool
    defined_in: str

    @property
    def package(self) -> str:
        """The top-level package that the patch comes from."""
        return self.defined_in.partition(".")[0]

    @property
    def where(self) -> str:
        """Who speaks and of what, for the beginning of an error."""
        return _place(self.name, self.defined_in, self.target)


class _PatchType(type):
    """Keeps several bodies of one name apart while a patch's class statement runs."""

    @classmethod
    def __prepare__(cls, name: str, bases: tuple[type, ...], /, **keywords: object) -> Body:
        return Body()


class VLLMPatch(Generic[T], metaclass=_PatchType):
    """A surgical change to one class or module.

    ::

        class Guard(VLLMPatch["vllm.v1.metrics.loggers:StatLoggerManager"], name="guard", vllm=">=0.26,<0.33"):
            @wrap
            def record(self, *args, **kwargs):
                return self._original_record(*args, **kwargs)

    The target is a class, a module, or a string; a string is resolved when its module is imported, so declaring
    costs no import. An attribute without a mark wraps if it mentions ``_original_<its name>`` or takes ``call``;
    otherwise it replaces what is there or adds what is not. The class is never instantiated.
    """

    declaration: ClassVar[Declaration]
    _patch_target: ClassVar[Target]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """In a hook, ``self`` is an instance of the target."""

    def __init_subclass__(
        cls,
        *,
        name: str = "",
        vllm: str = "",
        why: str = "",
        upstream: str = "",
        remove_when: str = "",
        processes: Iterable[str] = PROCESSES,
        models: Iterable[str] = (),
        after: Iterable[str] = (),
        conflicts: Iterable[str] = (),
        on_drift: OnDrift | None = None,
        locked: bool = False,
        **unknown: object,
    ) -> None:
        super().__init_subclass__()
        if "_patch_target" in vars(cls):
            return
        defined_in = f"{cls.__module__}.{cls.__qualname__}"
        where = _place(name or cls.__name__, defined_in, getattr(cls, "_patch_target", None))
        _check_bases(cls, where)
        _check_keywords(unknown, where)
        cls.declaration = Declaration(
            name=_checked_name(name or cls.__name__, where),
            target=cls._patch_target,
            hooks=read_body(dict(vars(cls)), cls, cls._patch_target, where),
            vllm=check_range(vllm, where),
            why=why,
            upstream=upstream,
            remove_when=remove_when,
            processes=_checked_processes(processes, where),
            models=_checked_names("models", models, where),
            after=_checked_names("after", after, where),
            conflicts=_checked_names("conflicts", conflicts, where),
            on_drift=_checked_on_drift(on_drift, where),
            locked=locked,
            defined_in=defined_in,
        )
        _uncover(cls)

    if not TYPE_CHECKING:

        def __class_getitem__(cls, target: object) -> type[VLLMPatch]:
            if cls is not VLLMPatch:
                raise DeclarationError(f"{cls.__name__} has a target already", fix="write VLLMPatch[Target]")
            found = target_of(target)
            return type(f"VLLMPatch[{found.short}]", (VLLMPatch,), {"_patch_target": found, "__module__": __name__})

    @classmethod
    def apply(cls) -> None:
        """Apply this patch through the process's default engine; applying it again changes nothing."""
        from vllm_graft.patching.engine import default_engine

        default_engine().apply([declared(cls)])

    @classmethod
    def revert(cls) -> None:
        """Take this patch back through the process's default engine."""
        from vllm_graft.patching.engine import default_engine

        default_engine().revert(declared(cls))


Patch = type[VLLMPatch[Any]]
"""A declared patch: the class itself, never an instance."""


def declared(cls: object) -> Patch:
    """The class, if it is a declared patch; DeclarationError otherwise."""
    if isinstance(cls, type) and issubclass(cls, VLLMPatch) and "declaration" in vars(cls):
        return cls
    raise DeclarationError(
        f"{getattr(cls, '__qualname__', cls)!r} is not a declared patch", fix="write class MyPatch(VLLMPatch[Target])"
    )


def min_vllm_version(version: str) -> Callable[[type[F]], type[F]]:
    """Narrow a patch to vLLM ``version`` and later, in addition to its ``vllm=`` range."""

    def narrow(cls: type[F]) -> type[F]:
        patch = declared(cls)
        known = patch.declaration
        lower = check_range(f">={version}", known.where)
        patch.declaration = dataclasses.replace(known, vllm=f"{known.vllm},{lower}" if known.vllm else lower)
        return cls

    return narrow


def _place(name: str, defined_in: str, target: Target | None) -> str:
    return f"patch {name!r} ({defined_in})" + (f" on {target}" if target else "")


def _check_bases(cls: type, where: str) -> None:
    if not hasattr(cls, "_patch_target"):
        raise DeclarationError("it has no target", where=where, fix=f"write class {cls.__name__}(VLLMPatch[Target])")
    base = cls.__bases__[0]
    if len(cls.__bases__) != 1 or "_patch_target" not in vars(base):
        raise DeclarationError(
            "it inherits from something else than VLLMPatch[Target], and only its own body would be applied",
            where=where,
            fix="derive from VLLMPatch[Target] alone, and put shared code into functions that the hooks call",
        )


def _check_keywords(unknown: dict[str, object], where: str) -> None:
    for keyword in unknown:
        raise DeclarationError(
            f"it has no keyword {keyword!r}{nearest(keyword, KEYWORDS)}", where=where, fix=f"use {', '.join(KEYWORDS)}"
        )


def _checked_name(name: str, where: str) -> str:
    if name.isascii() and all(part.isalnum() or part in "-_.:" for part in name):
        return name
    raise DeclarationError(
        f"{name!r} cannot be its name",
        where=where,
        fix="use letters, digits and any of '-_.:', because names stand in lists that commas separate",
    )


def _checked_processes(processes: Iterable[str], where: str) -> frozenset[str]:
    asked: frozenset[str] = frozenset((processes,)) if isinstance(processes, str) else frozenset(processes)
    for name in sorted(asked - PROCESSES):
        raise DeclarationError(
            f"there is no process {name!r}{nearest(name, PROCESSES)}",
            where=where,
            fix=f"use some of {', '.join(sorted(PROCESSES))}",
        )
    if not asked:
        raise DeclarationError("it wants no process at all", where=where, fix="leave processes= out to mean every one")
    return asked


def _checked_names(keyword: str, names: Iterable[str], where: str) -> tuple[str, ...]:
    asked = (names,) if isinstance(names, str) else tuple(names)
    for name in asked:
        if not isinstance(name, str) or not name.strip():
            raise DeclarationError(f"{keyword}= has {name!r}, which is no name", where=where, fix="give strings")
    return asked


def _checked_on_drift(on_drift: OnDrift | None, where: str) -> OnDrift | None:
    known = get_args(OnDrift)
    if on_drift is None or on_drift in known:
        return on_drift
    raise DeclarationError(f"on_drift= is {on_drift!r}", where=where, fix=f"use one of {', '.join(known)}")


def _uncover(cls: type) -> None:
    """Take hooks off the patch class that hide what every patch has: upstream methods may be named ``apply`` too."""
    for name in ("apply", "revert", "__init_subclass__", "__class_getitem__"):
        if name in vars(cls):
            delattr(cls, name)
