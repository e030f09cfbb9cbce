"""A sampler's view of a step: rows of logits, the slot and position of each, and the tokens before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class History(Protocol):
    """The tokens of requests so far, prompt and answer.

    If the logits are in host memory, the tokens are there too, as lists; if they are on a device, the last tokens
    are beside them, as a tensor. ``on_host`` tells which is free; the other way works too and may cost a copy.
    """

    @property
    def on_host(self) -> bool:
        """True if the tokens are in host memory."""
        ...

    def length(self, slot: int) -> int:
        """Return how many tokens the slot's request has so far. On the V2 model runner it waits for the device."""
        ...

    def since(self, slot: int, start: int) -> Sequence[int]:
        """Return the tokens of the slot's request from index ``start`` on. On the V2 runner it waits for the device."""
        ...

    def tokens(self, rows: Rows, window: int) -> torch.Tensor:
        """Return the last tokens of each row, [rows, window] on the logits' device: the newest in the last column, -1
        if a request has fewer."""
        ...


class Step(Protocol):
    """The part of ``Rows`` that a binding implements: computed on demand."""

    def pairs(self, rows: Rows) -> Sequence[tuple[int, int]]:
        """Return row and slot on the host, if ``Rows`` does not hold them."""
        ...

    def positions(self, rows: Rows) -> torch.Tensor:
        """Return how many tokens stand before the one to be picked, for each row."""
        ...

    def uniform(self, rows: Rows, salt: int) -> torch.Tensor:
        """Return a random number in [0, 1) for each row."""
        ...

    @property
    def history(self) -> History:
        """The tokens so far."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a step's logits that are a strategy's to change.

    rows:  indices of rows in the logits, on their device
    slots: the slot of each row's request
    step:  computes the rest on demand
    known: row and slot of each on the host, if the host knows them

    Rows change from step to step; a slot stays a request's own until it is opened again. With speculative decoding a
    request has several rows, and since only the device knows which, rows of other requests may be among them: they have
    the slot number ``ServedModel.slots``, which no request has and for which ``PerSlot`` holds its default.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    step: Step
    known: Sequence[tuple[int, int]] | None = None

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        """Row and slot of each, on the host, without those of other requests. Free, but with speculative decoding it
        waits for the device."""
        return self.step.pairs(self) if self.known is None else self.known

    @property
    def positions(self) -> torch.Tensor:
        """The number of tokens before the one that is to be picked, for each row."""
        return self.step.positions(self)

    @property
    def history(self) -> History:
        """The tokens so far; only for strategies that declare a ``window``."""
        return self.step.history

    def uniform(self, salt: int = 0) -> torch.Tensor:
        """Return a random number in [0, 1) for each row: a hash of the request's seed, the position and ``salt``.

        Nothing is drawn from a generator, so every rank gets the same number, and a step that is computed twice too.
        """
        return self.step.uniform(self, salt)


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Statistics of each row's logits, for truncations; entries that are -inf do not count.

    max:       the greatest logit
    logsumexp: the logarithm of the sum of all exponentials: ``logit - logsumexp`` is a log-probability
    mean, std: of the finite logits (the spread over the number of them)
    """

    max: torch.Tensor
    logsumexp: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor

    def select(self, at: slice | torch.Tensor) -> Statistics:
        """Return the statistics of some of the rows."""
        return Statistics(self.max[at], self.logsumexp[at], self.mean[at], self.std[at])

    def clone(self) -> Statistics:
        """Return a copy in memory of its own."""
        return Statistics(self.max.clone(), self.logsumexp.clone(), self.mean.clone(), self.std.clone())


class PerSlot:
    """One number per slot: written on the host when a request enters, read on the device for each row.

    ``default`` is for rows of other requests (see ``Rows``): choose the number that changes nothing.
    """

    def __init__(self, slots: int, default: float, device: torch.device, *, integer: bool = False) -> None:
        # Every process imports this module, and it must stay free of torch; a caller that has a device has imported it.
        torch = sys.modules["torch"]
        # One more than there are slots: the last entry is for rows that belong to no request.
        self._host = torch.full((slots + 1,), default, dtype=torch.int64 if integer else torch.float32)
        # On a CPU both are one tensor, and nothing is ever copied.
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        self._stale = False

    def __setitem__(self, slot: int, value: float) -> None:
        self._host[slot] = value
        self._stale = True

    def __getitem__(self, slot: int) -> float:
        return float(self._host[slot])

    def of(self, rows: Rows) -> torch.Tensor:
        """Return the number of each row, on the device."""
        return self.all()[rows.slots]

    def all(self) -> torch.Tensor:
        """Return the numbers of all slots, on the device, and last the default."""
        if self._stale and self._device is not self._host:
            from vllm_graft.contracts.kernels import copy_into

            copy_into(self._device, self._host)
        self._stale = False
        return self._device


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """The model, described to samplers once, before the first request.

    name:           as the server was started with it
    vocabulary:     how many logits a row has
    slots:          slots are numbered from 0 to slots - 1
    device:         where the logits are
    eos:            the tokens that end an answer
    speculative:    whether drafts are verified, so that a request has several rows in a step
    load_tokenizer: see ``tokenizer``
    max_requests:   how many requests there can be at a time
    """

    name: str
    vocabulary: int
    slots: int
    device: torch.device
    eos: tuple[int, ...] = ()
    speculative: bool = False
    load_tokenizer: Callable[[], object] | None = None
    max_requests: int = 0

    def per_slot(self, default: float = 0.0, *, integer: bool = False) -> PerSlot:
        """Return a table with a number for each slot, on the device: float32, or int64 if ``integer``."""
        return PerSlot(self.slots, default, self.device, integer=integer)

    @property
    def tokenizer(self) -> object:
        """The model's tokenizer, loaded on first use; an error if the server runs without one."""
        if self.load_tokenizer is None:
            raise RuntimeError(f"{self.name} is served without a tokenizer")
        return self.load_tokenizer()
