"""A batch of requests without an engine: logits, texts, and steps over them."""

from __future__ import annotations

import random

import torch

from vllm_graft.contracts import Params, Rows, ServedModel

PROBABLE = 4


class Batch:
    """Logits with a few probable tokens in each row, and texts that repeat a phrase at their end."""

    def __init__(self, device: str, size: int, vocabulary: int, window: int) -> None:
        self.device = torch.device(device)
        self.size, self.vocabulary, self.window = size, vocabulary, window
        draw = torch.Generator().manual_seed(0)
        logits = torch.randn(size, vocabulary, generator=draw) * 3
        top = torch.randint(vocabulary, (size, PROBABLE), generator=draw)
        logits.scatter_(1, top, 17 + torch.rand(size, PROBABLE, generator=draw))
        self._source = logits.to(self.device)
        self.logits = self._source.clone()
        self.rows = torch.arange(size, device=self.device)
        self.model = ServedModel("none", vocabulary, size, self.device)
        self.texts = [text(seed, window) for seed in range(size)]
        self.tokens = self._on_device(self.texts)
        self.circles = self._on_device([circle(seed, window) for seed in range(size)])

    def restored(self) -> torch.Tensor:
        """The logits as they were."""
        return self.logits.copy_(self._source)

    def params(self, kind: type, carried: dict[str, object]) -> Params:
        return Params(values={**{key.name: key.default for key in kind.request_keys()}, **carried})

    def _on_device(self, texts: list[list[int]]) -> torch.Tensor:
        return torch.tensor(texts, dtype=torch.int32).to(self.device)


def text(seed: int, length: int) -> list[int]:
    """Common words are common, and the end stood there before."""
    draw = random.Random(seed)
    weights = [1 / (rank + 3) for rank in range(20_000)]
    found = draw.choices(range(20_000), weights, k=length)
    return found[:-8] + found[100:108]


def circle(seed: int, length: int) -> list[int]:
    """The same few tokens again and again."""
    return (list(range(seed % 7 + 1)) * length)[:length]


class tensors:
    """Texts on the device."""

    on_host = False

    def __init__(self, batch: Batch, tokens: torch.Tensor | None = None) -> None:
        self._tokens = batch.tokens if tokens is None else tokens

    def tokens(self, rows: Rows, window: int) -> torch.Tensor:
        return self._tokens


class lists:
    """Texts on the host, each as long as the window and growing."""

    on_host = True

    def __init__(self, batch: Batch, *, circles: bool = False) -> None:
        made = circle if circles else text
        self._texts = [made(seed, batch.window) for seed in range(batch.size)]
        self._more = [made(seed if circles else 10_000 + seed, 5040) for seed in range(batch.size)]
        # Where a circle goes on: 5040 is divided by every length of one, the window is not.
        self._steps = batch.window if circles else 0

    def grow(self) -> None:
        """Every request has one token more."""
        for own, more in zip(self._texts, self._more, strict=True):
            own.append(more[self._steps % len(more)])
        self._steps += 1

    def length(self, slot: int) -> int:
        return len(self._texts[slot])

    def since(self, slot: int, start: int) -> list[int]:
        return self._texts[slot][start:]


class Step:
    """A step in which every draw is 0."""

    def __init__(self, batch: Batch, history: tensors | lists) -> None:
        self.history = history
        self._zeros = torch.zeros(batch.size, device=batch.device)

    def uniform(self, rows: Rows, salt: int) -> torch.Tensor:
        return self._zeros


def rows_of(batch: Batch, history: tensors | lists) -> Rows:
    """Row n is slot n's."""
    return Rows(batch.rows, batch.rows, Step(batch, history), [(row, row) for row in range(batch.size)])
