"""One attribute of a target with the layers that patches put there: an onion that any layer can be taken out of.

At the bottom is what was there before; over it at most one replacement or addition; over that the wraps, in the order
in which their patches were applied. A layer of form ``self._original_x`` finds the one beneath under a private name on
the target, one per patch and attribute, so that two layers never share a name.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType

from vllm_graft.errors import ConflictError
from vllm_graft.patching import checks, surgery
from vllm_graft.patching.checks import ABSENT
from vllm_graft.patching.conflicts import refuse_second_definition, sort_by_after
from vllm_graft.patching.declaration import Declaration, Patch
from vllm_graft.patching.functions import AnyCallable, describe_origin, functions_in, innermost, parameter_at
from vllm_graft.patching.hooks import Hook, HookKind, call_position
from vllm_graft.patching.target import Owner

_lock = threading.RLock()
_lock_pid = os.getpid()


def change_lock() -> threading.RLock:
    """Return the lock to hold while targets are changed: one for all engines, and a new one in a forked child."""
    global _lock, _lock_pid
    if _lock_pid != os.getpid():
        # The thread that held it at the fork does not exist in the child and would never release it.
        _lock, _lock_pid = threading.RLock(), os.getpid()
    return _lock


@dataclass(slots=True, eq=False)
class PatchLayer:
    """One hook of one patch on one target.

    alias:    the private name of what lies beneath; empty if no function of the patch mentions it
    renames:  what ``_original_x`` becomes in the hook's code
    hit:      counts one call
    proven:   whether a replacement or addition has been called, so that its calls need no counting any more
    codes:    the code objects that run for this layer, or did before what lies beneath it changed
    """

    patch: Patch
    hook: Hook
    kind: HookKind
    order: int
    alias: str
    renames: Mapping[str, str]
    hit: surgery.Hit
    proven: bool = False
    codes: list[CodeType] = field(default_factory=list, repr=False)
    _made: tuple[object, bool, object] | None = field(default=None, repr=False)

    def build(self, beneath: object, place: PatchedAttribute) -> object:
        """Return what this layer sets on the target; the same object as long as what lies beneath is the same."""
        if self._made is None or self._made[0] is not beneath or self._made[1] is not self.proven:
            self._made = (beneath, self.proven, self._make(beneath, place))
        return self._made[2]

    def _make(self, beneath: object, place: PatchedAttribute) -> object:
        if self.hook.form == "value":
            return self.hook.value
        if self.hook.form == "property":
            return self._make_property(beneath, place)
        function = surgery.only_function(self.hook.value)
        upstream = next(iter(place.upstream_functions()), None)
        made = self._copy(function, place)
        if self.kind == "wrap":
            made = self._make_wrap(function, made, surgery.only_function(beneath), self.hit)
        elif place.is_cached:
            # Counted at each cache miss: exchanging the function after its first call would lose what that call cached.
            made = surgery.count_calls(made, self.hit)
        elif not self.proven:
            made = surgery.count_calls(made, surgery.hide_from_tracer(lambda: place.first_call(self)))
        self.codes.append(surgery.code_under(made))
        made.__doc__ = function.__doc__
        surgery.copy_signature(made, upstream if upstream is not None and self.kind == "wrap" else function)
        surgery.copy_identity(made, upstream, place.owner, self.hook.attribute)
        return surgery.convert_to_form(self.hook.form, made)

    def _copy(self, function: FunctionType, place: PatchedAttribute) -> FunctionType:
        owner = place.owner if isinstance(place.owner, type) else None
        return surgery.transplant(function, self.patch, owner, self.renames)

    def _make_wrap(
        self, written: FunctionType, copy: FunctionType, beneath: FunctionType | None, hit: surgery.Hit
    ) -> FunctionType:
        position = call_position(self.hook.form, self.patch.declaration.target.is_class)
        if beneath is not None and parameter_at(written, position) == "call":
            made = surgery.inject_call(copy, beneath, position, hit)
        else:
            made = surgery.count_calls(copy, hit)
        for like in (written, beneath):
            if like is not None:
                surgery.copy_attributes(made, like)
        return made

    def _make_property(self, beneath: object, place: PatchedAttribute) -> property:
        """Build a property: a wrap keeps the accessors it does not define, a replacement is the whole property."""
        parts: list[AnyCallable | None] = []
        below = surgery.accessors(beneath) if self.kind == "wrap" else (None, None, None)
        for mine, theirs in zip(surgery.accessors(self.hook.value), below, strict=True):
            if mine is None:
                parts.append(theirs)
                continue
            made = self._copy(mine, place)
            if self.kind == "wrap":
                made = self._make_wrap(mine, made, theirs, surgery.no_hit)
            self.codes.append(surgery.code_under(made))
            parts.append(surgery.copy_identity(made, theirs, place.owner, self.hook.attribute))
        getter, setter, deleter = parts
        return property(getter, setter, deleter, getattr(beneath, "__doc__", None) if self.kind == "wrap" else None)


AttributeState = tuple[tuple[PatchLayer, ...], dict[str, object]]
"""The layers of a patched attribute, and the value under each name that they set on the target."""


class PatchedAttribute:
    """The layers on one attribute of one target, and what was there before them.

    base:       the raw attribute in the target's own dictionary before the first layer, or ABSENT
    inherited:  the raw attribute of a base class if the target has none of its own, or ABSENT
    placed:     what was set on the target, by name: the attribute and the private names of layers beneath others
    """

    def __init__(self, owner: Owner, attribute: str) -> None:
        self.owner = owner
        self.attribute = attribute
        self.base = checks.own(owner, attribute)
        self.inherited = checks.inherited(owner, attribute) if self.base is ABSENT else ABSENT
        self.layers: tuple[PatchLayer, ...] = ()
        self.placed: dict[str, object] = {attribute: self.base}
        self._bottom = surgery.strip_cache(self.base)
        self.is_cached = self._bottom is not self.base
        self._cached: tuple[object, object] | None = None
        if self.inherited is not ABSENT and isinstance(owner, type):
            plain = checks.upstream_form(self.inherited) in ("value", "class", "callable")
            self._bottom = self.inherited if plain else surgery.delegate_to_bases(owner, attribute, self.inherited)

    def __str__(self) -> str:
        inside = f"{self.owner.__qualname__}." if isinstance(self.owner, type) else ""
        module = self.owner.__module__ if isinstance(self.owner, type) else self.owner.__name__
        return f"{module}:{inside}{self.attribute}" if inside else f"{module}.{self.attribute}"

    def upstream(self, layers: Sequence[PatchLayer]) -> object:
        """Return what a hook would change: the target's own attribute, an inherited one, or what a patch added."""
        if self.base is not ABSENT:
            return self._bottom
        if self.inherited is not ABSENT:
            return self.inherited
        return next((layer.hook.value for layer in layers if layer.kind == "add"), ABSENT)

    def upstream_functions(self) -> tuple[FunctionType, ...]:
        """Return the plain functions of what was there before; a property may have three."""
        return functions_in(self.inherited if self.base is ABSENT else self._bottom)

    def check_definition(self, layers: Sequence[PatchLayer], mine: Declaration, hook: Hook) -> None:
        """Raise ConflictError if a hook replaces or adds what another patch replaces or adds."""
        other = next((layer for layer in layers if layer.kind != "wrap"), None)
        if hook.kind != "wrap" and other is not None:
            kind: HookKind = "replace" if hook.kind == "auto" else hook.kind
            raise refuse_second_definition(self.attribute, mine, kind, other.patch.declaration, other.kind)

    def add_layer(self, layers: Sequence[PatchLayer], new: PatchLayer) -> tuple[PatchLayer, ...]:
        """Return the layers with a new one at its position in the onion."""
        below = [layer for layer in (*layers, new) if layer.kind != "wrap"]
        wraps = sorted((layer for layer in (*layers, new) if layer.kind == "wrap"), key=lambda layer: layer.order)
        return (*below, *sort_by_after(wraps, lambda layer: layer.patch.declaration))

    def remove_patch(self, patch: Patch) -> tuple[PatchLayer, ...]:
        """Return the layers without a patch's, or raise ConflictError if another patch wraps what this one added."""
        left = tuple(layer for layer in self.layers if layer.patch is not patch)
        if left and self.upstream(left) is ABSENT:
            user = left[0].patch.declaration.name
            what = f"it added {self.attribute!r}, which patch {user!r} wraps"
            raise ConflictError(what, where=patch.declaration.where, fix=f"revert {user!r} first")
        return left

    @property
    def is_ours(self) -> bool:
        """True if the target still holds what was put there."""
        return checks.own(self.owner, self.attribute) is self.placed[self.attribute]

    def check_ownership(self, where: str) -> None:
        """Raise ConflictError if other code has set or deleted the attribute since."""
        if self.is_ours:
            return
        found = checks.own(self.owner, self.attribute)
        does = "was deleted" if found is ABSENT else f"was set to {describe_origin(found)}"
        names = ", ".join(repr(layer.patch.declaration.name) for layer in self.layers)
        what = f"{self} {does} by other code, over what patch {names} put there"
        raise ConflictError(what, where=where, fix="leave out the other package's change, or this patch")

    def set_layers(self, layers: Sequence[PatchLayer]) -> None:
        """Put exactly these layers on the target; with none left, what was there before."""
        placed: dict[str, object] = {}
        top: object = self._bottom if layers else self.base
        for layer in layers:
            if layer.alias:
                placed[layer.alias] = top
            top = layer.build(top, self)
        placed[self.attribute] = self._with_cache(top) if layers else top
        self.restore((tuple(layers), placed))

    def _with_cache(self, top: object) -> object:
        """Put the layers behind a cache if upstream has one; the same cache as long as the layers are the same."""
        if not self.is_cached:
            return top
        if self._cached is None or self._cached[0] is not top:
            self._cached = (top, surgery.restore_cache(self.base, top))
        return self._cached[1]

    def snapshot(self) -> AttributeState:
        """Return the present state, for ``restore``."""
        return self.layers, self.placed

    def is_in(self, state: AttributeState) -> bool:
        """Return whether no layer has changed since a snapshot; changes by other code do not count."""
        return self.layers is state[0] and self.placed is state[1]

    def unpatched_state(self) -> AttributeState:
        """Return the state without any layer: what was there before."""
        return (), {self.attribute: self.base}

    def restore(self, state: AttributeState) -> None:
        """Set what a state names and remove what it does not; private names are set first and removed last."""
        layers, placed = state
        before = self.placed
        # Every name is recorded before it is set, so that an interrupt here can be undone.
        self.placed = {**dict.fromkeys(placed, ABSENT), **before}
        try:
            for name, value in placed.items():
                self._set(name, value)
            for name in self.placed.keys() - placed.keys():
                self._set(name, ABSENT)
            self.layers, self.placed = layers, placed
        except BaseException:
            for name in self.placed:
                self._set(name, before.get(name, ABSENT))
            self.placed = before
            raise

    def _set(self, name: str, value: object) -> None:
        if value is checks.own(self.owner, name):
            return
        if value is ABSENT:
            delattr(self.owner, name)
        else:
            setattr(self.owner, name, value)

    def first_call(self, layer: PatchLayer) -> None:
        """Count a replacement's first call, and exchange the counting function for the plain one."""
        if layer.proven:
            return
        layer.hit()
        if surgery.is_tracing():
            # The tracer is about to guard the function it found, and in the graph the counting one costs nothing.
            layer.proven = True
            return
        if not change_lock().acquire(blocking=False):
            # Another thread is changing targets: this call must not wait for it, and the next call will do.
            return
        try:
            layer.proven = True
            if layer in self.layers and self.is_ours:
                self.set_layers(self.layers)
        finally:
            change_lock().release()

    def codes(self) -> list[CodeType]:
        """Return the code objects that run when the attribute is called."""
        ours = [code for layer in self.layers for code in layer.codes]
        return [innermost(function).__code__ for function in self.upstream_functions()] + ours


def describe_running_call(codes: Collection[CodeType], owner: Owner) -> str:
    """Say where one of these code objects runs on this thread's stack for ``owner``; empty if none does.

    A patch that comes while its target runs has no effect on that call: vLLM loads plugins from inside
    ``EngineCore.__init__`` in a spawned engine, for example.
    """
    # By identity: equal code may stand in another file.
    wanted = {id(code) for code in codes}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame.f_code) in wanted and _concerns(frame, owner):
            return (
                f"{frame.f_code.co_qualname} was running when it was patched ({frame.f_code.co_filename}:"
                f"{frame.f_lineno}): that call, and what it had done before, used the unpatched code"
            )
        frame = frame.f_back
    return ""


def _concerns(frame: FrameType, owner: Owner) -> bool:
    """Return whether a call is on the owner: a base's method may run for another of its subclasses."""
    code = frame.f_code
    if not isinstance(owner, type) or not code.co_argcount:
        return True
    first = frame.f_locals.get(code.co_varnames[0])
    kind = first if isinstance(first, type) else type(first)
    return issubclass(kind, owner) or not any(issubclass(kind, base) for base in owner.__mro__[1:-1])
