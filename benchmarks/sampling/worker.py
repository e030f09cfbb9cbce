"""The samplers' pipeline as a worker has it, without an engine around it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from benchmarks.sampling.batch import Batch

from vllm_graft.bindings.sampling.guarded import GuardedSampler
from vllm_graft.bindings.sampling.pipeline import SamplerPipeline
from vllm_graft.bindings.sampling.step import DeviceHistory, DeviceStep, HostStep, Tokens
from vllm_graft.ledger import Ledger
from vllm_graft.plan import PlanItem


class Worker:
    """Every request of a batch asks for all of the strategies; their texts grow by one token with each step."""

    def __init__(self, batch: Batch, keys: dict[type, dict[str, object]], package: str = "vllm-graft") -> None:
        self._batch, self._package = batch, package
        ledger = Ledger()
        made = [self._planned(kind, ledger) for kind in keys]
        self._pipeline = SamplerPipeline(made, batch.model, 0)
        asked = {key: value for each in keys.values() for key, value in each.items()}
        for slot in range(batch.size):
            sampling = SimpleNamespace(
                extra_args=asked, temperature=1.0, top_p=1.0, top_k=0, seed=slot, max_tokens=None
            )
            assert self._pipeline.enter(slot, sampling, tuple)
        self._layout = list(range(batch.size))
        self._on_device = batch.device.type != "cpu"
        if self._on_device:
            self._begin_on_device()
        else:
            self._tokens = {slot: Tokens([], list(text)) for slot, text in enumerate(batch.texts)}
            self._host = HostStep(self._pipeline.seeds, self._tokens)

    def _planned(self, kind: type, ledger: Ledger) -> GuardedSampler:
        name = kind.__name__
        ledger.set_item("sampler", name, "applied")
        # A budget that nobody overruns: what is measured here must not be put aside.
        options = {**kind.options, "budget_us": 10**9}
        made = GuardedSampler(
            PlanItem("sampler", name, "m:C", self._package, ("worker",), options),
            kind(options),
            self._batch.model,
            ledger,
            None,
        )
        made.sampler.setup(self._batch.model)
        return made

    def _begin_on_device(self) -> None:
        batch, device = self._batch, self._batch.device
        states = SimpleNamespace(
            max_num_reqs=batch.size,
            device=device,
            total_len=SimpleNamespace(gpu=torch.full((batch.size,), batch.window, device=device)),
            prefill_len=SimpleNamespace(np=[batch.window] * batch.size),
            all_token_ids=SimpleNamespace(gpu=batch.tokens),
        )
        self._history = DeviceHistory(states, batch.window)
        self._device = DeviceStep(self._pipeline.seeds, self._history)
        self._positions = torch.full((batch.size,), batch.window, device=device)
        self._fed = batch.tokens[:, -1].contiguous()
        for slot in self._layout:
            self._history.enter(slot)

    def grow(self) -> None:
        """One token more for everybody."""
        if self._on_device:
            self._positions = self._positions + 1
        else:
            for tokens in self._tokens.values():
                tokens.output.append(tokens.output[-4096])

    def step(self, logits: torch.Tensor) -> None:
        """What the processor does in a step."""
        if self._on_device:
            self._device.begin(self._positions)
            read = ((slot, self._batch.window) for slot in self._layout)
            self._history.begin(self._batch.rows, self._positions, self._fed, read)
            self._pipeline.run(logits, self._device, self._layout)
        else:
            self._pipeline.run(logits, self._host, self._layout)
