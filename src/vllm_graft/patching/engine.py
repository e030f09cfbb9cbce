"""Applying patches and taking them back: everything is resolved first, then all is changed or nothing.

Copies that other modules made by ``from module import function`` follow (``copies.py``). Limits: a bound method or a
``cached_property`` value taken before stays what it was, and so does a copy kept in a class, a closure or a default.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from vllm_graft.errors import ConflictError, PatchError, join
from vllm_graft.patching import neighbours
from vllm_graft.patching.declare import Patch, declared
from vllm_graft.patching.imports import ImportWatch
from vllm_graft.patching.report import Entry, HookState
from vllm_graft.patching.review import Reviewer
from vllm_graft.patching.slot import Slot, lock
from vllm_graft.patching.slots import Changes, Slots
from vllm_graft.patching.stack import running
from vllm_graft.patching.tally import LocalTally, Tally
from vllm_graft.patching.target import Owner, Places, owner_now, readiness, resolved

_LOG: Final = logging.getLogger("vllm.graft")

OnRefused = Callable[[Patch, PatchError], None]


class Engine:
    """Holds the patches of one process.

    tally:       where hits are counted
    strict:      whether a patch that its module's import cannot take fails that import
    on_refused:  called with the patch and the error when that happens, strict or not
    on_change:   called with a patch whose state has changed at an import, for better or worse
    """

    def __init__(self, tally: Tally | None = None, *, strict: bool = True, on_refused: OnRefused | None = None) -> None:
        self.tally: Tally = LocalTally() if tally is None else tally
        self.strict = strict
        self.on_refused = on_refused
        self.on_change: Callable[[Patch], None] | None = None
        self._entries: dict[str, Entry] = {}
        self._slots = Slots()
        self._orders = itertools.count(1)
        self._imports = ImportWatch(self._before_import, self._after_import)

    def apply(self, patches: Iterable[Patch]) -> list[HookState]:
        """Apply patches as a whole, and say what became of each hook; those active already are left as they are.

        A target whose module is not imported yet is armed. Whatever is raised, KeyboardInterrupt included, leaves every
        target as it was.
        """
        wanted = [declared(patch) for patch in dict.fromkeys(patches)]
        batch = [Entry(patch, next(self._orders)) for patch in wanted if not self.is_active(patch)]
        owners: dict[Entry, Owner | None] = {}
        reviewer, places = Reviewer(), Places()
        for entry in batch:
            with self._blaming(entry, batch):
                self._check_neighbours(entry, batch)
                _settle(entry, reviewer)
                declaration = entry.patch.declaration
                owners[entry] = owner_now(declaration.target, declaration.where, places)
        with lock(), self._all_or_nothing(batch):
            self._land([(entry, owner) for entry, owner in owners.items() if owner is not None], batch)
            self._entries.update((entry.patch.declaration.name, entry) for entry in batch)
            self._arm([entry for entry, owner in owners.items() if owner is None])
        return [state for patch in wanted for state in self._states(self._entries[patch.declaration.name])]

    def revert(self, patch: Patch) -> None:
        """Take one patch back, wherever it lies in the onion; one that is not active is left alone."""
        entry = self._entries.get(declared(patch).declaration.name)
        if entry is None or entry.patch is not patch or not (entry.is_active or entry.awaited):
            return
        with lock():
            failure = self._slots.commit(self._slots.plan_without(patch))
            if failure is not None:
                raise failure[1]
            entry.owner, entry.awaited = None, False
            entry.become("reverted")
            self._watch()

    def revert_all(self) -> None:
        """Take every patch back, the last one first; one that cannot be taken back does not hold up the others."""
        failures: list[PatchError] = []
        for entry in reversed(self._in_order()):
            try:
                self.revert(entry.patch)
            except PatchError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def is_active(self, patch: Patch) -> bool:
        """Whether the patch stands on its target or waits for it to be imported."""
        entry = self._entries.get(patch.declaration.name)
        return entry is not None and entry.patch is patch and entry.is_active

    def active(self) -> list[Patch]:
        """The patches that stand on their targets or wait for them, in the order of application."""
        return [entry.patch for entry in self._in_order() if entry.is_active]

    def report(self) -> list[HookState]:
        """Every hook this engine was asked for, in the order of application."""
        return [state for entry in self._in_order() for state in self._states(entry)]

    def verify(self) -> list[ConflictError]:
        """What has happened to our targets behind our back: attributes set by others, classes exchanged."""
        return list(self.disturbed().values())

    def disturbed(self) -> dict[Patch, ConflictError]:
        """The same by patch."""
        found: dict[Patch, ConflictError] = {}
        for entry in list(self._entries.values()):
            if entry.owner is None:
                continue
            try:
                _check_same_owner(entry)
                for slot in self._slots.of(entry.patch):
                    slot.check_stranger(entry.patch.declaration.where)
            except ConflictError as error:
                found[entry.patch] = error
        return found

    def recount(self) -> None:
        """Count the first call of replacements and additions again: a forked child has calls of its own to prove."""
        with lock():
            self._slots.recount()

    def _check_neighbours(self, entry: Entry, batch: Sequence[Entry]) -> None:
        held = [other for other in self._entries.values() if other.is_active]
        others = [other for other in (*held, *batch[: batch.index(entry)]) if other.patch is not entry.patch]
        neighbours.check(entry.patch.declaration, [other.patch.declaration for other in others])

    def _land(self, landing: Sequence[tuple[Entry, Owner]], batch: Sequence[Entry]) -> None:
        changes: Changes = {}
        asked_by: dict[Slot, Entry] = {}
        for entry, owner in landing:
            with self._blaming(entry, batch):
                self._slots.plan(entry, owner, self.tally, changes)
            asked_by.update((slot, entry) for slot in changes if slot.owner is owner and slot.attribute in entry.hooks)
        frames = {slot: running(slot.codes(), slot.owner) for slot in changes}
        failure = self._slots.commit(changes)
        if failure is not None:
            with self._blaming(asked_by[failure[0]], batch):
                raise failure[1]
        for entry, owner in landing:
            entry.owner, entry.awaited = owner, False
            entry.become("applied")
            for slot in self._slots.of(entry.patch):
                if frames.get(slot):
                    entry.hooks[slot.attribute].state = "late"
                    entry.hooks[slot.attribute].reason = frames[slot]

    def _arm(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            _await(entry)
        self._watch()
        for entry in entries:
            module = sys.modules.get(entry.patch.declaration.target.module)
            now = readiness(entry.patch.declaration.target)
            if now == "importing" and module is not None:
                self._imports.await_end(module)
            elif now == "ready":
                # Another thread has imported it since it was looked for.
                self._after_import(entry.patch.declaration.target.module)

    def _watch(self) -> None:
        entries = [entry for entry in self._entries.values() if entry.awaited or entry.owner is not None]
        targets = [entry.patch.declaration.target for entry in entries]
        self._imports.watch(frozenset(target.module for target in targets if target.given is None))

    def _of_module(self, name: str) -> list[Entry]:
        targets = ((entry, entry.patch.declaration.target) for entry in self._in_order())
        return [entry for entry, target in targets if target.given is None and target.module == name]

    def _before_import(self, name: str) -> None:
        """Free a module's old contents before its body runs again: it may be reloaded in place."""
        with lock():
            for entry in reversed(self._of_module(name)):
                if entry.owner is None:
                    continue
                self._slots.release(entry.patch)
                _await(entry)

    def _after_import(self, name: str) -> None:
        refusals: list[PatchError] = []
        for entry in self._of_module(name):
            if not entry.awaited or entry.owner is not None:
                continue
            try:
                self._meet(entry)
            except PatchError as error:
                refusals += self._refusal(entry.patch, error)
            finally:
                if self.on_change is not None:
                    self.on_change(entry.patch)
        if refusals:
            raise join(refusals)

    def _refusal(self, patch: Patch, error: PatchError) -> list[PatchError]:
        """Say that a patch is refused; the error, where it is to fail the import."""
        try:
            if self.on_refused is not None:
                self.on_refused(patch, error)
        except PatchError as fatal:
            return [fatal]
        return [error] if self.strict else []

    def _meet(self, entry: Entry) -> None:
        """Put an awaited patch on its target, whose module has just run."""
        declaration = entry.patch.declaration
        with self._blaming(entry, [entry]):
            owner = resolved(declaration.target, declaration.where)
        with lock(), self._all_or_nothing([entry]):
            self._land([(entry, owner)], [entry])

    @contextmanager
    def _all_or_nothing(self, batch: Sequence[Entry]) -> Iterator[None]:
        """Put everything back if anything is raised: a refusal stays in the report, an interruption leaves no trace."""
        slots, entries = self._slots.snapshot(), dict(self._entries)
        awaited = [entry for entry in batch if entry.awaited]
        try:
            yield
        except BaseException as error:
            self._slots.restore(slots)
            if not isinstance(error, PatchError):
                self._entries = entries
            for entry in batch:
                entry.owner, entry.awaited = None, entry in awaited
                if entry.awaited and not isinstance(error, PatchError):
                    _await(entry)
            self._watch()
            raise

    @contextmanager
    def _blaming(self, entry: Entry, batch: Sequence[Entry]) -> Iterator[None]:
        """Keep the reason in the report if this patch, and with it the batch, is refused."""
        try:
            yield
        except PatchError as error:
            name = entry.patch.declaration.name
            for other in batch:
                other.become(
                    "refused", str(error) if other is entry else f"it was to be applied together with {name!r}"
                )
                held = self._entries.get(other.patch.declaration.name)
                if held is None or not held.is_active:
                    self._entries[other.patch.declaration.name] = other
            raise

    def _in_order(self) -> list[Entry]:
        return sorted(self._entries.values(), key=lambda entry: entry.order)

    def _states(self, entry: Entry) -> Iterator[HookState]:
        declaration = entry.patch.declaration
        for attribute, record in entry.hooks.items():
            hits = 0 if record.at is None else self.tally.cells[record.at]
            yield HookState(
                declaration.name,
                str(declaration.target),
                attribute,
                record.kind,
                record.state,
                record.reason,
                hits,
                record.at,
                record.review,
            )


def _await(entry: Entry) -> None:
    entry.owner, entry.awaited = None, True
    entry.become("armed", f"until {entry.patch.declaration.target.module} is imported")


def _settle(entry: Entry, reviewer: Reviewer) -> None:
    """Choose the bodies that fit, and hold what is beneath them against what was reviewed."""
    found = reviewer.review(entry.patch)
    entry.choose(tuple(hook for hook, _ in found.values()))
    for attribute, (_, verdict) in found.items():
        entry.hooks[attribute].review, entry.hooks[attribute].note = verdict.standing, verdict.note
        if verdict.note:
            _LOG.warning("vllm-graft: %s: %s", entry.patch.declaration.where, verdict.note)


def _check_same_owner(entry: Entry) -> None:
    target, where = entry.patch.declaration.target, entry.patch.declaration.where
    if target.given is not None:
        return
    try:
        now = resolved(target, where) if target.module in sys.modules else None
    except PatchError:
        now = None
    if now is not entry.owner:
        raise ConflictError(
            "the target has been exchanged for another object since it was patched",
            where=where,
            fix="apply the patch after whatever exchanges it",
        )


_default: Engine | None = None


def default_engine() -> Engine:
    """The engine behind ``MyPatch.apply()`` and behind a plan, made on first use; it counts in the ledger's cells."""
    global _default
    if _default is None:
        from vllm_graft.ledger import current

        _default = Engine(tally=current().cells)
    return _default


def set_default_engine(engine: Engine) -> None:
    """Let another engine stand behind ``MyPatch.apply()``; refused while the present one holds active patches."""
    global _default
    held = [] if _default is None or _default is engine else _default.active()
    if held:
        raise ConflictError(
            f"the default engine holds patch {held[0].declaration.name!r}",
            fix="set the engine before the first patch is applied, or revert that patch",
        )
    _default = engine
