"""What an engine knows of its patches: one row per hook, with its state and the proof that it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vllm_graft.patching.declare import Patch
from vllm_graft.patching.hooks import Asked, Hook
from vllm_graft.patching.review import Standing
from vllm_graft.patching.target import Owner

State = Literal["armed", "applied", "late", "refused", "reverted"]
"""
armed:     waits for its target's module to be imported
applied:   stands on its target
late:      stands on its target, which was running when it came
refused:   does not stand on its target, for the reason given
reverted:  stood on its target and was taken back
"""


@dataclass(frozen=True, slots=True)
class HookState:
    """One hook of one patch in this process.

    patch:      the patch's name
    target:     the class or module, as "pkg.module:Class" or "pkg.module"
    attribute:  the name on the target
    kind:       wrap, replace or add; auto while only the target, once loaded, can tell
    state:      see ``State``
    reason:     why it is armed, late or refused, or what is to be known of an applied one; empty otherwise
    review:     reviewed, drifted or unlocked, as in ``review.Standing``; empty where nothing is upstream's
    hits:       calls counted: all of a wrap, the first of a replacement or addition, none of properties and values
    cell:       the tally's cell they are counted in; None where nothing is counted, or not yet
    """

    patch: str
    target: str
    attribute: str
    kind: Asked
    state: State
    reason: str
    hits: int
    cell: int | None
    review: Standing = ""


@dataclass(slots=True, eq=False)
class HookRecord:
    """What changes about one hook while an engine holds its patch.

    at:      its cell in the tally
    review:  whether upstream's code was reviewed
    note:    what is to be known of it while it is applied
    """

    kind: Asked
    state: State = "armed"
    reason: str = ""
    at: int | None = None
    review: Standing = ""
    note: str = ""


@dataclass(slots=True, eq=False)
class Entry:
    """One patch as an engine holds it.

    order:    the place in the order of application
    owner:    the target while the patch stands on it
    awaited:  whether the patch is to be put on its target at the next import
    bodies:   the hooks that fit the installed vLLM
    hooks:    what is known of each, by attribute
    """

    patch: Patch
    order: int
    owner: Owner | None = None
    awaited: bool = False
    bodies: tuple[Hook, ...] = ()
    hooks: dict[str, HookRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.choose(self.bodies or self.patch.declaration.hooks)

    def choose(self, bodies: tuple[Hook, ...]) -> None:
        """Settle which bodies are meant."""
        self.bodies = bodies
        self.hooks = {hook.attribute: HookRecord(hook.kind) for hook in bodies}

    @property
    def is_active(self) -> bool:
        """Whether the patch stands on its target or waits for it; a refused one does neither."""
        refused = any(record.state == "refused" for record in self.hooks.values())
        return self.owner is not None or (self.awaited and not refused)

    def become(self, state: State, reason: str = "") -> None:
        """Give every hook the same state."""
        for record in self.hooks.values():
            record.state, record.reason = state, reason or (record.note if state == "applied" else "")
