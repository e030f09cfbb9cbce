"""The worker that vLLM's engine drives on the simulated accelerator: it answers each step without computing it.

To the engine it is a worker like any other: it reports the layers' KV cache and the memory, takes a step in
``execute_model`` and returns its tokens in ``sample_tokens``. A subclass may override three methods: ``token_source``
(which tokens), ``stage_seconds`` (how long a step takes) and ``timeline`` (on which clock).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_graft.bindings.attention.layers import planned_layers
from vllm_graft.errors import ConfigError
from vllm_graft.simulator.batch import Batch, RequestTable
from vllm_graft.simulator.clock import VIRTUAL_CLOCK, RealClock, Timeline
from vllm_graft.simulator.evictions import Evictions
from vllm_graft.simulator.logprobs import LogprobModel
from vllm_graft.simulator.memory import attention_windows, build_roofline, kv_cache_bytes, kv_cache_specs
from vllm_graft.simulator.outputs import Drafter, StepOutput, build_output
from vllm_graft.simulator.settings import carried_settings
from vllm_graft.simulator.tokens import HashedTokens, LengthModel, TokenSource, read_vocabulary

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_log = logging.getLogger("vllm.graft")

_MEMORY = frozenset({"weights", "kv_cache"})
"""The parts of memory that sleep and wake, by vLLM's names."""


def _unavailable(what: str) -> Callable[..., None]:
    """Make a worker method that refuses with its reason."""

    def method(self: SimulatedWorker, *args: object, **kwargs: object) -> None:
        self._refuse(
            f"{what} is not possible: it holds no weights and computes nothing",
            fix="run it on a real device (unset GRAFT_SIMULATE)",
        )

    return method


class SimulatedWorker(WorkerBase):
    """One simulated device. In a tensor-parallel group only the first answers; the others idle."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.settings = carried_settings(vllm_config)
        self._roofline = build_roofline(vllm_config, self.settings)
        vocabulary = read_vocabulary(self.model_config)
        self._requests = RequestTable(self.token_source(), LogprobModel(self.model_config.seed, vocabulary))
        speculative = self.speculative_config
        count = speculative.num_speculative_tokens if speculative else 0
        # A draft model is never loaded: the drafter knows the right tokens, and misses on purpose.
        self._drafter = Drafter(count, self.settings.acceptance, vocabulary.size) if count else None
        self._drafting: tuple[Batch, int] = (Batch(()), 0)
        self._asleep: frozenset[str] = frozenset()
        self._weights_on_host = False
        self._evictions = Evictions(self.cache_config.block_size)
        self._timeline = self.timeline()
        self._launched: tuple[Batch, float] | None = None
        # vLLM keeps max_loras adapters on the device and max_cpu_loras on the host; here they are one.
        lora = self.lora_config
        self._adapters = AdapterCache(max(lora.max_loras, lora.max_cpu_loras or 0)) if lora else None

    # The three methods for a subclass to override.

    def token_source(self) -> TokenSource:
        """Return the source of tokens."""
        mean = self.settings.output_tokens
        lengths = LengthModel(mean) if mean else None
        return HashedTokens(self.model_config.seed, read_vocabulary(self.model_config), lengths)

    def stage_seconds(self, batch: Batch) -> Sequence[float]:
        """Return how long each pipeline stage works on a batch."""
        return (0.0,) if self._roofline is None else self._roofline.stage_seconds(batch.shares)

    def timeline(self) -> Timeline:
        """Return the queue of steps, on the clock that the settings choose."""
        if not self.settings.virtual:
            return Timeline(RealClock(self.settings.speed))
        VIRTUAL_CLOCK.install(self)
        return Timeline(VIRTUAL_CLOCK)

    # The start, in the order of vLLM's calls.

    def init_device(self) -> None:
        """Name the CPU as the device for tensors, should vLLM make one."""
        self.device = torch.device("cpu")
        if getattr(self.parallel_config, "nnodes", 1) <= 1:
            return
        # vLLM hands steps and outputs from node to node by a process group; no tensor travels in it.
        from vllm.distributed.parallel_state import init_distributed_environment
        from vllm.platforms import current_platform

        # For an out-of-tree platform vLLM makes a torch.device of the platform's name, which torch must know.
        type(current_platform).device_name = current_platform.device_type
        size = self.parallel_config.world_size
        init_distributed_environment(size, self.rank, self.distributed_init_method, self.local_rank, "gloo")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load nothing: a model is its configuration alone."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return what each layer keeps per token."""
        return kv_cache_specs(self.vllm_config)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Accept every layout. Called from vLLM 0.29 on, which has the module."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return [layout.name for layout in KVCacheLayout]

    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache, of which none is ever allocated."""
        size = kv_cache_bytes(self.vllm_config, self.settings)
        _log.info("simulated accelerator: rank %d has %d bytes for its KV cache", self.rank, size)
        return size

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate nothing for the blocks; the groups of layers with a planned window are in use from here on."""
        planned_layers.check_choice(self.vllm_config)
        planned_layers.prove_groups(kv_cache_config.kv_cache_groups)
        self._evictions.score_every = planned_layers.score_every
        if any(planned_layers.windows.values()):
            # Once more, with what the queries really read.
            self._roofline = build_roofline(self.vllm_config, self.settings, attention_windows(self.vllm_config))

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Report that nothing took time: there is nothing to compile."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take over the length that vLLM has fitted to the memory."""
        self.model_config.max_model_len = max_model_len

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return text generation alone; the other tasks need hidden states."""
        return ("generate",)

    # The steps.

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Launch a step, whose tokens ``sample_tokens`` returns; an empty step is answered at once."""
        if self._adapters is not None:
            for request in scheduler_output.scheduled_new_reqs:
                if request.lora_request is not None:
                    self._adapters.add(request.lora_request.lora_int_id)
        # Of a tensor-parallel group the executor reads the first worker's output.
        if not self.is_driver_worker:
            return None
        batch = self._requests.advance(scheduler_output)
        self._evictions.apply(scheduler_output, batch)
        if not batch.shares:
            # vLLM calls sample_tokens after every step that scheduled something, under asynchronous scheduling without
            # looking at the result of execute_model; an empty step must be answered here.
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})
        # vLLM pauses its scheduler while the device sleeps; a step then is an error of the caller.
        if self._asleep:
            parts = ", ".join(sorted(self._asleep))
            raise ConfigError(
                f"execute_model was called while {parts} is asleep",
                where="simulated accelerator",
                fix="wake it up first",
            )
        self._drafting = (batch, scheduler_output.num_spec_tokens_to_schedule)
        end = self._timeline.launch(
            self.stage_seconds(batch),
            (share.request_id for share in batch.shares),
            (share.request_id for share in batch.shares if share.index is not None),
        )
        self._launched = (batch, end)
        # None makes the engine call sample_tokens, where a grammar's mask arrives.
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepOutput | None:
        """Return the tokens of the step launched last; None if none was, which vLLM reports as its error."""
        if self._launched is None:
            return None
        (batch, end), self._launched = self._launched, None
        output = build_output(batch, grammar_output, self._drafter)
        self._evictions.score(batch, output)
        # Counted here, not when the output is read: under asynchronous scheduling the next step comes first.
        self._requests.settle(output.req_ids, output.sampled_token_ids)
        return StepOutput(output, lambda: self._timeline.wait(end))

    def execute_dummy_batch(self) -> None:
        """Take the time of one token: a data-parallel rank without work keeps step with the others."""
        if self._roofline is not None:
            one_token = SimpleNamespace(new_tokens=1, context=1)
            self._timeline.wait(self._timeline.launch(self._roofline.stage_seconds([one_token])))

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return drafts for the tokens after those given out; None without speculative decoding."""
        if self._drafter is None:
            return None
        batch, count = self._drafting
        count = min(count, self._drafter.count)
        upcoming = self._requests.upcoming(batch)
        drafts = [self._drafter.propose(stream, index, count) for _, stream, index in upcoming]
        return DraftTokenIds([request_id for request_id, _, _ in upcoming], drafts)

    def synchronize_device(self) -> None:
        """Wait for the steps in flight."""
        self._timeline.wait()

    # Around the steps.

    def get_model(self) -> torch.nn.Module:
        """Return a module without parameters."""
        return torch.nn.Module()

    def reset_encoder_cache(self) -> None:
        """Do nothing: encoder outputs are never computed."""

    def sleep(self, level: int = 1) -> None:
        """Sleep: level 1 moves the weights to the host, level 2 drops them. vLLM's scheduler drops cached blocks."""
        # vLLM's CuMemAllocator has the same two tags.
        self._asleep = _MEMORY
        self._weights_on_host = level == 1
        if self._weights_on_host:
            self._move_weights()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake everything or the named parts; weights on the host are moved back."""
        woken = self._asleep.intersection(_MEMORY if tags is None else tags)
        self._asleep -= woken
        if "weights" in woken and self._weights_on_host:
            self._move_weights()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Drop the named parts. Called from vLLM 0.31 on."""
        self._asleep = self._asleep.union(tags)

    def reload_weights(self, *args: object, **kwargs: object) -> None:
        """Take the time that the weights need, after a sleep of level 2; nothing is read."""
        self._move_weights()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter by its number; its files are never read."""
        if self._adapters is None:
            self._refuse("LoRA is not enabled", fix="start with --enable-lora")
            return False
        return self._adapters.add(lora_request.lora_int_id)

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        return self._adapters is not None and self._adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded."""
        return self._adapters is not None and self._adapters.pin(lora_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return self._adapters.ids() if self._adapters is not None else set()

    profile = _unavailable("profiling a device")
    save_sharded_state = _unavailable("saving weights")
    save_tensorized_model = _unavailable("saving weights")
    update_weights = _unavailable("updating weights")
    init_weight_transfer_engine = _unavailable("transferring weights")
    compute_weight_checksums = _unavailable("computing checksums of weights")

    def shutdown(self) -> None:
        """Give Python its clocks back, if time was virtual and no other engine of this process needs it."""
        VIRTUAL_CLOCK.release(self)
        super().shutdown()

    def simulated_load(self) -> dict[str, float]:
        """Return the steps so far and their modelled seconds; called by ``collective_rpc``."""
        return {"steps": self._timeline.steps, "busy_s": self._timeline.busy_s}

    def _move_weights(self) -> None:
        """Take the time that the weights need over the host link."""
        if self._roofline is not None:
            seconds = self._roofline.weight_bytes / (1e9 * self._roofline.device.host_gb_s)
            self._timeline.wait(self._timeline.launch([seconds]))

    def _refuse(self, what: str, *, fix: str) -> None:
        """Raise on the last rank, or if this worker stands for all ranks; return elsewhere.

        vLLM's multi-process executor stops reading replies at the first failure and takes unread replies for those of
        its next call. After the last rank's reply there are none.
        """
        alone = "SimulatedExecutor" in str(self.parallel_config.distributed_executor_backend)
        if alone or self.rank == self.parallel_config.world_size - 1:
            raise ConfigError(what, where="simulated accelerator", fix=fix)


class AdapterCache:
    """The numbers of the loaded LoRA adapters; the least recently used one leaves first, a pinned one stays."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._pinned: OrderedDict[int, bool] = OrderedDict()

    def add(self, adapter: int) -> bool:
        """Load an adapter, or mark it as used; return whether it is loaded afterwards."""
        self._pinned.setdefault(adapter, False)
        self._pinned.move_to_end(adapter)
        excess = len(self._pinned) - self._capacity
        for other in [each for each, pinned in self._pinned.items() if not pinned][: max(excess, 0)]:
            del self._pinned[other]
        return adapter in self._pinned

    def remove(self, adapter: int) -> bool:
        """Unload an adapter; False if it was not loaded."""
        return self._pinned.pop(adapter, None) is not None

    def pin(self, adapter: int) -> bool:
        """Keep an adapter from leaving; False if it is not loaded."""
        if adapter not in self._pinned:
            return False
        self._pinned[adapter] = True
        return True

    def ids(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return set(self._pinned)
