"""One sampler in a worker: the requests that are its own, and its methods, guarded and metered.

The option ``on_error`` decides what happens when a sampler raises. ``quarantine`` puts the sampler aside for good, and
all requests go on without it. ``request`` ends only the request it was raised for; a batch that raised is split to find
that one. Either way the rows stay as they were before: a strategy works on a copy of its own rows, unless it ships with
this package and promises that a step which raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final, cast

import torch

from vllm_graft.bindings.instantiate import guard_method
from vllm_graft.bindings.sampling import isolation
from vllm_graft.contracts import Params, Rows, Sampler, SamplingStrategy, ServedModel, Statistics, Truncation
from vllm_graft.contracts.kernels import indices
from vllm_graft.contracts.request_keys import KeyValue, read_keys
from vllm_graft.contracts.sampling import STAGES, OptInSampler, read_defaults
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import PlanItem
from vllm_graft.points import point

Fail = Callable[[int, str], None]
"""Ends the request of a slot with an error, for a reason."""

_OURS: Final = "vllm-graft"
OPEN_BUDGET_US: Final = 20_000.0
"""The cost of ``open`` allowed beyond a step's: it is called once for each request, and may have tables to make."""
_PASSES: Final = 16
_HOST_BYTES_PER_US: Final = 5000.0


def step_budget_us(model: ServedModel, per_row: float = 0.0) -> float:
    """Return what a step may cost: the point's budget, and ``per_row`` for each request that can run at a time.

    In half a millisecond a current accelerator passes over a batch's logits 16 times. If the logits are in host
    memory, the time of as many passes at 5 GB/s comes on top.
    """
    budget = (point("sampler").budget_us or 0.0) + model.max_requests * per_row
    if model.device.type != "cpu":
        return budget
    return round(budget + model.max_requests * model.vocabulary * 4 * _PASSES / _HOST_BYTES_PER_US, -2)


class GuardedSampler:
    """A planned sampler whose failures are its own: each method runs behind a guard that counts, times and stops it."""

    def __init__(
        self, item: PlanItem, sampler: OptInSampler, model: ServedModel, ledger: Ledger, fail: Fail | None
    ) -> None:
        self.name = item.name
        self.sampler = sampler
        self.keys = sampler.request_keys()
        self.requests: dict[int, Params] = {}
        """The requests that are this sampler's, by slot."""
        self.mask = model.per_slot(0, integer=True)
        """1 for the slots of those requests, on the device."""
        self.on_request_end: Callable[[], None] = lambda: None
        """Called when a request ends within a step and is this sampler's no longer."""
        self.truncates = isinstance(sampler, Truncation)
        self.picks = isinstance(sampler, Sampler)
        self.stage = STAGES.index(sampler.stage) if isinstance(sampler, SamplingStrategy) else len(STAGES)
        """The place in the order of a step; samplers that pick tokens come last."""
        self._broken = ""
        self._defaults: Mapping[str, KeyValue] = {key.name: key.default for key in self.keys}
        self._planned_values = read_defaults(type(sampler), item.options)
        # Decided once: `enter` runs for every request of the server, and most carry no key.
        self._by_default = bool(item.options.get("every_request")) or (
            bool(self._planned_values) and sampler.is_requested(self._planned_values)
        )
        self._fail = fail
        self._fails_request = fail is not None and item.options.get("on_error") == "request"
        self._ledger = ledger
        self._unowned = model.slots
        self._isolated: tuple[Rows, Rows] | None = None
        self._copies = isolation.CopyBuffer()
        self._atomic = isinstance(sampler, SamplingStrategy) and sampler.atomic
        self._in_place = self._atomic and item.package == _OURS
        self._nan_flag = isolation.DeviceFlag(model.device) if model.device.type != "cpu" else None
        own = item.options.get("budget_us")
        budget = (
            float(own) if isinstance(own, int | float) and own > 0 else step_budget_us(model, sampler.row_budget_us)
        )
        methods: dict[str, Callable[..., object]] = {}
        if isinstance(sampler, SamplingStrategy):
            methods["open"] = self._run_open
            if type(sampler).sampled is not SamplingStrategy.sampled:
                methods["sampled"] = sampler.sampled
            methods |= {"threshold": self._run_threshold} if self.truncates else {"step": self._run_step}
        elif self.picks:
            methods["sample"] = self._run_sample
        if item.package != _OURS:
            methods = {name: isolation.keep_settings(name, call) for name, call in methods.items()}
        self._guards = {
            name: guard_method(item, name, call, ledger, budget_us=budget + OPEN_BUDGET_US * (name == "open"))
            for name, call in methods.items()
        }

    @property
    def listens(self) -> bool:
        """True if its ``sampled`` is called with the tokens that were picked."""
        return "sampled" in self._guards and not self.aside

    @property
    def aside(self) -> bool:
        """True if it is put aside: a strategy of which one method has failed is of no use."""
        return bool(self._broken) or any(guard.aside for guard in self._guards.values())

    def put_aside(self, reason: str) -> None:
        """Put the sampler aside for a failure outside of its own methods; it has no requests any more."""
        if not self.aside:
            self._ledger.put_aside(self.name, reason)
        self._broken = reason
        self.requests.clear()

    def warm_up(self, model: ServedModel) -> None:
        """Compile the kernels that write a strategy's rows back, so that no request waits for them."""
        if "step" in self._guards and not self._in_place and self._nan_flag is not None:
            logits = torch.zeros((1, model.vocabulary), device=model.device)
            row = torch.zeros(1, dtype=torch.int64, device=model.device)
            seen = self._nan_flag.seen
            isolation.write_back(logits, row, logits.clone(), mine=None, keep_forbidden=not self._atomic, seen=seen)

    def enter(
        self,
        slot: int,
        extra: Mapping[str, object],
        params_of: Callable[[Mapping[str, KeyValue]], Params],
        *,
        resumed: bool = False,
    ) -> bool:
        """Take in a request under a slot, whose former request is gone; return whether it is this sampler's.

        extra:     the request's extra arguments
        params_of: makes the request's parameters from the values of this sampler's keys
        resumed:   whether the request was preempted and comes back
        """
        self.leave(slot)
        if not extra and not self._by_default:
            return False
        try:
            found = read_keys(self.keys, extra)
        except ValueError as error:
            # The front end answers such a request with a 400; this one bypassed it, perhaps by way of another vLLM.
            self._ledger.note_error(
                self.name, f"a request bypassed the front end's check and continues without this sampler: {error}"
            )
            return False
        try:
            values = {**self._planned_values, **found}
            requested = bool(self.sampler.is_requested(values)) if found else self._by_default
        except BaseException as error:
            if raised_by_signal(error):
                raise
            self.put_aside(reason_of(error))
            return False
        if not requested:
            return False
        if self.aside:
            # The front end refuses such requests once it hears of the failure; this one was on its way, or came from a
            # machine without a record of this process. A request that has begun goes on without the sampler.
            if found and not resumed and self._fail is not None:
                self._fail(slot, f"{self.name}: was put aside after a failure, but the request asks for it")
            return False
        params = params_of({**self._defaults, **values})
        if "open" in self._guards and not self._guards["open"](slot, params):
            return False
        self.requests[slot] = params
        self.mask[slot] = 1
        return True

    def leave(self, slot: int) -> None:
        """Forget the slot's request."""
        if self.requests.pop(slot, None) is not None:
            self.mask[slot] = 0

    def step(self, logits: torch.Tensor, rows: Rows) -> None:
        """Change the logits of these rows."""
        if not self._check_aside():
            self._guards["step"](logits, rows)

    def threshold(self, stats: Statistics, rows: Rows) -> torch.Tensor | None:
        """Return the least logit that stays, for each row; None if the strategy is put aside."""
        if self._check_aside():
            return None
        return cast("torch.Tensor | None", self._guards["threshold"](stats, rows))

    def pick(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor | None:
        """Return the tokens of these rows; None if vLLM is to pick them."""
        if self.aside:
            return None
        if logits.device.type != "cpu" and cast("Sampler", self.sampler).syncs_device:
            # The host waits for the model here, outside of the guard: the sampler's budget does not pay for that.
            logits[0, 0].item()
        return cast("torch.Tensor | None", self._guards["sample"](logits, rows))

    def sampled(self, tokens: torch.Tensor, rows: Rows) -> None:
        """Tell the strategy which tokens were picked for its rows."""
        if self.listens:
            self._guards["sampled"](tokens, self._own_view(rows))

    def _check_aside(self) -> bool:
        """Return whether the sampler is put aside, by what the device has reported since the last step too."""
        if not self.aside and self._nan_flag is not None and self._nan_flag.is_set():
            self.put_aside(f"it gave {isolation.NOT_NUMBERS}; those rows were left as they were")
        return self.aside

    def _own_view(self, rows: Rows) -> Rows:
        """Return the rows as the strategy sees them: the same object as long as the rows are."""
        if self._in_place:
            return rows
        if self._isolated is None or self._isolated[0] is not rows:
            self._isolated = (rows, isolation.isolate(rows))
        return self._isolated[1]

    def _run_open(self, slot: int, params: Params) -> bool:
        try:
            return bool(cast("SamplingStrategy", self.sampler).open(slot, params))
        except BaseException as error:
            self._end_request(slot, error)
            return False

    def _run_step(self, logits: torch.Tensor, rows: Rows) -> None:
        change = cast("SamplingStrategy", self.sampler).step if self._in_place else self._step_on_copy
        try:
            change(logits, rows)
        except BaseException as error:
            self._raise_unless_request_fails(error)
            for each in _split(rows):
                try:
                    change(logits, each)
                except BaseException as of_one:
                    self._end_request(each.pairs[0][1], of_one)

    def _step_on_copy(self, logits: torch.Tensor, rows: Rows) -> None:
        """Run a step that leaves the logits as they were if it raises, and other rows whatever it does."""
        mine = rows.slots != self._unowned if rows.known is None else None
        own = self._copies.take(logits, rows.rows)
        form = isolation.logits_form(own)
        try:
            answer = cast("SamplingStrategy", self.sampler).step(own, self._own_view(rows))
            result = isolation.read_result(answer, own, form)
        except BaseException:
            self._copies = isolation.CopyBuffer()  # the step may have resized or freed the memory
            raise
        forbidden = not self._atomic
        if self._nan_flag is None:
            _refuse(
                isolation.write_back_on_host(logits, rows.rows, result, mine=mine, keep_forbidden=forbidden), "step"
            )
        else:
            isolation.write_back(
                logits, rows.rows, result, mine=mine, keep_forbidden=forbidden, seen=self._nan_flag.seen
            )
            self._nan_flag.count_step()

    def _run_threshold(self, stats: Statistics, rows: Rows) -> torch.Tensor:
        try:
            return self._limits(stats, rows)
        except BaseException as error:
            self._raise_unless_request_fails(error)
            limits = stats.max.new_full(stats.max.shape, float("-inf"))
            numbers = {row: number for number, row in enumerate(rows.rows.tolist())}
            for each in _split(rows):
                row, slot = each.pairs[0]
                part = slice(numbers[row], numbers[row] + 1)
                try:
                    limits[part] = self._limits(stats.select(part), each)
                except BaseException as of_one:
                    self._end_request(slot, of_one)
            return limits

    def _limits(self, stats: Statistics, rows: Rows) -> torch.Tensor:
        """Return a limit for each row; raise a ValueError if the strategy's answer is not one."""
        # A copy for other packages: the mask and other truncations read the statistics after this strategy.
        own = stats if self._in_place else stats.clone()
        answer: object = cast("Truncation", self.sampler).threshold(own, self._own_view(rows))
        if not isinstance(answer, torch.Tensor) or answer.shape != stats.max.shape:
            gave = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
            raise ValueError(f"threshold must return {len(stats.max)} limits, one for each row, but returned {gave}")
        if self._in_place:
            return answer.to(stats.max)
        # A plain tensor: one of the author's own class, or a sparse one, might raise later, outside the guard.
        limits = torch.full_like(stats.max, float("-inf"))
        limits.copy_(answer.detach())
        broken = limits.isnan() & stats.max.isfinite()
        if self._nan_flag is None:
            _refuse(broken.tolist(), "threshold")
        else:
            self._nan_flag.seen |= broken.any()
            self._nan_flag.count_step()
        return limits

    def _run_sample(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        sampler = cast("Sampler", self.sampler)
        params = [self.requests[slot] for _, slot in rows.pairs]
        try:
            return _token_ids(sampler.sample(logits[rows.rows], params), logits, len(params))
        except BaseException as error:
            self._raise_unless_request_fails(error)
            tokens = []
            for each, own in zip(_split(rows), params, strict=True):
                try:
                    tokens.append(int(_token_ids(sampler.sample(logits[each.rows], [own]), logits, 1).item()))
                except BaseException as of_one:
                    self._end_request(each.pairs[0][1], of_one)
                    # The request ends, but its row must have a token: the most probable one.
                    tokens.append(int(logits[each.rows].argmax().item()))
            return _token_ids(tokens, logits, len(params))

    def _raise_unless_request_fails(self, error: BaseException) -> None:
        if not self._fails_request or raised_by_signal(error):
            raise error

    def _end_request(self, slot: int, error: BaseException) -> None:
        """End the request that a method raised for; raise the error again if the sampler pays instead."""
        self._raise_unless_request_fails(error)
        assert self._fail is not None
        reason = reason_of(error)
        self._ledger.note_error(self.name, f"raised for one request, which ends with an error: {reason}")
        self._fail(slot, f"{self.name}: {reason}")
        self.leave(slot)
        self.on_request_end()


def _token_ids(answer: Sequence[int] | torch.Tensor, logits: torch.Tensor, number: int) -> torch.Tensor:
    """Return a sampler's answer as token ids on the device; raise a ValueError if it is something else."""
    # One more than there should be shows that there are too many: an iterator may have no end.
    ids = answer if isinstance(answer, torch.Tensor) else torch.tensor([*islice(answer, number + 1)], dtype=torch.int64)
    if tuple(ids.shape) != (number,):
        raise ValueError(f"sample must return {number} token ids, one for each row, but returned {tuple(ids.shape)}")
    vocabulary = logits.shape[1]
    if ids.device.type == "cpu" and number and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise ValueError(f"sample must return token ids from 0 to {vocabulary - 1}, but returned {ids.tolist()}")
    # A plain tensor, as of limits. To look at ids on the device would cost a wait; clamped, none of them reads past the
    # model's embedding table.
    plain = torch.zeros(number, device=logits.device, dtype=torch.int64)
    plain.copy_(ids.detach(), non_blocking=True)
    return plain.clamp_(0, vocabulary - 1)


def _split(rows: Rows) -> list[Rows]:
    """Split rows into one object for each row."""
    device = rows.rows.device
    return [
        Rows(indices([row], device), indices([slot], device), rows.step, ((row, slot),)) for row, slot in rows.pairs
    ]


def _refuse(broken: Sequence[bool], method: str) -> None:
    """Raise a ValueError if a method has left NaN or +inf in any row."""
    if any(broken):
        raise ValueError(f"{method} gave {isolation.NOT_NUMBERS}, in {sum(broken)} of {len(broken)} rows")
