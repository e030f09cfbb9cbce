"""Plays a workload on the simulated accelerator, with vLLM's real engine, and reports what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_graft.errors import ConfigError
from vllm_graft.plugins.platforms.simulated.models import FILE, find_model
from vllm_graft.plugins.platforms.simulated.settings import Settings, resolve_settings
from vllm_graft.plugins.platforms.simulated.workload.engine import (
    engine_config,
    environment,
    plan_facts,
    surroundings,
    variables_of,
)
from vllm_graft.plugins.platforms.simulated.workload.report import Report
from vllm_graft.plugins.platforms.simulated.workload.result import Result

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from vllm_graft.plugins.platforms.simulated.workload.request import Request
    from vllm_graft.plugins.platforms.simulated.workload.workload import Workload

Progress: TypeAlias = Callable[[int, int, float], None]
"""Called with the requests that are behind us, all there are, and the modelled seconds so far."""


def run(
    workload: Workload,
    engine_args: Mapping[str, Any] | AsyncEngineArgs,
    simulated: Mapping[str, object] | None = None,
    *,
    progress: Progress | None = None,
) -> Report:
    """Play a workload and report.

    engine_args: vLLM's engine arguments; ``model`` is a config.json's folder or the name of a shape that ships
    simulated:   keys of ``[simulated]`` over those of graft.toml and the environment: device, speed, ...
    progress:    called as requests end

    With the speed "virtual" the engine runs in this process and the result is the same every time. Else it runs as
    behind the API server, by the clock. Ctrl-C ends the run, and the report has what was measured so far.
    """
    with surroundings(environment(simulated or {})):
        settings = resolve_settings()
        given = _with_folder(engine_args) if isinstance(engine_args, Mapping) else engine_args
        with surroundings(variables_of(settings)):
            config = engine_config(given, text=workload.has_text)
            tape = Tape(workload, settings, config, progress)
            if settings.virtual:
                from vllm_graft.plugins.platforms.simulated.workload.virtual import play
            else:
                from vllm_graft.plugins.platforms.simulated.workload.realtime import play
            play(tape)
            return tape.report()


def _with_folder(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    model = find_model(str(engine_args.get("model", "")))
    if model.file.name != FILE:
        raise ConfigError(
            f"vLLM wants a folder with a {FILE}", where=str(model.file), fix=f"copy it to a folder of its own as {FILE}"
        )
    named = {"served_model_name": model.name} if model.shipped else {}
    return {**named, **engine_args, "model": str(model.folder)}


@dataclass(slots=True)
class Tape:
    """A run as it is written down: what is played, and what has come of it."""

    workload: Workload
    settings: Settings
    config: VllmConfig
    progress: Progress | None = None
    results: dict[str, Result] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    """The report's fields that a driver fills in."""
    began: float = field(default_factory=time.time)
    """When the run began, by the clock on the wall."""

    @property
    def vocabulary(self) -> int:
        """How many token ids prompts may have."""
        size: int = self.config.model_config.get_vocab_size()
        return size

    def rejected(self, request: Request, error: Exception, now: float) -> None:
        """vLLM turned a request away."""
        reason = " ".join(str(error).split())
        self._add(request, Result(request.id, request.group, request.priority, request.at, "rejected", reason), now)

    def ended(self, request: Request, output: Any, start: float, now: float, speed: float = 1.0) -> None:
        """A request's last output came; ``start`` is the run's first moment on the clock of its engine."""
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

    def report(self) -> Report:
        """What came of it, with the requests that never ended as aborted."""
        results = tuple(self.results.get(request.id) or _cut_off(request) for request in self.workload)
        return Report(
            results,
            workload=self.workload.name,
            model=_served_name(self.config.model_config),
            device=self.settings.name,
            speed=self.settings.speed,
            vllm=_version(),
            async_scheduling=bool(self.config.scheduler_config.async_scheduling),
            engines=self.config.parallel_config.data_parallel_size,
            **plan_facts(self.config, self.began),
            **self.measured,
        )

    def _add(self, request: Request, result: Result, now: float) -> None:
        self.results[request.id] = result
        if self.progress is not None:
            self.progress(len(self.results), len(self.workload), now)


def _cut_off(request: Request) -> Result:
    return Result(request.id, request.group, request.priority, request.at, "aborted", "the run ended before it did")


def _served_name(model_config: Any) -> str:
    served = model_config.served_model_name
    return str(served if isinstance(served, str) else (served or [model_config.model])[0])


def _version() -> str:
    import vllm

    return str(vllm.__version__)
