"""A start in the front end: resolve the plan, carry it to the children, add it to vLLM's own arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_graft import ledger
from vllm_graft.bindings.attention import engine_arguments as attention
from vllm_graft.bindings.balancing import engine_arguments as balancing
from vllm_graft.bindings.models.planned_models import planned_models
from vllm_graft.bindings.routing import engine_arguments as routing
from vllm_graft.bindings.sampling import engine_arguments as sampling
from vllm_graft.bindings.scheduling import scheduler
from vllm_graft.boot import platforms, startup_error
from vllm_graft.boot.process import LOG, process
from vllm_graft.boot.proof import EXTENSION
from vllm_graft.boot.role import child_role
from vllm_graft.errors import ConfigError, StartError
from vllm_graft.findings import Finding
from vllm_graft.plan import Plan, PlanRequest, Run, clear_exported_plan, export_plan, inherited_run, resolve
from vllm_graft.server.callers import Callers
from vllm_graft.switches import disabled
from vllm_graft.versions import TESTED_BELOW, TESTED_FROM, in_tested_range, vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def engine_config(
    args: EngineArgs, call: Callable[..., VllmConfig], positional: tuple[Any, ...], keywords: dict[str, Any]
) -> VllmConfig:
    """Run ``EngineArgs.create_engine_config`` with the plan for its model, which is in force from here on."""
    if disabled():
        return call(*positional, **keywords)
    # EngineArgs.__post_init__ has had vLLM call every general plugin, on 0.26 to 0.32.
    served = _as_names(args.served_model_name)
    plan = resolve(PlanRequest(args.model, served, args.additional_config, plugins_loaded=True))
    known = process.plan
    if known is not None and known.hash != plan.hash:
        what = (
            "this process already runs an engine with another plan:"
            f" the first has {_items(known)}, this one {_items(plan)};"
            " patches apply to the whole process, so one of the two would run with the wrong ones"
        )
        fix = "run the second model in a process of its own, or give both the same plan"
        raise ConfigError(what, where=f"model {plan.model}", fix=fix)
    is_child = child_role() is not None
    if not is_child:
        # A child that resolves the plan again has nothing to add.
        _log(plan.findings)
    for name, reason in plan.left_out.items():
        LOG.info("vllm-graft: %s %s: it is left out", name, reason)
    if not plan:
        process.plan = plan
        if not is_child:
            clear_exported_plan()
        return call(*positional, **keywords)
    _refuse_unsupported(plan)
    first = process.plan is None and not is_child
    if first:
        platforms.refuse_broken()
    try:
        run = _begin(plan, args.worker_extension_cls or "", headless=bool(keywords.get("headless")))
        with _injected(args, plan):
            config = call(*positional, **keywords)
        planned_models.check_model(config)
        left_out = sampling.unusable_samplers(config, plan) | attention.unusable_kernels(plan)
        left_out |= balancing.unusable_balancers(config, plan) | routing.unusable_routers(plan)
    except BaseException as error:
        better = planned_models.explanation(error)
        if first:
            # A corrected configuration may be tried again in this process, as in a notebook.
            process.drop_plan()
        if better is not None:
            raise better from error
        raise
    # Afterwards, because ours is derived from the class that vLLM chooses once async_scheduling is settled.
    scheduler.set_scheduler_class(config, plan)
    _note_engine(plan, run, config, left_out)
    return config


def begin_engine_here(config: VllmConfig) -> None:
    """Apply the engine's part in a process that was entered before: the front end's own, or a forked child."""
    if disabled():
        return
    process.raise_deferred_error()
    refuse_config_by_hand(config, process.plan or None)
    if process.plan and process.run is not None and "engine" not in process.roles:
        process.adopt_plan(process.plan, process.run, "engine")


def _as_names(served: str | list[str] | None) -> tuple[str, ...]:
    return (served,) if isinstance(served, str) else tuple(served or ())


def _log(findings: Iterable[Finding]) -> None:
    levels = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}
    for finding in findings:
        LOG.log(levels[finding.level], "vllm-graft: %s", finding.explain())


def _refuse_unsupported(plan: Plan) -> None:
    """Refuse a vLLM or a front end in which what is planned could silently be absent."""
    process.raise_deferred_error()
    hook = process.missing_core_patch()
    if hook is not None:
        what = f"this vLLM ({vllm_version()}) lacks a place that vllm-graft needs: {hook.reason}"
        fix = f"install vLLM >={TESTED_FROM},<{TESTED_BELOW} or a newer vllm-graft, or set GRAFT_DISABLE=1"
        raise StartError(what, where=f"{hook.target}.{hook.attribute}", fix=fix)
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") in ("1", "true", "True"):
        # It replaces vLLM's Python front end, and with it everything of ours there.
        lost = f"no front-end part of the plan ({_items(plan)}) would run"
        what = f"with the Rust front end nothing can be proven active before the server serves, and {lost}"
        fix = "unset VLLM_USE_RUST_FRONTEND, or set GRAFT_DISABLE=1 for a stock server"
        raise StartError(what, where="VLLM_USE_RUST_FRONTEND", fix=fix)
    if plan.callers:
        Callers.read(plan.callers).check_plan(plan)
        if "--grpc" in sys.argv:
            # Callers are identified by HTTP headers.
            what = "with --grpc there is no API server that could tell callers apart"
            raise StartError(what, where="--grpc", fix="remove `callers` from the configuration, or serve HTTP")


def _items(plan: Plan) -> str:
    return ", ".join(item.name for item in plan) or "nothing"


def _begin(plan: Plan, extension: str, *, headless: bool) -> Run:
    """Carry the plan to the children and make it this process's own; ``extension`` is the user's own."""
    # EngineArgs that were used before may have ours.
    extension = "" if extension == EXTENSION else extension
    inherited = inherited_run()
    if child_role() == "frontend" and inherited is not None:
        run = inherited
    elif process.run is not None:
        run = dataclasses.replace(process.run, extension=extension)
    else:
        run = Run(f"{os.getpid()}-{secrets.token_hex(4)}", os.getpid(), extension=extension, headless=headless)
        ledger.current().begin_run(run.id, plan)
        startup_error.install_last_line(run.id)
    export_plan(plan, run)
    version = vllm_version()
    if version is not None and not in_tested_range(version):
        tested = f"outside the tested range {TESTED_FROM} to {TESTED_BELOW} (exclusive)"
        then = "each feature is probed, and what is missing is refused by name"
        LOG.warning("vllm-graft: vLLM %s is %s; %s", version, tested, then)
    if plan.of("sampler") and not sampling.v2_takes_samplers():
        LOG.warning(
            "vllm-graft: P005: a sampler is planned, but vLLM %s takes none on its V2 model runner: this server uses "
            "the V1 runner. Next: install vLLM 0.31 or newer to have both",
            version,
        )
    process.adopt_plan(plan, run, "frontend")
    return run


@contextlib.contextmanager
def _injected(args: EngineArgs, plan: Plan) -> Iterator[None]:
    """Add our part to the arguments, and restore them afterwards: the caller may use them again."""
    scheduler.check_arguments(args, plan)
    ours = {"worker_extension_cls": EXTENSION, **sampling.arguments(args, plan)}
    before = {name: getattr(args, name) for name in ours}
    try:
        for name, value in ours.items():
            setattr(args, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def _note_engine(plan: Plan, run: Run, config: VllmConfig, left_out: dict[str, str]) -> None:
    """Carry what is known only after the engine's configuration is made."""
    runner = "V2" if getattr(config, "use_v2_model_runner", False) else "V1"
    speculative = config.speculative_config is not None
    process.run = dataclasses.replace(
        run, runner=runner, speculative=speculative, left_out=left_out, processors=sampling.user_processors(config)
    )
    export_plan(plan, process.run)
    for item in plan:
        if item.name in left_out:
            LOG.warning("vllm-graft: S011: %s %s is left out: %s", item.point, item.name, left_out[item.name])
    record = ledger.current().record
    if record is not None:
        record.runner = runner
        if run.headless:
            # As vLLM's run_headless tells them apart (0.26 to 0.32).
            workers_only = getattr(config.parallel_config, "node_rank_within_dp", 0) > 0
            record.headless = "workers" if workers_only else "engines"
        ledger.current().save()


def refuse_config_by_hand(config: Any, plan: Plan | None) -> None:
    """Refuse a VllmConfig that did not come through ``create_engine_config``, if something is planned for it."""
    if config.parallel_config.worker_extension_cls == EXTENSION:
        return
    if plan is None:
        model = config.model_config
        plan = resolve(PlanRequest(model.model, _as_names(model.served_model_name), config.additional_config))
        # The front end has already reported what is only informational, such as P004.
        _log(finding for finding in plan.findings if finding.level != "info")
    if not plan:
        return
    what = f"this engine's VllmConfig was built by hand, so its plan ({_items(plan)}) cannot take effect"
    fix = (
        "build the configuration with EngineArgs(...).create_engine_config(), or set GRAFT_DISABLE=1 for a stock engine"
    )
    message = StartError(what, where="engine core", fix=fix)
    if plan.strict:
        raise message
    LOG.warning("vllm-graft: %s", message)
