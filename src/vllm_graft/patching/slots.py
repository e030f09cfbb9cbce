"""All attributes that an engine's patches stand on: planning what would be there, and bringing it about at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from vllm_graft.errors import ConflictError, TargetError
from vllm_graft.patching import checks, surgery
from vllm_graft.patching.copies import Copies
from vllm_graft.patching.declare import Declaration, Patch
from vllm_graft.patching.functions import ORIGINAL
from vllm_graft.patching.hooks import Hook
from vllm_graft.patching.report import Entry
from vllm_graft.patching.slot import Layer, Slot, SlotState
from vllm_graft.patching.tally import Tally
from vllm_graft.patching.target import Owner

_LOG: Final = logging.getLogger("vllm.graft")

Changes = dict[Slot, tuple[Layer, ...]]
"""The layers that each attribute is to have."""


class Slots:
    """The slots in use, one per owner and attribute."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], Slot] = {}
        self._copies = Copies()

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._held.values()))

    def of(self, patch: Patch) -> list[Slot]:
        """The slots that a patch has a layer in."""
        return [slot for slot in self if any(layer.patch is patch for layer in slot.layers)]

    def plan(self, entry: Entry, owner: Owner, tally: Tally, changes: Changes) -> None:
        """Note in ``changes`` what a patch does to its target; PatchError where it cannot be done."""
        declaration = entry.patch.declaration
        checks.check_owner(declaration, owner)
        for hook in entry.bodies:
            slot = self._slot(owner, hook.attribute, changes)
            slot.check_stranger(declaration.where)
            layers = changes.get(slot, slot.layers)
            slot.check_definer(layers, declaration, hook)
            record = entry.hooks[hook.attribute]
            record.kind = kind = checks.check_hook(declaration, hook, owner, slot.upstream(layers))
            record.note = record.note or _inherited(owner, slot) or _cached(slot)
            counts = hook.form not in ("property", "value")
            record.at = tally.allot(f"{declaration.name} {declaration.target} {hook.attribute}") if counts else None
            layer = Layer(
                patch=entry.patch,
                hook=hook,
                kind=kind,
                order=entry.order,
                alias=_alias(declaration, hook, owner),
                renames={ORIGINAL + name: _alias_name(declaration, name) for name in hook.originals},
                hit=surgery.hit_counter(tally, record.at) if record.at is not None else surgery.uncounted,
            )
            changes[slot] = slot.with_layer(layers, layer)

    def _slot(self, owner: Owner, attribute: str, changes: Changes) -> Slot:
        planned = (slot for slot in changes if slot.owner is owner and slot.attribute == attribute)
        return self._held.get((id(owner), attribute)) or next(planned, None) or Slot(owner, attribute)

    def plan_without(self, patch: Patch) -> Changes:
        """The changes that take a patch away; ConflictError where that cannot be done exactly."""
        changes: Changes = {}
        for slot in self.of(patch):
            slot.check_stranger(patch.declaration.where)
            changes[slot] = slot.without_patch(patch)
        return changes

    def commit(self, changes: Changes) -> tuple[Slot, TargetError] | None:
        """Bring every slot to its layers; or leave all as they were, and say which one Python would not let be set."""
        before = self.snapshot()
        try:
            for slot in changes:
                self._held.setdefault((id(slot.owner), slot.attribute), slot)
            self._copies.note(changes)
            for slot, layers in changes.items():
                try:
                    slot.become(layers)
                except Exception as error:
                    self.restore(before)
                    failed = TargetError(
                        f"Python would not set it: {error}",
                        where=str(slot),
                        fix="leave this attribute out of the patch",
                    )
                    failed.__cause__ = error
                    return slot, failed
            self._prune()
            self._follow(changes)
        except BaseException:
            self.restore(before)
            raise
        return None

    def snapshot(self) -> dict[Slot, SlotState]:
        """What ``restore`` takes to bring every target back to this state."""
        return {slot: slot.snapshot() for slot in self}

    def restore(self, before: Mapping[Slot, SlotState]) -> None:
        """Bring every target that was changed since back to its state, however far the change has come."""
        touched = {slot: state for slot, state in before.items() if not slot.is_in(state)}
        touched.update((slot, slot.bare()) for slot in self if slot not in before)
        self._held.update(((id(slot.owner), slot.attribute), slot) for slot in before)
        for slot, state in touched.items():
            slot.put_back(state)
        self._prune()
        self._follow(touched)

    def _prune(self) -> None:
        for key, slot in list(self._held.items()):
            if not slot.layers:
                del self._held[key]

    def _follow(self, slots: Iterable[Slot]) -> None:
        for name in self._copies.follow(slots):
            _LOG.debug("vllm-graft: %s, a copy of a patched function, follows it", name)

    def recount(self) -> None:
        """Have the first call of every replacement and addition counted again."""
        for slot in self:
            for layer in slot.layers:
                layer.proven = False
            if slot.is_ours:
                self._copies.note([slot])
                slot.become(slot.layers)
        self._follow(self)

    def release(self, patch: Patch) -> None:
        """Take a patch away from contents that are about to be thrown away, whoever has changed them since."""
        for slot in self.of(patch):
            left = tuple(layer for layer in slot.layers if layer.patch is not patch)
            orphaned = slot.upstream(left) is checks.ABSENT
            if slot.is_ours:
                self.commit({slot: () if orphaned else left})
            else:
                self._held.pop((id(slot.owner), slot.attribute))


def _inherited(owner: Owner, slot: Slot) -> str:
    """What is to be known of a name that the target only inherits; nothing where it is its own."""
    if slot.base is not checks.ABSENT or slot.inherited is checks.ABSENT or not isinstance(owner, type):
        return ""
    base = next(each for each in owner.__mro__[1:] if slot.attribute in vars(each))
    return f"it is inherited from {base.__module__}:{base.__qualname__}; other subclasses of that are not changed"


def _cached(slot: Slot) -> str:
    return "it is behind functools.cache: the hook is too, and the cache has started empty" if slot.is_cached else ""


def _alias(declaration: Declaration, hook: Hook, owner: Owner) -> str:
    """The private name of what lies beneath a hook, empty where no function of the patch asks for it."""
    if not any(hook.attribute in other.originals for other in declaration.hooks):
        return ""
    name = _alias_name(declaration, hook.attribute)
    if checks.own(owner, name) is not checks.ABSENT:
        raise ConflictError(
            f"the target has an attribute {name!r} already: another engine has applied a patch of this name",
            where=declaration.where,
            fix="apply it through one engine only, or give it another name=",
        )
    return name


def _alias_name(declaration: Declaration, attribute: str) -> str:
    # An identifier, because torch.compile writes attribute names into the source of its guards.
    slug = "".join(part if part.isalnum() else "_" for part in declaration.name)
    return f"_graft_{slug}{ORIGINAL}{attribute}"
