"""Every door through which vLLM hands us control, and what happens behind it.

========================================  ==========================================================================
``enter``                                 vLLM calls our general plugin: apply the carried plan for this role
``_after_fork``, ``_in_named_child``      a forked child, in which vLLM calls no plugin: drop the parent's state, then
                                          apply the plan for the child's role
``CORE_PATCHES``                          our patches of vLLM, on functions that kept their shape from 0.26 to 0.32;
                                          each calls the original
``proof.WorkerExtension``                 vLLM resolves it by name before it makes a worker: apply the worker's part
``clients.GraftEndpoint``                 an API server is built: routes, and the last comparison before it serves
========================================  ==========================================================================

The work is done in the other modules of this package. They never import this one, so nothing here is imported late.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from vllm_graft import ledger
from vllm_graft.boot import clients, env, loops, proof, start
from vllm_graft.boot.process import LOG, Process, process
from vllm_graft.boot.role import child_role, engine_config_above, named_role
from vllm_graft.errors import GraftError, StartError
from vllm_graft.patching import VLLMPatch, wrap
from vllm_graft.plan import inherited_plan, inherited_run
from vllm_graft.points import Role
from vllm_graft.switches import disabled
from vllm_graft.versions import vllm_version

_WHY: Final = "vLLM has no hook between parsing the arguments and starting the processes"


def enter() -> None:
    """Handle vLLM's call of our entry point; a second call in the same process does nothing."""
    if process.entered:
        return
    process.entered = True
    role = child_role()
    if disabled():
        env.silence_warnings()
        line = "vllm-graft: GRAFT_DISABLE is set; this is the stock server"
        # vLLM sets its logging up after it has called the plugins, on 0.26 to 0.32.
        if role is None and LOG.hasHandlers():
            LOG.info(line)
        elif role is None:
            print(line, file=sys.stderr, flush=True)
        return
    try:
        env.register_variables(process.patchset)
    except (ImportError, AttributeError) as error:
        # No reason to disturb a server that plans nothing; one that does is refused.
        what = f"this vLLM ({vllm_version()}) does not keep its environment variables where vllm-graft looks: {error}"
        fix = "install a vLLM of the tested range or a newer vllm-graft, or set GRAFT_DISABLE=1"
        process.deferred_error = StartError(what, where="vllm.envs.environment_variables", fix=fix)
    # A program of its own resolves a plan later, whatever a parent left in its environment.
    plan, run = (inherited_plan(), inherited_run()) if role is not None else (None, None)
    if role is None or role == "frontend":
        process.install(CORE_PATCHES)
    elif role != "engine" or plan is not None:
        process.install(_IN_CHILDREN.get(role, ()))
        if role == "engine" and run is not None and run.headless:
            process.install([HeadlessEngine])
    if not process.fork_hooks_registered:
        # Neither can be unregistered, and a second registration would run them twice.
        process.fork_hooks_registered = True
        os.register_at_fork(after_in_child=_after_fork)
        multiprocessing.util.register_after_fork(process, _in_named_child)
    if role == "engine" and (config := engine_config_above()) is not None:
        start.refuse_config_by_hand(config, plan)
    if role is not None and plan is not None and run is not None:
        process.adopt_plan(plan, run, role)


def _after_fork() -> None:
    """Let go of the parent's record and counters, before the child counts into them."""
    ledger.current().forked()
    process.roles.clear()
    process.deferred_error = None


def _in_named_child(own: Process) -> None:
    """Apply the plan in a forked child, once multiprocessing has given it the name that reveals its role."""
    role = named_role()
    plan, run = inherited_plan(), inherited_run()
    if role is None or plan is None or run is None or own.plan is None:
        return
    ledger.current().forget_items()
    own.engine.recount()
    try:
        own.adopt_plan(plan, run, role)
    except GraftError as error:
        # multiprocessing swallows what is raised here; the engine or worker that is made next raises it.
        own.deferred_error = error


class EngineArguments(VLLMPatch["vllm.engine.arg_utils:EngineArgs"], name="graft.engine-arguments", why=_WHY):
    """Resolve the plan before the engine's configuration is made: the model's name is known from here on."""

    @wrap
    def create_engine_config(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        config = start.engine_config(self, call, args, kwargs)
        if process.run is not None and process.run.headless:
            # For engines that are forked from this process; a spawned one installs it when it enters.
            process.install([HeadlessEngine])
        return config


class AsyncClient(VLLMPatch["vllm.v1.engine.async_llm:AsyncLLM"], name="graft.async-client", why=_WHY):
    """Give the planned stat sinks to the engine client, and repeat a child's error as the front end's own."""

    @wrap
    def __init__(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        clients.make_client(self, call, args, kwargs, offline=False)


class OfflineClient(VLLMPatch["vllm.v1.engine.llm_engine:LLMEngine"], name="graft.offline-client", why=_WHY):
    """Give the planned stat sinks to the engine behind ``LLM``, and compare its processes with the plan."""

    @wrap
    def __init__(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        clients.make_client(self, call, args, kwargs, offline=True)


class EngineInPlace(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="graft.engine-in-place", why=_WHY):
    """Apply the engine's part if the engine runs in the front end's process or is forked from it."""

    @wrap
    def __init__(self, call: Callable[..., None], vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # LLM makes its engine in its own process with VLLM_ENABLE_V1_MULTIPROCESSING=0.
        start.begin_engine_here(vllm_config)
        call(vllm_config, *args, **kwargs)


class EngineReports(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="graft.engine-reports", why=_WHY):
    """Give an engine core the method that front ends call for its records and those of its workers.

    An engine core without it has no plan. vLLM answers the call with an error then, before it calls any worker.
    """

    def graft_report(self) -> list[str]:
        # vLLM calls any public method of EngineCore by name, for call_utility of its clients (0.26 to 0.32).
        return proof.report_engine(self.model_executor)


class EngineLoop(VLLMPatch["vllm.v1.engine.core:EngineCoreProc"], name="graft.engine-loop", why=_WHY):
    """Watch the engine's steps, and record an error that ends them before vLLM tells the front end."""

    @wrap
    def run_busy_loop(self, call: Callable[..., None]) -> None:
        loops.run_engine(self, call)


# DPEngineCoreProc overrides the loop without calling that of its base.
class ParallelEngineLoop(
    VLLMPatch["vllm.v1.engine.core:DPEngineCoreProc"], name="graft.parallel-engine-loop", why=_WHY
):
    """Watch the steps of the engines of data parallelism, which have a loop of their own."""

    @wrap
    def run_busy_loop(self, call: Callable[..., None]) -> None:
        loops.run_engine(self, call)


class WorkerLoop(VLLMPatch["vllm.v1.executor.multiproc_executor:WorkerProc"], name="graft.worker-loop", why=_WHY):
    """Watch a worker in a process of its own, and record the error that ends its loop."""

    @wrap
    def worker_busy_loop(self, call: Callable[..., None]) -> None:
        loops.run_worker(call)


class HeadlessEngine(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="graft.headless-engine", why=_WHY):
    """Notice, on a node without a front end, requests from a front end that has no plan and never asks for records."""

    @wrap
    def add_request(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        process.note_request()
        return call(*args, **kwargs)


class Endpoints(VLLMPatch["vllm.plugins"], name="graft.endpoints", why=_WHY):
    """Add our endpoint plugin: an entry point in vLLM's group would make every vLLM server warn of it."""

    @wrap
    def load_endpoint_plugins(call: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
        return [*call(*args, **kwargs), *clients.endpoint_plugins()]


class EngineProcesses(VLLMPatch["vllm.v1.engine.utils:CoreEngineProcManager"], name="graft.engine-processes", why=_WHY):
    """Mark engines that vLLM shuts down, by force if they are slow, as stopped deliberately."""

    @wrap
    def shutdown(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        ledger.current().mark_stopped(each.pid for each in self.processes if each.pid)
        call(*args, **kwargs)


class ServerProcesses(VLLMPatch["vllm.v1.utils:APIServerProcessManager"], name="graft.server-processes", why=_WHY):
    """Watch the launcher of several API servers, and mark those as stopped deliberately that vLLM shuts down."""

    @wrap
    def __init__(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        if process.plan:
            # The launcher makes no engine client, which starts the watch elsewhere.
            process.watch.start()

    @wrap
    def shutdown(self, call: Callable[..., None], timeout: float | None = None, *args: Any, **kwargs: Any) -> None:
        ledger.current().mark_stopped(each.pid for each in self.processes if each.pid)
        # None is vLLM's own grace of some seconds. With a number, 0 unless --shutdown-timeout is given, vLLM kills the
        # servers that are left then, with whatever their sinks have not written yet.
        call(None if timeout is None else max(timeout, clients.closing_seconds()), *args, **kwargs)


CORE_PATCHES = (
    EngineArguments, AsyncClient, OfflineClient, EngineInPlace, EngineReports, EngineLoop, ParallelEngineLoop,
    WorkerLoop, Endpoints, EngineProcesses, ServerProcesses,
)  # fmt: skip
"""Our patches in a front end. It needs all of them, because an engine may be forked from it."""

_IN_CHILDREN: Final[dict[Role, tuple[type[VLLMPatch[Any]], ...]]] = {
    "engine": (EngineReports, EngineLoop, ParallelEngineLoop),
    "worker": (WorkerLoop,),
}
"""Our patches in the other processes that vLLM starts."""
