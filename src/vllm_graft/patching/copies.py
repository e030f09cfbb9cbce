"""Copies of a patched function that other modules made by ``from module import function``: they follow the original.

Every module that has been imported is looked through for names bound to the very object that stood on the target.
Left alone are the modules of the patch's own package, where an author keeps the original on purpose. Not found are
copies elsewhere than among a module's names: in a class, a closure, a default value, a ``functools.partial``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_graft.patching.slot import Slot


class Copies:
    """Which objects have stood under the names of module functions, so that their copies are known."""

    def __init__(self) -> None:
        self._stood: dict[Slot, dict[int, object]] = {}

    def note(self, slots: Iterable[Slot]) -> None:
        """Remember what stands on these targets now."""
        for slot in slots:
            if isinstance(slot.owner, ModuleType) and (slot.is_cached or isinstance(slot.base, FunctionType)):
                held = self._stood.setdefault(slot, {id(slot.base): slot.base})
                now = slot.placed[slot.attribute]
                held[id(now)] = now

    def follow(self, slots: Iterable[Slot]) -> list[str]:
        """Rebind every copy to what stands on its target now; the names that were rebound."""
        slots = list(slots)
        self.note(slots)
        places = [slot for slot in slots if slot in self._stood]
        old = {key: slot for slot in places for key in self._stood[slot]}
        rebound = [_rebind(module, name, old[id(value)]) for module, name, value in _bindings(old)]
        for slot in places:
            if not slot.layers:
                del self._stood[slot]
        return [name for name in rebound if name]


def _bindings(wanted: Mapping[int, Slot]) -> Iterator[tuple[ModuleType, str, object]]:
    """The names of all modules that are bound to one of these objects."""
    if not wanted:
        return
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in wanted:
                yield module, name, value


def _rebind(module: ModuleType, name: str, slot: Slot) -> str:
    own = {layer.patch.declaration.package for layer in slot.layers}
    now = slot.placed[slot.attribute]
    if module is slot.owner or vars(module).get(name) is now or module.__name__.partition(".")[0] in own:
        return ""
    setattr(module, name, now)
    return f"{module.__name__}.{name}"
