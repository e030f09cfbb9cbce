"""One planned sampler in a worker: which requests are its own, and its methods, guarded and metered.

What an exception costs is the plan's to say. ``quarantine``: the sampler, which is put aside for good while all
requests go on. ``request``: the request it was raised for, which ends with an error; a batch that raised is taken apart
to find it. Either way the rows are as they were before: a strategy works on a copy of its own rows, unless it ships
with this package and promises that a step which raises has changed nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

from vllm_graft.bindings.sampling.isolation import (
    NOT_NUMBERS,
    Copy,
    Watch,
    form_of,
    isolate,
    read_result,
    write_back,
    write_back_on_host,
)
from vllm_graft.contracts import Params, Rows, Sampler, SamplingStrategy, ServedModel, Statistics, Truncation
from vllm_graft.contracts.request_keys import KeyValue, read_keys
from vllm_graft.contracts.sampling import STAGES, Chosen, read_defaults
from vllm_graft.ledger import Guard, Ledger
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import PlanItem
from vllm_graft.points import point

if TYPE_CHECKING:
    import torch

Fail = Callable[[int, str], None]

_OURS: Final = "vllm-graft"
OPEN_BUDGET_US: Final = 20_000.0
"""What ``open`` may cost beyond a step: it is called once for each request, and may have tables to make."""
_PASSES: Final = 16
_HOST_BYTES_PER_US: Final = 5000.0


def budget_us(model: ServedModel, per_row: float = 0.0) -> float:
    """What a step may cost: the point's budget, and where the logits are in host memory the time of as many passes over
    them as the budget has on a current accelerator: 16, at 5 GB/s. Each request that runs may cost ``per_row`` more."""
    budget = (point("sampler").budget_us or 0.0) + model.at_a_time * per_row
    if model.device.type != "cpu":
        return budget
    return round(budget + model.at_a_time * model.vocabulary * 4 * _PASSES / _HOST_BYTES_PER_US, -2)


class Planned:
    """One planned sampler of a worker."""

    def __init__(self, item: PlanItem, made: Chosen, model: ServedModel, ledger: Ledger, fail: Fail | None) -> None:
        self.name = item.name
        self.made = made
        self.keys = made.request_keys()
        self.opened: dict[int, Params] = {}
        self.mask = model.per_slot(0, whole=True)
        self.ended: Callable[[], None] = _nothing
        """Called when a request of its own ends within a step, and is its own no longer."""
        self._broken = ""
        self._defaults: Mapping[str, KeyValue] = {key.name: key.default for key in self.keys}
        self._of_plan = read_defaults(type(made), item.options)
        self._by_default = bool(item.options.get("every_request")) or (
            bool(self._of_plan) and made.asked(self._of_plan)
        )
        self._end_request = fail
        self._fail = fail if item.options.get("on_error") == "request" else None
        self._ledger = ledger
        self._nobody = model.slots
        self._isolated: tuple[Rows, Rows] | None = None
        self._copy = Copy()
        self._in_place = isinstance(made, SamplingStrategy) and made.whole and item.package == _OURS
        self._watch = Watch(model.device) if model.device.type != "cpu" else None
        own = item.options.get("budget_us")
        self._methods(float(own) if isinstance(own, int | float) and own > 0 else budget_us(model, made.row_budget_us))

    def _methods(self, budget: float) -> None:
        made = self.made
        self._open = self._step = self._sampled = self._threshold = self._sample = None
        if isinstance(made, SamplingStrategy):
            self._open = self._guarded("open", self._opening(made.open), _no, budget + OPEN_BUDGET_US)
            if type(made).sampled is not SamplingStrategy.sampled:
                self._sampled = self._guarded("sampled", made.sampled, _nothing, budget)
        if isinstance(made, Truncation):
            self._threshold = self._guarded("threshold", self._limiting(made), _nothing, budget)
        elif isinstance(made, SamplingStrategy):
            self._step = self._guarded("step", self._stepping(made), _nothing, budget)
        elif isinstance(made, Sampler):
            self._sample = self._guarded("sample", self._picking(made), _nothing, budget)

    def _guarded(
        self, name: str, call: Callable[..., object], instead: Callable[..., object], budget: float | None = None
    ) -> Guard[..., object]:
        aside = functools.partial(self._ledger.put_aside, self.name)
        return Guard(call, instead, self._ledger.hook(self.name, name, budget), aside)

    @property
    def stage(self) -> int:
        """Where it stands in a step; samplers that pick come last."""
        return STAGES.index(self.made.stage) if isinstance(self.made, SamplingStrategy) else len(STAGES)

    @property
    def truncates(self) -> bool:
        """Whether it says a limit for each row instead of changing logits itself."""
        return self._threshold is not None

    @property
    def picks(self) -> bool:
        """Whether it picks the tokens itself."""
        return self._sample is not None

    @property
    def listens(self) -> bool:
        """Whether it wants to be told what was picked."""
        return self._sampled is not None and not self.aside

    @property
    def aside(self) -> bool:
        """Whether any of its methods has failed for good: half a strategy is none."""
        guards = (self._open, self._step, self._sampled, self._threshold, self._sample)
        return bool(self._broken) or any(guard is not None and guard.aside for guard in guards)

    def put_aside(self, reason: str) -> None:
        """Something around it failed for good: it has no requests any more."""
        if not self.aside:
            self._ledger.put_aside(self.name, reason)
        self._broken = reason
        self.opened.clear()

    def enter(
        self,
        slot: int,
        extra: Mapping[str, object],
        request: Callable[[Mapping[str, KeyValue]], Params],
        *,
        begun: bool = False,
    ) -> bool:
        """A request has this slot now, whoever had it before; returns whether it is this sampler's."""
        self.leave(slot)
        if not extra and not self._by_default:
            return False
        try:
            found = read_keys(self.keys, extra)
        except ValueError as error:
            # The front end refuses such a request; one that comes past it asks for nothing that could be given.
            self._ledger.note_error(self.name, f"a request came past the front end and goes on without it: {error}")
            return False
        try:
            asked = self.made.asked({**self._of_plan, **found}) if found else self._by_default
        except BaseException as error:
            if raised_by_signal(error):
                raise
            self.put_aside(reason_of(error))
            return False
        if not asked:
            return False
        if self.aside:
            if found and not begun:
                self._turn_away(slot)
            return False
        params = request({**self._defaults, **self._of_plan, **found})
        if self._open is not None and not self._open(slot, params):
            return False
        self.opened[slot] = params
        self.mask[slot] = 1
        return True

    def _turn_away(self, slot: int) -> None:
        """End a request that asks for this sampler after it was put aside; one that has begun goes on without it.

        The front end refuses such requests as soon as it hears of it; this one was on its way, or came from a machine
        that has no record of this process.
        """
        if self._end_request is not None:
            self._end_request(slot, f"{self.name}: was put aside after a failure, and the request asks for it")

    def leave(self, slot: int) -> None:
        """The slot's request is gone."""
        if self.opened.pop(slot, None) is not None:
            self.mask[slot] = 0

    def step(self, logits: torch.Tensor, rows: Rows) -> None:
        """Change the logits of these rows."""
        if self._step is not None and not self._is_aside_by_now():
            self._step(logits, rows)

    def threshold(self, stats: Statistics, rows: Rows) -> torch.Tensor | None:
        """The least logit that stays, for each row; None where the strategy is put aside."""
        if self._threshold is None or self._is_aside_by_now():
            return None
        return cast("torch.Tensor | None", self._threshold(stats, rows))

    def pick(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor | None:
        """The tokens of these rows; None where vLLM is to pick them."""
        if self._sample is None or self.aside:
            return None
        if logits.device.type != "cpu" and cast("Sampler", self.made).waits:
            # What is waited for is the model, and not the sampler's to pay.
            logits[0, 0].item()
        return cast("torch.Tensor | None", self._sample(logits, rows))

    def sampled(self, tokens: torch.Tensor, rows: Rows) -> None:
        """Tell it what was picked."""
        if self._sampled is not None and not self.aside:
            self._sampled(tokens, self._alone_in(rows))

    def warm_up(self, model: ServedModel) -> None:
        """Compile what writes a strategy's rows back, where kernels do that: no request should wait for it."""
        if self._step is not None and not self._in_place and self._watch is not None:
            import torch

            logits = torch.zeros((1, model.vocabulary), device=model.device)
            row = torch.zeros(1, dtype=torch.int64, device=model.device)
            given = {"keep_forbidden": not _is_whole(self.made), "seen": self._watch.seen}
            write_back(logits, row, logits.clone(), mine=None, **given)

    def _is_aside_by_now(self) -> bool:
        """Whether it is put aside, with what the device has told of since the last step."""
        if not self.aside and self._watch is not None and self._watch.found():
            self.put_aside(f"it gave {NOT_NUMBERS}; those rows were left as they were")
        return self.aside

    def _alone_in(self, rows: Rows) -> Rows:
        """The rows as the strategy is to see them; the same object while they stay the same."""
        if self._in_place:
            return rows
        if self._isolated is None or self._isolated[0] is not rows:
            self._isolated = (rows, isolate(rows))
        return self._isolated[1]

    def _opening(self, call: Callable[[int, Params], bool]) -> Callable[[int, Params], bool]:
        def opened(slot: int, params: Params) -> bool:
            try:
                return bool(call(slot, params))
            except BaseException as error:
                self._end(slot, error)
                return False

        return opened

    def _stepping(self, made: SamplingStrategy) -> Callable[[torch.Tensor, Rows], None]:
        def stepped(logits: torch.Tensor, rows: Rows) -> None:
            try:
                self._change(made, logits, rows)
            except BaseException as error:
                self._raise_unless_requests_pay(error)
                for each in _singly(rows):
                    try:
                        self._change(made, logits, each)
                    except BaseException as of_one:
                        self._end(each.pairs[0][1], of_one)

        return stepped

    def _change(self, made: SamplingStrategy, logits: torch.Tensor, rows: Rows) -> None:
        """A step that leaves the logits as they were when it raises, and other rows as they were whatever it does."""
        if self._in_place:
            made.step(logits, rows)
            return
        mine = rows.slots != self._nobody if rows.known is None else None
        own = self._copy.take(logits, rows.rows)
        form = form_of(own)
        try:
            result = read_result(made.step(own, self._alone_in(rows)), own, form)
        except BaseException:
            self._copy = Copy()  # nobody knows in which state its memory is
            raise
        if self._watch is None:
            _refuse(write_back_on_host(logits, rows.rows, result, mine=mine, keep_forbidden=not made.whole), "step")
        else:
            seen = self._watch.seen
            write_back(logits, rows.rows, result, mine=mine, keep_forbidden=not made.whole, seen=seen)
            self._watch.stepped()

    def _limiting(self, made: Truncation) -> Callable[[Statistics, Rows], torch.Tensor]:
        def limited(stats: Statistics, rows: Rows) -> torch.Tensor:
            try:
                return self._limits(made, stats, rows)
            except BaseException as error:
                self._raise_unless_requests_pay(error)
                limits = stats.max.new_full(stats.max.shape, float("-inf"))
                numbers = {row: number for number, row in enumerate(rows.rows.tolist())}
                for each in _singly(rows):
                    at = numbers[each.pairs[0][0]]
                    part = slice(at, at + 1)
                    own = Statistics(stats.max[part], stats.logsumexp[part], stats.mean[part], stats.std[part])
                    try:
                        limits[part] = self._limits(made, own, each)
                    except BaseException as of_one:
                        self._end(each.pairs[0][1], of_one)
                return limits

        return limited

    def _limits(self, made: Truncation, stats: Statistics, rows: Rows) -> torch.Tensor:
        """A limit for each row; a ValueError where the answer cannot be that. The statistics are needed again."""
        import torch

        given = stats
        if not self._in_place:
            given = Statistics(stats.max.clone(), stats.logsumexp.clone(), stats.mean.clone(), stats.std.clone())
        answer: object = made.threshold(given, self._alone_in(rows))
        if not isinstance(answer, torch.Tensor) or answer.shape != stats.max.shape:
            gave = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
            raise ValueError(f"threshold must return {len(stats.max)} limits, one for each row, and gave {gave}")
        limits = answer.to(stats.max)
        if not self._in_place:
            broken = limits.isnan() & stats.max.isfinite()
            if self._watch is None:
                _refuse(broken.tolist(), "threshold")
            else:
                self._watch.seen |= broken.any()
                self._watch.stepped()
        return limits

    def _picking(self, made: Sampler) -> Callable[[torch.Tensor, Rows], torch.Tensor]:
        def picked(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
            params = [self.opened[slot] for _, slot in rows.pairs]
            try:
                return _tokens(made.sample(logits[rows.rows], params), logits, len(params))
            except BaseException as error:
                self._raise_unless_requests_pay(error)
                return _tokens([self._alone(made, logits, each) for each in _singly(rows)], logits, len(params))

        return picked

    def _alone(self, made: Sampler, logits: torch.Tensor, row: Rows) -> int:
        """The pick for one row; the most probable token where that raises and the request ends."""
        slot = row.pairs[0][1]
        try:
            return int(_tokens(made.sample(logits[row.rows], [self.opened[slot]]), logits, 1).item())
        except BaseException as error:
            self._end(slot, error)
            return int(logits[row.rows].argmax().item())

    def _raise_unless_requests_pay(self, error: BaseException) -> None:
        if self._fail is None or raised_by_signal(error):
            raise error

    def _end(self, slot: int, error: BaseException) -> None:
        """End the request that a method raised for; the error goes on where the sampler pays instead."""
        self._raise_unless_requests_pay(error)
        assert self._fail is not None
        reason = f"{self.name}: {reason_of(error)}"
        self._ledger.note_error(self.name, f"raised for one request, which ends with an error: {reason_of(error)}")
        self._fail(slot, reason)
        self.leave(slot)
        self.ended()


def _tokens(answer: Sequence[int] | torch.Tensor, logits: torch.Tensor, number: int) -> torch.Tensor:
    """What a sampler answered, as token ids on the device; a ValueError where it cannot be that."""
    import torch

    ids = answer if isinstance(answer, torch.Tensor) else torch.tensor(list(answer), dtype=torch.int64)
    if tuple(ids.shape) != (number,):
        raise ValueError(f"sample must return {number} token ids, one for each row, and gave {tuple(ids.shape)}")
    vocabulary = logits.shape[1]
    if ids.device.type == "cpu" and number and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise ValueError(f"sample must return token ids from 0 to {vocabulary - 1}, and gave {ids.tolist()}")
    # On the device a look would cost a wait; an id that is none must still not reach the model.
    return ids.to(device=logits.device, dtype=torch.int64, non_blocking=True).clamp(0, vocabulary - 1)


def _singly(rows: Rows) -> list[Rows]:
    """The same rows, each on its own."""
    from vllm_graft.bindings.sampling.steps import tensor

    device = rows.rows.device
    return [Rows(tensor([row], device), tensor([slot], device), rows.step, ((row, slot),)) for row, slot in rows.pairs]


def _refuse(broken: Sequence[bool], method: str) -> None:
    """Raise where a method has made something of rows that is no number."""
    if any(broken):
        raise ValueError(f"{method} gave {NOT_NUMBERS}, in {sum(broken)} of {len(broken)} rows")


def _is_whole(made: Chosen) -> bool:
    return isinstance(made, SamplingStrategy) and made.whole


def _no(*args: object) -> bool:
    return False


def _nothing(*args: object) -> None:
    """What is called in the place of a sampler that was put aside: logits pass as they are."""
