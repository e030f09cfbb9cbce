"""The worker that vLLM's engine drives on the simulated accelerator: it answers each step without computing it.

The engine cannot tell it from a real worker: it reports what the layers keep, how much memory there is, takes a step
in ``execute_model`` and gives its tokens in ``sample_tokens``. Three methods are there to be overridden:
``token_source`` (what the tokens are), ``stage_seconds`` (how long a step takes) and ``timeline`` (by which clock).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_graft.errors import ConfigError
from vllm_graft.plugins.platforms.simulated.adapters import AdapterShelf
from vllm_graft.plugins.platforms.simulated.answers import StepOutput, answer, draft_tokens
from vllm_graft.plugins.platforms.simulated.batch import RequestTable, Step
from vllm_graft.plugins.platforms.simulated.drafts import Drafter
from vllm_graft.plugins.platforms.simulated.lengths import LengthModel
from vllm_graft.plugins.platforms.simulated.logprobs import LogprobModel
from vllm_graft.plugins.platforms.simulated.memory import available_bytes, kv_cache_specs, roofline
from vllm_graft.plugins.platforms.simulated.settings import settings_of
from vllm_graft.plugins.platforms.simulated.timing import VIRTUAL_CLOCK, RealClock, Timeline
from vllm_graft.plugins.platforms.simulated.tokens import HashedTokens, TokenSource
from vllm_graft.plugins.platforms.simulated.vocabulary import vocabulary

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import DraftTokenIds

_log = logging.getLogger(__name__)

_MEMORY = frozenset({"weights", "kv_cache"})
"""What sleeps and wakes, by vLLM's names."""


class _OneToken(NamedTuple):
    new_tokens: int = 1
    context: int = 1


_DUMMY = _OneToken()


def _refused(what: str) -> Callable[..., None]:
    """A worker method that says why it cannot do its work."""

    def method(self: SimulatedWorker, *args: object, **kwargs: object) -> None:
        self._refuse(
            f"{what} is not possible: it holds no weights and computes nothing",
            fix="run it on a real device (unset GRAFT_SIMULATE)",
        )

    return method


class SimulatedWorker(WorkerBase):
    """One simulated device. Of several, only the first in a tensor-parallel group answers; the others have no part."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        self.settings = settings_of(vllm_config)
        self._roofline = roofline(vllm_config, self.settings)
        words = vocabulary(self.model_config)
        self._requests = RequestTable(self.token_source(), LogprobModel(self.model_config.seed, words))
        speculative = self.speculative_config
        count = speculative.num_speculative_tokens if speculative else 0
        self._drafter = Drafter(count, self.settings.acceptance, words.size) if count else None
        self._drafting: tuple[Step, int] = (Step(()), 0)
        self._asleep: frozenset[str] = frozenset()
        self._weights_on_host = False
        self._timeline = self.timeline()
        self._launched: tuple[Step, float] | None = None
        lora = self.lora_config
        self._adapters = AdapterShelf(max(lora.max_loras, lora.max_cpu_loras or 0)) if lora else None

    # What a subclass may give its own answer to.

    def token_source(self) -> TokenSource:
        """Where the tokens come from."""
        mean = self.settings.output_tokens
        return HashedTokens(self.model_config.seed, vocabulary(self.model_config), LengthModel(mean) if mean else None)

    def stage_seconds(self, step: Step) -> Sequence[float]:
        """How long each pipeline stage works on a step."""
        return (0.0,) if self._roofline is None else self._roofline.stage_seconds(step.shares)

    def timeline(self) -> Timeline:
        """The clock that the steps run on."""
        if not self.settings.virtual:
            return Timeline(RealClock(self.settings.speed))
        VIRTUAL_CLOCK.install(self)
        return Timeline(VIRTUAL_CLOCK)

    # The start, in the order vLLM calls it.

    def init_device(self) -> None:
        """There is no device; tensors, should anybody make one, belong to the CPU."""
        self.device = torch.device("cpu")
        if getattr(self.parallel_config, "nnodes", 1) > 1:
            self._join_nodes()

    def _join_nodes(self) -> None:
        """Join the process group by which vLLM hands steps and answers from node to node; no tensor travels in it."""
        from vllm.distributed.parallel_state import init_distributed_environment
        from vllm.platforms import current_platform

        # vLLM makes a torch.device of the name of a platform that is not its own.
        type(current_platform).device_name = current_platform.device_type
        size = self.parallel_config.world_size
        init_distributed_environment(size, self.rank, self.distributed_init_method, self.local_rank, "gloo")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """A model is its configuration alone."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each layer keeps per token."""
        return kv_cache_specs(self.vllm_config)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Any order of bytes will do. Asked from vLLM 0.29 on, where the module exists."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return [layout.name for layout in KVCacheLayout]

    def determine_available_memory(self) -> int:
        """The bytes for the KV cache, of which none is ever taken."""
        size = available_bytes(self.vllm_config, self.settings)
        _log.info("simulated accelerator: rank %d has %d bytes for its KV cache", self.rank, size)
        return size

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Takes note of the number of blocks. vLLM's guide for platforms names it; no release from 0.26 on calls it."""
        self.cache_config.num_gpu_blocks = num_gpu_blocks
        self.cache_config.num_cpu_blocks = num_cpu_blocks

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """No memory is taken for the blocks."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to compile."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Called when vLLM has fitted the length to the memory."""
        self.model_config.max_model_len = max_model_len

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Text generation, and nothing that needs hidden states."""
        return ("generate",)

    # The steps.

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Launches a step. Its tokens come from ``sample_tokens``; a step without tokens is answered at once."""
        self._load_adapters(scheduler_output)
        if not self.is_driver_worker:
            return None
        step = self._requests.advance(scheduler_output)
        if not step.shares:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})
        if self._asleep:
            parts = ", ".join(sorted(self._asleep))
            raise ConfigError(f"a step came while {parts} slept", where="simulated accelerator", fix="wake it up first")
        self._drafting = (step, scheduler_output.num_spec_tokens_to_schedule)
        end = self._timeline.launch(
            self.stage_seconds(step),
            (share.request_id for share in step.shares),
            (share.request_id for share in step.shares if share.index is not None),
        )
        self._launched = (step, end)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepOutput | None:
        """The tokens of the step launched last; None when there is none, from which vLLM finds its error."""
        if self._launched is None:
            return None
        (step, end), self._launched = self._launched, None
        output = answer(step, grammar_output, self._drafter)
        self._requests.settle(output.req_ids, output.sampled_token_ids)
        return StepOutput(output, lambda: self._timeline.wait(end))

    def execute_dummy_batch(self) -> None:
        """A data-parallel rank without work keeps the others company, for as long as one token takes."""
        if self._roofline is not None:
            self._timeline.wait(self._timeline.launch(self._roofline.stage_seconds([_DUMMY])))

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts for what comes after the tokens given out; None without speculative decoding."""
        if self._drafter is None:
            return None
        step, count = self._drafting
        return draft_tokens(step, self._requests, self._drafter, min(count, self._drafter.count))

    def synchronize_device(self) -> None:
        """Waits for the steps in flight."""
        self._timeline.wait()

    # Around the steps.

    def get_model(self) -> torch.nn.Module:
        """A module without parameters."""
        return torch.nn.Module()

    def reset_encoder_cache(self) -> None:
        """Encoder outputs are never computed, hence never kept."""

    def sleep(self, level: int = 1) -> None:
        """Level 1 moves the weights to the host, level 2 forgets them; the scheduler pauses and drops cached blocks."""
        self._asleep = _MEMORY
        self._weights_on_host = level == 1
        if self._weights_on_host:
            self._move_weights()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """All of it or the parts that are named; weights that are on the host come back from there."""
        woken = self._asleep.intersection(_MEMORY if tags is None else tags)
        self._asleep -= woken
        if "weights" in woken and self._weights_on_host:
            self._move_weights()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Lets go of the parts that are named. Called from vLLM 0.31 on."""
        self._asleep = self._asleep.union(tags)

    def reload_weights(self, *args: object, **kwargs: object) -> None:
        """What follows a sleep of level 2: there is nothing to read, but it takes the weights' time."""
        self._move_weights()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter by name; its files are never read."""
        if self._adapters is None:
            self._refuse("LoRA is not enabled", fix="start with --enable-lora")
            return False
        return self._adapters.add(lora_request.lora_int_id)

    def remove_lora(self, lora_id: int) -> bool:
        """Unloads an adapter."""
        return self._adapters is not None and self._adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter loaded."""
        return self._adapters is not None and self._adapters.pin(lora_id)

    def list_loras(self) -> set[int]:
        """The loaded adapters."""
        return self._adapters.ids() if self._adapters is not None else set()

    profile = _refused("profiling a device")
    save_sharded_state = _refused("saving weights")
    save_tensorized_model = _refused("saving weights")
    update_weights = _refused("updating weights")
    init_weight_transfer_engine = _refused("transferring weights")
    compute_weight_checksums = _refused("computing checksums of weights")

    def shutdown(self) -> None:
        """Gives Python its clocks back, where time was virtual and no other engine of this process needs that."""
        VIRTUAL_CLOCK.release(self)
        super().shutdown()

    def simulated_load(self) -> dict[str, float]:
        """Steps so far and the modelled seconds they took, for ``collective_rpc``."""
        return {"steps": self._timeline.steps, "busy_s": self._timeline.busy_s}

    def _move_weights(self) -> None:
        """Takes the time that the weights need over the host link."""
        if self._roofline is not None:
            seconds = self._roofline.weight_bytes / (1e9 * self._roofline.device.host_gb_s)
            self._timeline.wait(self._timeline.launch([seconds]))

    def _refuse(self, what: str, *, fix: str) -> None:
        """Raises on the last rank only, or where this worker stands for all of them.

        vLLM's multi-process executor stops reading replies at the first failure, and takes the replies it left unread
        for those of the next call. After the last rank's there are none.
        """
        alone = "SimulatedExecutor" in str(self.parallel_config.distributed_executor_backend)
        if alone or self.rank == self.parallel_config.world_size - 1:
            raise ConfigError(what, where="simulated accelerator", fix=fix)

    def _load_adapters(self, scheduler_output: SchedulerOutput) -> None:
        if self._adapters is None:
            return
        for request in scheduler_output.scheduled_new_reqs:
            if request.lora_request is not None:
                self._adapters.add(request.lora_request.lora_int_id)
