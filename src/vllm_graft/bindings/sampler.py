"""The sampler point: planned strategies as one logits processor that both of vLLM's model runners accept.

The V1 runner keys requests by a batch index that moves, the V2 runner (from 0.31 on) by a slot that stays. One class
that inherits both interfaces serves both: the number of constructor arguments tells which runner made it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.making import make
from vllm_graft.contracts import Rows, SamplingStrategy
from vllm_graft.errors import ConfigError
from vllm_graft.ledger import Guard, Ledger, current
from vllm_graft.plan import Plan, PlanItem, carried
from vllm_graft.plan.carry import PLAN_VARIABLE
from vllm_graft.plan.catalogue import load
from vllm_graft.points import point

if TYPE_CHECKING:
    import torch
    from vllm.engine.arg_utils import EngineArgs

QUALNAME: Final = f"{__name__}:PlannedProcessor"
"""What vLLM is given among its logits processors; it resolves the name in front end and workers."""

RUNNER_VARIABLE: Final = "VLLM_USE_V2_MODEL_RUNNER"
_V2: Final = "vllm.v1.worker.gpu.sample.logits_processor"


def arguments(args: EngineArgs, plan: Plan) -> dict[str, Any]:
    """The engine arguments that planned samplers need, beside the user's own logits processors."""
    planned = plan.of("sampler")
    if not planned:
        return {}
    if os.environ.get(RUNNER_VARIABLE) == "1" and not v2_takes_samplers():
        raise ConfigError(
            f"the sampler {planned[0].name!r} ({planned[0].origin}) cannot run on the V2 model runner of this vLLM, "
            "which takes custom logits processors from 0.31 on",
            where=f"{RUNNER_VARIABLE}=1",
            fix=f"unset {RUNNER_VARIABLE}, install vLLM 0.31 or newer, or take the sampler out of the plan",
        )
    theirs = [processor for processor in args.logits_processors or [] if processor != QUALNAME]
    return {"logits_processors": [*theirs, QUALNAME]}


def v2_takes_samplers() -> bool:
    """Whether the V2 model runner of the installed vLLM takes custom logits processors."""
    try:
        return importlib.util.find_spec(_V2) is not None
    except ModuleNotFoundError:
        return False


class Planned:
    """One planned strategy in a worker: which slots it has open, and its guarded methods."""

    def __init__(self, item: PlanItem, strategy: SamplingStrategy, ledger: Ledger) -> None:
        self.keys = strategy.keys
        budget = point("sampler").budget_us
        aside = functools.partial(ledger.put_aside, item.name)
        self._open = Guard(strategy.open, _refuse, ledger.hook(item.name, "open"), aside)
        self._step = Guard(strategy.step, _pass, ledger.hook(item.name, "step", budget), aside)

    @property
    def aside(self) -> bool:
        """Whether either of its methods has failed: half a strategy is none."""
        return bool(self._open.aside or self._step.aside)

    def open(self, slot: int, extra: Mapping[str, object]) -> bool:
        """Whether this strategy changes the logits of the request that enters."""
        mine = {key: extra[key] for key in self.keys if key in extra}
        return bool(mine) and not self.aside and self._open(slot, mine)

    def step(self, logits: torch.Tensor, rows: list[int], slots: list[int]) -> None:
        """Change the logits of these rows."""
        import torch

        if rows and not self.aside:
            on = logits.device
            self._step(logits, Rows(torch.tensor(rows, device=on), torch.tensor(slots, device=on)))


def _refuse(slot: int, params: Mapping[str, object]) -> bool:
    return False


def _pass(logits: torch.Tensor, rows: Rows) -> None:
    """What is called in the place of a strategy that was put aside: logits pass as they are."""


class Batch:
    """The V1 runner's batch: requests under an index that moves, each given a slot that stays."""

    def __init__(self, strategies: list[Planned]) -> None:
        self._strategies = strategies
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self.open: list[dict[int, int]] = [{} for _ in strategies]

    def update(self, change: Any) -> None:
        """Follow vLLM's account of a step: removed, then added, then moved."""
        for index in change.removed:
            self._leave(index)
        for index, params, *_ in change.added:
            self._leave(index)
            self._enter(index, getattr(params, "extra_args", None) or {})
        for first, second, direction in change.moved:
            self._move(first, second, swap=getattr(direction, "name", "") == "SWAP")

    def _enter(self, index: int, extra: Mapping[str, object]) -> None:
        slot = self._free.pop() if self._free else len(self._slots)
        self._slots[index] = slot
        for opened, strategy in zip(self.open, self._strategies, strict=True):
            if strategy.open(slot, extra):
                opened[index] = slot

    def _leave(self, index: int) -> None:
        # An index that is filled again in the same step is not among those removed.
        slot = self._slots.pop(index, None)
        if slot is not None:
            self._free.append(slot)
        for opened in self.open:
            opened.pop(index, None)

    def _move(self, first: int, second: int, *, swap: bool) -> None:
        if not swap:
            self._leave(second)
        for table in (self._slots, *self.open):
            one, other = table.pop(first, None), table.pop(second, None)
            if one is not None:
                table[second] = one
            if other is not None:
                table[first] = other


def _planned() -> list[Planned]:
    plan, ledger = carried(), current()
    if plan is None:
        return []
    made = [(item, make(item, SamplingStrategy, plan, ledger)) for item in plan.of("sampler")]
    return [Planned(item, strategy, ledger) for item, strategy in made if strategy is not None]


def _items() -> tuple[PlanItem, ...]:
    plan = carried()
    return plan.of("sampler") if plan is not None else ()


@functools.lru_cache(maxsize=1)
def _checked(carried_text: str) -> tuple[type[SamplingStrategy], ...]:
    """The planned strategies' classes, in the front end; kept for as long as the carried plan stays the same."""
    return tuple(load(item.target, item.name, item.package) for item in _items())


def check(params: Any) -> None:
    """Refuse a request with bad values for a planned strategy: a ValueError, which becomes a 400."""
    extra = getattr(params, "extra_args", None) or {}
    for kind in _checked(os.environ.get(PLAN_VARIABLE, "")):
        mine = {key: extra[key] for key in kind.keys if key in extra}
        if not mine:
            continue
        try:
            kind.check(mine)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{', '.join(mine)}: {type(error).__name__}: {error}") from error


def _make() -> type:
    from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1

    bases: tuple[type, ...] = (V1,)
    if v2_takes_samplers():
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2

        bases = (V1, V2)
    return type("PlannedProcessor", bases, {**vars(_Processor), "__module__": __name__})


class _Processor:
    """The body of the class that vLLM is given."""

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        self._strategies = _planned()
        self._batch = Batch(self._strategies)
        self._slots: list[set[int]] = [set() for _ in self._strategies]

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        check(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is not None:
            self._batch.update(batch_update)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        extra = getattr(sampling_params, "extra_args", None) or {}
        for opened, strategy in zip(self._slots, self._strategies, strict=True):
            opened.discard(req_idx)
            if strategy.open(req_idx, extra):
                opened.add(req_idx)
        return any(req_idx in opened for opened in self._slots)

    def apply_staged_writes(self) -> None:
        """Nothing is staged."""

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        if ctx is None:
            for opened, strategy in zip(self._batch.open, self._strategies, strict=True):
                strategy.step(logits, list(opened), list(opened.values()))
            return logits
        # With speculative decoding a request owns several rows, which only the device knows.
        alone = len(ctx.idx_mapping_np) == logits.shape[0]
        slots = (ctx.idx_mapping_np if alone else ctx.expanded_idx_mapping).tolist()
        for mine, strategy in zip(self._slots, self._strategies, strict=True):
            rows = [row for row, slot in enumerate(slots) if slot in mine]
            strategy.step(logits, rows, [slots[row] for row in rows])
        return logits


def __getattr__(name: str) -> Any:
    if name != "PlannedProcessor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _make()
    return globals()[name]
