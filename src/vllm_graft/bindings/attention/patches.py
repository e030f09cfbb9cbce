"""The patches of the attention point, on functions that kept their shape from 0.26 to 0.32. Each calls the original.

A layer asks the plan when vLLM wants its KV-cache spec: the block size is settled then, and the metadata builders are
not made yet. Every platform and runner passes there. A backend that is named in the arguments is ignored on CPU, and
one that is registered under one of vLLM's names is shared by all plugins of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm_graft.bindings.attention import requests
from vllm_graft.bindings.attention.freed_block_check import FREE, attach_free, checked
from vllm_graft.bindings.attention.kernel_layers import planned_kernel
from vllm_graft.bindings.attention.layers import (
    EVICTIONS,
    asking_managers,
    planned_layers,
    stamp_request,
    windowed_managers,
)
from vllm_graft.bindings.attention.request_windows import follow_windows, keep_window
from vllm_graft.patching import Engine, Patch, VLLMPatch, wrap

_WHY: Final = "vLLM takes no attention backend and no KV-cache spec per layer"

Call = Callable[..., Any]


class PlannedWindows(
    VLLMPatch["vllm.model_executor.layers.attention.attention:Attention"], name="graft.attention-windows", why=_WHY
):
    """Give a layer the backend and the KV-cache spec of its window."""

    @wrap
    def get_kv_cache_spec(self, call: Call, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        spec = call(vllm_config, *args, **kwargs)
        if spec is not None:
            planned_kernel.settle_layer(self, spec, vllm_config)
        return planned_layers.adapt(self, spec, vllm_config) if spec is not None else None


class PlannedKernels(
    VLLMPatch["vllm.model_executor.layers.attention.attention:Attention"], name="graft.attention-kernel", why=_WHY
):
    """Give a layer the planned kernel when it is made."""

    @wrap
    def __init__(self, call: Call, *args: Any, **kwargs: Any) -> None:
        planned_kernel.make_layer(self, call, args, kwargs)


class RefusedKernels(
    VLLMPatch["vllm.model_executor.layers.attention.mla_attention:MLAAttention"], name="graft.attention-mla", why=_WHY
):
    """Refuse the planned kernel to a layer with multi-head latent attention, which has a class of its own."""

    @wrap
    def __init__(self, call: Call, *args: Any, **kwargs: Any) -> None:
        planned_kernel.make_layer(self, call, args, kwargs)


class PlannedManagers(
    VLLMPatch["vllm.v1.core.kv_cache_manager:KVCacheManager"], name="graft.attention-managers", why=_WHY
):
    """Record in engine core which groups of layers free blocks, and whose blocks they are asked about."""

    @wrap
    def __init__(self, call: Call, *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        planned_layers.prove_managers(self)

    @wrap
    def allocate_slots(self, call: Call, request: Any, *args: Any, **kwargs: Any) -> Any:
        # Managers are given only the name of a request.
        managers: tuple[Any, ...] = (*asking_managers(self), *windowed_managers(self))
        for manager in managers:
            manager.request = request
        return call(request, *args, **kwargs)

    @wrap
    def free(self, call: Call, *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        # The last request to end is followed by no step that would report it.
        planned_layers.report_blocks()


class WindowStamps(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="graft.window-stamps", why=_WHY):
    """Stamp a request with the window that it asks for, before vLLM hashes its blocks."""

    @wrap
    def preprocess_add_request(self, call: Call, request: Any, *args: Any, **kwargs: Any) -> Any:
        stamp_request(getattr(self.scheduler, "kv_cache_manager", None), request)
        return call(request, *args, **kwargs)


class SessionWindows(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="graft.session-windows", why=_WHY):
    """Keep the window of a streaming session in all of its turns."""

    @wrap
    def _update_request_as_session(self, call: Call, session: Any, update: Any, *args: Any, **kwargs: Any) -> Any:
        if windowed_managers(self.kv_cache_manager):
            keep_window(session, update)
        return call(session, update, *args, **kwargs)


class EvictionNotes(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="graft.eviction-notes", why=_WHY):
    """Send the blocks that a policy evicted to the workers, with the step in which they are gone."""

    @wrap
    def schedule(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        managers = asking_managers(self.kv_cache_manager)
        for manager in managers:
            manager.workers_follow = True
        output = call(*args, **kwargs)
        if managers:
            from vllm_graft.bindings.attention.eviction import attach_evictions

            attach_evictions(managers, output)
        if checked():
            attach_free(self.kv_cache_manager.block_pool, output)
        return output


class EngineScores(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="graft.engine-scores", why=_WHY):
    """Take in the scores of blocks that a worker has put beside its output."""

    @wrap
    def update_from_output(
        self, call: Call, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if managers := asking_managers(self.kv_cache_manager):
            from vllm_graft.bindings.attention.eviction import take_in_scores

            take_in_scores(managers, self, model_runner_output)
        return call(scheduler_output, model_runner_output, *args, **kwargs)


def _prepare_layers(self: Any, call: Call, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
    result = call(kv_cache_config, *args, **kwargs)
    planned_layers.prepare(self, kv_cache_config)
    return result


def _score_blocks(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    return planned_layers.score_step(self, lambda: call(*args, **kwargs))


class V1Scores(VLLMPatch["vllm.v1.worker.gpu_model_runner:GPUModelRunner"], name="graft.v1-scores", why=_WHY):
    """On the V1 runner, score blocks between the forward pass and the sampling of a step."""

    initialize_kv_cache = wrap(_prepare_layers)
    sample_tokens = wrap(_score_blocks)


class V2Scores(VLLMPatch["vllm.v1.worker.gpu.model_runner:GPUModelRunner"], name="graft.v2-scores", why=_WHY):
    """On the V2 runner, score blocks between the forward pass and the sampling of a step."""

    initialize_kv_cache = wrap(_prepare_layers)
    sample_tokens = wrap(_score_blocks)


def _fill_freed(runner: Any, scheduler_output: Any) -> None:
    freed, free = getattr(runner, "graft_freed", None), getattr(scheduler_output, FREE, None)
    if freed is not None and free is not None:
        freed.fill(runner.kv_caches, free)


class V1Evictions(VLLMPatch["vllm.v1.worker.gpu_model_runner:GPUModelRunner"], name="graft.v1-evictions", why=_WHY):
    """On the V1 runner, take evicted blocks out of the block tables, and follow the windows of single requests."""

    @wrap
    def _update_states(self, call: Call, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(scheduler_output, *args, **kwargs)
        if getattr(scheduler_output, EVICTIONS, None):
            from vllm_graft.bindings.attention.eviction import apply_evictions_v1

            apply_evictions_v1(self, scheduler_output)
        follow_windows(self, scheduler_output)
        # Backends that want their rows in another order have had them sorted by now.
        planned_layers.row_windows.arrange(self, self.input_batch.req_ids)
        _fill_freed(self, scheduler_output)
        return result


class V2Evictions(VLLMPatch["vllm.v1.worker.gpu.model_runner:GPUModelRunner"], name="graft.v2-evictions", why=_WHY):
    """On the V2 runner, take evicted blocks out of the block tables, and follow the windows of single requests."""

    @wrap
    def update_requests(self, call: Call, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(scheduler_output, *args, **kwargs)
        if getattr(scheduler_output, EVICTIONS, None):
            from vllm_graft.bindings.attention.eviction import apply_evictions_v2

            apply_evictions_v2(self, scheduler_output)
        follow_windows(self, scheduler_output)
        _fill_freed(self, scheduler_output)
        return result

    @wrap
    def prepare_inputs(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        batch = call(*args, **kwargs)
        planned_layers.row_windows.arrange(self, batch.req_ids)
        return batch


def _check_keys(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    params = call(*args, **kwargs)
    requests.prepare(self, params)
    return params


def _refuse_beams(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    requests.refuse_beams(self.model_extra, self.vllm_xargs)
    return call(*args, **kwargs)


class ChatPolicyKeys(
    VLLMPatch["vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"],
    name="graft.chat-policy-keys",
    why=_WHY,
):
    """Check a chat request's keys for the policy before anything is streamed."""

    to_sampling_params = wrap(_check_keys)
    to_beam_search_params = wrap(_refuse_beams)


class CompletionPolicyKeys(
    VLLMPatch["vllm.entrypoints.openai.completion.protocol:CompletionRequest"],
    name="graft.completion-policy-keys",
    why=_WHY,
):
    """Check a completion request's keys for the policy before anything is streamed."""

    to_sampling_params = wrap(_check_keys)
    to_beam_search_params = wrap(_refuse_beams)


class ResponsesPolicyKeys(
    VLLMPatch["vllm.entrypoints.openai.responses.protocol:ResponsesRequest"],
    name="graft.responses-policy-keys",
    why=_WHY,
):
    """Check the keys for the policy of a request to the responses API before anything is streamed."""

    to_sampling_params = wrap(_check_keys)


class InputPolicyKeys(VLLMPatch["vllm.v1.engine.input_processor:InputProcessor"], name="graft.policy-keys", why=_WHY):
    """Check the keys for the policy of every other request, such as one of ``LLM.generate``."""

    @wrap
    def _validate_params(self, call: Call, params: Any, *args: Any, **kwargs: Any) -> Any:
        requests.check(params)
        return call(params, *args, **kwargs)


ATTENTION_PATCHES: Final[tuple[Patch, ...]] = (
    PlannedWindows, PlannedKernels, RefusedKernels, PlannedManagers, WindowStamps, SessionWindows, EvictionNotes,
    V1Evictions, V2Evictions, EngineScores, V1Scores, V2Scores, ChatPolicyKeys, CompletionPolicyKeys,
    ResponsesPolicyKeys, InputPolicyKeys,
)  # fmt: skip


def install(engine: Engine) -> None:
    """Apply the patches, each when its module is imported. A target that this vLLM lacks refuses the plan."""
    for patch in ATTENTION_PATCHES:
        engine.apply([patch])
