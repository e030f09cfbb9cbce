"""This process: its plan, its roles, and how the plan takes effect in it.

``doors.py`` has the ways in. Every one of them ends in ``Process.adopt_plan``, which applies the part of the plan
that the process's role needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from vllm_graft.bindings.attention import patches as attention_patches
from vllm_graft.bindings.balancing import patches as balancer_patches
from vllm_graft.bindings.models import patches as model_patches
from vllm_graft.bindings.models.planned_models import planned_models
from vllm_graft.bindings.routing import patches as router_patches
from vllm_graft.bindings.sampling import patches as sampler_patches
from vllm_graft.boot.role import named_role
from vllm_graft.errors import GraftError, PatchError, StartError, join
from vllm_graft.ledger import Watch, current
from vllm_graft.ledger.comparison import SAME_PLAN
from vllm_graft.ledger.record import ItemStateName, Record
from vllm_graft.patching import HookState, Patch, default_engine, patchset_hash
from vllm_graft.patching.declaration import as_patch
from vllm_graft.plan import Plan, PlanItem, Run, clear_exported_plan
from vllm_graft.plan.catalogue import load
from vllm_graft.points import Role
from vllm_graft.text import make_printable
from vllm_graft.versions import vllm_version

LOG: Final = logging.getLogger("vllm.graft")
"""Below vLLM's own logger, so that its handlers and levels apply in every process."""

LOG.addFilter(make_printable)


OWN_PREFIX: Final = "graft."
"""The prefix of our own patches of vLLM; whether one of them fits matters only once something is planned."""


class Process:
    """The plan of this process, and the patches that it applied.

    entered:               whether vLLM has called our entry point here
    fork_hooks_registered: whether the handlers for forked children are registered
    deferred_error:        an error that could not be raised where it happened; the next engine, worker or plan
                           raises it
    front_end_check_done:  whether a front end has asked this engine for its records, or that none did is recorded
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.run: Run | None = None
        self.roles: set[Role] = set()
        self.entered = False
        self.fork_hooks_registered = False
        self.deferred_error: GraftError | None = None
        self.front_end_check_done = False
        # One patching engine per process: it may already hold what another plugin applied by hand.
        self.engine = default_engine()
        self.engine.strict = False
        self.engine.on_refused = self._patch_refused
        self.engine.on_change = self._patch_changed
        self._classes: dict[str, Patch] = {}
        self._core_names: set[str] = set()
        self._patchset = ""
        self.watch = Watch(current(), self.check_patches)

    def patchset(self) -> str:
        """Return the hash of every planned patch, the same in every process of a server."""
        return self._patchset

    def raise_deferred_error(self) -> None:
        """Raise the error that could not be raised where it happened, if there is one."""
        if self.deferred_error is not None:
            raise self.deferred_error

    def install(self, patches: Iterable[Patch]) -> None:
        """Apply our own patches of vLLM.

        One that the installed vLLM has no place for must not disturb a server that plans nothing. The engine's report
        keeps the refusal, and a plan is refused because of it (``missing_core_patch``).
        """
        for patch in patches:
            self._core_names.add(patch.declaration.name)
            with contextlib.suppress(PatchError):
                self.engine.apply([patch])

    def missing_core_patch(self) -> HookState | None:
        """Return the first hook of our own patches that the installed vLLM has no place for; None if all fit."""
        hooks = self.engine.report()
        return next((hook for hook in hooks if hook.patch in self._core_names and hook.state == "refused"), None)

    def adopt_plan(self, plan: Plan, run: Run, role: Role) -> None:
        """Make the plan this process's own: apply what the role needs, open the record, log one line.

        With a strict plan, an item that cannot be applied raises StartError after it has been recorded.
        """
        self.plan, self.run = plan, run
        self.roles.add(role)
        ledger = current()
        # Before the record is opened, which then holds the states of all items from the start.
        refused = self._apply(plan)
        if ledger.record is None:
            version = vllm_version() or ""
            ledger.open(Record.of_this_process(run.id, plan.hash, plan.model, sorted(self.roles), version, run.runner))
            if named_role() == "worker":
                # vLLM's worker_main catches what goes wrong before its loop begins, and ends with status 0.
                ledger.unfinished = "it ended before it was ready; its error is in the server's log"
        else:
            if role not in ledger.record.roles:
                ledger.record.roles.append(role)
            ledger.save()
        record, roles = ledger.record, "+".join(sorted(self.roles))
        if record is not None:
            items = ", ".join(f"{item.name} {item.state}" for item in record.items) or "nothing needed here"
            LOG.info("vllm-graft: plan %s in %s (%s): %s", plan.hash, record.name, roles, items)
        if refused and plan.strict:
            here = f"{record.name if record else 'this process'} ({roles}, pid {os.getpid()})"
            places = [f"{here}: {item.point} {item.name!r} (from {item.origin})" for item, _ in refused]
            faults = zip(places, (error for _, error in refused), strict=True)
            raise join([StartError(error.what, where=place, fix=error.fix) for place, error in faults])

    def _apply(self, plan: Plan) -> list[tuple[PlanItem, GraftError]]:
        """Apply the patches that this process needs and revert those it does not; return the refused ones."""
        ledger = current()
        needed = plan.needed_by(self.roles)
        refused: list[tuple[PlanItem, GraftError]] = []
        classes: dict[str, Patch] = {}
        for item in plan.of("patch"):
            # Every process imports every planned patch, because the hash of the patches covers all.
            try:
                classes[item.name] = as_patch(load(item.target, item.name, item.package))
            except GraftError as error:
                if item in needed:
                    ledger.set_item(item.point, item.name, "refused", str(error))
                    refused.append((item, error))
        self._patchset = patchset_hash(classes.values()) + _traced_hash(plan)
        wanted = {item.name for item in needed}
        if any(self.engine.is_active(kind) for name, kind in classes.items() if name not in wanted):
            # A forked child has its parent's patches. The last goes first, because one may wrap what another added,
            # and all go before one is applied, because two of different processes may define one name.
            for kind in reversed(classes.values()):
                self.engine.revert(kind)
        left_out = self.run.left_out if self.run is not None else {}
        for item in needed:
            if item.name in classes:
                self._classes[item.name] = classes[item.name]
                try:
                    self.engine.apply([classes[item.name]])
                except GraftError as error:
                    ledger.set_item(item.point, item.name, "refused", str(error))
                    refused.append((item, error))
                else:
                    self._note_patch(item.name, classes[item.name])
            elif item.point != "patch" and not ledger.knows(item.name):
                # Items of other points are set to "applied" by their bindings, when vLLM first makes them.
                if item.name in left_out:
                    ledger.set_item(item.point, item.name, "skipped", left_out[item.name])
                else:
                    ledger.set_item(item.point, item.name, "armed", "nothing in this process has used it yet")
        if plan.of("sampler"):
            sampler_patches.install(self.engine)
        if plan.of("attention"):
            attention_patches.install(self.engine)
        if plan.of("expert-balancer"):
            balancer_patches.install(self.engine)
        if plan.of("router"):
            router_patches.install(self.engine)
        if plan.of("model"):
            model_patches.install(self.engine)
            refused += planned_models.register(plan, self.roles)
        return refused

    def _patch_refused(self, patch: Patch, error: PatchError) -> None:
        """Handle an armed patch whose module does not fit: raise if it is planned strictly or was applied by hand."""
        strict = self.plan is None or self.plan.strict
        point = next((point for point, patches in _NEEDED_PATCHES.items() if patch in patches), None)
        if point is not None:
            # Without one of its patches a planned item would silently be left out, so it is refused.
            for item in self.plan.of(point) if self.plan is not None else ():
                current().set_item(item.point, item.name, "refused", str(error))
                current().save()
                if strict:
                    raise error
            return
        if patch.declaration.name.startswith(OWN_PREFIX):
            sampler_patches.log_refusal(patch, error)
            return
        planned = patch in self._classes.values()
        if planned:
            self._patch_changed(patch)
        if not planned or strict:
            raise error

    def _patch_changed(self, patch: Patch) -> None:
        """Record that an armed patch met its module, or could not be applied to it."""
        for name, known in self._classes.items():
            if known is patch:
                self._note_patch(name, patch)
                current().save()

    def _note_patch(self, name: str, patch: Patch) -> None:
        ledger = current()
        hooks = [hook for hook in self.engine.report() if hook.patch == patch.declaration.name]
        state, reason = _joint_state(hooks, self.run.runner if self.run and "worker" in self.roles else "")
        ledger.set_item("patch", name, state, reason)
        for hook in hooks:
            if hook.cell is not None:
                ledger.note_hook(name, f"{hook.target}.{hook.attribute}", hook.cell)

    def check_patches(self) -> None:
        """Record planned patches whose attribute something else has set since; log each once."""
        ledger, overwritten_now = current(), self.engine.find_overwritten()
        for name, patch in list(self._classes.items()):
            known = ledger.record.item(name) if ledger.record is not None else None
            overwritten = known is not None and known.state == "overwritten"
            if patch in overwritten_now:
                ledger.set_item("patch", name, "overwritten", overwritten_now[patch].what)
                if not overwritten:
                    LOG.error("vllm-graft: S010: patch %s is overwritten: %s", name, overwritten_now[patch])
                    ledger.save()
            elif overwritten:
                self._note_patch(name, patch)
                ledger.save()

    def note_request(self) -> None:
        """Record once that a front end on another node sends requests and has never asked for records."""
        if self.front_end_check_done or self.plan is None:
            return
        self.front_end_check_done = True
        what = "requests arrive from a front end without a plan"
        text = f"plan {self.plan.hash}: {what}, so this plan is active on this node only. Next: {SAME_PLAN}"
        current().note_error("S024", text)

    def drop_plan(self) -> None:
        """Revert the patches, close the record and drop the plan, so that this process can take another."""
        self.watch.stop()
        for kind in self._classes.values():
            self.engine.revert(kind)
        current().close()
        clear_exported_plan()
        planned_models.forget()
        self.plan = self.run = None
        self.roles.clear()
        self._classes.clear()
        self._patchset = ""

    def uninstall(self, held: Collection[Patch]) -> None:
        """Undo ``doors.enter``: revert our own patches, and leave those that the engine held before."""
        for patch in reversed(self.engine.active()):
            if patch not in held:
                self.engine.revert(patch)
        self.entered = False


_NEEDED_PATCHES: Final[Mapping[str, tuple[Patch, ...]]] = {
    "attention": attention_patches.ATTENTION_PATCHES,
    "router": router_patches.ROUTER_PATCHES,
    "model": model_patches.MODEL_PATCHES,
    "expert-balancer": balancer_patches.BALANCER_PATCHES,
}
"""The patches of points whose items are refused if one of them does not fit."""

process = Process()
"""The one ``Process`` of this process."""


_V1_ONLY: Final = (
    "vllm.v1.sample.rejection_sampler",
    "vllm.v1.sample.sampler",
    "vllm.v1.worker.gpu_model_runner",
)
_V2_ONLY: Final = ("vllm.v1.worker.gpu",)
"""The modules, with those below them, that only one of the two model runners calls (0.26 to 0.32)."""


def _traced_hash(plan: Plan) -> str:
    """Return a hash of what else changes compiled code: which layers are routed. Empty if no router is planned."""
    routers = [[item.name, item.target, dict(item.options)] for item in plan.of("router")]
    text = json.dumps(routers, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8] if routers else ""


_WORST: Final[tuple[ItemStateName, ...]] = ("refused", "late")


def _joint_state(hooks: list[HookState], runner: str) -> tuple[ItemStateName, str]:
    """Return the state of a patch, with the reason: that of its worst hook."""
    for state in _WORST:
        for hook in hooks:
            if hook.state == state:
                return state, hook.reason
    unreached = {"V1": _V2_ONLY, "V2": _V1_ONLY}.get(runner, ())
    for hook in hooks:
        if any(f"{hook.target.partition(':')[0]}.".startswith(f"{module}.") for module in unreached):
            return "dead", f"{hook.target} belongs to the other model runner; this server uses {runner}"
    for hook in hooks:
        if hook.review == "drifted" and hook.reason and hook.state == "applied":
            return "drifted", hook.reason
    return next((("armed", hook.reason) for hook in hooks if hook.state == "armed"), ("applied", ""))
