"""JSON documents that grow by a token with each step, over a vocabulary made of random words."""

from __future__ import annotations

import random

import torch
from benchmarks.sampling.batch import Batch

from vllm_graft.contracts import Params, ServedModel
from vllm_graft.plugins.samplers.constrained_json import ConstrainedJSONSampler
from vllm_graft.plugins.samplers.constrained_json.vocabulary import _byte_signs

LONGEST = 120


class Words:
    """A tokenizer: every byte, then words of a few letters with a blank or a sign of JSON before some of them."""

    all_special_ids = (0,)

    def __init__(self, size: int) -> None:
        draw = random.Random(0)
        signs = {byte: sign for sign, byte in _byte_signs().items()}
        found = dict.fromkeys(["end", *signs.values()])
        while len(found) < size:
            text = draw.choice(["", " ", " ", '"', ', "', '{"', '": ']) + "".join(
                draw.choices("etaoinshrdlu", k=draw.randint(1, 8))
            )
            found["".join(signs[byte] for byte in text.encode())] = None
        self._vocabulary = {text: token for token, text in enumerate(found)}

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    def get_added_vocab(self) -> dict[str, int]:
        return {}


class Documents:
    """One document for each row of a batch; an ended one makes room for another."""

    def __init__(self, batch: Batch, **asked: float) -> None:
        self._batch, self._asked = batch, asked
        words = Words(batch.vocabulary)
        model = ServedModel("words", batch.vocabulary, batch.size, batch.device, (0,), load_tokenizer=lambda: words)
        self._sampler = ConstrainedJSONSampler()
        self._sampler.setup(model)
        self._requests = [self._enter(seed) for seed in range(batch.size)]
        self._picked: torch.Tensor | None = None

    def step(self, logits: torch.Tensor) -> None:
        """As the binding does it: on a copy."""
        self._picked = self._sampler.sample(logits[self._batch.rows], [params for params, _ in self._requests])

    def grow(self) -> None:
        """What was picked is part of the documents."""
        for row, token in enumerate(self._picked.tolist() if self._picked is not None else ()):
            generated = self._requests[row][1]
            generated.append(token)
            if token == 0 or len(generated) == LONGEST:
                self._requests[row] = self._enter(row)

    def _enter(self, seed: int) -> tuple[Params, list[int]]:
        generated: list[int] = []
        keys = {"json_sampler": True, "json_max_depth": 8, "json_root": "object"}
        params = Params(keys, seed=seed, max_tokens=LONGEST, generated_so_far=lambda: generated, **self._asked)
        return params, generated
