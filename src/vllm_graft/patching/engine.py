"""Apply and revert patches: everything is resolved first, then all of it is changed or nothing.

Copies that other modules made by ``from module import function`` follow (``patch_table.py``). Limits: a bound method or
a ``cached_property`` value taken before stays what it was, and so does a copy kept in a class, a closure or a default.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from vllm_graft.errors import ConflictError, PatchError, join
from vllm_graft.patching.conflicts import check_conflicts
from vllm_graft.patching.declaration import Patch, as_patch
from vllm_graft.patching.patch_table import Changes, PatchTable
from vllm_graft.patching.patched_attribute import PatchedAttribute, change_lock, describe_running_call
from vllm_graft.patching.report import HitCounter, HookState, LocalHitCounter, PatchEntry
from vllm_graft.patching.review import Reviewer
from vllm_graft.patching.target import ImportWatch, Owner, SearchPaths, find_target, readiness, resolve_target

_LOG: Final = logging.getLogger("vllm.graft")

OnRefused = Callable[[Patch, PatchError], None]


class Engine:
    """Holds the patches of one process.

    strict:      whether a patch that is refused when its module is imported fails that import
    on_refused:  called with the patch and the error when that happens, strict or not
    on_change:   called with a patch whose state has changed at an import
    locks:       whether upstream's code has to be what ``patches.lock`` says was reviewed
    """

    def __init__(
        self,
        counter: HitCounter | None = None,
        *,
        strict: bool = True,
        on_refused: OnRefused | None = None,
        locks: bool = True,
    ) -> None:
        self.counter: HitCounter = LocalHitCounter() if counter is None else counter
        self.strict = strict
        self.locks = locks
        self.on_refused = on_refused
        self.on_change: Callable[[Patch], None] | None = None
        self._entries: dict[str, PatchEntry] = {}
        self._table = PatchTable()
        self._orders = itertools.count(1)
        self._imports = ImportWatch(self._before_import, self._after_import)

    def apply(self, patches: Iterable[Patch]) -> list[HookState]:
        """Apply patches as a whole and return the state of each hook; patches that are active already are left alone.

        A patch is armed while its target's module is not imported. Any exception, KeyboardInterrupt included, leaves
        every target as it was.
        """
        wanted = [as_patch(patch) for patch in dict.fromkeys(patches)]
        batch = [PatchEntry(patch, next(self._orders)) for patch in wanted if not self.is_active(patch)]
        owners: dict[PatchEntry, Owner | None] = {}
        reviewer, paths = Reviewer(locks=self.locks), SearchPaths()
        for entry in batch:
            with self._record_refusal(entry, batch):
                held = [other for other in self._entries.values() if other.is_active]
                others = [one.patch for one in (*held, *batch[: batch.index(entry)]) if one.patch is not entry.patch]
                declaration = entry.patch.declaration
                check_conflicts(declaration, [other.declaration for other in others])
                reviews = reviewer.review(entry.patch)
                entry.choose([each.hook for each in reviews])
                for each in reviews:
                    entry.update(each.hook.attribute, review=each.standing, note=each.note)
                    if each.note:
                        _LOG.warning("vllm-graft: %s: %s", declaration.where, each.note)
                owners[entry] = find_target(declaration.target, declaration.where, paths)
        with change_lock(), self._all_or_nothing(batch):
            self._put_on_targets([(entry, owner) for entry, owner in owners.items() if owner is not None], batch)
            self._entries.update((entry.patch.declaration.name, entry) for entry in batch)
            self._arm([entry for entry, owner in owners.items() if owner is None])
        return [state for patch in wanted for state in self._states(self._entries[patch.declaration.name])]

    def revert(self, patch: Patch) -> None:
        """Revert one patch, whichever layers lie over it; one that is not active is left alone."""
        entry = self._entries.get(as_patch(patch).declaration.name)
        if entry is None or entry.patch is not patch or not (entry.is_active or entry.awaited):
            return
        with change_lock():
            failure = self._table.commit(self._table.plan_without(patch))
            if failure is not None:
                raise failure[1]
            entry.owner, entry.awaited = None, False
            entry.set_state("reverted")
            self._watch()

    def revert_all(self) -> None:
        """Revert every patch, the last one first; one that cannot be reverted does not stop the others."""
        failures: list[PatchError] = []
        for entry in reversed(self._in_order()):
            try:
                self.revert(entry.patch)
            except PatchError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def is_active(self, patch: Patch) -> bool:
        """Return whether the patch is on its target, or armed."""
        entry = self._entries.get(patch.declaration.name)
        return entry is not None and entry.patch is patch and entry.is_active

    def active(self) -> list[Patch]:
        """Return the patches that are on their targets or armed, in the order of application."""
        return [entry.patch for entry in self._in_order() if entry.is_active]

    def report(self) -> list[HookState]:
        """Return the state of every hook this engine was given, in the order of application."""
        return [state for entry in self._in_order() for state in self._states(entry)]

    def verify(self) -> list[ConflictError]:
        """Return an error for each patch whose target other code has changed since."""
        return list(self.find_overwritten().values())

    def find_overwritten(self) -> dict[Patch, ConflictError]:
        """Find the patches whose attributes other code has set, or whose class it has replaced, with the error."""
        found: dict[Patch, ConflictError] = {}
        for entry in list(self._entries.values()):
            if entry.owner is None:
                continue
            target, where = entry.patch.declaration.target, entry.patch.declaration.where
            try:
                now = (
                    resolve_target(target, where) if target.given is not None or target.module in sys.modules else None
                )
            except PatchError:
                now = None
            try:
                if now is not entry.owner and target.given is None:
                    what = "the target has been replaced by another object since it was patched"
                    raise ConflictError(what, where=where, fix="apply the patch after whatever replaces it")
                for place in self._table.of(entry.patch):
                    place.check_ownership(where)
            except ConflictError as error:
                found[entry.patch] = error
        return found

    def recount(self) -> None:
        """Count the first call of replacements and additions again: a forked child has to prove its own calls."""
        with change_lock():
            self._table.recount()

    def _put_on_targets(self, ready: Sequence[tuple[PatchEntry, Owner]], batch: Sequence[PatchEntry]) -> None:
        changes: Changes = {}
        entry_of: dict[PatchedAttribute, PatchEntry] = {}
        for entry, owner in ready:
            with self._record_refusal(entry, batch):
                self._table.plan(entry, owner, self.counter, changes)
            places = [place for place in changes if place.owner is owner and place.attribute in entry.hooks]
            entry_of.update(dict.fromkeys(places, entry))
        frames = {place: describe_running_call(place.codes(), place.owner) for place in changes}
        failure = self._table.commit(changes)
        if failure is not None:
            with self._record_refusal(entry_of[failure[0]], batch):
                raise failure[1]
        for entry, owner in ready:
            entry.owner, entry.awaited = owner, False
            entry.set_state("applied")
            for place in self._table.of(entry.patch):
                if frames.get(place):
                    entry.update(place.attribute, state="late", reason=frames[place])

    def _arm(self, entries: Sequence[PatchEntry]) -> None:
        for entry in entries:
            entry.wait()
        self._watch()
        for entry in entries:
            module = sys.modules.get(entry.patch.declaration.target.module)
            now = readiness(entry.patch.declaration.target)
            if now == "importing" and module is not None:
                self._imports.await_end(module)
            elif now == "ready":
                # Another thread has imported it since ``find_target`` looked.
                self._after_import(entry.patch.declaration.target.module)

    def _watch(self) -> None:
        entries = [entry for entry in self._entries.values() if entry.awaited or entry.owner is not None]
        targets = [entry.patch.declaration.target for entry in entries]
        self._imports.watch(frozenset(target.module for target in targets if target.given is None))

    def _of_module(self, name: str) -> list[PatchEntry]:
        targets = ((entry, entry.patch.declaration.target) for entry in self._in_order())
        return [entry for entry, target in targets if target.given is None and target.module == name]

    def _before_import(self, name: str) -> None:
        """Free a module's old contents before its body runs again: it may be reloaded in place."""
        with change_lock():
            for entry in reversed(self._of_module(name)):
                if entry.owner is None:
                    continue
                self._table.release(entry.patch)
                entry.wait()

    def _after_import(self, name: str) -> None:
        """Apply the armed patches of a module that has just run."""
        refusals: list[PatchError] = []
        for entry in self._of_module(name):
            if not entry.awaited or entry.owner is not None:
                continue
            declaration = entry.patch.declaration
            try:
                with self._record_refusal(entry, [entry]):
                    owner = resolve_target(declaration.target, declaration.where)
                with change_lock(), self._all_or_nothing([entry]):
                    self._put_on_targets([(entry, owner)], [entry])
            except PatchError as error:
                try:
                    if self.on_refused is not None:
                        self.on_refused(entry.patch, error)
                    refusals += [error] if self.strict else []
                except PatchError as fatal:
                    refusals.append(fatal)
            finally:
                if self.on_change is not None:
                    self.on_change(entry.patch)
        if refusals:
            raise join(refusals)

    @contextmanager
    def _all_or_nothing(self, batch: Sequence[PatchEntry]) -> Iterator[None]:
        """Put everything back on any exception: a refusal stays in the report, an interrupt leaves no trace."""
        slots, entries = self._table.snapshot(), dict(self._entries)
        awaited = [entry for entry in batch if entry.awaited]
        try:
            yield
        except BaseException as error:
            self._table.restore(slots)
            if not isinstance(error, PatchError):
                self._entries = entries
            for entry in batch:
                entry.owner, entry.awaited = None, entry in awaited
                if entry.awaited and not isinstance(error, PatchError):
                    entry.wait()
            self._watch()
            raise

    @contextmanager
    def _record_refusal(self, entry: PatchEntry, batch: Sequence[PatchEntry]) -> Iterator[None]:
        """Record the reason in the report if this patch, and with it the batch, is refused."""
        try:
            yield
        except PatchError as error:
            beside = f"it was to be applied together with {entry.patch.declaration.name!r}"
            for other in batch:
                other.set_state("refused", str(error) if other is entry else beside)
                held = self._entries.get(other.patch.declaration.name)
                if held is None or not held.is_active:
                    self._entries[other.patch.declaration.name] = other
            raise

    def _in_order(self) -> list[PatchEntry]:
        return sorted(self._entries.values(), key=lambda entry: entry.order)

    def _states(self, entry: PatchEntry) -> Iterator[HookState]:
        for hook in entry.hooks.values():
            yield hook if hook.cell is None else replace(hook, hits=self.counter.cells[hook.cell])


_default: Engine | None = None


def default_engine() -> Engine:
    """Return the engine behind ``MyPatch.apply()`` and plans, made on first use; it counts in the ledger's cells."""
    global _default
    if _default is None:
        from vllm_graft.ledger import current

        _default = Engine(counter=current().cells)
    return _default


def set_default_engine(engine: Engine) -> None:
    """Put another engine behind ``MyPatch.apply()``; refused while the present one holds active patches."""
    global _default
    held = [] if _default is None or _default is engine else _default.active()
    if held:
        fix = "set the engine before the first patch is applied, or revert that patch"
        raise ConflictError(f"the default engine holds patch {held[0].declaration.name!r}", fix=fix)
    _default = engine
