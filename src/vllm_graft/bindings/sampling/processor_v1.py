"""The V1 model runner's processor: requests under a batch index that moves, each given a slot that stays.

V1 reports which requests were added, removed and moved before each step, and calls ``apply`` before its own penalties.
A patch calls ``run`` after them instead, where the V2 runner has its processors.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_graft.bindings.sampling import patches
from vllm_graft.bindings.sampling.pipeline import SamplerPipeline
from vllm_graft.bindings.sampling.processor import Processor
from vllm_graft.bindings.sampling.step import DeviceStep, HistoryMirror, HostStep, ReadOnlyTokens, Tokens
from vllm_graft.contracts.kernels import indices
from vllm_graft.ledger.guard import reason_of


class BatchTracker:
    """The V1 runner's batch, followed from its account of what changed."""

    def __init__(
        self, pipeline: SamplerPipeline, tokens: dict[int, Tokens], slots: int, mirror: HistoryMirror | None = None
    ) -> None:
        self._pipeline = pipeline
        self._mirror = mirror
        self._tokens = tokens
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self.layout: list[int | None] = []
        """The slot of each row."""

    def update(self, change: Any) -> None:
        """Follow vLLM's ``BatchUpdate``: removed, then added, then moved."""
        # The order is vLLM's: removed, added, moved. Signatures and semantics are the same from 0.26 to 0.32.
        for index in change.removed:
            self._leave(index)
        for index, params, prompt, output in change.added:
            # An index that is filled again in the same step is not among those removed.
            self._leave(index)
            self._enter(index, params, prompt, output)
        for first, second, direction in change.moved:
            # A move in one direction overwrites the request at its target, which is then in none of the lists.
            if getattr(direction, "name", "") != "SWAP":
                self._leave(second)
            one, other = self._slots.pop(first, None), self._slots.pop(second, None)
            if one is not None:
                self._slots[second] = one
            if other is not None:
                self._slots[first] = other
        self.layout = [self._slots.get(index) for index in range(max(self._slots, default=-1) + 1)]

    def index(self, slot: int) -> int | None:
        """Return where a slot's request is in vLLM's batch."""
        return next((index for index, mine in self._slots.items() if mine == slot), None)

    def _enter(self, index: int, params: Any, prompt: Any, output: Any) -> None:
        slot = self._slots[index] = self._free.pop()
        # A request whose prompt is given as embeddings has no prompt tokens.
        self._tokens[slot] = Tokens(prompt if prompt is not None else (), output)
        # The list itself: vLLM appends each token to it, so nothing has to be passed again.
        generated = ReadOnlyTokens(output)
        self._pipeline.enter(slot, params, lambda: generated, resumed=bool(output))
        if self._mirror is not None:
            self._mirror.enter(slot)

    def _leave(self, index: int) -> None:
        slot = self._slots.pop(index, None)
        if slot is not None:
            self._free.append(slot)
            self._tokens.pop(slot, None)
            self._pipeline.leave(slot)


class ProcessorV1(Processor):
    """The samplers' pipeline behind the V1 runner's ``LogitsProcessor`` interface."""

    def __init__(self, config: Any, device: torch.device) -> None:
        # One account may hold requests that leave and others that take their index: for a moment twice as many.
        slots = 2 * int(config.scheduler_config.max_num_seqs)
        super().__init__(config, slots, device)
        self.pipeline.overrides = patches.is_applied("v1-picks")
        self._after_penalties = patches.is_applied("after-penalties")
        self._tokens: dict[int, Tokens] = {}
        self._host = HostStep(self.pipeline.seeds, self._tokens)
        self._mirror: HistoryMirror | None = None
        if device.type != "cpu":
            self._mirror = HistoryMirror(self._tokens, slots, self.pipeline.window, device)
            self._device = DeviceStep(self.pipeline.seeds, self._mirror)
        self._batch = BatchTracker(self.pipeline, self._tokens, slots, self._mirror)

    def is_argmax_invariant(self) -> bool:
        """Return False: samplers work on greedy requests too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Take in what has changed in the batch."""
        if batch_update is not None and not self.broken:
            with self:
                self._batch.update(batch_update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Work on a step's logits, unless ``run`` is called once vLLM's penalties are in them."""
        # V1 applies processors before its penalties, V2 after them; the patch moves V1's to where V2 has them.
        if not self._after_penalties:
            self.run(logits)
        return logits

    def run(self, logits: torch.Tensor) -> None:
        """Work on a step's logits."""
        if self.broken:
            return
        with self:
            layout = self._batch.layout
            if not self.pipeline.concerns(layout):
                return
            if self._mirror is None:
                self.pipeline.run(logits, self._host, layout)
                return
            lengths = [len(self._tokens[slot]) if slot is not None else 0 for slot in layout]
            self._device.begin(indices(lengths, logits.device))
            if self.pipeline.window:
                try:
                    self._mirror.begin(self.pipeline.with_history(layout))
                except Exception as error:  # no sampler's code runs here
                    self.pipeline.put_aside(reason_of(error), history_only=True)
            self.pipeline.run(logits, self._device, layout)

    def request_id(self, slot: int, runner: Any) -> str | None:
        """Return the id of a slot's request, from the runner's batch."""
        index = self._batch.index(slot)
        return str(runner.input_batch.req_ids[index]) if index is not None else None
