"""Plays a workload on the simulated accelerator with vLLM's real engine, in virtual time or by the clock."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from vllm_graft import ledger, sockets
from vllm_graft.errors import ConfigError, GraftError, SetupError, StartError, nearest
from vllm_graft.ledger.comparison import findings_of
from vllm_graft.plan import inherited_plan
from vllm_graft.simulator.clock import VIRTUAL_CLOCK
from vllm_graft.simulator.memory import kv_cache_bytes
from vllm_graft.simulator.model_shape import FILE, find_model
from vllm_graft.simulator.settings import VARIABLES, SimulationSettings, carried_settings, resolve_settings
from vllm_graft.simulator.workload.report import Result, WorkloadReport
from vllm_graft.simulator.workload.requests import Workload, WorkloadRequest, build_prompt

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

RunProgress: TypeAlias = Callable[[int, int, float], None]
"""Called with the finished requests, all requests, and the modelled seconds so far."""

EXECUTOR: Final = "vllm_graft.simulator.executor.SimulatedExecutor"
"""One process for all devices: the executor if parallel sizes are above 1, unless another is named."""

_GARBAGE: Final = (50_000, 20, 100)
"""Thresholds of Python's garbage collector. A run makes many objects that live for a while and few cycles; with
Python's defaults the collector takes a tenth of the run's time."""

_POLL_S: Final = 0.001
"""The clock's step while a scheduler holds every request back: it may wait for a moment to come."""

_LEAD_S: Final = 0.2
"""The time between the end of the preparations and the run's start."""

_LOAD_TIMEOUT_S: Final = 5.0
"""The timeout for an engine's load; the engine may be dying."""


def run(
    workload: Workload,
    engine_args: Mapping[str, Any] | AsyncEngineArgs,
    simulated: Mapping[str, object] | None = None,
    *,
    progress: RunProgress | None = None,
) -> WorkloadReport:
    """Play a workload and return the report.

    engine_args: vLLM's engine arguments; ``model`` is a config.json's folder or the name of a shipped model
    simulated:   keys of ``[simulated]`` over those of graft.toml and the environment: device, speed, ...
    progress:    called as requests end

    With the speed "virtual" the engine runs in this process and the result is the same every time. Otherwise it runs as
    behind the API server, by the clock. Ctrl-C ends the run, and the report has what was measured so far.
    """
    for key in simulated or {}:
        if key not in VARIABLES:
            what = f"the simulation has no setting {key!r}{nearest(key, VARIABLES)}"
            raise ConfigError(what, where="run", fix="correct the name")
    chosen = {VARIABLES[key]: str(value) for key, value in (simulated or {}).items() if value is not None}
    # One variable always asks for the simulated device.
    chosen.setdefault(VARIABLES["device"], os.environ.get(VARIABLES["device"]) or "1")
    with set_environment(chosen):
        settings = resolve_settings()
        given = with_model_folder(engine_args) if isinstance(engine_args, Mapping) else engine_args
        variables = {"VLLM_NO_USAGE_STATS": "1"}
        if settings.virtual:
            # vLLM appends a random part to request ids, which would break ties differently in every run.
            variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
        with set_environment(variables):
            config = engine_config(given, text=workload.has_text)
            recording = Recording(workload, settings, config, progress)
            (play_virtual if settings.virtual else play_by_clock)(recording)
            return recording.report()


def with_model_folder(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return engine arguments with the model's folder in place of a shipped model's name."""
    model = find_model(str(engine_args.get("model", "")))
    if model.file.name != FILE:
        raise ConfigError(
            f"vLLM wants a folder with a {FILE}", where=str(model.file), fix=f"copy it to a folder of its own as {FILE}"
        )
    named = {"served_model_name": model.name} if model.shipped else {}
    return {**named, **engine_args, "model": str(model.folder)}


@dataclass(slots=True)
class Recording:
    """A run being recorded: the workload, and the results so far."""

    workload: Workload
    settings: SimulationSettings
    config: VllmConfig
    progress: RunProgress | None = None
    results: dict[str, Result] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    """Fields of the report that the player measures."""
    began: float = field(default_factory=time.time)
    """The time of the run's start, by the wall clock."""

    @property
    def vocabulary(self) -> int:
        """The number of token ids for prompts."""
        size: int = self.config.model_config.get_vocab_size()
        return size

    def add_rejection(self, request: WorkloadRequest, error: Exception, now: float) -> None:
        """Record that vLLM rejected a request."""
        reason = " ".join(str(error).split())
        self._add(request, Result(request.id, request.group, request.priority, request.at, "rejected", reason), now)

    def add_output(self, request: WorkloadRequest, output: Any, start: float, now: float, speed: float = 1.0) -> None:
        """Record a request's last output; ``start`` is the run's first moment on its engine's clock."""
        completion, stats = output.outputs[0], output.metrics

        def moment(stamp: float) -> float | None:
            return round((stamp - start) * speed, 6) if stamp else None

        served = completion.finish_reason in ("length", "stop", "repetition")
        result = Result(
            id=request.id,
            group=request.group,
            priority=request.priority,
            at=request.at,
            state="done" if served else "aborted",
            reason=str(completion.finish_reason),
            prompt_tokens=len(output.prompt_token_ids or ()),
            output_tokens=len(completion.token_ids),
            cached_tokens=max(output.num_cached_tokens or 0, 0),
            scheduled_at=moment(stats.scheduled_ts),
            first_token_at=moment(stats.first_token_ts),
            finished_at=moment(stats.last_token_ts),
            token_ids=tuple(completion.token_ids),
        )
        self._add(request, result, now)

    def report(self) -> WorkloadReport:
        """Return the report, with unfinished requests as aborted."""
        results = tuple(
            self.results.get(each.id)
            or Result(each.id, each.group, each.priority, each.at, "aborted", "the run ended before it did")
            for each in self.workload
        )
        import vllm

        model, cache = self.config.model_config, self.config.cache_config
        served = model.served_model_name or model.model
        return WorkloadReport(
            results,
            workload=self.workload.name,
            model=str(served if isinstance(served, str) else served[0]),
            device=self.settings.name,
            speed=self.settings.speed,
            vllm=str(vllm.__version__),
            async_scheduling=bool(self.config.scheduler_config.async_scheduling),
            engines=self.config.parallel_config.data_parallel_size,
            kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
            **describe_plan(self.config, self.began),
            **self.measured,
        )

    def _add(self, request: WorkloadRequest, result: Result, now: float) -> None:
        self.results[request.id] = result
        if self.progress is not None:
            self.progress(len(self.results), len(self.workload), now)


# Virtual time: the engine in this process, and a clock that jumps to the next event.


def play_virtual(recording: Recording) -> None:
    """Play the workload in virtual time; Ctrl-C ends it early."""
    from vllm.v1.engine.llm_engine import LLMEngine

    real = VIRTUAL_CLOCK.real
    began = real()
    # The same moments in every run make the same floats, down to the last bit.
    VIRTUAL_CLOCK.restart()
    counter = preemption_counter(alone=True)
    try:
        # The synchronous engine, whose steps this loop drives itself.
        engine = LLMEngine.from_vllm_config(recording.config, stat_loggers=[counter])
        try:
            recording.measured["start_s"] = real() - began
            began, used = real(), time.process_time()
            start = VIRTUAL_CLOCK.now()
            # The garbage collector runs less often, and not over the objects of the engine's start.
            thresholds = gc.get_threshold()
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GARBAGE)
            try:
                _loop(recording, engine, start)
            except KeyboardInterrupt:
                recording.measured["interrupted"] = True
            finally:
                gc.set_threshold(*thresholds)
                gc.unfreeze()
            load = _busiest(engine.collective_rpc("simulated_load"))
            recording.measured |= {"steps": int(load["steps"]), "device_busy_s": load["busy_s"]}
            recording.measured |= {"modelled_s": VIRTUAL_CLOCK.now() - start, "wall_s": real() - began}
            recording.measured["cpu_s"] = time.process_time() - used
            recording.measured["preemptions"] = counter.seen  # type: ignore[attr-defined]
        finally:
            engine.engine_core.shutdown()
    finally:
        VIRTUAL_CLOCK.remove()


def _loop(recording: Recording, engine: Any, start: float) -> None:
    """Send each request at its moment, and step the engine until all are answered."""
    coming, playing = deque(recording.workload), dict[str, WorkloadRequest]()
    launched, idle_rounds = -1.0, 0
    most_in_flight = recording.config.parallel_config.pipeline_parallel_size + 2
    while coming or playing:
        now = VIRTUAL_CLOCK.now()
        while coming and start + coming[0].at <= now:
            request = coming.popleft()
            try:
                engine.add_request(
                    request.id,
                    build_prompt(request, recording.vocabulary),
                    sampling_params(request, recording.settings),
                    arrival_time=start + request.at,
                    priority=request.priority,
                )
                playing[request.id] = request
            except rejection_errors() as error:
                recording.add_rejection(request, error, VIRTUAL_CLOCK.now() - start)
        if not playing:
            if coming:
                VIRTUAL_CLOCK.reach(start + coming[0].at)
            continue
        # A step takes its modelled time: reading its output moves the virtual clock.
        for output in engine.step():
            if output.finished:
                recording.add_output(playing.pop(output.request_id), output, start, VIRTUAL_CLOCK.now() - start)
        if playing and VIRTUAL_CLOCK.now() == now:
            steps = _busiest(engine.collective_rpc("simulated_load"))["steps"]
            idle_rounds = idle_rounds + 1 if steps == launched else 0
            launched = steps
            # More rounds have launched nothing than steps can be in flight: the scheduler holds every request back.
            if idle_rounds > most_in_flight:
                soon = now + _POLL_S
                VIRTUAL_CLOCK.reach(min(soon, start + coming[0].at) if coming else soon)


def _busiest(loads: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the load of the one worker that launches: of a tensor-parallel group only the first does."""
    return max(loads, key=lambda each: each["steps"])


# By the clock: vLLM's asynchronous engine, whose core has a process of its own, as in a server.


def play_by_clock(recording: Recording) -> None:
    """Play the workload by the clock, sped up by the settings' factor; Ctrl-C ends it early."""
    with sockets.temporary(os.environ) as variables, set_environment(variables):
        asyncio.run(_play_by_clock(recording))


async def _play_by_clock(recording: Recording) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.perf_counter()
    counter = preemption_counter(alone=False)
    try:
        engine = AsyncLLM.from_vllm_config(recording.config, stat_loggers=[counter])
    except RuntimeError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise KeyboardInterrupt from None
        raise StartError(
            f"the engine did not start: {error}", where="engine core", fix="see its error above"
        ) from error
    try:
        recording.measured["start_s"] = time.perf_counter() - began
        # Prompts are built beforehand, as a client's are: by the clock they would count as the engine's time.
        prompts = [build_prompt(request, recording.vocabulary) for request in recording.workload]
        # Steps of the engine's start are not the workload's.
        before = await _load(engine)
        start = time.monotonic() + _LEAD_S
        await send_all(recording, engine, prompts, start)
        wall = time.monotonic() - start
        recording.measured |= {"modelled_s": wall * recording.settings.speed, "wall_s": wall}
        recording.measured["preemptions"] = counter.seen  # type: ignore[attr-defined]
        after = await _load(engine)
        recording.measured["steps"] = max(int(after["steps"] - before["steps"]), 0)
        recording.measured["device_busy_s"] = max(after["busy_s"] - before["busy_s"], 0.0)
    finally:
        engine.shutdown()


async def send_all(recording: Recording, engine: Any, prompts: list[dict[str, Any]], start: float) -> None:
    """Send every request at its time; a signal ends it early, with what was recorded so far."""
    from vllm.v1.engine.exceptions import EngineDeadError

    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    tasks = [
        asyncio.create_task(_send(recording, engine, request, prompt, start))
        for request, prompt in zip(recording.workload, prompts, strict=True)
    ]
    with contextlib.suppress(ValueError, RuntimeError):  # signal handlers belong to the main thread
        loop.add_signal_handler(signal.SIGTERM, main.cancel)
    try:
        await asyncio.gather(*tasks)
    except (asyncio.CancelledError, EngineDeadError) as error:
        # Ctrl-C reaches the engine's process too, which may end first; vLLM cancels what waits for a dead engine.
        if main.cancelling():
            recording.measured["interrupted"] = True
            return
        raise StartError(
            "the engine died in the middle of the run", where="engine core", fix="see its last messages above"
        ) from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send(
    recording: Recording, engine: Any, request: WorkloadRequest, prompt: dict[str, Any], start: float
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    speed = recording.settings.speed
    await asyncio.sleep(start + request.at / speed - time.monotonic())
    last = None
    try:
        params = sampling_params(request, recording.settings)
        async for output in engine.generate(prompt, params, request.id, priority=request.priority):
            last = output
    except EngineDeadError:
        # Newer releases derive it from the errors by which vLLM rejects a request.
        raise
    except rejection_errors() as error:
        recording.add_rejection(request, error, (time.monotonic() - start) * speed)
        return
    if last is not None:
        recording.add_output(request, last, start, (time.monotonic() - start) * speed, speed)


async def _load(engine: Any) -> dict[str, float]:
    """Return steps and modelled seconds so far; 0 if the engine is gone."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return _busiest(await asyncio.wait_for(engine.collective_rpc("simulated_load"), _LOAD_TIMEOUT_S))
    except (EngineDeadError, TimeoutError):
        return {"steps": 0, "busy_s": 0.0}


# The engine of a run: its environment, its arguments, and its statistics.


@contextlib.contextmanager
def set_environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables in this process's environment, unset those that are None, and put the old ones back afterwards."""

    def assign(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    before = {name: os.environ.get(name) for name in variables}
    try:
        assign(variables)
        yield
    finally:
        # Only these: vLLM sets variables of its own during a run, on which later engines of this process rely.
        assign(before)


def parse_engine_args(words: Sequence[str]) -> AsyncEngineArgs:
    """Parse engine arguments from a command line with vLLM's own parser."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> None:
            raise ConfigError(message, where="arguments for vLLM", fix="see `vllm serve --help` for what there is")

    parser = Parser(add_help=False)
    AsyncEngineArgs.add_cli_args(parser)
    return AsyncEngineArgs.from_cli_args(parser.parse_args(list(words)))


def engine_config(engine_args: AsyncEngineArgs | Mapping[str, Any], *, text: bool) -> VllmConfig:
    """Build vLLM's configuration for a run as its API server does; ConfigError if vLLM refuses the arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    kind = type(current_platform).__name__
    if "Simulated" not in kind:
        raise SetupError(
            f"vLLM has chosen {kind} in this process instead of the simulated device",
            where="vllm.platforms",
            fix=f"set {VARIABLES['device']} before anything imports vLLM, and let VLLM_PLUGINS list graft if it is set",
        )
    for name in ("vllm.v1.engine.input_processor", "vllm.renderers.base"):
        # They warn with every run: of unrendered prompts, of request ids that are not vLLM's, of a missing end token.
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        args = AsyncEngineArgs(**engine_args) if isinstance(engine_args, Mapping) else engine_args
        # Without statistics vLLM gives its outputs no timestamps.
        args.disable_log_stats = False
        args.skip_tokenizer_init = args.skip_tokenizer_init or not text
        if args.tensor_parallel_size * args.pipeline_parallel_size > 1 and args.distributed_executor_backend is None:
            args.distributed_executor_backend = EXECUTOR
        config = args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except GraftError:
        raise
    except (ValueError, TypeError, OSError) as error:
        # On one line, without pydantic's links.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = " ".join(line for line in lines if not line.startswith("For further information"))
        what = f"vLLM refuses the arguments: {said or type(error).__name__}"
        raise ConfigError(what, where="engine", fix="correct them, as it says") from error
    # Refuse here what does not fit: the message of an engine process is hard to find in its output.
    kv_cache_bytes(config, carried_settings(config))
    return config


def describe_plan(config: VllmConfig, began: float) -> dict[str, Any]:
    """Return a report's fields about the plan: its hash, scheduler, KV policy, and items not active until the end.

    ``began`` is the time of the run's start: a program may play several, and earlier engines left records too.
    """
    plan = inherited_plan()
    if plan is None:
        chosen = config.scheduler_config.scheduler_cls
        name = getattr(chosen, "__qualname__", chosen) or f"vLLM's own, {config.scheduler_config.policy}"
        return {"scheduler": str(name)}
    planned = [item.name for item in plan.of("scheduler")]
    # The engine's processes have ended by now; as "unknown" their last records count, and their end is not a finding.
    own = os.getpid()
    rows = [row for row in ledger.current().rows() if row["pid"] == own or row["since"] >= began]
    for row in rows:
        row["life"] = "unknown"
    return {
        "plan": plan.hash,
        "scheduler": planned[0] if planned else f"vLLM's own, {config.scheduler_config.policy}",
        "attention": next((item.name for item in plan.of("attention")), ""),
        "findings": tuple(findings_of(rows, plan)),
    }


def rejection_errors() -> tuple[type[Exception], ...]:
    """Return the errors by which vLLM rejects a request: ValueError, and from 0.28 on a tree of its own."""
    from vllm import exceptions

    named = (getattr(exceptions, name, None) for name in ("VLLMValidationError", "VLLMError"))
    return (ValueError, TypeError, *(kind for kind in named if kind is not None))


def preemption_counter(*, alone: bool) -> type:
    """Return a stat logger class whose attribute ``seen`` counts preemptions.

    ``alone`` takes the place of vLLM's Prometheus metrics, which cost time and have no reader in such a run.
    """
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger

    # vLLM replaces its own Prometheus logger by a subclass of it, and adds any other class beside.
    base: Any = PrometheusStatLogger if alone else AggregateStatLoggerBase

    class PreemptionCounter(base):
        """Counts the preemptions in vLLM's statistics."""

        seen = 0

        def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
            self.engine_indexes = engine_indexes or [0]

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            if iteration_stats is not None:
                type(self).seen += iteration_stats.num_preempted_reqs

        def log(self) -> None:
            """Do nothing."""

        def log_engine_initialized(self) -> None:
            """Do nothing."""

        def record_sleep_state(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing."""

    return PreemptionCounter


def sampling_params(request: WorkloadRequest, settings: SimulationSettings) -> Any:
    """Build the sampling parameters of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ignore = request.ignore_eos if request.ignore_eos is not None else not settings.output_tokens
    return SamplingParams(
        max_tokens=request.max_tokens,
        ignore_eos=ignore,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=dict(request.extra) or None,
    )
