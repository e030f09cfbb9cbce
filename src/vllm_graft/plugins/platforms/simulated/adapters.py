"""Which LoRA adapters the simulated accelerator holds: their numbers, never their weights."""

from __future__ import annotations

from collections import OrderedDict


class AdapterShelf:
    """The loaded adapters, the longest unused one leaving first; a pinned one stays."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._pinned: OrderedDict[int, bool] = OrderedDict()

    def add(self, adapter: int) -> bool:
        """Loads an adapter, or marks it as used; True when it is there afterwards."""
        self._pinned.setdefault(adapter, False)
        self._pinned.move_to_end(adapter)
        excess = len(self._pinned) - self._capacity
        for other in [each for each, pinned in self._pinned.items() if not pinned][: max(excess, 0)]:
            del self._pinned[other]
        return adapter in self._pinned

    def remove(self, adapter: int) -> bool:
        """Unloads an adapter; False when it was not there."""
        return self._pinned.pop(adapter, None) is not None

    def pin(self, adapter: int) -> bool:
        """Keeps an adapter from leaving; False when it is not there."""
        if adapter not in self._pinned:
            return False
        self._pinned[adapter] = True
        return True

    def ids(self) -> set[int]:
        """The numbers of the adapters that are loaded."""
        return set(self._pinned)
