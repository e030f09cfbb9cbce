"""Steps for strategies without an engine: texts in lists on the host or in tensors as on a device, rows as asked."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_graft.contracts import Params, Rows, ServedModel

CPU = torch.device("cpu")


class Lists:
    """Texts on the host, by slot."""

    on_host = True

    def __init__(self, texts):
        self.texts = texts

    def length(self, slot):
        return len(self.texts[slot])

    def since(self, slot, start):
        return list(self.texts[slot][start:])

    def tokens(self, rows, window):
        raise AssertionError("a copy of all tokens in every step")


class Tensors:
    """Texts as on a device: whoever asks the host for them would wait."""

    on_host = False

    def __init__(self, texts):
        self.texts = texts

    def length(self, slot):
        raise AssertionError("waits for the device")

    def since(self, slot, start):
        raise AssertionError("waits for the device")

    def tokens(self, rows, window):
        lines = [self.texts.get(slot, [])[-window:] for slot in rows.slots.tolist()]
        return torch.tensor([[-1] * (window - len(line)) + list(line) for line in lines], dtype=torch.int32)


@dataclass
class Step:
    """A step whose random numbers are given."""

    history: object
    draws: dict[int, float] = field(default_factory=dict)

    def pairs(self, rows):
        if not self.history.on_host:
            raise AssertionError("waits for the device")
        return list(zip(rows.rows.tolist(), rows.slots.tolist(), strict=True))

    def positions(self, rows):
        raise AssertionError("nobody needs positions")

    def uniform(self, rows, salt):
        return torch.tensor([self.draws.get(slot, 0.0) for slot in rows.slots.tolist()])


def rows_of(places, history, draws=None):
    """``places``: row to slot."""
    return Rows(torch.tensor(list(places)), torch.tensor(list(places.values())), Step(history, draws or {}))


def params_of(kind, temperature=1.0, **carried):
    """A request of a strategy, defaults filled in."""
    values = {key.name: key.default for key in kind.request_keys()}
    assert set(carried) <= set(values)
    return Params(values={**values, **carried}, temperature=temperature)


class Words:
    """A tokenizer whose tokens are these texts, and whose encoding is one token for each letter."""

    def __init__(self, texts):
        self.texts = texts
        self.decoded = 0

    def __len__(self):
        return len(self.texts)

    def decode(self, ids):
        self.decoded += 1
        return "".join(self.texts[token] for token in ids)

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [self.texts.index(letter) for letter in text if letter in self.texts]


def made(kind, vocabulary, slots=4, texts=None, options=None):
    """A strategy, set up for a model whose tokens read like this."""
    words = Words(texts or [chr(97 + token % 26) for token in range(vocabulary)])
    strategy = kind(options)
    strategy.setup(ServedModel("a model", vocabulary, slots, CPU, load_tokenizer=lambda: words))
    return strategy


def lengths_of(text, window, breakers=frozenset(), longest=128):
    """The reference: for each token of the window how many tokens before it equal the text's end, by looking."""
    text = text[-window:]
    found = []
    for at in range(len(text)):
        length = 0
        while length < longest and at - 1 - length >= 0:
            token = text[len(text) - 1 - length]
            if text[at - 1 - length] != token or token < 0 or token in breakers:
                break
            length += 1
        found.append((text[at], length))
    return found
