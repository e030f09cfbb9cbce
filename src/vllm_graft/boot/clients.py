"""The engine client in the front end: stat sinks go in, and nothing is served before the processes match the plan."""

from __future__ import annotations

import asyncio
import inspect
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm_graft import ledger
from vllm_graft.boot import proof, startup_error
from vllm_graft.boot.process import LOG, process
from vllm_graft.boot.role import frames_above
from vllm_graft.errors import GraftError, StartError
from vllm_graft.findings import Finding
from vllm_graft.ledger import ProcessRow, comparison
from vllm_graft.ledger.quarantine import QuarantineReader
from vllm_graft.plan import Plan
from vllm_graft.switches import disabled

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

_STATUS_TIMEOUT_S: Final = 10.0  # the seconds that engines have to answer a request for the status
_FRESH_S: Final = 1.0  # the seconds for which an answer is reused
_LEAVE_S: Final = 5.0  # the seconds that an API server takes to end, apart from its sinks
_HTTP: Final = "run_server_worker"  # the function in which vLLM's HTTP server makes its client (0.26 to 0.32)


def make_client(
    client: Any, call: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any], *, offline: bool
) -> None:
    """Run ``AsyncLLM.__init__`` or ``LLMEngine.__init__`` with the planned stat sinks, then compare with the plan."""
    plan = process.plan
    if disabled() or not plan or process.run is None:
        call(*args, **kwargs)
        return
    # Callers pass stat_loggers by keyword or by position, and the position differs between releases.
    bound = inspect.signature(call).bind(*args, **kwargs)
    if plan.of("stats"):
        from vllm_graft.bindings.stats import stat_loggers

        theirs = bound.arguments.get("stat_loggers") or []
        bound.arguments["stat_loggers"] = [*theirs, *stat_loggers(plan, ledger.current(), threads=not offline)]
        if offline:
            # LLM() turns statistics off by default, and a planned sink would then receive nothing.
            bound.arguments["log_stats"] = True
    try:
        call(*bound.args, **bound.kwargs)
    except GraftError:
        raise
    except Exception as error:
        reason = startup_error.recorded_error(process.run.id)
        if reason is None:
            raise
        raise reason from error
    parallel = client.vllm_config.parallel_config
    nodes = parallel.data_parallel_size * getattr(parallel, "nnodes", 1)
    if offline:
        proof.compare(plan, proof.ask_engine(client.engine_core))
    elif ledger.current().home is not None and nodes == 1 and parallel.distributed_executor_backend != "ray":
        # Every process of the engine records on this machine, as far as its configuration tells.
        proof.compare(plan)
    elif not any(frame.f_code.co_name == _HTTP for frame in frames_above()):
        # An HTTP server asks its engines before it serves (GraftEndpoint); other programs do not.
        what = "is not compared with the engines of this AsyncLLM: they may run on other machines and were not asked"
        where = "data parallelism, several nodes, Ray, or records in memory"
        asks = "which asks every engine before it serves"
        fix = f"run `vllm-graft status` on every node, or serve with `vllm serve`, {asks}"
        LOG.warning("vllm-graft: %s", Finding("S026", "warning", f"plan {plan.hash}", what, where, fix).explain())
    ledger.current().set_ready()
    process.watch.start()


def closing_seconds() -> float:
    """Return how long API servers may take to end: time for their sinks, if the plan has any."""
    if disabled() or not process.plan or not process.plan.of("stats"):
        return 0.0
    from vllm_graft.bindings.stats import CLOSE_S

    return CLOSE_S + _LEAVE_S


def endpoint_plugins() -> list[GraftEndpoint]:
    """Return our endpoint plugin if there is a plan."""
    if disabled() or not process.plan or process.run is None:
        return []
    return [GraftEndpoint(process.plan, process.run.id)]


class GraftEndpoint:
    """Our endpoint plugin: the last comparison before an API server serves, our routes and our metrics."""

    name = "graft"
    required_tasks = None

    def __init__(self, plan: Plan, run: str) -> None:
        self._plan = plan
        self._run = run
        self._client: EngineClient | None = None
        self._keys: list[str] = []
        self._unmanaged: list[Finding] = []
        self._report: proof.RunReport | None = None
        self._reported_at = 0.0
        self._quarantine = QuarantineReader(ledger.current())
        self._aside: Mapping[str, str] = {}
        self._pending: asyncio.Task[proof.RunReport] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add middleware and routes; vLLM calls this while it builds the application."""
        # Only API servers need these, and this module is imported in every process.
        from vllm_graft.server.body_errors import install_body_errors
        from vllm_graft.server.gate import install_gate
        from vllm_graft.server.metrics import install_metrics
        from vllm_graft.server.status import install_status

        install_gate(app, self._plan, ledger.current())
        install_body_errors(app)
        if self._plan.endpoint:
            install_status(app, self._run, self.status, self._plan, lambda: self._keys)
        install_metrics(app, self._plan)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Compare all engines with the plan; vLLM calls this before it serves, and an error stops the start."""
        from vllm_graft.server.status import server_keys

        self._client = engine_client
        self._keys = server_keys(args)
        if engine_client is None:
            return
        from vllm_graft.bindings.attention import requests as policies
        from vllm_graft.bindings.sampling.requests import check_early

        if policies.policy_keys(self._plan):
            policies.check_early(engine_client)
        # Without samplers too: vLLM answers what cannot be sent to an engine with a 500.
        check_early(engine_client)
        if self._plan.callers:
            from vllm_graft.server.callers import install_stamp

            install_stamp(engine_client, process.engine)
        core = _engine_core(engine_client)
        proof.compare(self._plan, await proof.ask_engines(core))
        size = engine_client.vllm_config.parallel_config.data_parallel_size
        if (unmanaged := proof.unmanaged_ranks(size, core.core_engines)) is not None:
            self._unmanaged = [unmanaged]
            LOG.warning("vllm-graft: %s", unmanaged.explain())

    async def status(self) -> tuple[list[ProcessRow], list[Finding]]:
        """Return every process of this server and the findings about them.

        Engines are asked once a second at most, unless a process of this machine has put an item aside meanwhile.
        Requests that come while engines are being asked wait for the same answer. An engine that does not answer has a
        row without a record, which is a finding.
        """
        aside = self._quarantine.reasons()
        if self._report is None or time.monotonic() - self._reported_at >= _FRESH_S or aside != self._aside:
            if self._pending is None or self._pending.done():
                self._pending, self._aside = asyncio.ensure_future(self._ask()), aside
            # Shielded, because a client that disconnects must not cancel the answer for the others.
            self._report = await asyncio.shield(self._pending)
            self._reported_at = time.monotonic()
        report = self._report
        findings = comparison.findings_of(report.rows, self._plan, proof.disk_full_reason())
        return report.rows, [*findings, *report.damaged, *self._unmanaged]

    async def _ask(self) -> proof.RunReport:
        client = self._client
        answers = await proof.ask_engines(_engine_core(client), _STATUS_TIMEOUT_S) if client is not None else []
        return await asyncio.to_thread(proof.gather, answers)


def _engine_core(client: Any) -> Any:
    """Return the part of an engine client that speaks to single engines, or refuse a vLLM without one."""
    core = getattr(client, "engine_core", None)
    if not hasattr(core, "core_engines") or not hasattr(core, "_call_utility_async"):
        what = f"this vLLM's engine client ({type(client).__name__}) has no way to ask each engine what it has"
        fix = "install a vLLM of the tested range or a newer vllm-graft, or set GRAFT_DISABLE=1"
        raise StartError(what, where="engine_core._call_utility_async", fix=fix)
    return core
