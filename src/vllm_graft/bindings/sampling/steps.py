"""What a step offers behind ``Rows``: row and slot on the host, positions, randomness that needs no generator, history.

The V1 model runner keeps a request's tokens in lists on the host, the V2 runner on the device. ``HostStep`` and
``DeviceStep`` offer the same from either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.contracts import PerSlot, Rows

if TYPE_CHECKING:
    import torch

_DRAFTS: Final = 64
"""How many positions beyond the last certain one a step may look at: drafts that are yet to be verified."""


@dataclass(slots=True)
class Tokens:
    """A request's tokens on the host: vLLM's own lists, of which the second grows."""

    prompt: Sequence[int]
    output: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def since(self, start: int) -> list[int]:
        """The tokens from an index on."""
        first = len(self.prompt)
        found = [*self.prompt[start:], *self.output] if start < first else list(self.output[start - first :])
        if found and found[-1] < 0:
            raise RuntimeError("vLLM has not filled in the last tokens of this request, so its history is not known")
        return found


def tensor(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Whole numbers on the device, without waiting for it."""
    import torch

    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, salt: int) -> torch.Tensor:
    """Numbers in [0, 1), each a hash of seed, position and salt; the same on every device."""
    import torch

    mixed = _mix(seeds + _mix(positions + (salt << 32)))
    return ((mixed >> 40) & 0xFFFFFF).to(torch.float32) / 16777216.0


def _mix(number: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64, on signed numbers that wrap."""
    number = number * _signed(0x9E3779B97F4A7C15) + 1
    number = (number ^ _shifted(number, 30)) * _signed(0xBF58476D1CE4E5B9)
    number = (number ^ _shifted(number, 27)) * _signed(0x94D049BB133111EB)
    return number ^ _shifted(number, 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(number: torch.Tensor, bits: int) -> torch.Tensor:
    return (number >> bits) & ((1 << (64 - bits)) - 1)


class HostStep:
    """A step of the V1 model runner: everything but the logits is on the host."""

    def __init__(self, seeds: PerSlot, tokens: dict[int, Tokens]) -> None:
        self._seeds = seeds
        self.history = HostHistory(tokens)
        self._tokens = tokens

    def pairs(self, rows: Rows) -> Sequence[tuple[int, int]]:
        """Row and slot of each."""
        return list(zip(rows.rows.tolist(), rows.slots.tolist(), strict=True))

    def positions(self, rows: Rows) -> torch.Tensor:
        """How many tokens each request has."""
        return tensor([len(self._tokens[slot]) for _, slot in rows.pairs], rows.rows.device)

    def uniform(self, rows: Rows, salt: int) -> torch.Tensor:
        """A hash of seed and position."""
        return uniform(self._seeds.of(rows), self.positions(rows), salt)


class HostHistory:
    """Tokens in vLLM's own lists."""

    on_host = True

    def __init__(self, tokens: dict[int, Tokens]) -> None:
        self._tokens = tokens

    def length(self, slot: int) -> int:
        """How many tokens the request has."""
        return len(self._tokens[slot])

    def since(self, slot: int, start: int) -> Sequence[int]:
        """The request's tokens from an index on."""
        return self._tokens[slot].since(start)

    def tokens(self, rows: Rows, window: int) -> torch.Tensor:
        """The last tokens of each row, the newest in the last column."""
        lines = []
        for _, slot in rows.pairs:
            last = self.since(slot, max(0, self.length(slot) - window))
            lines.append([-1] * (window - len(last)) + list(last))
        return tensor([token for line in lines for token in line], rows.rows.device).view(len(lines), window)


class DeviceStep:
    """A step of the V2 model runner: rows, positions and tokens are on the device."""

    def __init__(self, seeds: PerSlot, history: DeviceHistory) -> None:
        self._seeds = seeds
        self.history = history
        self._positions: torch.Tensor | None = None

    def begin(self, positions: torch.Tensor) -> None:
        """A step: how many tokens stand before the one to be picked, for every row of the logits."""
        self._positions = positions

    def pairs(self, rows: Rows) -> Sequence[tuple[int, int]]:
        """Row and slot of each, asked of the device; needed with speculative decoding only."""
        nobody = self.history.slots
        listed = zip(rows.rows.tolist(), rows.slots.tolist(), strict=True)
        return [(row, slot) for row, slot in listed if slot != nobody]

    def positions(self, rows: Rows) -> torch.Tensor:
        """Those of the step, for these rows."""
        assert self._positions is not None
        return self._positions[rows.rows]

    def uniform(self, rows: Rows, salt: int) -> torch.Tensor:
        """A hash of seed and position."""
        return uniform(self._seeds.of(rows), self.positions(rows), salt)


class DeviceHistory:
    """Tokens on the device: a ring of the last ones of each slot.

    vLLM keeps all tokens in memory of the host that the device reads over its bus. The ring is a copy near the device,
    made when a request enters and kept up with the tokens that each step is fed. A token stands at its position
    modulo the ring's size, so that drafts which were refused are overwritten by what came instead, and a step that is
    computed twice writes the same again.
    """

    on_host = False

    def __init__(self, states: Any, window: int) -> None:
        import torch

        self.slots: int = states.max_num_reqs
        self._states = states
        self._size = window + _DRAFTS
        self._ring = torch.full((self.slots + 1, self._size), -1, dtype=torch.int32, device=states.device)
        self._ages = torch.arange(self._size, device=states.device)
        self._new: list[int] = []

    def enter(self, slot: int) -> None:
        """A request has this slot now; its tokens are fetched with the next step."""
        self._new.append(slot)

    def begin(self, slots: torch.Tensor, positions: torch.Tensor, fed: torch.Tensor) -> None:
        """Keep up with a step: ``fed`` is each row's newest token, ``positions`` counts it in."""
        if self._new:
            self._fetch(tensor(sorted(set(self._new)), self._ring.device))
            self._new.clear()
        self._ring[slots, (positions - 1) % self._size] = fed.to(self._ring.dtype)

    def _fetch(self, slots: torch.Tensor) -> None:
        import torch

        total = self._states.total_len.gpu[slots].to(torch.int64)[:, None]
        at = total - 1 - self._ages
        tokens = self._states.all_token_ids.gpu[slots[:, None], at.clamp(min=0)]
        self._ring[slots[:, None], at % self._size] = torch.where(at >= 0, tokens, -1).to(self._ring.dtype)

    def length(self, slot: int) -> int:
        """How many tokens the request has; waits for the device."""
        return int(self._states.total_len.gpu[slot].item())

    def since(self, slot: int, start: int) -> Sequence[int]:
        """The request's tokens from an index on; waits for the device."""
        found: list[int] = self._states.all_token_ids.gpu[slot, start : self.length(slot)].tolist()
        return found

    def tokens(self, rows: Rows, window: int) -> torch.Tensor:
        """The last tokens of each row, the newest in the last column."""
        import torch

        back = torch.arange(window, 0, -1, device=self._ring.device)
        at = rows.positions[:, None] - back
        return torch.where(at >= 0, self._ring[rows.slots[:, None], at % self._size], -1)
