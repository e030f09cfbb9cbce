"""This process: what it does when vLLM calls us, and how the plan takes effect in it.

A front end resolves the plan when the model's name is known (``start.py``); its children find the plan in their
environment and apply their part of it here. A forked child is never called by vLLM: it is put right after the fork.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import sys
from collections.abc import Collection
from typing import Final

from vllm_graft import ledger
from vllm_graft.bindings.sampling import patches as sampler_patches
from vllm_graft.boot import disabled, names
from vllm_graft.boot.role import child_role, named_role
from vllm_graft.errors import GraftError, PatchError, StartError, join
from vllm_graft.ledger.reading import SAME_PLAN
from vllm_graft.ledger.record import Record, State
from vllm_graft.patching import HookState, Patch, default_engine, patchset_hash
from vllm_graft.patching.declaration import as_patch
from vllm_graft.plan import Plan, PlanItem, Run, carried, carried_run, drop
from vllm_graft.plan.catalogue import load
from vllm_graft.points import Role
from vllm_graft.text import make_printable
from vllm_graft.versions import vllm_version

LOG: Final = logging.getLogger("vllm.graft")
"""Below vLLM's own logger, so that its handlers and levels apply in every process."""

LOG.addFilter(make_printable)


OWN_PREFIX: Final = "graft."
"""How the names of our own patches of vLLM begin; whether one of them fits matters only once something is planned."""


class Process:
    """What is in force in this process."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.run: Run | None = None
        self.roles: set[Role] = set()
        self.entered = False
        self.told_of_forks = False
        self.failed: GraftError | None = None
        self.asked = False
        """Whether a front end has asked this engine what is active here."""
        # One engine per process: it may already hold what another plugin applied by hand.
        self.engine = default_engine()
        self.engine.strict = False
        self.engine.on_refused = self._patch_refused
        self.engine.on_change = self._patch_changed
        self._classes: dict[str, Patch] = {}
        self._patchset = ""
        self.watch = ledger.Watch(ledger.current(), self.look)

    def patchset(self) -> str:
        """The hash of every patch the plan names, in whatever process it is asked for."""
        return self._patchset

    def take(self, plan: Plan, run: Run, role: Role) -> None:
        """Make the plan this process's own: open the record, apply what the role needs, say so in one line.

        With a strict plan, an item that cannot be applied raises StartError after it has been recorded.
        """
        self.plan, self.run = plan, run
        self.roles.add(role)
        book = ledger.current()
        refused = self._apply(plan)
        if book.record is None:
            version = vllm_version() or ""
            book.open(Record.of_this_process(run.id, plan.hash, plan.model, sorted(self.roles), version, run.runner))
            if named_role() == "worker":
                # vLLM's worker_main catches what goes wrong before its loop begins, and ends with status 0.
                book.unfinished = "it ended before it was ready; its error is in the server's log"
        else:
            book.add_role(role)
            book.save()
        self._announce(plan)
        if refused and plan.strict:
            raise self._refusal(refused)

    def _apply(self, plan: Plan) -> list[tuple[PlanItem, str, str]]:
        """Apply the patches this process needs and take back those it does not; the refusals, each with its fix."""
        book = ledger.current()
        needed = plan.needed_by(self.roles)
        refused: list[tuple[PlanItem, str, str]] = []
        classes = {item.name: self._patch_class(item, refused) for item in plan.of("patch")}
        loaded = [kind for kind in classes.values() if kind is not None]
        self._patchset = patchset_hash(loaded)
        if any(
            self.engine.is_active(kind)
            for item in plan.of("patch")
            if item not in needed and (kind := classes[item.name])
        ):
            # A forked child has its parent's patches. The last goes first, because one may wrap what another added,
            # and all go before one is applied, because two of different processes may define one name.
            for kind in reversed(loaded):
                self.engine.revert(kind)
        for item in needed:
            kind = classes.get(item.name)
            if kind is None:
                continue
            self._classes[item.name] = kind
            try:
                self.engine.apply([kind])
            except GraftError as error:
                refused.append((item, error.what, error.fix))
                book.set_item(item.point, item.name, "refused", str(error))
            else:
                self._note_patch(item.name, kind)
        for item in needed:
            if item.point != "patch" and not book.knows(item.name):
                self._await(item)
        if plan.of("sampler"):
            sampler_patches.install(self.engine)
        return refused

    def _await(self, item: PlanItem) -> None:
        """Say of an item that something in this process is yet to use it, or that this engine cannot have it."""
        reason = self.run.left_out.get(item.name) if self.run is not None else None
        if reason is not None:
            ledger.current().set_item(item.point, item.name, "skipped", reason)
        else:
            ledger.current().set_item(item.point, item.name, "armed", "nothing in this process has used it yet")

    def _patch_class(self, item: PlanItem, refused: list[tuple[PlanItem, str, str]]) -> Patch | None:
        try:
            return as_patch(load(item.target, item.name, item.package))
        except GraftError as error:
            if self.roles.intersection(item.roles):
                refused.append((item, error.what, error.fix))
                ledger.current().set_item(item.point, item.name, "refused", str(error))
            return None

    def _patch_refused(self, patch: Patch, error: PatchError) -> None:
        """A module that a patch waited for does not fit it: raise, unless nobody depends on it."""
        if patch.declaration.name.startswith(OWN_PREFIX):
            sampler_patches.log_refusal(patch, error)
            return
        planned = patch in self._classes.values()
        if planned:
            self._patch_changed(patch)
        if not planned or self.plan is None or self.plan.strict:
            raise error

    def _patch_changed(self, patch: Patch) -> None:
        """An armed patch met its module, or could not be applied to it."""
        for name, known in self._classes.items():
            if known is patch:
                self._note_patch(name, patch)
                ledger.current().save()

    def _note_patch(self, name: str, patch: Patch) -> None:
        book = ledger.current()
        hooks = [hook for hook in self.engine.report() if hook.patch == patch.declaration.name]
        state, reason = _joint_state(hooks, self.run.runner if self.run and "worker" in self.roles else "")
        book.set_item("patch", name, state, reason)
        for hook in hooks:
            if hook.cell is not None:
                book.note_hook(name, f"{hook.target}.{hook.attribute}", hook.cell)

    def look(self) -> None:
        """Notice what others have done since to the targets of planned patches, and say so once."""
        book, overwritten_now = ledger.current(), self.engine.find_overwritten()
        for name, patch in list(self._classes.items()):
            known = book.record.item(name) if book.record is not None else None
            overwritten = known is not None and known.state == "overwritten"
            if patch in overwritten_now:
                book.set_item("patch", name, "overwritten", overwritten_now[patch].what)
                if not overwritten:
                    LOG.error("vllm-graft: S010: patch %s is overwritten: %s", name, overwritten_now[patch])
                    book.save()
            elif overwritten:
                self._note_patch(name, patch)
                book.save()

    def note_work(self) -> None:
        """Say once that a front end on another node gives this engine work and never asked what is active here."""
        if self.asked or self.plan is None:
            return
        self.asked = True
        what = (
            "requests come from a front end that never asked for it: its node has no plan, so this one is active on "
            "its own node alone"
        )
        ledger.current().note_error("S024", f"plan {self.plan.hash}: {what}. Next: {SAME_PLAN}")

    def _announce(self, plan: Plan) -> None:
        record = ledger.current().record
        if record is None:
            return
        items = ", ".join(f"{item.name} {item.state}" for item in record.items) or "nothing needed here"
        LOG.info("vllm-graft: plan %s in %s (%s): %s", plan.hash, record.name, "+".join(sorted(self.roles)), items)

    def _refusal(self, refused: list[tuple[PlanItem, str, str]]) -> StartError:
        """The error that stops the start: every item that is refused, each with its reason and next step."""
        record = ledger.current().record
        here = f"{record.name if record else 'this process'} ({'+'.join(sorted(self.roles))}, pid {os.getpid()})"
        return join([StartError(what, where=f"{here}: {_named(item)}", fix=fix) for item, what, fix in refused])

    def leave(self) -> None:
        """Put everything back, so that this process can take another plan: patches, record, what was carried."""
        self.watch.stop()
        for kind in self._classes.values():
            self.engine.revert(kind)
        ledger.current().close()
        drop()
        self.plan = self.run = None
        self.roles.clear()
        self._classes.clear()
        self._patchset = ""

    def withdraw(self, held: Collection[Patch]) -> None:
        """Undo ``enter``: take our own places in vLLM back, and leave what the engine held before."""
        for patch in reversed(self.engine.active()):
            if patch not in held:
                self.engine.revert(patch)
        self.entered = False


def _named(item: PlanItem) -> str:
    return f"{item.point} {item.name!r} (from {item.origin})"


process = Process()
"""What is in force in this process."""


def enter() -> None:
    """What vLLM's call of our entry point does; again in the same process it does nothing."""
    if process.entered:
        return
    process.entered = True
    if disabled():
        names.silence_warnings()
        if child_role() is None:
            _say("vllm-graft: GRAFT_DISABLE is set; this is the stock server")
        return
    role = child_role()
    try:
        names.make_known(process.patchset)
    except (ImportError, AttributeError) as error:
        # No reason to disturb a server that plans nothing; one that does is refused.
        process.failed = StartError(
            f"this vLLM ({vllm_version()}) does not keep its environment variables where vllm-graft looks: {error}",
            where="vllm.envs.environment_variables",
            fix="install a vLLM of the tested range or a newer vllm-graft, or set GRAFT_DISABLE=1",
        )
    from vllm_graft.boot import injections

    if role != "engine" or carried() is not None:
        injections.install(process.engine, role)
    if not process.told_of_forks:
        # Neither can be taken back, and twice would be once too often.
        process.told_of_forks = True
        os.register_at_fork(after_in_child=_forked)
        multiprocessing.util.register_after_fork(process, _settled_after_fork)
    if role is None:
        return
    plan, run = carried(), carried_run()
    if role == "engine":
        from vllm_graft.boot.start import notice_engine

        notice_engine(plan)
    if plan is not None and run is not None:
        process.take(plan, run, role)


def _say(line: str) -> None:
    """One line at INFO, also where vLLM has not set its logging up yet: it does so after it calls plugins."""
    if LOG.hasHandlers():
        LOG.info(line)
    else:
        print(line, file=sys.stderr, flush=True)


def _forked() -> None:
    ledger.current().forked()
    process.roles.clear()
    process.failed = None


def _settled_after_fork(own: Process) -> None:
    """In a forked child that multiprocessing started, once its name is known: its own record, its own part."""
    role = named_role()
    plan, run = carried(), carried_run()
    if role is None or plan is None or run is None or own.plan is None:
        return
    ledger.current().forget_items()
    own.engine.recount()
    try:
        own.take(plan, run, role)
    except GraftError as error:
        # multiprocessing would swallow it here; the engine or worker that is made next raises it.
        own.failed = error


_V1_ONLY: Final = (
    "vllm.v1.sample.rejection_sampler",
    "vllm.v1.sample.sampler",
    "vllm.v1.worker.gpu_model_runner",
)
_V2_ONLY: Final = ("vllm.v1.worker.gpu",)
"""The modules, with those below them, that only one of the two model runners calls."""


def _joint_state(hooks: list[HookState], runner: str) -> tuple[State, str]:
    """The state of a patch from the states of its hooks: the worst one counts."""
    for wanted in ("refused", "late"):
        for hook in hooks:
            if hook.state == wanted:
                return ("refused" if wanted == "refused" else "late"), hook.reason
    unreached = {"V1": _V2_ONLY, "V2": _V1_ONLY}.get(runner, ())
    for hook in hooks:
        if any(f"{hook.target.partition(':')[0]}.".startswith(f"{module}.") for module in unreached):
            return "dead", f"{hook.target} belongs to the other model runner; this server uses {runner}"
    for hook in hooks:
        if hook.review == "drifted" and hook.reason and hook.state == "applied":
            return "drifted", hook.reason
    if any(hook.state == "armed" for hook in hooks):
        return "armed", next(hook.reason for hook in hooks if hook.state == "armed")
    return "applied", ""
