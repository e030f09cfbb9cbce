"""Copies of rows for strategies of other packages, of which only valid results are written back.

Such a strategy cannot reach rows of other requests or vLLM's own storage, and a step that raises has changed nothing.
Nothing here waits for a device: there, rows that hold NaN or +inf are left out at once, and the host learns of them
some steps later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from vllm_graft.contracts import Rows
from vllm_graft.contracts.kernels import has_triton, indices
from vllm_graft.contracts.rows import History
from vllm_graft.ledger.guard import raised_by_signal

NOT_NUMBERS: Final = "NaN or +inf"


class IsolatedStep:
    """A step as one strategy sees it: rows are numbered from 0, in the order of ``rows``."""

    def __init__(self, rows: Rows, known: Sequence[tuple[int, int]]) -> None:
        numbers = indices(range(len(known)), rows.rows.device)
        self._rows = rows
        self.isolated = Rows(numbers, rows.slots.clone(), self, known)

    def pairs(self, rows: Rows) -> Sequence[tuple[int, int]]:
        """Return row and slot of a selection that the strategy made itself."""
        return list(zip(rows.rows.tolist(), rows.slots.tolist(), strict=True))

    def positions(self, rows: Rows) -> torch.Tensor:
        """Return how many tokens stand before the one to be picked."""
        return self._rows.step.positions(self._original(rows))

    def uniform(self, rows: Rows, salt: int) -> torch.Tensor:
        """Return the random numbers of the original rows."""
        return self._rows.step.uniform(self._original(rows), salt)

    @property
    def history(self) -> History:
        """The tokens so far: they are found by slot and position, so renumbered rows need no translation."""
        return self._rows.step.history

    def _original(self, rows: Rows) -> Rows:
        if rows is self.isolated:
            return self._rows
        return Rows(self._rows.rows[rows.rows], rows.slots, self._rows.step)


def isolate(rows: Rows) -> Rows:
    """Renumber rows for a copy that holds nothing else.

    With speculative decoding only the device knows whose each row is: the copy then holds all rows, numbered as before.
    """
    if rows.known is None:
        return Rows(rows.rows.clone(), rows.slots.clone(), rows.step)
    return IsolatedStep(rows, [(number, slot) for number, (_, slot) in enumerate(rows.known)]).isolated


class CopyBuffer:
    """Memory for copies of rows on the host, used again in every step: to allocate it takes as long as the copy.

    Filled by numpy: torch would share out each operation among threads, and wait for all of them.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def take(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of these rows of the logits."""
        if logits.device.type != "cpu":
            return logits[rows]
        import numpy as np

        size = len(rows) * logits.shape[1]
        if self._memory is None or self._memory.numel() < size or self._memory.dtype != logits.dtype:
            self._memory = torch.empty(size, dtype=logits.dtype)
        # detach() makes a new tensor over that memory: a strategy that resizes or replaces its data spoils only that.
        own = self._memory.detach()[:size].view(len(rows), logits.shape[1])
        np.take(logits.numpy(), rows.numpy(), axis=0, out=own.numpy(), mode="clip")
        return own


def keep_settings(name: str, call: Callable[..., object]) -> Callable[..., object]:
    """Wrap a sampler's method so that it raises if it has changed one of torch's settings, which is restored first.

    The whole process shares them: with another default type or device, vLLM's next step fails, and with it the engine.
    After ``torch.manual_seed`` all requests without a seed would be given the same random numbers in each step.
    """

    def checked(*args: object) -> object:
        before, ending = _settings(), False
        states: list[tuple[torch.Tensor, ...]] = []

        def note_seed(seed: int) -> torch.Generator:
            states.append(_random_states())
            return set_seed(seed)

        # Not told by the seed alone: that of the process, often 0, is the one that authors are most likely to set.
        set_seed, torch.manual_seed = torch.manual_seed, note_seed
        try:
            return call(*args)
        except BaseException as error:
            ending = raised_by_signal(error)
            raise
        finally:
            torch.manual_seed = set_seed
            changed = [part for part, value in _settings().items() if value != before[part]]
            if changed:
                _restore(before)
            if states:
                _restore_random(states[0])
                changed.append("random seed")
            if changed and not ending:
                # In place of what the call raised too: that is the lesser fault.
                raise RuntimeError(f"{name} has changed torch's {', '.join(changed)}, which the whole process shares")

    return checked


def _settings() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _random_states() -> tuple[torch.Tensor, ...]:
    """Return the states of torch's random numbers on the host and, without waiting for it, on the device."""
    on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
    return (torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_device else []))


def _restore_random(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def _restore(settings: Mapping[str, Any]) -> None:
    torch.set_default_dtype(settings["default dtype"])
    # None, not the device itself: torch would then look at each of its calls.
    torch.set_default_device(None)
    if torch.get_default_device() != settings["default device"]:
        torch.set_default_device(settings["default device"])
    torch.set_num_threads(settings["number of threads"])
    torch.use_deterministic_algorithms(settings["deterministic algorithms"])


LogitsForm = tuple["torch.Size", "torch.dtype", "torch.device"]


def logits_form(logits: torch.Tensor) -> LogitsForm:
    """Return shape, type and device of logits."""
    return logits.shape, logits.dtype, logits.device


def read_result(answer: object, own: torch.Tensor, form: LogitsForm) -> torch.Tensor:
    """Return the logits that a step made, in place or as its result, or raise if they do not fit.

    ``form`` is that of the logits the step was given, taken before it could resize them.
    """
    if answer is not None and not isinstance(answer, torch.Tensor):
        gave = type(answer).__name__
        raise TypeError(f"step must change its logits in place or return new ones, but returned {gave}")
    result = own if answer is None else answer
    if logits_form(result) != form:
        raise ValueError(f"step was given logits of {_shown(form)} but left or returned {_shown(logits_form(result))}")
    last = result.storage_offset() + sum((n - 1) * step for n, step in zip(result.shape, result.stride(), strict=True))
    if result.untyped_storage().nbytes() < (last + 1) * result.element_size():
        raise ValueError("step freed the memory of its logits")
    return result


def write_back(
    logits: torch.Tensor,
    rows: torch.Tensor,
    result: torch.Tensor,
    *,
    mine: torch.Tensor | None,
    keep_forbidden: bool,
    seen: torch.Tensor,
) -> None:
    """Write a strategy's result into the logits; ``seen`` becomes 1 where a row holds NaN or +inf.

    Such a row, one in which no token would be left, and one that is not ``mine`` stay as they were. With
    ``keep_forbidden`` so does a logit that was -inf. NaN that the model itself gave is not held against the strategy.
    """
    if has_triton(logits):
        from vllm_graft.bindings.sampling.triton_kernels import write_back_by_triton

        write_back_by_triton(logits, rows, result, mine=mine, keep_forbidden=keep_forbidden, seen=seen)
        return
    before = logits[rows]
    after = torch.where(before == -torch.inf, before, result) if keep_forbidden else result
    # amax gives NaN where any entry is NaN: one pass tells all there is to know.
    top = after.amax(1)
    numbers = top < torch.inf
    broken = ~numbers & (before.amax(1) < torch.inf)
    keep = numbers & (top > -torch.inf)
    if mine is not None:
        broken, keep = broken & mine, keep & mine
    seen |= broken.any()
    logits[rows] = torch.where(keep[:, None], after, before)


def write_back_on_host(
    logits: torch.Tensor, rows: torch.Tensor, result: torch.Tensor, *, mine: torch.Tensor | None, keep_forbidden: bool
) -> list[bool]:
    """Write a result as ``write_back`` does, but return which rows hold NaN or +inf, and write none if any does.

    Row after row by numpy, while each is in the cache; few rows have a logit that is -inf.
    """
    import numpy as np

    own = [True] * len(rows) if mine is None else mine.tolist()
    broken, writes = [False] * len(rows), []
    all_before, all_after = logits.numpy(), result.detach().numpy()
    for number, row in enumerate(rows.tolist()):
        if not own[number]:
            continue
        before, after = all_before[row], all_after[number]
        if keep_forbidden and not before.min() > -math.inf:
            after = np.where(before == -math.inf, before, after)
        top = after.max()
        if -math.inf < top < math.inf:
            writes.append((before, after))
        elif top != -math.inf:
            broken[number] = bool(before.max() < math.inf)
    if not any(broken):
        for before, after in writes:
            before[:] = after
    return broken


class DeviceFlag:
    """A flag that kernels set on a device, read on the host without waiting for it.

    Steps leave a 1 in ``seen``; every ``EVERY`` steps it is copied, and read once the copy has arrived.
    """

    EVERY: Final = 8

    def __init__(self, device: torch.device) -> None:
        self.seen = torch.zeros(1, dtype=torch.int32, device=device)
        # Pinned, or the copy back would wait for the device.
        self._host = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._arrived = torch.Event(device.type)
        self._steps = 0
        self._under_way = False

    def count_step(self) -> None:
        """Count a step that is on its way to the device."""
        self._steps += 1
        if self._steps % self.EVERY == 1 and not self._under_way:
            self._host.copy_(self.seen, non_blocking=True)
            self._arrived.record()
            self._under_way = True

    def is_set(self) -> bool:
        """Return whether a copy has arrived in which the flag is set."""
        if not self._under_way or not self._arrived.query():
            return False
        self._under_way = False
        return bool(self._host[0])


def _shown(form: LogitsForm) -> str:
    shape, dtype, device = form
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"
