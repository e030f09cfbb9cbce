"""The same by other means: plainly in torch, with a sort, and row by row in Python as logits processors are written."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from benchmarks.sampling.batch import Batch

from vllm_graft.plugins.samplers.xtc import exclude_top

Step = Callable[[torch.Tensor], None]


def dry_loop(batch: Batch) -> Step:
    """Each row's text is gone through backwards, place by place."""
    allowed, base, multiplier = 2, 1.75, 0.8

    def step(logits: torch.Tensor) -> None:
        for row, text in enumerate(batch.texts):
            worst: dict[int, float] = {}
            last = text[-1]
            for at in range(len(text) - 2, -1, -1):
                if text[at] != last:
                    continue
                length = 1
                while length <= at and length < 128 and text[at - length] == text[-1 - length]:
                    length += 1
                if length >= allowed:
                    token = text[at + 1]
                    worst[token] = max(worst.get(token, 0.0), multiplier * base ** (length - allowed))
            for token, penalty in worst.items():
                logits[row, token] -= penalty

    return step


def ngram_loop(batch: Batch) -> Step:
    """Every sequence of each row is made and compared."""
    size = 3

    def step(logits: torch.Tensor) -> None:
        for row, text in enumerate(batch.texts):
            prefix = tuple(text[1 - size :])
            found = set()
            for at in range(len(text) - size + 1):
                sequence = tuple(text[at : at + size])
                if sequence[:-1] == prefix:
                    found.add(sequence[-1])
            if found:
                logits[row, list(found)] = -math.inf

    return step


def sigma_eager(logits: torch.Tensor) -> None:
    """As it is written down, with what is -inf left out."""
    finite = logits > -torch.inf
    count = finite.sum(1, keepdim=True)
    mean = torch.where(finite, logits, 0.0).sum(1, keepdim=True) / count
    spread = torch.where(finite, logits - mean, 0.0).square().sum(1, keepdim=True).div(count).sqrt()
    logits.masked_fill_(logits < logits.amax(1, keepdim=True) - spread, -torch.inf)


def sigma_loop(logits: torch.Tensor) -> None:
    """The same for one row after the other."""
    for row in logits:
        finite = row[row > -math.inf]
        row[row < finite.max() - finite.std(correction=0)] = -math.inf


def xtc_sorted(logits: torch.Tensor) -> None:
    """A full sort of all probabilities, and a question to the device for each row."""
    shares, order = logits.softmax(1).sort(1, descending=True)
    for row in range(logits.shape[0]):
        count = int((shares[row] >= 0.1).sum().item())
        if count >= 2:
            logits[row, order[row, : count - 1]] = -math.inf


def all_eager(batch: Batch, logits: torch.Tensor, drawn: torch.Tensor, logarithms: torch.Tensor) -> None:
    """The loops over texts where there is nothing plain, else plain torch."""
    dry_loop(batch)(logits)
    ngram_loop(batch)(logits)
    sigma_eager(logits)
    exclude_top(logits, batch.rows, drawn, logarithms)
