"""The multiplexer: every planned sampler of a worker, the requests that are its own, and the stages of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_graft.bindings.sampling.planned import Planned
from vllm_graft.bindings.sampling.steps import tensor
from vllm_graft.contracts import Params, Rows, ServedModel, Statistics
from vllm_graft.contracts.request_keys import KeyValue
from vllm_graft.contracts.rows import Step

if TYPE_CHECKING:
    import torch

Generated = Callable[[], Sequence[int]]


class Mux:
    """All planned samplers of one worker, in the order of their stages."""

    def __init__(self, planned: Iterable[Planned], model: ServedModel, seed: int) -> None:
        self.planned = sorted(planned, key=lambda each: each.stage)
        self.seeds = model.per_slot(0, whole=True)
        self.overrides = False
        """Whether somebody will call ``after`` with what vLLM picked; else picks are forced through the logits."""
        self._nobody = model.slots
        self._seed = seed
        self._entered = 0
        self._layout: list[int | None] = []
        self._rows: dict[str, Rows | None] = {}
        self._picked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._told: list[tuple[Planned, Rows]] = []
        for each in self.planned:
            each.ended = self._rows.clear

    @property
    def window(self) -> int:
        """How many of a request's last tokens anybody wants."""
        return max((each.made.window for each in self.planned), default=0)

    def enter(self, slot: int, sampling: Any, generated: Generated, *, begun: bool = False) -> bool:
        """A request has this slot now, and has ``begun`` where it was preempted; returns whether any sampler is
        concerned."""
        extra: Mapping[str, object] = getattr(sampling, "extra_args", None) or {}
        self._entered += 1
        self._rows.clear()

        def request(values: Mapping[str, KeyValue]) -> Params:
            return _params(values, sampling, generated)

        concerned = [each.enter(slot, extra, request, begun=begun) for each in self.planned]
        if any(concerned):
            own = sampling.seed
            # All ranks see requests enter in the same order; a seed of the request's own survives a second entry too.
            self.seeds[slot] = _in_64_bits(own if own is not None else (self._seed << 32) + self._entered)
        return any(concerned)

    def leave(self, slot: int) -> None:
        """The slot's request is gone."""
        self._rows.clear()
        for each in self.planned:
            each.leave(slot)

    def put_aside(self, reason: str, *, history_only: bool = False) -> None:
        """What samplers stand on has failed: none of them, or none that looks at tokens, can work any more."""
        self._rows.clear()
        for each in self.planned:
            if each.made.window or not history_only:
                each.put_aside(reason)

    def concerns(self, slots: Iterable[int | None]) -> bool:
        """Whether any of these slots' requests is a sampler's."""
        found = list(slots)
        return any(slot in each.opened for each in self.planned if each.opened for slot in found)

    def with_history(self, layout: Sequence[int | None]) -> list[tuple[int, int]]:
        """Row and slot of the requests whose sampler looks at their tokens."""
        wanted = [each.opened for each in self.planned if each.made.window and each.opened]
        return [(row, slot) for row, slot in enumerate(layout) if slot is not None and any(slot in o for o in wanted)]

    def run(self, logits: torch.Tensor, step: Step, layout: Sequence[int | None]) -> None:
        """A step in which the host knows whose each row is."""
        if self._layout != layout:
            self._layout = list(layout)
            self._rows.clear()
        self._work(logits, lambda each: self._own_rows(each, step, logits.device))

    def run_drafts(self, logits: torch.Tensor, step: Step, slots: torch.Tensor, present: Iterable[int]) -> None:
        """A step in which only the device knows whose each row is; ``present`` are the slots that have any."""
        import torch

        self._rows.clear()
        here = list(present)

        def rows_of(each: Planned) -> Rows | None:
            if not any(slot in each.opened for slot in here):
                return None
            every = torch.arange(logits.shape[0], device=logits.device)
            return Rows(every, torch.where(each.mask.all()[slots] == 1, slots, self._nobody), step)

        self._work(logits, rows_of)

    def after(self, sampled: torch.Tensor) -> None:
        """vLLM has picked a token for each row: put in what samplers picked, and tell those who want to know."""
        for rows, tokens in self._picked:
            sampled[rows] = tokens.to(sampled.dtype)
        for each, which in self._told:
            each.sampled(sampled[which.rows], which)
        self._picked.clear()
        self._told.clear()

    def _own_rows(self, each: Planned, step: Step, device: torch.device) -> Rows | None:
        if each.name not in self._rows:
            pairs = [(row, slot) for row, slot in enumerate(self._layout) if slot in each.opened]
            known = [(row, slot) for row, slot in pairs if slot is not None]
            rows, slots = [row for row, _ in known], [slot for _, slot in known]
            self._rows[each.name] = Rows(tensor(rows, device), tensor(slots, device), step, known) if known else None
        return self._rows[each.name]

    def _work(self, logits: torch.Tensor, rows_of: Callable[[Planned], Rows | None]) -> None:
        self._picked.clear()
        self._told.clear()
        active = [(each, rows) for each in self.planned if each.opened and (rows := rows_of(each)) is not None]
        truncations = [(each, rows) for each, rows in active if each.truncates and not each.aside]
        truncated = False
        for each, rows in active:
            if each.truncates:
                if not truncated and truncations:
                    _truncate(logits, truncations)
                truncated = True
            elif each.picks:
                self._pick(each, logits, rows)
            else:
                each.step(logits, rows)
            if each.listens:
                self._told.append((each, rows))

    def _pick(self, each: Planned, logits: torch.Tensor, rows: Rows) -> None:
        tokens = each.pick(logits, rows)
        if tokens is None:
            return
        if self.overrides:
            self._picked.append((rows.rows, tokens))
        else:
            logits[rows.rows] = float("-inf")
            logits[rows.rows, tokens] = 0.0


def _truncate(logits: torch.Tensor, truncations: Sequence[tuple[Planned, Rows]]) -> None:
    """One pass for statistics, one that takes away what is below the greatest of all limits."""
    import torch

    from vllm_graft.bindings.sampling.truncation import mask_below, statistics

    if len(truncations) == 1:
        ((one, rows),) = truncations
        stats = statistics(logits, rows.rows)
        limit = one.threshold(stats, rows)
        if limit is not None:
            mask_below(logits, rows.rows, limit, stats.max)
        return
    every = _joined([rows for _, rows in truncations], logits.device)
    stats = statistics(logits, every)
    place = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    place[every] = torch.arange(every.shape[0], device=logits.device)
    limits = torch.full_like(stats.max, float("-inf"))
    for each, rows in truncations:
        at = place[rows.rows]
        own = Statistics(stats.max[at], stats.logsumexp[at], stats.mean[at], stats.std[at])
        limit = each.threshold(own, rows)
        if limit is not None:
            limits[at] = torch.maximum(limits[at], limit.nan_to_num(nan=float("-inf"), posinf=float("inf")))
    mask_below(logits, every, limits, stats.max)


def _joined(each: Sequence[Rows], device: torch.device) -> torch.Tensor:
    """The rows of several, each once."""
    if any(rows.known is None for rows in each):
        return each[0].rows
    return tensor(sorted({row for rows in each for row, _ in rows.pairs}), device)


def _in_64_bits(number: int) -> int:
    """A seed as the table of seeds holds it: vLLM takes greater ones too."""
    return ((number + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _params(values: Mapping[str, KeyValue], sampling: Any, generated: Generated) -> Params:
    return Params(
        values=values,
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        top_k=int(sampling.top_k),
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        generated_so_far=generated,
    )
