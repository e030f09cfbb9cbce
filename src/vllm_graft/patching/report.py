"""The state of each hook in this process, and the count of its calls: the proof that a patch runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from vllm_graft.patching.declaration import Patch
from vllm_graft.patching.hooks import DeclaredKind, Hook
from vllm_graft.patching.review import ReviewState
from vllm_graft.patching.target import Owner
from vllm_graft.points import PatchState

HookStateName = Literal[PatchState, "reverted"]
"""The states that the ledger knows of a patch, and "reverted": taken off its target again."""


@dataclass(frozen=True, slots=True)
class HookState:
    """One hook of one patch in this process.

    target:     the class or module, as "pkg.module:Class" or "pkg.module"
    kind:       wrap, replace or add; auto until the target is loaded and decides
    reason:     why it is armed, late or refused, or a note on an applied one; empty otherwise
    hits:       calls counted: all of a wrap, the first of a replacement or addition, none of properties and values
    cell:       the counter's cell for its hits; None if nothing is counted, or not yet
    review:     reviewed, drifted or unlocked, as in ``review.ReviewState``; empty for an addition
    note:       the reason to show while the hook is applied
    """

    patch: str
    target: str
    attribute: str
    kind: DeclaredKind
    state: HookStateName = "armed"
    reason: str = ""
    hits: int = 0
    cell: int | None = None
    review: ReviewState = ""
    note: str = field(default="", compare=False, repr=False)


@dataclass(slots=True, eq=False)
class PatchEntry:
    """One patch as an engine holds it.

    order:    its position in the order of application
    owner:    the target while the patch is on it
    awaited:  whether the next import of the target's module applies the patch, also after an import refused it
    bodies:   the hooks for the installed vLLM, one per attribute
    hooks:    the state of each, by attribute
    """

    patch: Patch
    order: int
    owner: Owner | None = None
    awaited: bool = False
    bodies: tuple[Hook, ...] = ()
    hooks: dict[str, HookState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.choose(self.patch.declaration.hooks)

    def choose(self, bodies: Sequence[Hook]) -> None:
        """Settle which bodies are applied, and start their states afresh."""
        declaration = self.patch.declaration
        self.bodies = tuple(bodies)
        self.hooks = {
            hook.attribute: HookState(declaration.name, str(declaration.target), hook.attribute, hook.kind)
            for hook in bodies
        }

    @property
    def is_active(self) -> bool:
        """True if the patch is on its target, or armed; a refused one is neither."""
        refused = any(hook.state == "refused" for hook in self.hooks.values())
        return self.owner is not None or (self.awaited and not refused)

    def update(self, attribute: str, **changes: Any) -> None:
        """Change fields of one hook's state."""
        self.hooks[attribute] = replace(self.hooks[attribute], **changes)

    def set_state(self, state: HookStateName, reason: str = "") -> None:
        """Give every hook the same state."""
        for attribute, hook in self.hooks.items():
            note = hook.note if state == "applied" else ""
            self.hooks[attribute] = replace(hook, state=state, reason=reason or note)

    def wait(self) -> None:
        """Arm the patch until its target's module is imported."""
        self.owner, self.awaited = None, True
        self.set_state("armed", f"until {self.patch.declaration.target.module} is imported")


class CounterCells(Protocol):
    """A row of integers: a list, an array, a view of shared memory."""

    def __getitem__(self, at: int, /) -> int: ...

    def __setitem__(self, at: int, count: int, /) -> None: ...


class HitCounter(Protocol):
    """A row of cells to count hits in, allotted by key; the ledger's cells are one.

    ``cells`` is read again at each hit, so that a process can exchange the memory, for instance after a fork.
    """

    @property
    def cells(self) -> CounterCells:
        """The integers in which hits are counted."""
        ...

    def allot(self, key: str) -> int:
        """Return the index of the cell of ``key``; the same key gets the same cell again."""
        ...


class LocalHitCounter:
    """A hit counter in this process's own memory."""

    def __init__(self) -> None:
        self.cells: list[int] = []
        self._indices: dict[str, int] = {}

    def allot(self, key: str) -> int:
        """Return the index of the cell of ``key``, made on first use."""
        if key not in self._indices:
            # The cell before its index: an interrupt between the two leaves a spare cell, never an index without one.
            self.cells.append(0)
            self._indices[key] = len(self.cells) - 1
        return self._indices[key]
