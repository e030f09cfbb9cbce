"""The patches of the sampler point: what a logits processor alone cannot reach. Each calls the original.

``SAMPLER_PATCHES`` lists them with what a server without each one does instead. They are applied in every process of a
plan that names a sampler; a target that the installed vLLM lacks is logged with that consequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from vllm_graft.bindings.sampling import failures, requests
from vllm_graft.bindings.sampling.engine_arguments import QUALNAME, v2_takes_samplers
from vllm_graft.errors import PatchError
from vllm_graft.patching import Engine, Patch, VLLMPatch, default_engine, wrap
from vllm_graft.plan import inherited_run

_LOG: Final = logging.getLogger("vllm.graft")
_WHY: Final = "vLLM's interfaces for logits processors do not reach there"
_PREFIX: Final = "graft."

Call = Callable[..., Any]


def _ours(processors: Any) -> list[Any]:
    from vllm_graft.bindings.sampling.processor import Processor

    return [processor for processor in processors if isinstance(processor, Processor)]


class AfterPenalties(VLLMPatch["vllm.v1.sample.sampler:Sampler"], name="graft.after-penalties", why=_WHY):
    """On the V1 runner, let strategies work where they do on the V2 runner: after penalties, before temperature.

    V1 applies logits processors first, so that a truncation would see logits that penalties change afterwards.
    """

    @wrap
    @staticmethod
    def apply_penalties(call: Call, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        logits = call(logits, sampling_metadata, *args, **kwargs)
        for processor in _ours(sampling_metadata.logitsprocs.non_argmax_invariant):
            processor.run(logits)
        return logits


class V1Picks(VLLMPatch["vllm.v1.sample.sampler:Sampler"], name="graft.v1-picks", why=_WHY):
    """On the V1 runner, put a sampler's tokens in place of vLLM's, and tell strategies which were picked."""

    @wrap
    def sample(self, call: Call, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        # The body of V1's Sampler.sample is the same from 0.26 to 0.32.
        sampled, logprobs = call(logits, sampling_metadata, *args, **kwargs)
        for processor in _ours(sampling_metadata.logitsprocs.non_argmax_invariant):
            processor.after(sampled)
        return sampled, logprobs


class V2Picks(VLLMPatch["vllm.v1.worker.gpu.sample.sampler:Sampler"], name="graft.v2-picks", why=_WHY):
    """On the V2 runner, put a sampler's tokens in place of vLLM's, and tell strategies which were picked."""

    @wrap
    def sample(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        # V2's Sampler.sample has another body in every release up to 0.31, and other arguments in 0.28 and 0.31: passed
        # on unread.
        sampled, logits = call(*args, **kwargs)
        for processor in _ours(self.logits_processors):
            processor.after(sampled)
        return sampled, logits


def _read_keys(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    params = call(*args, **kwargs)
    requests.with_status(requests.prepare, self, params)
    return params


def _refuse_beams(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    requests.with_status(requests.refuse_beams, self.model_extra, self.vllm_xargs)
    requests.refuse_unsendable_texts(self)
    return call(*args, **kwargs)


class ChatKeys(
    VLLMPatch["vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"],
    name="graft.chat-keys",
    why=_WHY,
):
    """Read samplers' keys from the top level of a chat request too, and check all before anything is streamed."""

    to_sampling_params = wrap(_read_keys)


class CompletionKeys(
    VLLMPatch["vllm.entrypoints.openai.completion.protocol:CompletionRequest"], name="graft.completion-keys", why=_WHY
):
    """Read samplers' keys from the top level of a completion request too, and check all before streaming."""

    to_sampling_params = wrap(_read_keys)


class ResponsesKeys(
    VLLMPatch["vllm.entrypoints.openai.responses.protocol:ResponsesRequest"], name="graft.responses-keys", why=_WHY
):
    """Read samplers' keys from the top level of a request to the responses API too, and check all before streaming."""

    to_sampling_params = wrap(_read_keys)


class ChatBeams(
    VLLMPatch["vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"],
    name="graft.chat-beams",
    why=_WHY,
):
    """Refuse a chat request for beam search that asks for a sampler."""

    to_beam_search_params = wrap(_refuse_beams)


class CompletionBeams(
    VLLMPatch["vllm.entrypoints.openai.completion.protocol:CompletionRequest"], name="graft.completion-beams", why=_WHY
):
    """Refuse a completion request for beam search that asks for a sampler."""

    to_beam_search_params = wrap(_refuse_beams)


def _without_ours(processors: Any) -> Any:
    """Leave our processor out of a list of them, if the engine cannot have it; pass anything else."""
    run = inherited_run()
    if run is None or not run.left_out or not isinstance(processors, list | tuple):
        return processors
    return type(processors)(each for each in processors if each != QUALNAME)


def _build_without_ours(call: Call, *args: Any, **kwargs: Any) -> Any:
    # Both builders take the processors as custom_logitsprocs, the last of their parameters.
    named = {name: _without_ours(value) if name == "custom_logitsprocs" else value for name, value in kwargs.items()}
    return call(*map(_without_ours, args), **named)


class V1Builder(VLLMPatch["vllm.v1.sample.logits_processor"], name="graft.v1-builder", why=_WHY):
    """Start an engine that cannot have samplers without ours; the front end refuses their requests."""

    build_logitsprocs = wrap(_build_without_ours)


class V2Builder(VLLMPatch["vllm.v1.worker.gpu.sample.logits_processor.loader"], name="graft.v2-builder", why=_WHY):
    """Start an engine of the V2 runner that cannot have samplers without ours."""

    build_custom_logits_processors = wrap(_build_without_ours)


def _report_failures(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    return failures.report(self, call(*args, **kwargs))


class V1Failures(VLLMPatch["vllm.v1.worker.gpu_model_runner:GPUModelRunner"], name="graft.v1-failures", why=_WHY):
    """On the V1 runner, report requests whose sampler raised beside the output of the step."""

    sample_tokens = wrap(_report_failures)


class V2Failures(VLLMPatch["vllm.v1.worker.gpu.model_runner:GPUModelRunner"], name="graft.v2-failures", why=_WHY):
    """On the V2 runner, report requests whose sampler raised beside the output of the step."""

    sample_tokens = wrap(_report_failures)


class EngineFailures(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="graft.engine-failures", why=_WHY):
    """In the engine, end the requests that a worker reported."""

    @wrap
    def update_from_output(
        self, call: Call, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        answers = call(scheduler_output, model_runner_output, *args, **kwargs)
        return failures.finish(self, model_runner_output, answers)


_NO_PICKS: Final = "a sampler's pick is forced through the logits, and no strategy is told which tokens were picked"
_NO_KEYS: Final = "samplers' keys work in vllm_xargs only"
_NO_BEAMS: Final = "samplers' keys have no effect on requests for beam search"
_NO_BUILDER: Final = "an engine that cannot have samplers does not start"
_NO_FAILURES: Final = "a request whose sampler raised goes on without it"

SAMPLER_PATCHES: Final[Mapping[Patch, str]] = {
    AfterPenalties: "strategies work before the penalties of the V1 model runner",
    V1Picks: _NO_PICKS,
    V2Picks: _NO_PICKS,
    ChatKeys: _NO_KEYS,
    CompletionKeys: _NO_KEYS,
    ResponsesKeys: _NO_KEYS,
    ChatBeams: _NO_BEAMS,
    CompletionBeams: _NO_BEAMS,
    V1Builder: _NO_BUILDER,
    V2Builder: _NO_BUILDER,
    V1Failures: _NO_FAILURES,
    V2Failures: _NO_FAILURES,
    EngineFailures: _NO_FAILURES,
}
"""Every patch of the sampler point, with what a server without it does."""

_OF_V2: Final = frozenset({V2Picks, V2Builder, V2Failures})


def install(engine: Engine) -> None:
    """Apply the patches, each when its module is imported; a target that this vLLM lacks is logged."""
    for patch in SAMPLER_PATCHES:
        try:
            engine.apply([patch])
        except PatchError as error:
            log_refusal(patch, error)


def log_refusal(patch: Patch, error: PatchError) -> None:
    """Log that one of these patches does not fit the installed vLLM, and what a server without it does."""
    consequence = SAMPLER_PATCHES.get(patch)
    if consequence is None:
        return
    # Before vLLM 0.31 the V2 runner takes no samplers, and a plan that needs it to is refused (see ``arguments``).
    level = logging.DEBUG if patch in _OF_V2 and not v2_takes_samplers() else logging.WARNING
    _LOG.log(level, "vllm-graft: patch %s is not applied, so %s: %s", patch.declaration.name, consequence, error)


def is_applied(name: str) -> bool:
    """Return whether the patch of this name, without its prefix, is applied in this process."""
    states = [hook.state for hook in default_engine().report() if hook.patch == _PREFIX + name]
    return bool(states) and all(state == "applied" for state in states)
