"""The logits processor that vLLM is given, and what its V1 and V2 forms share.

vLLM resolves one name in the front end and in workers, and each model runner wants a subclass of its own interface. So
the class under that name inherits both, and makes a ``ProcessorV1`` or a ``ProcessorV2``: V1 calls it with three
arguments (configuration, device, pinned memory), V2, from vLLM 0.31 on, with two (configuration, request states).
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, Final

import torch

from vllm_graft.bindings.instantiate import failure_reason, instantiate, warn_if_slow
from vllm_graft.bindings.sampling import failures, requests
from vllm_graft.bindings.sampling.engine_arguments import v2_takes_samplers
from vllm_graft.bindings.sampling.guarded import GuardedSampler
from vllm_graft.bindings.sampling.pipeline import SamplerPipeline
from vllm_graft.contracts import ServedModel
from vllm_graft.contracts.sampling import OptInSampler
from vllm_graft.contracts.validation import find_window_mistake
from vllm_graft.errors import StartError
from vllm_graft.ledger import current
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import inherited_plan

_LOG: Final = logging.getLogger("vllm.graft")
_NOTABLE_BYTES: Final = 16 * 2**20
"""The device memory that a sampler's setup may take before the log says so."""


class Processor:
    """The base of both runners' processors: the pipeline, failed requests, and containment of errors.

    As a context manager it contains what goes wrong around samplers: all of them are put aside and the engine goes on.
    An exception that left a logits processor would end every request there is.
    """

    def __init__(self, config: Any, slots: int, device: torch.device) -> None:
        self.failed: dict[int, str] = {}
        """The slots of requests that are to end with an error, each with the reason."""
        self.broken = False
        self.model = served_model(config, slots, device)
        self.pipeline = build_pipeline(self.model, int(config.model_config.seed or 0), self.failed.__setitem__)
        failures.PROCESSORS.add(self)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request in the front end; vLLM turns a ValueError into a 400."""
        requests.check(sampling_params)

    def after(self, sampled: torch.Tensor) -> None:
        """Take in the tokens that vLLM picked, one for each row."""
        if not self.broken:
            with self:
                self.pipeline.after(sampled)

    def request_id(self, slot: int, runner: Any) -> str | None:
        """Return the id of a slot's request, from vLLM's own tables."""
        raise NotImplementedError

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or raised_by_signal(error):
            return False
        self.broken = True
        self.pipeline.put_aside(reason_of(error))
        return True


def build_pipeline(model: ServedModel, seed: int, fail: Any) -> SamplerPipeline:
    """Instantiate the planned samplers of this worker and set them up for the model."""
    plan, ledger = inherited_plan(), current()
    provided = {"tokenizer": lambda: model.tokenizer, "model": lambda: model}
    made = []
    for item in plan.of("sampler") if plan is not None else ():
        sampler = instantiate(item, OptInSampler, plan, ledger, provided=provided)  # type: ignore[arg-type]
        if sampler is not None:
            made.append(GuardedSampler(item, sampler, model, ledger, fail))
    ready = [each for each in made if _set_up(each, model)]
    for each in ready:
        each.warm_up(model)
    return SamplerPipeline(ready, model, seed)


def _set_up(guarded: GuardedSampler, model: ServedModel) -> bool:
    """Set a sampler up; one that raises is refused, and with a strict plan so is the start."""
    plan, ledger = inherited_plan(), current()
    on_gpu = model.device.type == "cuda"
    before = torch.cuda.memory_allocated(model.device) if on_gpu else 0
    try:
        with warn_if_slow(f"setup of the sampler {guarded.name!r} runs"):
            guarded.sampler.setup(model)
        if mistake := find_window_mistake(guarded.sampler.window):
            raise ValueError(f"it {mistake.what}")
    except BaseException as error:
        reason = failure_reason(error)
        ledger.set_item("sampler", guarded.name, "refused", reason)
        ledger.save()
        if plan is None or not plan.strict:
            return False
        raise StartError(
            f"the sampler {guarded.name!r} cannot be set up for {model.name}: {reason}",
            where="worker",
            fix="fix the sampler or its options, or remove it from the plan",
        ) from error
    taken = torch.cuda.memory_allocated(model.device) - before if on_gpu else 0
    if taken >= _NOTABLE_BYTES:
        _LOG.info("vllm-graft: sampler %s has taken %.0f MiB of device memory in setup", guarded.name, taken / 2**20)
    return True


def served_model(config: Any, slots: int, device: torch.device) -> ServedModel:
    """Describe the model to samplers."""
    model = config.model_config

    def load_tokenizer() -> object:
        # vLLM caches it by its configuration.
        from vllm.tokenizers.registry import cached_tokenizer_from_config

        return cached_tokenizer_from_config(model)

    # The files of a model name its end tokens in generation_config.json, or else in config.json.
    eos = (model.try_get_generation_config() or {}).get("eos_token_id")
    if eos is None:
        eos = getattr(model.hf_text_config, "eos_token_id", None)
    return ServedModel(
        name=str(model.model),
        vocabulary=int(model.get_vocab_size()),
        slots=slots,
        device=device,
        max_requests=int(config.scheduler_config.max_num_seqs),
        eos=tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),),
        speculative=config.speculative_config is not None,
        load_tokenizer=None if model.skip_tokenizer_init else load_tokenizer,
    )


def __getattr__(name: str) -> Any:
    """Make ``PlannedProcessor``, which both of vLLM's loaders accept; late, as it inherits vLLM's own classes."""
    if name != "PlannedProcessor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1

    # vLLM checks for a subclass: a V1 class alone stops the start of an engine on the V2 runner, from 0.31 on.
    interfaces: tuple[type, ...] = (V1,)
    if v2_takes_samplers():
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2

        interfaces = (V1, V2)

    def make_processor(cls: type, vllm_config: Any, *runner: Any) -> Processor:
        from vllm_graft.bindings.sampling.processor_v1 import ProcessorV1
        from vllm_graft.bindings.sampling.processor_v2 import ProcessorV2

        # One argument besides the configuration is the V2 runner's request states; two are the V1 runner's device and
        # pinning.
        kind, interface = (ProcessorV2, interfaces[-1]) if len(runner) == 1 else (ProcessorV1, V1)
        made: Processor = type(kind.__name__, (kind, interface), {})(vllm_config, runner[0])
        return made

    body = {"__module__": __name__, "__new__": make_processor, "validate_params": Processor.validate_params}
    globals()[name] = type(name, interfaces, body)
    return globals()[name]
