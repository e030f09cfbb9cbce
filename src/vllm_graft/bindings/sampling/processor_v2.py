"""The V2 model runner's processor, from vLLM 0.31 on: requests under a slot that stays.

V2 says nothing when a request leaves: its slot is opened again, or has no row any more. Tokens are on the device, and
so is, if drafts are verified, the request that each row belongs to.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_graft.bindings.sampling import patches
from vllm_graft.bindings.sampling.processor import Processor
from vllm_graft.bindings.sampling.step import DeviceHistory, DeviceStep
from vllm_graft.ledger.guard import reason_of


class ProcessorV2(Processor):
    """The samplers' pipeline behind the V2 runner's ``LogitsProcessor`` interface."""

    def __init__(self, config: Any, states: Any) -> None:
        super().__init__(config, int(states.max_num_reqs), states.device)
        speculative = self.model.speculative
        self.pipeline.overrides = patches.is_applied("v2-picks") and not speculative
        drafts = int(config.speculative_config.num_speculative_tokens or 0) if speculative else 0
        self._states = states
        self._history = DeviceHistory(states, self.pipeline.window, drafts)
        self._device = DeviceStep(self.pipeline.seeds, self._history)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Take in a request that enters or comes back after a preemption; return whether it is any sampler's."""
        # False lets vLLM skip the whole stage, and its float32 copy of the logits, if no request of a batch needs it.
        taken = False
        if not self.broken:
            with self:
                states = self._states
                # At a preemption what was generated becomes part of what is filled in again.
                resumed = bool(states.prefill_len.np[req_idx] > states.prompt_len.np[req_idx])
                generated = lambda: self._history.since(req_idx, int(states.prompt_len.np[req_idx]))  # noqa: E731
                taken = self.pipeline.enter(req_idx, sampling_params, generated, resumed=resumed)
                if taken and self.pipeline.window:
                    self._history.enter(req_idx)
        return taken

    def apply_staged_writes(self) -> None:
        """Do nothing: what a slot holds is copied to the device when it is first read."""

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Work on a step's logits; the runner's penalties are in them."""
        if self.broken:
            return logits
        with self:
            # On the host already; the mapping of single rows, with drafts, is on the device only.
            layout = ctx.idx_mapping_np.tolist()
            if not self.pipeline.concerns(layout):
                return logits
            # `pos` counts from 0 and is that of the newest token, which the model has just read.
            positions = ctx.pos + 1
            self._device.begin(positions)
            if self.pipeline.window:
                read = zip(layout, ctx.seq_lens_upper_bound_np.tolist(), strict=False)
                try:
                    self._history.begin(ctx.expanded_idx_mapping, positions, ctx.input_ids, read)
                except Exception as error:  # no sampler's code runs here
                    self.pipeline.put_aside(reason_of(error), history_only=True)
            # A request has a row for each draft besides its own.
            slots = None if len(layout) == logits.shape[0] else ctx.expanded_idx_mapping
            self.pipeline.run(logits, self._device, layout, slots)
        return logits

    def request_id(self, slot: int, runner: Any) -> str | None:
        """Return the id of a slot's request, from the runner's states."""
        found = runner.req_states.index_to_req_id.get(slot)
        return str(found) if found is not None else None
