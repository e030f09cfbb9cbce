"""How a start flows in the front end: resolve the plan, carry it, inject it into vLLM's own arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from vllm_graft import ledger
from vllm_graft.bindings.sampling import arguments as sampling
from vllm_graft.bindings.scheduling import scheduler
from vllm_graft.boot import disabled, injections, lastline, platforms
from vllm_graft.boot.process import LOG, process
from vllm_graft.boot.role import child_role, local_above
from vllm_graft.errors import ConfigError, StartError
from vllm_graft.plan import Plan, Request, Run, carried_run, carry, drop, resolve
from vllm_graft.server.callers import Callers
from vllm_graft.versions import TESTED_BELOW, TESTED_FROM, in_tested_range, vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

EXTENSION: Final = "vllm_graft.boot.extension.WorkerExtension"
"""The worker extension a planned server runs with, composed with the user's own."""

_LEVELS: Final = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}

_BY_HAND: Final = "EngineArgs(...).create_engine_config()"


def engine_config(
    args: EngineArgs, call: Callable[..., VllmConfig], given: tuple[Any, ...], named: dict[str, Any]
) -> VllmConfig:
    """What ``EngineArgs.create_engine_config`` does with us: the plan first, then vLLM's own configuration."""
    if disabled():
        return call(*given, **named)
    # EngineArgs.__post_init__ has had vLLM call every general plugin, on 0.26 to 0.32.
    plan = resolve(Request(args.model, _served(args), args.additional_config, plugins_loaded=True))
    _refuse_second(plan)
    _say_findings(plan)
    for name, reason in plan.left_out.items():
        LOG.info("vllm-graft: %s %s: it is left out", name, reason)
    if not plan:
        process.plan = plan
        if child_role() is None:
            drop()
        return call(*given, **named)
    _refuse_unknown_vllm()
    _refuse_rust_front_end(plan)
    if plan.callers:
        Callers.read(plan.callers).check_plan(plan)
        _refuse_grpc()
    first = process.plan is None
    if first and child_role() is None:
        platforms.refuse_broken()
    try:
        run = _begin(plan, _own_extension(args), headless=bool(named.get("headless")))
        if run.headless:
            injections.install_headless(process.engine)
        with _injected(args, plan):
            config = call(*given, **named)
        left_out = sampling.unusable_samplers(config, plan)
    except BaseException:
        if first and child_role() is None:
            # A corrected configuration may be tried again in this process, as in a notebook.
            process.leave()
        raise
    scheduler.set_scheduler_class(config, plan)
    _note_engine(plan, run, config, left_out)
    return config


def notice_engine(plan: Plan | None) -> None:
    """In an engine process vLLM just called us from: was its configuration made with the plan?"""
    config = local_above("vllm_config")
    if config is not None:
        _refuse_config_by_hand(config, plan)


def engine_here(config: VllmConfig) -> None:
    """In a process that had been called before its engine is made: the front end's own, or a forked child."""
    if disabled():
        return
    if process.failed is not None:
        raise process.failed
    _refuse_config_by_hand(config, process.plan or None)
    if process.plan and process.run is not None and "engine" not in process.roles:
        process.take(process.plan, process.run, "engine")


def _served(args: EngineArgs) -> tuple[str, ...]:
    names = args.served_model_name
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def _refuse_second(plan: Plan) -> None:
    first = process.plan
    if first is None or first.hash == plan.hash:
        return
    raise ConfigError(
        f"a second engine with another plan in one process: the first has {_items(first)}, this one {_items(plan)}; "
        "patches belong to a process, so one of the two would not get what it asked for",
        where=f"model {plan.model}",
        fix="run the second model in a process of its own, or give both the same plan",
    )


def _refuse_unknown_vllm() -> None:
    """Refuse a plan where a place of ours is missing: without it, what is planned could be absent in silence."""
    if process.failed is not None:
        raise process.failed
    hook = injections.missing(process.engine)
    if hook is not None:
        raise StartError(
            f"this vLLM ({vllm_version()}) lacks a place that vllm-graft needs: {hook.reason}",
            where=f"{hook.target}.{hook.attribute}",
            fix=f"install vLLM >={TESTED_FROM},<{TESTED_BELOW} or a newer vllm-graft, or set GRAFT_DISABLE=1",
        )


def _refuse_rust_front_end(plan: Plan) -> None:
    """Refuse what the Rust front end would drop: it runs none of vLLM's Python front end, and so nothing of ours."""
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("1", "true", "True"):
        return
    raise StartError(
        f"with the Rust front end nothing can be proven active before the server serves, and no front-end part of the "
        f"plan ({_items(plan)}) would run",
        where="VLLM_USE_RUST_FRONTEND",
        fix="unset VLLM_USE_RUST_FRONTEND, or set GRAFT_DISABLE=1 for a stock server",
    )


def _refuse_grpc() -> None:
    """Refuse callers where nothing of HTTP is served: nobody would be asked who he is."""
    if "--grpc" in sys.argv:
        raise StartError(
            "with --grpc there is no API server in which callers could be told apart",
            where="--grpc",
            fix="take `callers` out of the configuration, or serve HTTP",
        )


def _items(plan: Plan) -> str:
    return ", ".join(item.name for item in plan) or "nothing"


def _begin(plan: Plan, extension: str, *, headless: bool) -> Run:
    """Carry the plan to the children and make it this process's own."""
    inherited = carried_run()
    if child_role() == "frontend" and inherited is not None:
        run = inherited
    elif process.run is not None:
        run = dataclasses.replace(process.run, extension=extension)
    else:
        run = Run(f"{os.getpid()}-{secrets.token_hex(4)}", os.getpid(), extension=extension, headless=headless)
        ledger.current().begin_run(run.id, plan)
        lastline.install(run.id)
    carry(plan, run)
    _warn_outside_range()
    _say_where_samplers_run(plan)
    process.take(plan, run, "frontend")
    return run


def _say_findings(plan: Plan) -> None:
    """Say what the resolution noticed, once: a child that resolves the plan again has nothing to add."""
    if child_role() is None:
        for finding in plan.findings:
            LOG.log(_LEVELS[finding.level], "vllm-graft: %s", finding.explain())


def _say_where_samplers_run(plan: Plan) -> None:
    if plan.of("sampler") and not sampling.v2_takes_samplers():
        LOG.warning(
            "vllm-graft: P005: a sampler is planned, and vLLM %s takes none on its V2 model runner: this server uses "
            "the V1 runner. Next: install vLLM 0.31 or newer to have both",
            vllm_version(),
        )


def _warn_outside_range() -> None:
    version = vllm_version()
    if version is not None and not in_tested_range(version):
        LOG.warning(
            "vllm-graft: vLLM %s is outside the tested range %s to %s (exclusive); each feature is probed, and what is "
            "missing is refused by name",
            version,
            TESTED_FROM,
            TESTED_BELOW,
        )


def _own_extension(args: EngineArgs) -> str:
    return "" if args.worker_extension_cls == EXTENSION else args.worker_extension_cls or ""


@contextlib.contextmanager
def _injected(args: EngineArgs, plan: Plan) -> Iterator[None]:
    """The arguments with our part in them, put back afterwards: the caller may use them again."""
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
    """Carry what is known only now that the engine's configuration is made."""
    runner = "V2" if getattr(config, "use_v2_model_runner", False) else "V1"
    speculative = config.speculative_config is not None
    process.run = dataclasses.replace(
        run, runner=runner, speculative=speculative, left_out=left_out, processors=sampling.user_processors(config)
    )
    carry(plan, process.run)
    for name, reason in left_out.items():
        LOG.warning("vllm-graft: S011: sampler %s is left out: %s", name, reason)
    record = ledger.current().record
    if record is not None:
        record.runner = runner
        if run.headless:
            # As vLLM's run_headless tells them apart (0.26 to 0.32).
            workers_only = getattr(config.parallel_config, "node_rank_within_dp", 0) > 0
            record.headless = "workers" if workers_only else "engines"
        ledger.current().save()


def _refuse_config_by_hand(config: Any, plan: Plan | None) -> None:
    """A VllmConfig that did not come through ``create_engine_config`` has no plan in it: say so, do not serve."""
    if config.parallel_config.worker_extension_cls == EXTENSION:
        return
    if plan is None:
        model = config.model_config
        served = model.served_model_name
        names = (served,) if isinstance(served, str) else tuple(served or ())
        plan = resolve(Request(model.model, names, config.additional_config))
        for finding in plan.findings:
            LOG.log(_LEVELS[finding.level], "vllm-graft: %s", finding.explain())
    if not plan:
        return
    message = StartError(
        f"this engine's VllmConfig was built by hand, so its plan ({_items(plan)}) cannot take effect",
        where="engine core",
        fix=f"build the configuration with {_BY_HAND}, or set GRAFT_DISABLE=1 for a stock engine",
    )
    if plan.strict:
        raise message
    LOG.warning("vllm-graft: %s", message)
