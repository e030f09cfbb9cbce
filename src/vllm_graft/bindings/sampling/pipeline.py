"""The samplers of a worker as one pipeline: requests enter and leave by slot, and a step passes through the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from vllm_graft.bindings.sampling.guarded import GuardedSampler
from vllm_graft.contracts import Params, Rows, ServedModel
from vllm_graft.contracts.kernels import indices, mask_below, statistics
from vllm_graft.contracts.request_keys import KeyValue
from vllm_graft.contracts.rows import Step
from vllm_graft.splitmix import signed


class SamplerPipeline:
    """All planned samplers of one worker, in the order of their stages."""

    def __init__(self, samplers: Iterable[GuardedSampler], model: ServedModel, seed: int) -> None:
        self.samplers = sorted(samplers, key=lambda each: each.stage)
        self.window = max((each.sampler.window for each in self.samplers), default=0)
        """The most of a request's last tokens that a sampler looks at."""
        self.seeds = model.per_slot(0, integer=True)
        self.overrides = False
        """True if ``after`` is called with the tokens that vLLM picked; otherwise picks are forced by the logits."""
        self._unowned = model.slots
        self._seed = seed
        self._entered = 0
        self._layout: list[int | None] = []
        self._rows: dict[str, Rows | None] = {}
        self._picked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._listening: list[tuple[GuardedSampler, Rows]] = []
        for each in self.samplers:
            each.on_request_end = self._rows.clear

    def enter(self, slot: int, sampling: Any, generated: Callable[[], Sequence[int]], *, resumed: bool = False) -> bool:
        """Take in a request with vLLM's sampling parameters; return whether it is any sampler's.

        ``generated`` returns its tokens so far; ``resumed`` is true if it was preempted and comes back.
        """
        # Counted for requests of no sampler too: tensor-parallel ranks must give equal numbers to equal requests.
        self._entered += 1
        self._rows.clear()

        def params_of(values: Mapping[str, KeyValue]) -> Params:
            return Params(
                values=values,
                temperature=float(sampling.temperature),
                top_p=float(sampling.top_p),
                top_k=int(sampling.top_k),
                seed=sampling.seed,
                max_tokens=sampling.max_tokens,
                generated_so_far=generated,
            )

        extra: Mapping[str, object] = getattr(sampling, "extra_args", None) or {}
        # Every sampler must see the request: it then forgets the slot's former one.
        taken = [each.enter(slot, extra, params_of, resumed=resumed) for each in self.samplers]
        if any(taken):
            own = sampling.seed
            # All ranks see requests enter in the same order, so that they count alike. A seed of the request's own
            # survives a preemption too. vLLM takes seeds of more than 64 bits.
            self.seeds[slot] = signed(own if own is not None else (self._seed << 32) + self._entered)
        return any(taken)

    def leave(self, slot: int) -> None:
        """Forget the slot's request."""
        self._rows.clear()
        for each in self.samplers:
            each.leave(slot)

    def put_aside(self, reason: str, *, history_only: bool = False) -> None:
        """Put all samplers aside, or all that look at tokens, because what they depend on has failed."""
        self._rows.clear()
        for each in self.samplers:
            if each.sampler.window or not history_only:
                each.put_aside(reason)

    def concerns(self, slots: Sequence[int | None]) -> bool:
        """Return whether a request of these slots is any sampler's."""
        return any(slot in each.requests for each in self.samplers if each.requests for slot in slots)

    def with_history(self, layout: Sequence[int | None]) -> list[tuple[int, int]]:
        """Return row and slot of the requests whose samplers look at their tokens."""
        wanted = [each.requests for each in self.samplers if each.sampler.window and each.requests]
        return [(row, slot) for row, slot in enumerate(layout) if slot is not None and any(slot in o for o in wanted)]

    def run(
        self, logits: torch.Tensor, step: Step, layout: Sequence[int | None], slots: torch.Tensor | None = None
    ) -> None:
        """Let every sampler work on the step's logits.

        layout: the slot of each row; with ``slots`` those that have any row
        slots:  the slot of each row on the device, if drafts are verified and only the device knows
        """
        if slots is not None:
            self._rows.clear()
        elif self._layout != layout:
            self._layout = list(layout)
            self._rows.clear()
        self._picked.clear()
        self._listening.clear()
        active: list[tuple[GuardedSampler, Rows]] = []
        for each in self.samplers:
            if not each.requests:
                continue
            known = slots is None
            rows = self._known_rows(each, step, logits) if known else self._draft_rows(each, step, layout, slots)
            if rows is not None:
                active.append((each, rows))
        # Truncations are adjacent in the order of stages, so the first one runs all of them.
        truncations = [(each, rows) for each, rows in active if each.truncates and not each.aside]
        for each, rows in active:
            if each.truncates:
                if truncations:
                    _truncate(logits, truncations)
                    truncations = []
            elif each.picks:
                tokens = each.pick(logits, rows)
                if tokens is not None and self.overrides:
                    self._picked.append((rows.rows, tokens))
                elif tokens is not None:
                    logits[rows.rows] = float("-inf")
                    logits[rows.rows, tokens] = 0.0
            else:
                each.step(logits, rows)
            if each.listens:
                self._listening.append((each, rows))

    def after(self, sampled: torch.Tensor) -> None:
        """Replace the tokens that vLLM picked by those of samplers, and tell the strategies that listen."""
        for rows, tokens in self._picked:
            sampled[rows] = tokens.to(sampled.dtype)
        for each, which in self._listening:
            each.sampled(sampled[which.rows], which)
        self._picked.clear()
        self._listening.clear()

    def _known_rows(self, each: GuardedSampler, step: Step, logits: torch.Tensor) -> Rows | None:
        """Return the rows of a sampler's requests, kept until the batch changes; None if it has none."""
        if each.name not in self._rows:
            known = [(row, slot) for row, slot in enumerate(self._layout) if slot is not None and slot in each.requests]
            rows, slots = ([pair[side] for pair in known] for side in (0, 1))
            device = logits.device
            self._rows[each.name] = Rows(indices(rows, device), indices(slots, device), step, known) if known else None
        return self._rows[each.name]

    def _draft_rows(
        self, each: GuardedSampler, step: Step, present: Sequence[int | None], slots: torch.Tensor
    ) -> Rows | None:
        """Return all rows, those of other requests under a slot that no request has; None if all are others'."""
        if not any(slot in each.requests for slot in present):
            return None
        every = torch.arange(slots.shape[0], device=slots.device)
        return Rows(every, torch.where(each.mask.all()[slots] == 1, slots, self._unowned), step)


def _truncate(logits: torch.Tensor, truncations: Sequence[tuple[GuardedSampler, Rows]]) -> None:
    """Apply all truncations of a step: one pass gathers statistics, one masks what is below the strictest limit."""
    if len(truncations) == 1:
        ((one, rows),) = truncations
        stats = statistics(logits, rows.rows)
        limit = one.threshold(stats, rows)
        if limit is not None:
            mask_below(logits, rows.rows, limit, stats.max)
        return
    every = truncations[0][1].rows
    if all(rows.known is not None for _, rows in truncations):
        every = indices(sorted({row for _, rows in truncations for row, _ in rows.pairs}), logits.device)
    stats = statistics(logits, every)
    place = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    place[every] = torch.arange(every.shape[0], device=logits.device)
    limits = torch.full_like(stats.max, float("-inf"))
    for each, rows in truncations:
        at = place[rows.rows]
        limit = each.threshold(stats.select(at), rows)
        if limit is not None:
            limits[at] = torch.maximum(limits[at], limit.nan_to_num(nan=float("-inf"), posinf=float("inf")))
    mask_below(logits, every, limits, stats.max)
