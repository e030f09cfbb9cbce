"""The few places in vLLM where a logits processor alone cannot stand; each calls the original.

- V1 ``Sampler.apply_penalties``  strategies work after vLLM's penalties, as they do on the V2 runner
- ``Sampler.sample`` of both      what a sampler picked takes the place of what vLLM picked
- ``to_sampling_params``          keys at the top level of a request, which vLLM drops without a word; and the check of
                                  all keys, which vLLM makes only when an answer is being streamed
- ``to_beam_search_params``       beam search, with which vLLM drops all keys without a word
- the builders of processors      an engine that cannot have samplers is started without ours
- ``sample_tokens``, ``update_from_output``  a request whose sampler raised ends with an error
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.sampling import failures, requests
from vllm_graft.bindings.sampling.injection import QUALNAME
from vllm_graft.errors import PatchError
from vllm_graft.patching import Engine, VLLMPatch, default_engine, wrap
from vllm_graft.plan import carried_run

if TYPE_CHECKING:
    from collections.abc import Callable

_WHY: Final = "vLLM's interfaces for logits processors do not reach there"
_PREFIX: Final = "graft."


class AfterPenalties(VLLMPatch["vllm.v1.sample.sampler:Sampler"], name="graft.after-penalties", why=_WHY):
    """On the V1 runner, let strategies work where they do on the V2 runner: after penalties, before temperature."""

    @wrap
    @staticmethod
    def apply_penalties(
        call: Callable[..., Any], logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        logits = call(logits, sampling_metadata, *args, **kwargs)
        for processor in _ours(sampling_metadata.logitsprocs.non_argmax_invariant):
            processor.run(logits)
        return logits


class V1Picks(VLLMPatch["vllm.v1.sample.sampler:Sampler"], name="graft.v1-picks", why=_WHY):
    """On the V1 runner, let a sampler's own picks take the place of vLLM's."""

    @wrap
    def sample(self, call: Callable[..., Any], logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        sampled, logprobs = call(logits, sampling_metadata, *args, **kwargs)
        for processor in _ours(sampling_metadata.logitsprocs.non_argmax_invariant):
            processor.after(sampled)
        return sampled, logprobs


class V2Picks(VLLMPatch["vllm.v1.worker.gpu.sample.sampler:Sampler"], name="graft.v2-picks", why=_WHY):
    """The same on the V2 runner."""

    @wrap
    def sample(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sampled, logits = call(*args, **kwargs)
        for processor in _ours(self.logits_processors):
            processor.after(sampled)
        return sampled, logits


class ChatKeys(
    VLLMPatch["vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"],
    name="graft.chat-keys",
    why=_WHY,
):
    """Lift samplers' keys from the top level of a chat request, and check them before anything is streamed."""

    @wrap
    def to_sampling_params(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        params = call(*args, **kwargs)
        requests.with_status(requests.prepare, self, params)
        return params


class CompletionKeys(
    VLLMPatch["vllm.entrypoints.openai.completion.protocol:CompletionRequest"], name="graft.completion-keys", why=_WHY
):
    """The same for a completion request."""

    @wrap
    def to_sampling_params(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        params = call(*args, **kwargs)
        requests.with_status(requests.prepare, self, params)
        return params


class ResponsesKeys(
    VLLMPatch["vllm.entrypoints.openai.responses.protocol:ResponsesRequest"], name="graft.responses-keys", why=_WHY
):
    """The same for the responses API."""

    @wrap
    def to_sampling_params(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        params = call(*args, **kwargs)
        requests.with_status(requests.prepare, self, params)
        return params


class ChatBeams(
    VLLMPatch["vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"],
    name="graft.chat-beams",
    why=_WHY,
):
    """Refuse a chat request for beam search that asks for a sampler."""

    @wrap
    def to_beam_search_params(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        requests.with_status(requests.refuse_beams, self.model_extra, self.vllm_xargs)
        return call(*args, **kwargs)


class CompletionBeams(
    VLLMPatch["vllm.entrypoints.openai.completion.protocol:CompletionRequest"], name="graft.completion-beams", why=_WHY
):
    """The same for a completion request."""

    @wrap
    def to_beam_search_params(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        requests.with_status(requests.refuse_beams, self.model_extra, self.vllm_xargs)
        return call(*args, **kwargs)


class V1Builder(VLLMPatch["vllm.v1.sample.logits_processor"], name="graft.v1-builder", why=_WHY):
    """Start an engine that cannot have samplers without ours; their requests are refused in the front end."""

    @wrap
    def build_logitsprocs(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*_without_ours(args), **_named_without_ours(kwargs))


class V2Builder(VLLMPatch["vllm.v1.worker.gpu.sample.logits_processor.loader"], name="graft.v2-builder", why=_WHY):
    """The same for the V2 runner's builder."""

    @wrap
    def build_custom_logits_processors(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*_without_ours(args), **_named_without_ours(kwargs))


class V1Failures(VLLMPatch["vllm.v1.worker.gpu_model_runner:GPUModelRunner"], name="graft.v1-failures", why=_WHY):
    """Name requests whose sampler raised beside the output of the step."""

    @wrap
    def sample_tokens(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return failures.tell(self, call(*args, **kwargs))


class V2Failures(VLLMPatch["vllm.v1.worker.gpu.model_runner:GPUModelRunner"], name="graft.v2-failures", why=_WHY):
    """The same on the V2 runner."""

    @wrap
    def sample_tokens(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return failures.tell(self, call(*args, **kwargs))


class EngineFailures(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="graft.engine-failures", why=_WHY):
    """End those requests with an error, in the engine."""

    @wrap
    def update_from_output(
        self, call: Callable[..., Any], scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        answers = call(scheduler_output, model_runner_output, *args, **kwargs)
        return failures.end(self, model_runner_output, answers)


PLACES: Final = (
    AfterPenalties, V1Picks, V2Picks, ChatKeys, CompletionKeys, ResponsesKeys, ChatBeams, CompletionBeams, V1Builder,
    V2Builder, V1Failures, V2Failures, EngineFailures,
)  # fmt: skip
"""Every place of the sampler point."""


def install(engine: Engine) -> None:
    """Put them in, each when its module is imported; one that this vLLM does not have is done without."""
    for place in PLACES:
        with contextlib.suppress(PatchError):
            engine.apply([place])


def in_force(name: str) -> bool:
    """Whether a place is in force in this process."""
    states = [hook.state for hook in default_engine().report() if hook.patch == _PREFIX + name]
    return bool(states) and all(state == "applied" for state in states)


def _ours(processors: Any) -> list[Any]:
    from vllm_graft.bindings.sampling.processor import Processor

    return [processor for processor in processors if isinstance(processor, Processor)]


def _without_ours(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_filtered(each) if isinstance(each, list | tuple) else each for each in args)


def _named_without_ours(kwargs: dict[str, Any]) -> dict[str, Any]:
    name = "custom_logitsprocs"
    return {**kwargs, name: _filtered(kwargs[name])} if name in kwargs else kwargs


def _filtered(processors: Any) -> Any:
    run = carried_run()
    if run is None or not run.left_out or not processors:
        return processors
    return type(processors)(each for each in processors if each != QUALNAME)
