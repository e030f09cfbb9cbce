"""One attribute of one target with the layers patches put there: an onion that any layer can be taken out of.

At the bottom is what was there before; over it at most one replacement or addition; over that the wraps, in the order
in which their patches were applied. A layer of form ``self._original_x`` finds the one beneath under a private name on
the target, one per patch and attribute, so that two layers never meet under the same name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType

from vllm_graft.errors import ConflictError
from vllm_graft.patching import caches, checks, layers, neighbours, surgery
from vllm_graft.patching.checks import ABSENT
from vllm_graft.patching.declare import Declaration, Patch
from vllm_graft.patching.functions import Function, described, functions_in, innermost, parameter_at
from vllm_graft.patching.hooks import Hook, Kind, call_position
from vllm_graft.patching.target import Owner

_lock = threading.RLock()
_lock_pid = os.getpid()


def lock() -> threading.RLock:
    """The lock under which targets are changed: one for all engines, and a new one in a forked child."""
    global _lock, _lock_pid
    if _lock_pid != os.getpid():
        # The thread that held it at the fork does not exist in the child and would never release it.
        _lock, _lock_pid = threading.RLock(), os.getpid()
    return _lock


@dataclass(slots=True, eq=False)
class Layer:
    """One hook of one patch on one target.

    alias:    the private name of what lies beneath, empty where no function of the patch asks for it
    renames:  what ``_original_x`` becomes in the hook's code
    hit:      counts one call
    proven:   a replacement or addition that was called once and needs no counting any more
    codes:    the code objects that run for this layer, or did before what lies beneath it changed
    """

    patch: Patch
    hook: Hook
    kind: Kind
    order: int
    alias: str
    renames: Mapping[str, str]
    hit: surgery.Hit
    proven: bool = False
    codes: list[CodeType] = field(default_factory=list, repr=False)
    _made: tuple[object, bool, object] | None = field(default=None, repr=False)

    def over(self, beneath: object, slot: Slot) -> object:
        """What is set on the target for this layer; the same object as long as what lies beneath is the same."""
        if self._made is None or self._made[0] is not beneath or self._made[1] is not self.proven:
            self._made = (beneath, self.proven, self._make(beneath, slot))
        return self._made[2]

    def _make(self, beneath: object, slot: Slot) -> object:
        if self.hook.form == "value":
            return self.hook.value
        if self.hook.form == "property":
            return self._property(beneath, slot)
        function = surgery.single(self.hook.value)
        upstream = slot.upstream_function()
        made = self._copy(function, slot)
        if self.kind == "wrap":
            made = self._wrapping(function, made, surgery.single(beneath), self.hit)
        elif slot.is_cached:
            # Counted at each miss: to exchange the function after its first call would lose what that call cached.
            made = layers.counted(made, self.hit)
        elif not self.proven:
            made = layers.counted(made, surgery.once_when_traced(lambda: slot.first_call(self)))
        self.codes.append(layers.code_under(made))
        made.__doc__ = function.__doc__
        surgery.signed_like(made, upstream if upstream is not None and self.kind == "wrap" else function)
        return surgery.reformed(self.hook.form, surgery.dressed(made, upstream, slot.owner, self.hook.attribute))

    def _copy(self, function: FunctionType, slot: Slot) -> FunctionType:
        owner = slot.owner if isinstance(slot.owner, type) else None
        return surgery.transplanted(function, self.patch, owner, self.renames)

    def _wrapping(
        self, written: FunctionType, copy: FunctionType, beneath: FunctionType | None, hit: surgery.Hit
    ) -> FunctionType:
        position = call_position(self.hook.form, self.patch.declaration.target.is_class)
        if beneath is not None and parameter_at(written, position) == "call":
            return layers.passing(copy, beneath, position, hit)
        return layers.counted(copy, hit)

    def _property(self, beneath: object, slot: Slot) -> property:
        """Accessors that a wrap does not mention stay as they are beneath; a replacement is the whole property."""
        parts: list[Function | None] = []
        below = surgery.accessors(beneath) if self.kind == "wrap" else (None, None, None)
        for mine, theirs in zip(surgery.accessors(self.hook.value), below, strict=True):
            if mine is None:
                parts.append(theirs)
                continue
            made = self._copy(mine, slot)
            if self.kind == "wrap":
                made = self._wrapping(mine, made, theirs, surgery.uncounted)
            self.codes.append(layers.code_under(made))
            parts.append(surgery.dressed(made, theirs, slot.owner, self.hook.attribute))
        getter, setter, deleter = parts
        return property(getter, setter, deleter, getattr(beneath, "__doc__", None) if self.kind == "wrap" else None)


SlotState = tuple[tuple[Layer, ...], dict[str, object]]
"""The layers of a slot, and what stands under each name on its target."""


class Slot:
    """The layers on one attribute, and what was there before them."""

    def __init__(self, owner: Owner, attribute: str) -> None:
        self.owner = owner
        self.attribute = attribute
        self.base = checks.own(owner, attribute)
        self.inherited = checks.inherited(owner, attribute) if self.base is ABSENT else ABSENT
        self.layers: tuple[Layer, ...] = ()
        self.placed: dict[str, object] = {attribute: self.base}
        self._bottom = caches.uncached(self.base)
        self.is_cached = self._bottom is not self.base
        self._cached: tuple[object, object] | None = None
        if self.inherited is not ABSENT and isinstance(owner, type):
            plain = checks.upstream_form(self.inherited) in ("value", "class", "callable")
            self._bottom = self.inherited if plain else surgery.from_bases(owner, attribute, self.inherited)

    def __str__(self) -> str:
        inside = f"{self.owner.__qualname__}." if isinstance(self.owner, type) else ""
        module = self.owner.__module__ if isinstance(self.owner, type) else self.owner.__name__
        return f"{module}:{inside}{self.attribute}" if inside else f"{module}.{self.attribute}"

    def upstream(self, layers: Sequence[Layer]) -> object:
        """What a hook meets under this name: the target's own, an inherited one, or what a patch added."""
        if self.base is not ABSENT:
            return self._bottom
        if self.inherited is not ABSENT:
            return self.inherited
        return next((layer.hook.value for layer in layers if layer.kind == "add"), ABSENT)

    def upstream_function(self) -> FunctionType | None:
        """The first plain function of what was there before, for its name and signature."""
        found = self._upstream_functions()
        return found[0] if found else None

    def _upstream_functions(self) -> tuple[FunctionType, ...]:
        return functions_in(self.inherited if self.base is ABSENT else self._bottom)

    def check_definer(self, layers: Sequence[Layer], mine: Declaration, hook: Hook) -> None:
        """Raise ConflictError where a hook defines the name that another patch has defined."""
        other = next((layer for layer in layers if layer.kind != "wrap"), None)
        if hook.kind != "wrap" and other is not None:
            kind: Kind = "replace" if hook.kind == "auto" else hook.kind
            raise neighbours.second(self.attribute, mine, kind, other.patch.declaration, other.kind)

    def with_layer(self, layers: Sequence[Layer], new: Layer) -> tuple[Layer, ...]:
        """The layers and a new one in its place."""
        below = [layer for layer in (*layers, new) if layer.kind != "wrap"]
        wraps = sorted((layer for layer in (*layers, new) if layer.kind == "wrap"), key=lambda layer: layer.order)
        return (*below, *neighbours.ordered(wraps, lambda layer: layer.patch.declaration))

    def without_patch(self, patch: Patch) -> tuple[Layer, ...]:
        """The layers but for a patch's; ConflictError where another patch wraps what this one added."""
        left = tuple(layer for layer in self.layers if layer.patch is not patch)
        if left and self.upstream(left) is ABSENT:
            user = left[0].patch.declaration.name
            raise ConflictError(
                f"it added {self.attribute!r}, which patch {user!r} wraps",
                where=patch.declaration.where,
                fix=f"revert {user!r} first",
            )
        return left

    @property
    def is_ours(self) -> bool:
        """Whether the target still holds what was put there."""
        return checks.own(self.owner, self.attribute) is self.placed[self.attribute]

    def check_stranger(self, where: str) -> None:
        """Raise ConflictError where somebody else has set or deleted the attribute since."""
        if self.is_ours:
            return
        found = checks.own(self.owner, self.attribute)
        does = "was deleted" if found is ABSENT else f"was set to {described(found)}"
        names = ", ".join(repr(layer.patch.declaration.name) for layer in self.layers)
        raise ConflictError(
            f"{self} {does} by somebody else, over what patch {names} put there",
            where=where,
            fix="leave out the other package's change, or this patch",
        )

    def become(self, layers: Sequence[Layer]) -> None:
        """Put exactly these layers on the target; with none left, what was there before."""
        placed: dict[str, object] = {}
        top: object = self._bottom if layers else self.base
        for layer in layers:
            if layer.alias:
                placed[layer.alias] = top
            top = layer.over(top, self)
        placed[self.attribute] = self._with_cache(top) if layers else top
        self.put_back((tuple(layers), placed))

    def _with_cache(self, top: object) -> object:
        """The layers behind a cache where upstream has one; the same cache as long as they are the same."""
        if not self.is_cached:
            return top
        if self._cached is None or self._cached[0] is not top:
            self._cached = (top, caches.recached(self.base, top))
        return self._cached[1]

    def snapshot(self) -> SlotState:
        """What ``put_back`` takes to restore this very state."""
        return self.layers, self.placed

    def is_in(self, state: SlotState) -> bool:
        """Whether nothing has been put here since that snapshot; what a stranger has done does not count."""
        return self.layers is state[0] and self.placed is state[1]

    def bare(self) -> SlotState:
        """The state without any layer: what was there before."""
        return (), {self.attribute: self.base}

    def put_back(self, state: SlotState) -> None:
        """Set what the state names and remove what it does not, the private names first in and last out."""
        layers, placed = state
        before = self.placed
        # Every name is known before it is set, so that whoever is interrupted here can take it off again.
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
        current = checks.own(self.owner, name)
        if value is current:
            return
        if value is ABSENT:
            delattr(self.owner, name)
        else:
            setattr(self.owner, name, value)

    def first_call(self, layer: Layer) -> None:
        """Count a replacement's first call and put the plain function where the counting one was."""
        if layer.proven:
            return
        layer.hit()
        if surgery.being_traced():
            # The tracer is about to guard the function it found, and in the graph the counting one costs nothing.
            layer.proven = True
            return
        if not lock().acquire(blocking=False):
            # Somebody is changing targets just now: this call must not wait for them, and the next one will do.
            return
        try:
            layer.proven = True
            if layer in self.layers and self.is_ours:
                self.become(self.layers)
        finally:
            lock().release()

    def codes(self) -> list[CodeType]:
        """The code objects that run when the attribute is called."""
        upstream = self._upstream_functions()
        ours = [code for layer in self.layers for code in layer.codes]
        return [innermost(function).__code__ for function in upstream] + ours
