"""The worker that vLLM's engine drives on the simulated accelerator: it answers each step without computing it.

The engine cannot tell it from a real worker: it reports what the layers keep, how much memory there is, takes a step
in ``execute_model`` and gives its tokens in ``sample_tokens``. Three methods are there to be overridden:
``token_source`` (what the tokens are), ``step_seconds`` (how long a step takes) and ``timeline`` (by which clock).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_graft.errors import ConfigError
from vllm_graft.plugins.platforms.simulated.adapters import AdapterShelf
from vllm_graft.plugins.platforms.simulated.batch import RequestTable, Step
from vllm_graft.plugins.platforms.simulated.memory import available_bytes, kv_cache_specs
from vllm_graft.plugins.platforms.simulated.timing import Timeline
from vllm_graft.plugins.platforms.simulated.tokens import HashedTokens, TokenSource
from vllm_graft.plugins.platforms.simulated.vocabulary import vocabulary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_log = logging.getLogger(__name__)


class StepOutput(AsyncModelRunnerOutput):
    """A step's tokens, to be had once the step has ended; vLLM takes it with and without async scheduling."""

    def __init__(self, output: ModelRunnerOutput, wait: Callable[[], None]) -> None:
        self._output = output
        self._wait = wait

    def get_output(self) -> ModelRunnerOutput:
        """Waits for the end of the step."""
        self._wait()
        return self._output


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
        self._requests = RequestTable(self.token_source())
        self._timeline = self.timeline()
        self._launched: tuple[Step, float] | None = None
        lora = self.lora_config
        self._adapters = AdapterShelf(max(lora.max_loras, lora.max_cpu_loras or 0)) if lora else None

    # What a subclass may give its own answer to.

    def token_source(self) -> TokenSource:
        """Where the tokens come from."""
        return HashedTokens(self.model_config.seed, vocabulary(self.model_config))

    def step_seconds(self, step: Step) -> float:
        """How long the device works on a step."""
        return 0.0

    def timeline(self) -> Timeline:
        """The clock that the steps run on."""
        return Timeline()

    # The start, in the order vLLM calls it.

    def init_device(self) -> None:
        """There is no device; tensors, should anybody make one, belong to the CPU."""
        self.device = torch.device("cpu")

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
        size = available_bytes(self.vllm_config)
        _log.info("simulated accelerator: rank %d has %d bytes for its KV cache", self.rank, size)
        return size

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
        self._launched = (step, self._timeline.launch(self.step_seconds(step)))
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepOutput | None:
        """The tokens of the step launched last; None when there is none, from which vLLM finds its error."""
        if self._launched is None:
            return None
        (step, end), self._launched = self._launched, None
        masks = _masks(grammar_output)
        ids = [share.request_id for share in step.shares]
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: position for position, request_id in enumerate(ids)},
            sampled_token_ids=[
                [] if share.index is None else [share.stream.token(share.index, masks.get(share.request_id))]
                for share in step.shares
            ],
        )
        return StepOutput(output, lambda: self._timeline.wait(end))

    def execute_dummy_batch(self) -> None:
        """A data-parallel rank without work keeps the others company; here nobody waits for it."""

    def take_draft_token_ids(self) -> None:
        """No drafts: speculative decoding is refused at the start."""

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
        """Nothing is held that sleep could free; the scheduler forgets the cached blocks itself."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """As soon as asked."""

    def discard(self, tags: tuple[str, ...]) -> None:
        """Nothing is held."""

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
    reload_weights = _refused("loading weights")
    update_weights = _refused("updating weights")
    init_weight_transfer_engine = _refused("transferring weights")
    compute_weight_checksums = _refused("computing checksums of weights")

    def _refuse(self, what: str, *, fix: str) -> None:
        """Raises on the last rank only.

        vLLM's multi-process executor stops reading replies at the first failure, and takes the replies it left unread
        for those of the next call. After the last rank's there are none.
        """
        if self.rank == self.parallel_config.world_size - 1:
            raise ConfigError(what, where="simulated accelerator", fix=fix)

    def _load_adapters(self, scheduler_output: SchedulerOutput) -> None:
        if self._adapters is None:
            return
        for request in scheduler_output.scheduled_new_reqs:
            if request.lora_request is not None:
                self._adapters.add(request.lora_request.lora_int_id)


def _masks(grammar_output: GrammarOutput | None) -> dict[str, NDArray[np.int32]]:
    """Each structured request's row of allowed tokens."""
    if grammar_output is None:
        return {}
    return dict(zip(grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask, strict=False))
