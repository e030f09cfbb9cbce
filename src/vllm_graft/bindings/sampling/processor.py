"""The logits processor that vLLM is given: one class that inherits both interfaces and serves both model runners.

The V1 runner keys requests by a batch index that moves and tells what changed; the V2 runner (from 0.31 on) keys them
by a slot that stays, and says nothing when a request leaves. The number of constructor arguments tells which runner
made it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.instantiate import failure_reason, instantiate, warn_if_slow
from vllm_graft.bindings.sampling import failures, places, requests
from vllm_graft.bindings.sampling.injection import v2_takes_samplers
from vllm_graft.bindings.sampling.mux import Mux
from vllm_graft.bindings.sampling.planned import Planned
from vllm_graft.bindings.sampling.steps import (
    DeviceHistory,
    DeviceStep,
    FedHistory,
    HostStep,
    ReadOnlyTokens,
    Tokens,
    tensor,
)
from vllm_graft.contracts import ServedModel
from vllm_graft.contracts.sampling import Chosen
from vllm_graft.errors import StartError
from vllm_graft.ledger import current
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import carried

if TYPE_CHECKING:
    import torch

_LOG: Final = logging.getLogger("vllm.graft")
_WORTH_SAYING: Final = 16 * 2**20


def build_mux(model: ServedModel, seed: int, fail: Any) -> Mux:
    """The planned samplers of this worker, made and told of the model."""
    plan, ledger = carried(), current()
    provided = {"tokenizer": lambda: model.tokenizer, "model": lambda: model}
    made = []
    for item in plan.of("sampler") if plan is not None else ():
        chosen = instantiate(item, Chosen, plan, ledger, provided=provided)  # type: ignore[arg-type]
        if chosen is not None:
            made.append(Planned(item, chosen, model, ledger, fail))
    ready = [each for each in made if _set_up(each, model)]
    for each in ready:
        each.warm_up(model)
    return Mux(ready, model, seed)


def _set_up(planned: Planned, model: ServedModel) -> bool:
    """Tell a sampler of the model; one that raises is refused, and with a strict plan so is the start."""
    plan, ledger = carried(), current()
    before = _allocated(model.device)
    try:
        with warn_if_slow(f"setup of the sampler {planned.name!r} runs"):
            planned.made.setup(model)
    except BaseException as error:
        reason = failure_reason(error)
        ledger.set_item("sampler", planned.name, "refused", reason)
        ledger.save()
        if plan is None or not plan.strict:
            return False
        raise StartError(
            f"the sampler {planned.name!r} cannot be set up for {model.name}: {reason}",
            where="worker",
            fix="mend the sampler or its options, or take it out of the plan",
        ) from error
    taken = _allocated(model.device) - before
    if taken >= _WORTH_SAYING:
        _LOG.info("vllm-graft: sampler %s has taken %.0f MiB of device memory in setup", planned.name, taken / 2**20)
    return True


def _allocated(device: torch.device) -> int:
    """How much device memory torch has given out; 0 on a CPU."""
    import torch

    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def served_model(config: Any, slots: int, device: torch.device) -> ServedModel:
    """What samplers may know of the model."""
    model = config.model_config

    def load_tokenizer() -> object:
        from vllm.tokenizers.registry import cached_tokenizer_from_config

        return cached_tokenizer_from_config(model)

    return ServedModel(
        name=str(model.model),
        vocabulary=int(model.get_vocab_size()),
        slots=slots,
        device=device,
        at_a_time=int(config.scheduler_config.max_num_seqs),
        eos=_ends(model),
        speculative=config.speculative_config is not None,
        load_tokenizer=None if model.skip_tokenizer_init else load_tokenizer,
    )


def _ends(model: Any) -> tuple[int, ...]:
    """The tokens that end an answer, as the model's files say it in one place or the other."""
    said = (model.try_get_generation_config() or {}).get("eos_token_id")
    if said is None:
        said = getattr(model.hf_text_config, "eos_token_id", None)
    return tuple(said) if isinstance(said, list | tuple) else () if said is None else (int(said),)


class Batch:
    """The V1 runner's batch: requests under an index that moves, each given a slot that stays."""

    def __init__(self, mux: Mux, tokens: dict[int, Tokens], slots: int, fed: FedHistory | None = None) -> None:
        self._mux = mux
        self._fed = fed
        self._tokens = tokens
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self.layout: list[int | None] = []

    def update(self, change: Any) -> None:
        """Follow vLLM's account of a step: removed, then added, then moved."""
        for index in change.removed:
            self._leave(index)
        for index, params, prompt, output in change.added:
            self._leave(index)
            self._enter(index, params, prompt, output)
        for first, second, direction in change.moved:
            self._move(first, second, swap=getattr(direction, "name", "") == "SWAP")
        self.layout = [self._slots.get(index) for index in range(max(self._slots, default=-1) + 1)]

    def index(self, slot: int) -> int | None:
        """Where a slot's request is in vLLM's batch."""
        return next((index for index, mine in self._slots.items() if mine == slot), None)

    def _enter(self, index: int, params: Any, prompt: Any, output: Any) -> None:
        slot = self._free.pop()
        self._slots[index] = slot
        self._tokens[slot] = Tokens(prompt if prompt is not None else (), output)
        generated = ReadOnlyTokens(output)
        self._mux.enter(slot, params, lambda: generated, begun=bool(output))
        if self._fed is not None:
            self._fed.enter(slot)

    def _leave(self, index: int) -> None:
        # An index that is filled again in the same step is not among those removed.
        slot = self._slots.pop(index, None)
        if slot is not None:
            self._free.append(slot)
            self._tokens.pop(slot, None)
            self._mux.leave(slot)

    def _move(self, first: int, second: int, *, swap: bool) -> None:
        if not swap:
            self._leave(second)
        one, other = self._slots.pop(first, None), self._slots.pop(second, None)
        if one is not None:
            self._slots[second] = one
        if other is not None:
            self._slots[first] = other


def _make() -> type:
    from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1

    bases: tuple[type, ...] = (Processor, V1)
    if v2_takes_samplers():
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2

        bases = (Processor, V1, V2)
    return type("PlannedProcessor", bases, {"__module__": __name__})


class Processor:
    """The body of the class that vLLM is given."""

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        self._v2 = len(runner) == 1
        self._broken = False
        self.failed: dict[int, str] = {}
        if self._v2:
            self._begin_v2(vllm_config, runner[0])
        else:
            self._begin_v1(vllm_config, runner[0])
        failures.remember(self)

    def _begin_v1(self, config: Any, device: torch.device) -> None:
        # Requests that leave and others that take their index are told of in one account: twice as many, for a moment.
        slots = 2 * int(config.scheduler_config.max_num_seqs)
        tokens: dict[int, Tokens] = {}
        model = served_model(config, slots, device)
        self.mux = build_mux(model, int(config.model_config.seed or 0), self._fail)
        self.mux.overrides = places.in_force("v1-picks")
        self._after_penalties = places.in_force("after-penalties")
        self._fed = FedHistory(tokens, slots, self.mux.window, device) if device.type != "cpu" else None
        self._batch = Batch(self.mux, tokens, slots, self._fed)
        self._host = HostStep(self.mux.seeds, tokens)
        self._tokens = tokens
        if self._fed is not None:
            self._device = DeviceStep(self.mux.seeds, self._fed)

    def _begin_v2(self, config: Any, states: Any) -> None:
        model = served_model(config, int(states.max_num_reqs), states.device)
        self.mux = build_mux(model, int(config.model_config.seed or 0), self._fail)
        self.mux.overrides = places.in_force("v2-picks") and not model.speculative
        window = self.mux.window
        self._states = states
        drafts = config.speculative_config.num_speculative_tokens if model.speculative else 0
        self._history = DeviceHistory(states, window, int(drafts or 0))
        self._keeps_history = window > 0
        self._device = DeviceStep(self.mux.seeds, self._history)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request in the front end."""
        requests.check(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """Greedy requests are concerned too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """V1: what has changed in the batch."""
        if batch_update is not None:
            self._contain(self._batch.update, batch_update)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """V2: a request enters, or enters again."""
        return bool(self._contain(self._add, req_idx, sampling_params))

    def _add(self, req_idx: int, sampling_params: Any) -> bool:
        states = self._states
        begun = bool(states.prefill_len.np[req_idx] > states.prompt_len.np[req_idx])
        mine = self.mux.enter(req_idx, sampling_params, lambda: self._generated(req_idx), begun=begun)
        if mine and self._keeps_history:
            self._history.enter(req_idx)
        return mine

    def apply_staged_writes(self) -> None:
        """V2: nothing is staged; what a slot holds is copied when it is first read."""

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Both runners: where custom logits processors stand."""
        if ctx is not None:
            self._contain(self._apply_v2, logits, ctx)
        elif not self._after_penalties:
            self.run(logits)
        return logits

    def run(self, logits: torch.Tensor) -> None:
        """V1: work on a step's logits, once vLLM's penalties are in them."""
        self._contain(self._apply_v1, logits)

    def after(self, sampled: torch.Tensor) -> None:
        """Both runners: vLLM has picked a token for each row."""
        self._contain(self.mux.after, sampled)

    def _contain(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call what must not end the engine: where it fails, every sampler is put aside and requests go on."""
        if not self._broken:
            try:
                return call(*args)
            except BaseException as error:
                if raised_by_signal(error):
                    raise
                self._broken = True
                self.mux.put_aside(reason_of(error))
        return None

    def _keep_up(self, call: Callable[..., None], *args: Any) -> None:
        """Bring the history up to a step: where that fails, those who look at it are put aside."""
        try:
            call(*args)
        except Exception as error:  # no plugin's code runs here
            self.mux.put_aside(reason_of(error), history_only=True)

    def _apply_v1(self, logits: torch.Tensor) -> None:
        layout = self._batch.layout
        if not self.mux.concerns(layout):
            return
        if self._fed is None:
            self.mux.run(logits, self._host, layout)
            return
        lengths = [len(self._tokens[slot]) if slot is not None else 0 for slot in layout]
        self._device.begin(tensor(lengths, logits.device))
        if self.mux.window:
            self._keep_up(self._fed.begin, self.mux.with_history(layout))
        self.mux.run(logits, self._device, layout)

    def _apply_v2(self, logits: torch.Tensor, ctx: Any) -> None:
        layout = ctx.idx_mapping_np.tolist()
        if not self.mux.concerns(layout):
            return
        positions = ctx.pos + 1
        self._device.begin(positions)
        if self._keeps_history:
            read = zip(layout, ctx.seq_lens_upper_bound_np.tolist(), strict=False)
            self._keep_up(self._history.begin, ctx.expanded_idx_mapping, positions, ctx.input_ids, read)
        if len(layout) == logits.shape[0]:
            self.mux.run(logits, self._device, layout)
        else:
            self.mux.run_drafts(logits, self._device, ctx.expanded_idx_mapping, layout)

    def request_id(self, slot: int, runner: Any) -> str | None:
        """The name of the request that has a slot, by vLLM's own tables."""
        if self._v2:
            found = runner.req_states.index_to_req_id.get(slot)
        else:
            index = self._batch.index(slot)
            found = runner.input_batch.req_ids[index] if index is not None else None
        return str(found) if found is not None else None

    def _generated(self, slot: int) -> list[int]:
        start = int(self._states.prompt_len.np[slot])
        return list(self._history.since(slot, start))

    def _fail(self, slot: int, reason: str) -> None:
        self.failed[slot] = reason


def __getattr__(name: str) -> Any:
    if name != "PlannedProcessor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _make()
    return globals()[name]
