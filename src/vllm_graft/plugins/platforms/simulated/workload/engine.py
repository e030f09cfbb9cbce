"""vLLM's engine for a run of a workload: its environment, its arguments, and what it counts besides."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm_graft import ledger
from vllm_graft.errors import ConfigError, GraftError, SetupError, nearest
from vllm_graft.ledger.reading import findings_of
from vllm_graft.plan import carried
from vllm_graft.plugins.platforms.simulated.memory import available_bytes
from vllm_graft.plugins.platforms.simulated.settings import VARIABLES, Settings, settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

EXECUTOR: Final = "vllm_graft.plugins.platforms.simulated.executor.SimulatedExecutor"
"""One process for all devices: the executor where parallel sizes are above 1 and nobody asks for another."""


def environment(simulated: Mapping[str, object]) -> dict[str, str]:
    """The variables that stand for keys of ``[simulated]``; a device is always asked for."""
    for key in simulated:
        if key not in VARIABLES:
            raise ConfigError(
                f"the simulation has no setting {key!r}{nearest(key, VARIABLES)}", where="run", fix="correct the name"
            )
    made = {VARIABLES[key]: str(value) for key, value in simulated.items() if value is not None}
    made.setdefault(VARIABLES["device"], os.environ.get(VARIABLES["device"]) or "1")
    return made


@contextlib.contextmanager
def surroundings(variables: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with the variables in it, put back afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def variables_of(settings: Settings) -> dict[str, str]:
    """What vLLM needs in its environment for a run with these settings."""
    made = {"VLLM_NO_USAGE_STATS": "1"}
    if settings.virtual:
        # Random parts in the names of requests would break ties differently every time.
        made |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
    return made


def parsed(words: Sequence[str]) -> AsyncEngineArgs:
    """Engine arguments as a command line has them, read by vLLM's own parser."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> None:
            raise ConfigError(message, where="arguments for vLLM", fix="see `vllm serve --help` for what there is")

    parser = Parser(add_help=False)
    AsyncEngineArgs.add_cli_args(parser)
    return AsyncEngineArgs.from_cli_args(parser.parse_args(list(words)))


def engine_config(given: AsyncEngineArgs | Mapping[str, Any], *, text: bool) -> VllmConfig:
    """vLLM's configuration for a run, made as its API server makes it; what it refuses is a ConfigError."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    _check_platform()
    _hush()
    try:
        args = AsyncEngineArgs(**given) if isinstance(given, Mapping) else given
        args.disable_log_stats = False
        args.skip_tokenizer_init = args.skip_tokenizer_init or not text
        if args.tensor_parallel_size * args.pipeline_parallel_size > 1 and args.distributed_executor_backend is None:
            args.distributed_executor_backend = EXECUTOR
        config = args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except GraftError:
        raise
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(
            f"vLLM refuses the arguments: {_one_line(error)}", where="engine", fix="correct them, as it says"
        ) from error
    # Said here and not by a process of the engine, whose last words are hard to find.
    available_bytes(config, settings_of(config))
    return config


def plan_facts(config: VllmConfig, began: float) -> dict[str, Any]:
    """Return a report's facts of the plan: its hash, the scheduler, and what was not active until the end.

    ``began`` is when the run did: a program may play several, and the records of earlier engines are not this one's.
    """
    plan = carried()
    if plan is None:
        chosen = config.scheduler_config.scheduler_cls
        name = getattr(chosen, "__qualname__", chosen) or f"vLLM's own, {config.scheduler_config.policy}"
        return {"scheduler": str(name)}
    planned = [item.name for item in plan.of("scheduler")]
    # The engine's processes have ended by now, and what they recorded until then is what is wanted.
    own = os.getpid()
    rows = [
        {**row, "life": "unknown"}
        for row in ledger.current().rows()
        if row["pid"] == own or float(str(row["since"])) >= began
    ]
    return {
        "plan": plan.hash,
        "scheduler": planned[0] if planned else f"vLLM's own, {config.scheduler_config.policy}",
        "findings": tuple(findings_of(rows, plan)),
    }


def rejections() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it turns away: ValueError, and from 0.28 on a tree of its own."""
    from vllm import exceptions

    named = (getattr(exceptions, name, None) for name in ("VLLMValidationError", "VLLMError"))
    return (ValueError, TypeError, *(kind for kind in named if kind is not None))


def _hush() -> None:
    """Silence what vLLM says of us with every run: that prompts come unrendered, named by us, and without an end."""
    for name in ("vllm.v1.engine.input_processor", "vllm.renderers.base"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _check_platform() -> None:
    from vllm.platforms import current_platform

    kind = type(current_platform).__name__
    if "Simulated" not in kind:
        raise SetupError(
            f"vLLM has chosen {kind} in this process, and not the simulated device",
            where="vllm.platforms",
            fix=f"set {VARIABLES['device']} before anything imports vLLM, and let VLLM_PLUGINS list graft if it is set",
        )


def preemption_counter(*, alone: bool) -> type:
    """A stat logger with the class attribute ``seen``, the preemptions so far.

    ``alone`` keeps vLLM from exporting its own metrics beside it, which cost time that nobody looks at.
    """
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger

    base: Any = PrometheusStatLogger if alone else AggregateStatLoggerBase

    class PreemptionCounter(base):
        """Counts what vLLM's statistics tell of preemptions."""

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
            """Nobody sleeps."""

    return PreemptionCounter


def sampling(request: Any, settings: Settings) -> Any:
    """The sampling parameters of a request."""
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


def _one_line(error: Exception) -> str:
    """An error's text on one line; of pydantic's several the one that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith("For further information")]
    return " ".join(kept) or type(error).__name__
