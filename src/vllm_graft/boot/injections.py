"""Our own places in vLLM, declared as patches like anybody's.

They are few, on functions that kept their shape from 0.26 to 0.32, and every one calls the original:

- ``EngineArgs.create_engine_config``  the model's name is known: resolve the plan and inject it
- ``AsyncLLM`` and ``LLMEngine``       the engine client: hand in stat loggers, compare records with the plan
- ``EngineCore.__init__``              an engine in the front end's process, or forked from it
- the loops of engine cores and workers, which are watched, and whose errors are recorded
- ``load_endpoint_plugins``            the routes under ``/graft``, and the comparison before an API server serves
- the managers' ``shutdown``           vLLM takes its children down, which is no unclean end of theirs
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from vllm_graft import ledger
from vllm_graft.errors import PatchError
from vllm_graft.patching import Engine, HookState, Patch, VLLMPatch, wrap
from vllm_graft.plan import carried_run
from vllm_graft.points import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_WHY = "vLLM has no hook between parsing the arguments and starting the processes"


class EngineArguments(VLLMPatch["vllm.engine.arg_utils:EngineArgs"], name="graft.engine-arguments", why=_WHY):
    """Resolve the plan before the engine's configuration is made."""

    @wrap
    def create_engine_config(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from vllm_graft.boot.start import engine_config

        return engine_config(self, call, args, kwargs)


class AsyncClient(VLLMPatch["vllm.v1.engine.async_llm:AsyncLLM"], name="graft.async-client", why=_WHY):
    """Hand in planned stat loggers; say a child's error as our own."""

    @wrap
    def __init__(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        from vllm_graft.boot.clients import make_client

        make_client(self, call, args, kwargs, offline=False)


class OfflineClient(VLLMPatch["vllm.v1.engine.llm_engine:LLMEngine"], name="graft.offline-client", why=_WHY):
    """The same for the engine behind ``LLM``; it is also asked for its workers' records here."""

    @wrap
    def __init__(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        from vllm_graft.boot.clients import make_client

        make_client(self, call, args, kwargs, offline=True)


class EngineInPlace(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="graft.engine-in-place", why=_WHY):
    """Notice an engine that runs where our entry point had been called before it was made."""

    @wrap
    def __init__(self, call: Callable[..., None], vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from vllm_graft.boot.start import engine_here

        engine_here(vllm_config)
        call(vllm_config, *args, **kwargs)


class EngineLoop(VLLMPatch["vllm.v1.engine.core:EngineCoreProc"], name="graft.engine-loop", why=_WHY):
    """Watch the engine's steps, and record an error that ends them before anybody is told of it."""

    @wrap
    def run_busy_loop(self, call: Callable[..., None]) -> None:
        from vllm_graft.boot.loops import run_engine

        run_engine(self, call)


class ParallelEngineLoop(
    VLLMPatch["vllm.v1.engine.core:DPEngineCoreProc"], name="graft.parallel-engine-loop", why=_WHY
):
    """The same for the engines of data parallelism, whose loop is another."""

    @wrap
    def run_busy_loop(self, call: Callable[..., None]) -> None:
        from vllm_graft.boot.loops import run_engine

        run_engine(self, call)


class WorkerLoop(VLLMPatch["vllm.v1.executor.multiproc_executor:WorkerProc"], name="graft.worker-loop", why=_WHY):
    """The same for a worker in a process of its own."""

    @wrap
    def worker_busy_loop(self, call: Callable[..., None]) -> None:
        from vllm_graft.boot.loops import run_worker

        run_worker(call)


class EngineReports(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="graft.engine-reports", why=_WHY):
    """Give an engine core the method that front ends call for its records and those of its workers.

    An engine core without it has no plan. vLLM answers the call with an error then, before any worker hears of it.
    """

    def graft_report(self) -> list[str]:
        from vllm_graft.boot.extension import report_engine

        return report_engine(self.model_executor)


class HeadlessEngine(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="graft.headless-engine", why=_WHY):
    """Notice, on a node without a front end, work from a front end that has no plan and so never asks."""

    @wrap
    def add_request(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from vllm_graft.boot.process import process

        process.note_work()
        return call(*args, **kwargs)


class Endpoints(VLLMPatch["vllm.plugins"], name="graft.endpoints", why=_WHY):
    """Add our routes wherever vLLM collects endpoint plugins."""

    @wrap
    def load_endpoint_plugins(call: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
        from vllm_graft.boot.clients import endpoint_plugins

        return [*call(*args, **kwargs), *endpoint_plugins()]


class EngineProcesses(VLLMPatch["vllm.v1.engine.utils:CoreEngineProcManager"], name="graft.engine-processes", why=_WHY):
    """Tell processes that vLLM takes down, by force if they are slow, from those that died."""

    @wrap
    def shutdown(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        ledger.current().take_down(process.pid for process in self.processes if process.pid)
        call(*args, **kwargs)


class ServerProcesses(VLLMPatch["vllm.v1.utils:APIServerProcessManager"], name="graft.server-processes", why=_WHY):
    """The same for several API servers, which get the time to close their sinks.

    vLLM kills them as soon as it has told them to end, unless ``--shutdown-timeout`` is given. Their launcher has no
    client whose making would start the watch over it.
    """

    @wrap
    def __init__(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        from vllm_graft.boot.process import process

        call(*args, **kwargs)
        if process.plan:
            process.watch.start()

    @wrap
    def shutdown(self, call: Callable[..., None], timeout: float | None = None, *args: Any, **kwargs: Any) -> None:
        from vllm_graft.boot.clients import closing_seconds

        ledger.current().take_down(process.pid for process in self.processes if process.pid)
        # None is vLLM's own grace of some seconds.
        call(None if timeout is None else max(timeout, closing_seconds()), *args, **kwargs)


OWN = (
    EngineArguments, AsyncClient, OfflineClient, EngineInPlace, EngineReports, EngineLoop, ParallelEngineLoop,
    WorkerLoop, Endpoints, EngineProcesses, ServerProcesses,
)  # fmt: skip
"""Every place of ours."""

_IN_CHILDREN: Final[dict[Role, tuple[type[VLLMPatch[Any]], ...]]] = {
    "engine": (EngineReports, EngineLoop, ParallelEngineLoop),
    "worker": (WorkerLoop,),
}
"""Those that concern a child of vLLM's which is no front end."""


def install(engine: Engine, role: Role | None) -> None:
    """Put our places in where a front end is, or may yet be; vLLM's other children have few.

    A place that this vLLM does not have is no reason to disturb a server that plans nothing: it is remembered by the
    engine's report, and refuses a plan (see ``missing``).
    """
    places = OWN if role is None or role == "frontend" else _IN_CHILDREN.get(role, ())
    if role == "engine" and (run := carried_run()) is not None and run.headless:
        places = (*places, HeadlessEngine)
    _apply(engine, places)


def install_headless(engine: Engine) -> None:
    """Put in what a node without a front end has besides, for engines that are forked from this process."""
    _apply(engine, (HeadlessEngine,))


def _apply(engine: Engine, places: Iterable[Patch]) -> None:
    for place in places:
        with contextlib.suppress(PatchError):
            engine.apply([place])


def missing(engine: Engine) -> HookState | None:
    """The first of these places that this vLLM does not offer, or None; those of a single point may be missing."""
    names = {place.declaration.name for place in (*OWN, HeadlessEngine)}
    return next((hook for hook in engine.report() if hook.patch in names and hook.state == "refused"), None)
