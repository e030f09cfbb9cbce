"""vLLM's engine for a run of a workload: its environment, its arguments, and its statistics."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm_graft import ledger
from vllm_graft.errors import ConfigError, GraftError, SetupError, nearest
from vllm_graft.ledger.comparison import findings_of
from vllm_graft.plan import carried_plan
from vllm_graft.simulator.memory import kv_cache_bytes
from vllm_graft.simulator.settings import VARIABLES, SimulationSettings, carried_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from vllm_graft.simulator.workload.requests import WorkloadRequest

EXECUTOR: Final = "vllm_graft.simulator.executor.SimulatedExecutor"
"""One process for all devices: the executor where parallel sizes are above 1, unless another is named."""


def simulation_variables(simulated: Mapping[str, object]) -> dict[str, str]:
    """Return the variables for keys of ``[simulated]``; one always asks for the simulated device."""
    for key in simulated:
        if key not in VARIABLES:
            raise ConfigError(
                f"the simulation has no setting {key!r}{nearest(key, VARIABLES)}", where="run", fix="correct the name"
            )
    made = {VARIABLES[key]: str(value) for key, value in simulated.items() if value is not None}
    made.setdefault(VARIABLES["device"], os.environ.get(VARIABLES["device"]) or "1")
    return made


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
    """Build vLLM's configuration for a run as its API server does; ConfigError where vLLM refuses the arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    kind = type(current_platform).__name__
    if "Simulated" not in kind:
        raise SetupError(
            f"vLLM has chosen {kind} in this process, and not the simulated device",
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
    plan = carried_plan()
    if plan is None:
        chosen = config.scheduler_config.scheduler_cls
        name = getattr(chosen, "__qualname__", chosen) or f"vLLM's own, {config.scheduler_config.policy}"
        return {"scheduler": str(name)}
    planned = [item.name for item in plan.of("scheduler")]
    # The engine's processes have ended by now; as "unknown" their last records count, and their end is no finding.
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
            """Nothing to say."""

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

        def record_sleep_state(self, *args: Any, **kwargs: Any) -> None:
            """Nothing to record."""

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
