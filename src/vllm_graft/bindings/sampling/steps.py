"""What a step offers behind ``Rows``: row and slot on the host, positions, randomness that needs no generator, history.

The V1 model runner keeps a request's tokens in lists on the host, the V2 runner on the device. ``HostStep`` works where
logits and tokens are both on the host, ``DeviceStep`` where the logits are on a device: there the last tokens are kept
beside them, whichever runner they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.contracts import PerSlot, Rows

if TYPE_CHECKING:
    import torch

_DRAFTS: Final = 64
"""How many positions beyond the last certain one a step may look at, at least: drafts that are yet to be verified."""


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


class ReadOnlyTokens(Sequence[int]):
    """A list of vLLM's that grows, for samplers to read: what they write into it would be vLLM's too."""

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


def tensor(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Whole numbers on the device, without waiting for it."""
    import torch

    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, salt: int) -> torch.Tensor:
    """Numbers in [0, 1), each a hash of seed, position and salt; the same on every device."""
    import torch

    from vllm_graft.bindings.sampling.truncation import has_triton

    if has_triton(seeds):
        from vllm_graft.bindings.sampling.step_kernels import uniform_by_triton

        return uniform_by_triton(seeds, positions, salt)
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
    """A step of the V1 model runner on a CPU: everything is on the host."""

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


class Ring:
    """The last tokens of each slot, near the device.

    A token stands at its position modulo the ring's size, so that drafts which were refused are overwritten by what
    came instead, and a step that is computed twice writes the same again.
    """

    def __init__(self, slots: int, window: int, device: torch.device, drafts: int = _DRAFTS) -> None:
        import torch

        self.size = window + drafts
        self.device = device
        self._tokens = torch.full((slots + 1, self.size), -1, dtype=torch.int32, device=device)
        self._back = torch.arange(self.size, 0, -1, device=device)

    def write(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put tokens where they belong; positions count from 0."""
        self._tokens[slots, positions % self.size] = tokens.to(self._tokens.dtype)

    def last(self, slots: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
        """The tokens before each position, [slots, window], the newest in the last column, -1 where there is none."""
        import torch

        from vllm_graft.bindings.sampling.truncation import has_triton

        if has_triton(self._tokens):
            from vllm_graft.bindings.sampling.step_kernels import last_by_triton

            return last_by_triton(self._tokens, slots, positions, window)
        at = positions[:, None] - self._back[self.size - window :]
        return torch.where(at >= 0, self._tokens[slots[:, None], at % self.size], -1)


class DeviceHistory:
    """The V2 runner's tokens: it keeps them in memory of the host that the device reads over its bus, and those that
    are wanted are copied into a ring when a request enters, and with each step that feeds one more."""

    on_host = False

    def __init__(self, states: Any, window: int, drafts: int = 0) -> None:
        self.slots: int = states.max_num_reqs
        self._states = states
        self._ring = Ring(self.slots, window, states.device, max(_DRAFTS, drafts + 1))
        self._new: set[int] = set()

    def enter(self, slot: int) -> None:
        """A request has this slot now; its tokens are fetched with its steps until all of its prompt is read."""
        self._new.add(slot)

    def begin(
        self, slots: torch.Tensor, positions: torch.Tensor, fed: torch.Tensor, read: Iterable[tuple[int, int]]
    ) -> None:
        """Keep up with a step: ``fed`` is each row's newest token, ``positions`` counts it in, and ``read`` says of
        each request's slot how many tokens the model has read after it."""
        here = [(slot, end) for slot, end in read if slot in self._new] if self._new else ()
        if here:
            # A prompt that is read in parts feeds tokens from before the window: until its end all is fetched anew.
            self._fetch(tensor([slot for slot, _ in here], self._ring.device))
            self._new.difference_update(slot for slot, end in here if end >= self._states.prefill_len.np[slot])
        self._ring.write(slots, positions - 1, fed)

    def _fetch(self, slots: torch.Tensor) -> None:
        import torch

        ages = torch.arange(self._ring.size, device=self._ring.device)
        at = self._states.total_len.gpu[slots].to(torch.int64)[:, None] - 1 - ages
        tokens = self._states.all_token_ids.gpu[slots[:, None], at.clamp(min=0)]
        self._ring.write(slots[:, None], at, torch.where(at >= 0, tokens, -1))

    def length(self, slot: int) -> int:
        """How many tokens the request has; waits for the device."""
        return int(self._states.total_len.gpu[slot].item())

    def since(self, slot: int, start: int) -> Sequence[int]:
        """The request's tokens from an index on; waits for the device."""
        found: list[int] = self._states.all_token_ids.gpu[slot, start : self.length(slot)].tolist()
        return found

    def tokens(self, rows: Rows, window: int) -> torch.Tensor:
        """The last tokens of each row, the newest in the last column."""
        return self._ring.last(rows.slots, rows.positions, window)


class FedHistory:
    """The V1 runner's tokens where the logits are on a device: vLLM's lists, of which what is new is sent along."""

    on_host = False

    def __init__(self, tokens: dict[int, Tokens], slots: int, window: int, device: torch.device) -> None:
        self.slots = slots
        self._tokens = tokens
        self._ring = Ring(slots, window, device)
        self._sent: dict[int, int] = {}

    def enter(self, slot: int) -> None:
        """A request has this slot now; its tokens are sent with the next step."""
        self._sent.pop(slot, None)

    def begin(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Send the tokens that these requests have and the device has not: for most of them the last one."""
        slots: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        for _, slot in pairs:
            held = self._tokens[slot]
            end = len(held)
            new = held.since(max(self._sent.get(slot, 0), end - self._ring.size))
            self._sent[slot] = end
            slots += [slot] * len(new)
            positions += range(end - len(new), end)
            tokens += new
        if tokens:
            sent = tensor([*slots, *positions, *tokens], self._ring.device).view(3, -1)
            self._ring.write(sent[0], sent[1], sent[2])

    def length(self, slot: int) -> int:
        """How many tokens the request has."""
        return len(self._tokens[slot])

    def since(self, slot: int, start: int) -> Sequence[int]:
        """The request's tokens from an index on."""
        return self._tokens[slot].since(start)

    def tokens(self, rows: Rows, window: int) -> torch.Tensor:
        """The last tokens of each row, the newest in the last column."""
        return self._ring.last(rows.slots, rows.positions, window)


class DeviceStep:
    """A step whose logits, positions and last tokens are on a device."""

    def __init__(self, seeds: PerSlot, history: DeviceHistory | FedHistory) -> None:
        self._seeds = seeds
        self.history = history
        self._positions: torch.Tensor | None = None

    def begin(self, positions: torch.Tensor) -> None:
        """How many tokens stand before the one to be picked, for every row of the logits."""
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
