"""The form of a patch: ``VLLMPatch[Target]``, its keywords, and the marks ``wrap``, ``replace`` and ``add``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeVar, cast, get_args, overload

from vllm_graft.errors import DeclarationError, nearest
from vllm_graft.patching.functions import closure_values, functions_in
from vllm_graft.patching.hooks import Hook, HookKind, MarkedValue, PatchNamespace, read_body
from vllm_graft.patching.target import Target, target_of
from vllm_graft.points import ROLES, Role
from vllm_graft.versions import check_range

OnDrift = Literal["ignore", "warn", "refuse"]
"""The reaction to a hook whose upstream code was not reviewed: none, a warning, or a refusal."""

KEYWORDS: Final = (
    "name", "vllm", "why", "upstream", "remove_when", "processes", "models", "after", "conflicts", "on_drift", "locked",
)  # fmt: skip
"""The keywords of a patch class."""

F = TypeVar("F")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Declaration:
    """The facts that a patch class states about itself.

    name:         its name in configuration, reports and errors
    target:       the class or module it changes
    hooks:        the attributes it changes; one may have several bodies, each for other releases
    vllm:         the releases it is written for, a PEP 440 range; empty for all
    why:          the reason it exists
    upstream:     the issue or pull request it goes back to
    remove_when:  the event that makes it superfluous
    processes:    the roles of the processes it is for; a plan decides by them, the engine does not look
    models:       the models it is for, globs as in a profile; none for all. A plan decides by them too
    after:        patches over which its layers lie, wherever both change one attribute
    conflicts:    patches it cannot run beside: names, globs, or "package:name"
    on_drift:     see ``OnDrift``; None refuses a replacement and warns of a wrap whose signature is still the same
    locked:       whether it has a lock file, and is refused if the file is missing
    defined_in:   module and qualified name of the class
    """

    name: str
    target: Target
    hooks: tuple[Hook, ...]
    vllm: str
    why: str
    upstream: str
    remove_when: str
    processes: frozenset[Role]
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
        """The patch, its class and its target, for the beginning of an error."""
        return _place(self.name, self.defined_in, self.target)


class _PatchType(type):
    """Keeps several bodies of one name while a patch's class statement runs."""

    @classmethod
    def __prepare__(cls, name: str, bases: tuple[type, ...], /, **keywords: object) -> PatchNamespace:
        return PatchNamespace()


class VLLMPatch(Generic[T], metaclass=_PatchType):
    """A surgical change to one class or module.

    ::

        class Guard(VLLMPatch["vllm.v1.metrics.loggers:StatLoggerManager"], name="guard", vllm=">=0.26,<0.33"):
            @wrap
            def record(self, *args, **kwargs):
                return self._original_record(*args, **kwargs)

    The target is a class, a module, or a string; a string is resolved when its module is imported, so declaring
    costs no import. An attribute without a mark wraps if it uses ``_original_<its name>`` or takes ``call``;
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
        processes: Iterable[str] = ROLES,
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
        if not hasattr(cls, "_patch_target"):
            fix = f"write class {cls.__name__}(VLLMPatch[Target])"
            raise DeclarationError("it has no target", where=where, fix=fix)
        if len(cls.__bases__) != 1 or "_patch_target" not in vars(cls.__bases__[0]):
            what = "it inherits from something other than VLLMPatch[Target], but only its own body would be applied"
            fix = "derive from VLLMPatch[Target] alone, and put shared code into functions that the hooks call"
            raise DeclarationError(what, where=where, fix=fix)
        for keyword in unknown:
            what = f"it has no keyword {keyword!r}{nearest(keyword, KEYWORDS)}"
            raise DeclarationError(what, where=where, fix=f"use {', '.join(KEYWORDS)}")
        levels = get_args(OnDrift)
        if on_drift is not None and on_drift not in levels:
            raise DeclarationError(f"on_drift= is {on_drift!r}", where=where, fix=f"use one of {', '.join(levels)}")
        name = name or cls.__name__
        if not (name.isascii() and all(part.isalnum() or part in "-_.:" for part in name)):
            fix = "use letters, digits and any of '-_.:', because names appear in comma-separated lists"
            raise DeclarationError(f"{name!r} cannot be its name", where=where, fix=fix)
        named = {processes} if isinstance(processes, str) else set(processes)
        for process in sorted(named.difference(ROLES)):
            what = f"there is no process {process!r}{nearest(process, ROLES)}"
            raise DeclarationError(what, where=where, fix=f"use some of {', '.join(sorted(ROLES))}")
        if not named:
            fix = "leave processes= out to mean every one"
            raise DeclarationError("it names no process at all", where=where, fix=fix)
        cls.declaration = Declaration(
            name=name,
            target=cls._patch_target,
            hooks=read_body(dict(vars(cls)), cls, cls._patch_target, where),
            vllm=check_range(vllm, where),
            why=why,
            upstream=upstream,
            remove_when=remove_when,
            processes=frozenset(role for role in ROLES if role in named),
            models=_check_patterns("models", models, where),
            after=_check_patterns("after", after, where),
            conflicts=_check_patterns("conflicts", conflicts, where),
            on_drift=on_drift,
            locked=locked,
            defined_in=defined_in,
        )
        # Upstream methods may be named so too, and hooks for them must not hide the patch's own.
        for method in ("apply", "revert", "__init_subclass__", "__class_getitem__"):
            if method in vars(cls):
                delattr(cls, method)

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

        default_engine().apply([as_patch(cls)])

    @classmethod
    def revert(cls) -> None:
        """Revert this patch through the process's default engine."""
        from vllm_graft.patching.engine import default_engine

        default_engine().revert(as_patch(cls))


Patch = type[VLLMPatch[Any]]
"""A declared patch: the class itself, never an instance."""


def as_patch(cls: object) -> Patch:
    """Return the class if it is a declared patch, or raise DeclarationError."""
    if isinstance(cls, type) and issubclass(cls, VLLMPatch) and "declaration" in vars(cls):
        return cls
    what = f"{getattr(cls, '__qualname__', cls)!r} is not a declared patch"
    raise DeclarationError(what, fix="write class MyPatch(VLLMPatch[Target])")


def min_vllm_version(version: str) -> Callable[[type[F]], type[F]]:
    """Narrow a patch to vLLM ``version`` and later, in addition to its ``vllm=`` range."""

    def narrow(cls: type[F]) -> type[F]:
        patch = as_patch(cls)
        known = patch.declaration
        lower = check_range(f">={version}", known.where)
        patch.declaration = dataclasses.replace(known, vllm=f"{known.vllm},{lower}" if known.vllm else lower)
        return cls

    return narrow


def _place(name: str, defined_in: str, target: Target | None) -> str:
    return f"patch {name!r} ({defined_in})" + (f" on {target}" if target else "")


def _check_patterns(keyword: str, names: Iterable[str], where: str) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else tuple(names)
    for name in found:
        if not isinstance(name, str) or not name.strip():
            raise DeclarationError(f"{keyword}= has {name!r}, which is not a name", where=where, fix="give strings")
    return found


@overload
def wrap(function: F) -> F: ...
@overload
def wrap(*, vllm: str) -> Callable[[F], F]: ...
def wrap(function: F | None = None, *, vllm: str = "") -> F | Callable[[F], F]:
    """Mark a hook that wraps what is there and reaches it by ``call`` or ``self._original_<name>``."""
    return _mark("wrap", function, vllm)


@overload
def replace(value: F) -> F: ...
@overload
def replace(*, vllm: str) -> Callable[[F], F]: ...
def replace(value: F | None = None, *, vllm: str = "") -> F | Callable[[F], F]:
    """Mark a hook that takes the place of what is there; refused if there is nothing."""
    return _mark("replace", value, vllm)


@overload
def add(value: F) -> F: ...
@overload
def add(*, vllm: str) -> Callable[[F], F]: ...
def add(value: F | None = None, *, vllm: str = "") -> F | Callable[[F], F]:
    """Mark a hook that is new; refused if the target has the name already."""
    return _mark("add", value, vllm)


def _mark(kind: HookKind, value: F | None, vllm: str) -> F | Callable[[F], F]:
    """Mark a value, or return the decorator that marks one of several bodies with its ``vllm=`` range."""
    if vllm and value is None:
        return lambda body: _mark_value(kind, body, vllm)
    return _mark_value(kind, cast(F, value), "")


def _mark_value(kind: HookKind, value: F, vllm: str) -> F:
    if isinstance(value, property):
        # The mark goes on the getter, because @x.setter must still find a property.
        return cast(F, property(cast(Any, MarkedValue(kind, value.fget, vllm)), value.fset, value.fdel, value.__doc__))
    return cast(F, MarkedValue(kind, value, vllm))


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(Ellipsis))


def patchset_hash(patches: Iterable[Patch]) -> str:
    """Hash patches in this order to 16 hexadecimal digits, equal in every process and run.

    vLLM caches compiled code under a key that knows nothing of patches, so without this hash in the key a run would
    load what an unpatched one compiled. It covers names, targets and the code of the hooks, but not of what the hooks
    call. The order counts because it decides which layer runs first.
    """
    import hashlib  # loads OpenSSL, which declaring a patch does not need

    parts: list[str] = []
    for declaration in (as_patch(patch).declaration for patch in patches):
        parts.append(f"patch {declaration.name} {declaration.target}")
        for hook in declaration.hooks:
            parts.append(f"hook {hook.attribute} {hook.kind} {hook.form}")
            functions = functions_in(hook.value)
            for function in functions:
                parts += _function_parts(function, set())
            if not functions:
                parts.append(_constant_text(hook.value))
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _function_parts(function: FunctionType, seen: set[int]) -> Iterator[str]:
    if id(function) in seen:
        return
    seen.add(id(function))
    yield from _code_parts(function.__code__)
    yield _constant_text(function.__defaults__)
    yield _constant_text(function.__kwdefaults__)
    for value in closure_values(function):
        if isinstance(value, FunctionType):
            yield from _function_parts(value, seen)
        else:
            yield _constant_text(value)


def _code_parts(code: CodeType) -> Iterator[str]:
    yield f"{code.co_name} {code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags}"
    yield code.co_code.hex()
    yield f"{code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        else:
            yield _constant_text(constant)


def _constant_text(value: object) -> str:
    """Return a text for a value, without addresses or an order that differs between processes."""
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} {[_constant_text(one) for one in value]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(_constant_text(one) for one in value)}"
    if isinstance(value, dict):
        return f"dict {[(_constant_text(key), _constant_text(one)) for key, one in value.items()]}"
    named = value if isinstance(value, type) else type(value)
    return f"{named.__module__}.{named.__qualname__}"
