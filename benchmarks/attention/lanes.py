"""One text read under many policies at once: a language model of Hugging Face's, in float32, with the mask written out.

Each policy has a lane: the keys and values that it holds, and where in the text they stand. The model reads a block of
tokens in all lanes in one pass, which is about as fast as a longer prompt, and its attention is over what a lane holds.
A policy that has dropped nothing yet has no lane of its own: up to there it is full attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.attention.policies import BLOCK, Policy
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

FREE: Final = -1
"""The position of a slot that holds no token."""
EVERYBODY: Final = -1
"""The branch of tokens that all branches see."""


class Network:
    """A model, and the sizes of its KV cache."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        AttentionInterface.register("lanes", attend)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="lanes"
        ).to(device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        config = self.model.config
        self.heads: int = config.num_attention_heads
        self.shape: tuple[int, int, int] = (
            config.num_hidden_layers,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )

    def states(self, tokens: torch.Tensor, positions: torch.Tensor, lanes: Sequence[Lane]) -> torch.Tensor:
        """Return the last hidden states of tokens, a row for each lane."""
        found: torch.Tensor = self.model.model(
            input_ids=tokens, position_ids=positions, use_cache=False, lanes=lanes
        ).last_hidden_state
        return found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model.lm_head(states)
        return found

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, with nothing added."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return found

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, as far as the end of the answer."""
        end = self.tokenizer.eos_token_id
        found: str = self.tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens)
        return found


class Lane:
    """The keys and values that are held, in slots whose order means nothing: the keys carry their positions."""

    def __init__(self, network: Network, capacity: int) -> None:
        self.network, self.capacity = network, capacity
        layers, kv_heads, size = network.shape
        self.keys = torch.empty(layers, kv_heads, capacity, size)
        self.values = torch.empty(layers, kv_heads, capacity, size)
        self.at = torch.full((capacity,), FREE)
        self.branch = torch.full((capacity,), EVERYBODY)
        self.mass = torch.zeros(capacity)
        """The attention that each token has had, summed over the tokens since, in the mean of layers and heads."""
        self.used = 0
        self.scored = False
        self._slots = torch.empty(0, dtype=torch.long)
        self._bias = torch.empty(0)

    def fork(self, scored: bool) -> Lane:
        """Return another lane that holds the same."""
        lane = Lane(self.network, self.capacity)
        lane.used, lane.scored = self.used, scored
        for mine, its in ((self.keys, lane.keys), (self.values, lane.values)):
            its[:, :, : self.used] = mine[:, :, : self.used]
        for mine, its in ((self.at, lane.at), (self.branch, lane.branch), (self.mass, lane.mass)):
            its[:] = mine
        return lane

    @property
    def held(self) -> torch.Tensor:
        """The slots that hold a token."""
        return (self.at != FREE).nonzero().flatten()

    def drop(self, slots: torch.Tensor) -> None:
        self.at[slots] = FREE
        self.mass[slots] = 0

    def enter(self, positions: torch.Tensor, branches: torch.Tensor) -> None:
        """Give slots to the tokens that come next, and write out which tokens each of them sees."""
        self._slots = (self.at == FREE).nonzero().flatten()[: len(positions)]
        self.at[self._slots], self.branch[self._slots] = positions, branches
        self.used = int(self.held.max()) + 1
        at, branch = self.at[: self.used], self.branch[: self.used]
        earlier = (at != FREE) & (at <= positions[:, None])
        seen = earlier & ((branch == EVERYBODY) | (branch == branches[:, None]))
        self._bias = torch.where(seen, 0.0, -torch.inf)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return the attention output of the tokens that have entered, ``[heads, tokens, head_size]``."""
        keys, values = self.keys[layer], self.values[layer]
        keys[:, self._slots], values[:, self._slots] = key, value
        heads, tokens, size = query.shape
        kv_heads = keys.shape[0]
        # Query heads that share a key head are rows of one product.
        rows = (query * scale).reshape(kv_heads, -1, size)
        scores = rows @ keys[:, : self.used].transpose(1, 2)
        scores.view(heads, tokens, -1).add_(self._bias)
        weights = scores.softmax(-1)
        if self.scored:
            self.mass[: self.used] += weights.view(-1, self.used).sum(0) / (heads * self.keys.shape[0])
        return (weights @ values[:, : self.used]).view(heads, tokens, size)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    lanes: Sequence[Lane],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in each lane to what it holds; the attention of a layer, as Hugging Face's models call it."""
    rows = [
        lane.attend(module.layer_idx, query[row], key[row], value[row], scaling).transpose(0, 1)
        for row, lane in enumerate(lanes)
    ]
    return torch.stack(rows), None


class Reading:
    """A text that is read under many policies."""

    def __init__(self, network: Network, policies: Sequence[Policy], capacity: int) -> None:
        self.network = network
        self.base = Lane(network, capacity)
        self.base.scored = any(policy.scored for policy in policies)
        self.lane_of: dict[Policy, Lane] = dict.fromkeys(policies, self.base)

    @property
    def lanes(self) -> list[Lane]:
        """The lanes, each once."""
        return list(dict.fromkeys([self.base, *self.lane_of.values()]))

    def retain(self, begin: int) -> None:
        """Ask each policy what it keeps, before the tokens from ``begin`` on are read."""
        for policy, lane in self.lane_of.items():
            slots = lane.held
            at = lane.at[slots]
            gone = slots[~policy.keep(begin, at, lane.mass[slots] / (begin - at))]
            if not len(gone):
                continue
            if lane is self.base:
                lane = self.lane_of[policy] = self.base.fork(policy.scored)
            lane.drop(gone)

    def read(self, tokens: torch.Tensor) -> Iterator[tuple[int, dict[Policy, torch.Tensor]]]:
        """Read block by block; yield where each block begins, and its hidden states under each policy."""
        for begin in range(0, len(tokens), BLOCK):
            self.retain(begin)
            positions = torch.arange(begin, min(begin + BLOCK, len(tokens)))
            states = self.step(tokens[positions], positions, torch.full_like(positions, EVERYBODY))
            yield begin, states

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, branches: torch.Tensor) -> dict[Policy, torch.Tensor]:
        """Read tokens in all lanes, and return their hidden states under each policy.

        ``tokens`` are one row for all lanes, or a row for each, in the order of ``lanes``.
        """
        lanes = self.lanes
        for lane in lanes:
            lane.enter(positions, branches)
        states = self.network.states(tokens.expand(len(lanes), -1), positions.expand(len(lanes), -1), lanes)
        row_of = {id(lane): row for row, lane in enumerate(lanes)}
        return {policy: states[row_of[id(lane)]] for policy, lane in self.lane_of.items()}
