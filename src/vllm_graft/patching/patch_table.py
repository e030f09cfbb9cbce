"""All attributes that an engine's patches have layers on: plan changes, and make them all or none.

Copies of a patched function that other modules made by ``from module import function`` follow it: every imported
module is searched for names bound to the very object that was on the target. Modules of the patch's own package are
left alone, because an author keeps the original there on purpose. Copies outside a module's names are not found: in a
class, a closure, a default value, a ``functools.partial``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Final

from vllm_graft.errors import ConflictError, TargetError
from vllm_graft.patching import checks, surgery
from vllm_graft.patching.checks import ABSENT
from vllm_graft.patching.declaration import Declaration, Patch
from vllm_graft.patching.functions import ORIGINAL
from vllm_graft.patching.patched_attribute import AttributeState, PatchedAttribute, PatchLayer
from vllm_graft.patching.report import HitCounter, PatchEntry
from vllm_graft.patching.target import Owner

_LOG: Final = logging.getLogger("vllm.graft")

Changes = dict[PatchedAttribute, tuple[PatchLayer, ...]]
"""The layers that each attribute is to have."""


class PatchTable:
    """The patched attributes of one engine, one per owner and name."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], PatchedAttribute] = {}
        self._copies = _Copies()

    def __iter__(self) -> Iterator[PatchedAttribute]:
        return iter(list(self._places.values()))

    def of(self, patch: Patch) -> list[PatchedAttribute]:
        """Return the attributes that a patch has a layer on."""
        return [place for place in self if any(layer.patch is patch for layer in place.layers)]

    def plan(self, entry: PatchEntry, owner: Owner, counter: HitCounter, changes: Changes) -> None:
        """Add to ``changes`` what a patch does to its target, or raise PatchError if it cannot be done."""
        declaration = entry.patch.declaration
        checks.check_owner(declaration, owner)
        for hook in entry.bodies:
            key = id(owner), hook.attribute
            planned = (place for place in changes if (id(place.owner), place.attribute) == key)
            place = self._places.get(key) or next(planned, None) or PatchedAttribute(owner, hook.attribute)
            place.check_ownership(declaration.where)
            layers = changes.get(place, place.layers)
            place.check_definition(layers, declaration, hook)
            kind = checks.check_hook(declaration, hook, owner, place.upstream(layers))
            counts = hook.form not in ("property", "value")
            cell = counter.allot(f"{declaration.name} {declaration.target} {hook.attribute}") if counts else None
            note = entry.hooks[hook.attribute].note or _note(place)
            entry.update(hook.attribute, kind=kind, cell=cell, note=note)
            # The private name of what lies beneath; empty if no function of the patch mentions it.
            mentioned = any(hook.attribute in other.originals for other in declaration.hooks)
            alias = _alias_name(declaration, hook.attribute) if mentioned else ""
            if alias and checks.own(owner, alias) is not ABSENT:
                what = f"the target has an attribute {alias!r} already: another engine has applied a patch of this name"
                fix = "apply it through one engine only, or give it another name="
                raise ConflictError(what, where=declaration.where, fix=fix)
            layer = PatchLayer(
                patch=entry.patch,
                hook=hook,
                kind=kind,
                order=entry.order,
                alias=alias,
                renames={ORIGINAL + name: _alias_name(declaration, name) for name in hook.originals},
                hit=surgery.make_hit(counter, cell) if cell is not None else surgery.no_hit,
            )
            changes[place] = place.add_layer(layers, layer)

    def plan_without(self, patch: Patch) -> Changes:
        """Return the changes that take a patch away, or raise ConflictError if that cannot be done exactly."""
        changes: Changes = {}
        for place in self.of(patch):
            place.check_ownership(patch.declaration.where)
            changes[place] = place.remove_patch(patch)
        return changes

    def commit(self, changes: Changes) -> tuple[PatchedAttribute, TargetError] | None:
        """Give every attribute its layers; or leave all as they were and return the one that Python did not let set."""
        before = self.snapshot()
        try:
            for place in changes:
                self._places.setdefault((id(place.owner), place.attribute), place)
            self._copies.note(changes)
            for place, layers in changes.items():
                try:
                    place.set_layers(layers)
                except Exception as error:
                    self.restore(before)
                    what, fix = f"Python would not set it: {error}", "leave this attribute out of the patch"
                    failed = TargetError(what, where=str(place), fix=fix)
                    failed.__cause__ = error
                    return place, failed
            self._prune()
            self._copies.follow(changes)
        except BaseException:
            self.restore(before)
            raise
        return None

    def snapshot(self) -> dict[PatchedAttribute, AttributeState]:
        """Return the present state of every attribute, for ``restore``."""
        return {place: place.snapshot() for place in self}

    def restore(self, before: Mapping[PatchedAttribute, AttributeState]) -> None:
        """Bring every target that was changed since a snapshot back, however far the change had come."""
        touched = {place: state for place, state in before.items() if not place.is_in(state)}
        touched.update((place, place.unpatched_state()) for place in self if place not in before)
        self._places.update(((id(place.owner), place.attribute), place) for place in before)
        for place, state in touched.items():
            place.restore(state)
        self._prune()
        self._copies.follow(touched)

    def _prune(self) -> None:
        self._places = {key: place for key, place in self._places.items() if place.layers}

    def recount(self) -> None:
        """Count the first call of every replacement and addition again."""
        for place in self:
            for layer in place.layers:
                layer.proven = False
            if place.is_ours:
                self._copies.note([place])
                place.set_layers(place.layers)
        self._copies.follow(self)

    def release(self, patch: Patch) -> None:
        """Take a patch off contents that a reload is about to discard, even if other code has changed them since."""
        for place in self.of(patch):
            left = tuple(layer for layer in place.layers if layer.patch is not patch)
            orphaned = place.upstream(left) is ABSENT
            if place.is_ours:
                self.commit({place: () if orphaned else left})
            else:
                self._places.pop((id(place.owner), place.attribute))


class _Copies:
    """The objects that were on patched functions of modules, by which copies in other modules are recognised."""

    def __init__(self) -> None:
        self._known: dict[PatchedAttribute, dict[int, object]] = {}

    def note(self, places: Iterable[PatchedAttribute]) -> None:
        """Remember what is on these targets now."""
        for place in places:
            if isinstance(place.owner, ModuleType) and (place.is_cached or isinstance(place.base, FunctionType)):
                known = self._known.setdefault(place, {id(place.base): place.base})
                now = place.placed[place.attribute]
                known[id(now)] = now

    def follow(self, places: Iterable[PatchedAttribute]) -> None:
        """Rebind every copy to what is on its target now."""
        places = list(places)
        self.note(places)
        places = [place for place in places if place in self._known]
        wanted = {key: place for place in places for key in self._known[place]}
        for module, name, place in list(_find_copies(wanted)):
            own = {layer.patch.declaration.package for layer in place.layers}
            now = place.placed[place.attribute]
            foreign = module.__name__.partition(".")[0] not in own
            if foreign and module is not place.owner and vars(module).get(name) is not now:
                setattr(module, name, now)
                _LOG.debug("vllm-graft: %s.%s, a copy of a patched function, follows it", module.__name__, name)
        for place in places:
            if not place.layers:
                del self._known[place]


def _find_copies(wanted: Mapping[int, PatchedAttribute]) -> Iterator[tuple[ModuleType, str, PatchedAttribute]]:
    """Find the names of all modules that are bound to one of these objects, by ``id``."""
    for module in list(sys.modules.values()) if wanted else ():
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in wanted:
                yield module, name, wanted[id(value)]


def _note(place: PatchedAttribute) -> str:
    """Say what a reader of the report must know of an applied hook: that it is inherited or cached."""
    if place.is_cached:
        return "it is behind functools.cache: the hook is too, and the cache has started empty"
    if place.base is not ABSENT or place.inherited is ABSENT or not isinstance(place.owner, type):
        return ""
    base = next(each for each in place.owner.__mro__[1:] if place.attribute in vars(each))
    return f"it is inherited from {base.__module__}:{base.__qualname__}; other subclasses of that are not changed"


def _alias_name(declaration: Declaration, attribute: str) -> str:
    # An identifier, because torch.compile writes attribute names into the source of its guards.
    slug = "".join(part if part.isalnum() else "_" for part in declaration.name)
    return f"_graft_{slug}{ORIGINAL}{attribute}"
