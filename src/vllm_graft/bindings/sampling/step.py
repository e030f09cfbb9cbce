"""The part of a step behind ``Rows``: row and slot on the host, positions, random numbers, the tokens so far.

The V1 model runner keeps a request's tokens in lists on the host, the V2 runner on the device. ``HostStep`` serves
logits and tokens that are both on the host, ``DeviceStep`` logits on a device: there the last tokens are kept in a ring
beside them, whichever runner they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_graft.contracts import PerSlot, Rows
from vllm_graft.contracts.kernels import has_triton, indices, uniform

_DRAFTS: Final = 64
"""The positions beyond the last certain one that the ring has room for, at least: drafts that are yet to be
verified."""


@dataclass(slots=True)
class Tokens:
    """A request's tokens on the host: vLLM's own lists, of which the second grows."""

    prompt: Sequence[int]
    output: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def since(self, start: int) -> list[int]:
        """Return the tokens from an index on."""
        first = len(self.prompt)
        found = [*self.prompt[start:], *self.output] if start < first else list(self.output[start - first :])
        # With asynchronous scheduling vLLM appends -1 and fills it in later; see the patch async-history.
        if found and found[-1] < 0:
            raise RuntimeError("vLLM has not filled in the last tokens of this request, so its history is not known")
        return found


class ReadOnlyTokens(Sequence[int]):
    """A view of a list that vLLM appends to: a sampler that wrote into the list itself would change vLLM's."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, at: Any) -> Any:
        return self._tokens[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __eq__(self, other: object) -> bool:
        return list(self._tokens) == (list(other) if isinstance(other, Sequence) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self._tokens))


class HostHistory:
    """Tokens in vLLM's own lists."""

    on_host = True

    def __init__(self, tokens: dict[int, Tokens]) -> None:
        self._tokens = tokens

    def length(self, slot: int) -> int:
        """Return how many tokens the slot's request has."""
        return len(self._tokens[slot])

    def since(self, slot: int, start: int) -> Sequence[int]:
        """Return the tokens of the slot's request from an index on."""
        return self._tokens[slot].since(start)

    def tokens(self, rows: Rows, window: int) -> torch.Tensor:
        """Return the last tokens of each row, the newest in the last column."""
        lines = []
        for _, slot in rows.pairs:
            last = self.since(slot, max(0, self.length(slot) - window))
            lines.append([-1] * (window - len(last)) + list(last))
        return indices(lines, rows.rows.device).view(len(lines), window)


class HostStep:
    """A step of the V1 model runner on a CPU: everything is on the host."""

    def __init__(self, seeds: PerSlot, tokens: dict[int, Tokens]) -> None:
        self._seeds = seeds
        self.history = HostHistory(tokens)

    def pairs(self, rows: Rows) -> Sequence[tuple[int, int]]:
        """Return row and slot of each."""
        return list(zip(rows.rows.tolist(), rows.slots.tolist(), strict=True))

    def positions(self, rows: Rows) -> torch.Tensor:
        """Return how many tokens each row's request has."""
        return indices([self.history.length(slot) for _, slot in rows.pairs], rows.rows.device)

    def uniform(self, rows: Rows, salt: int) -> torch.Tensor:
        """Return a hash of seed and position for each row."""
        return uniform(self._seeds.of(rows), self.positions(rows), salt)


class Ring:
    """The last tokens of each slot, near the device.

    A token stands at its position modulo the ring's size, so that drafts which were refused are overwritten by what
    came instead, and a step that is computed twice writes the same again.
    """

    def __init__(self, slots: int, window: int, device: torch.device, drafts: int = _DRAFTS) -> None:
        self.size = window + drafts
        self.device = device
        self._tokens = torch.full((slots + 1, self.size), -1, dtype=torch.int32, device=device)
        self._back = torch.arange(self.size, 0, -1, device=device)

    def write(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put tokens where they belong; positions count from 0."""
        self._tokens[slots, positions % self.size] = tokens.to(self._tokens.dtype)

    def last(self, slots: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
        """Return the tokens before each position, [slots, window], newest last, -1 if there is none."""
        if has_triton(self._tokens):
            from vllm_graft.bindings.sampling.triton_kernels import last_by_triton

            return last_by_triton(self._tokens, slots, positions, window)
        at = positions[:, None] - self._back[self.size - window :]
        return torch.where(at >= 0, self._tokens[slots[:, None], at % self.size], -1)


class DeviceHistory:
    """The V2 runner's tokens, of which the last are copied into a ring.

    The runner keeps tokens in host memory that the device reads over its bus (``UvaBackedTensor``). Those that samplers
    look at are fetched when a request enters, and one more with each step.
    """

    on_host = False

    def __init__(self, states: Any, window: int, drafts: int = 0) -> None:
        self.slots: int = states.max_num_reqs
        self._states = states
        self._ring = Ring(self.slots, window, states.device, max(_DRAFTS, drafts + 1))
        self._new: set[int] = set()

    def enter(self, slot: int) -> None:
        """Fetch the tokens of the slot's new request with each of its steps, until all of its prompt is read."""
        self._new.add(slot)

    def begin(
        self, slots: torch.Tensor, positions: torch.Tensor, fed: torch.Tensor, read: Iterable[tuple[int, int]]
    ) -> None:
        """Bring the ring up to a step: ``fed`` is each row's newest token, ``positions`` counts it in, and ``read``
        holds each request's slot and how many tokens the model has read after this step."""
        here = [(slot, end) for slot, end in read if slot in self._new] if self._new else ()
        if here:
            # A prompt that is read in parts feeds tokens from before the window: until its end all is fetched anew.
            self._fetch(indices([slot for slot, _ in here], self._ring.device))
            self._new.difference_update(slot for slot, end in here if end >= self._states.prefill_len.np[slot])
        # On the device already as the model's input; the runner's own table is in host memory, behind the bus.
        self._ring.write(slots, positions - 1, fed)

    def _fetch(self, slots: torch.Tensor) -> None:
        ages = torch.arange(self._ring.size, device=self._ring.device)
        # On the device: reading these on the host would wait for it in every step.
        at = self._states.total_len.gpu[slots].to(torch.int64)[:, None] - 1 - ages
        tokens = self._states.all_token_ids.gpu[slots[:, None], at.clamp(min=0)]
        self._ring.write(slots[:, None], at, torch.where(at >= 0, tokens, -1))

    def length(self, slot: int) -> int:
        """Return how many tokens the slot's request has; waits for the device."""
        return int(self._states.total_len.gpu[slot].item())

    def since(self, slot: int, start: int) -> Sequence[int]:
        """Return the tokens of the slot's request from an index on; waits for the device."""
        found: list[int] = self._states.all_token_ids.gpu[slot, start : self.length(slot)].tolist()
        return found

    def tokens(self, rows: Rows, window: int) -> torch.Tensor:
        """Return the last tokens of each row, the newest in the last column."""
        return self._ring.last(rows.slots, rows.positions, window)


class HistoryMirror(HostHistory):
    """The V1 runner's tokens if the logits are on a device: new tokens of vLLM's lists are sent to a ring there."""

    on_host = False

    def __init__(self, tokens: dict[int, Tokens], slots: int, window: int, device: torch.device) -> None:
        super().__init__(tokens)
        self.slots = slots
        self._ring = Ring(slots, window, device)
        self._sent: dict[int, int] = {}

    def enter(self, slot: int) -> None:
        """Send all tokens of the slot's new request with the next step."""
        self._sent.pop(slot, None)

    def begin(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Send the tokens of these rows and slots that the device does not have: for most requests the last one."""
        slots: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        for _, slot in pairs:
            end = self.length(slot)
            new = self.since(slot, max(self._sent.get(slot, 0), end - self._ring.size))
            self._sent[slot] = end
            slots += [slot] * len(new)
            positions += range(end - len(new), end)
            tokens += new
        if tokens:
            self._ring.write(*indices([slots, positions, tokens], self._ring.device))

    def tokens(self, rows: Rows, window: int) -> torch.Tensor:
        """Return the last tokens of each row, the newest in the last column."""
        return self._ring.last(rows.slots, rows.positions, window)


class DeviceStep:
    """A step whose logits, positions and last tokens are on a device."""

    def __init__(self, seeds: PerSlot, history: DeviceHistory | HistoryMirror) -> None:
        self._seeds = seeds
        self.history = history
        self._positions: torch.Tensor | None = None

    def begin(self, positions: torch.Tensor) -> None:
        """Take in how many tokens stand before the one to be picked, for every row of the logits."""
        self._positions = positions

    def pairs(self, rows: Rows) -> Sequence[tuple[int, int]]:
        """Return row and slot of each, asked of the device; needed with speculative decoding only."""
        unowned = self.history.slots
        listed = zip(rows.rows.tolist(), rows.slots.tolist(), strict=True)
        return [(row, slot) for row, slot in listed if slot != unowned]

    def positions(self, rows: Rows) -> torch.Tensor:
        """Return the step's positions of these rows."""
        assert self._positions is not None
        return self._positions[rows.rows]

    def uniform(self, rows: Rows, salt: int) -> torch.Tensor:
        """Return a hash of seed and position for each row."""
        return uniform(self._seeds.of(rows), self.positions(rows), salt)
