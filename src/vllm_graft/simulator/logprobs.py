"""The log probabilities of the simulated accelerator: invented, but as consistent as a model's.

At every position the token of rank ``r`` has a probability in proportion to ``r ** -1.5``: the values are at most 0,
fall with the rank, and their probabilities add up to 1. The order of the tokens is an affine map of the ranks, so that
any token's rank is known without sorting: the hash of request and position gives the map, and the chosen token fixes
its start. A position of a prompt depends only on the tokens before it, as in a causal model.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from vllm_graft.simulator.tokens import request_key
from vllm_graft.splitmix import finalize_array, splitmix64

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_graft.simulator.tokens import Vocabulary

    Table = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]
    """Token ids and their values, a row per position with the chosen token first, and the chosen tokens' ranks."""

_EXPONENT = 1.5
# Few enough to be cached, many enough that neighbouring positions have other orders.
_MAPS = 64
_OUTPUT_SALT = 0x6F7574707574
_PROMPT_SALT = 0x70726F6D7074


class Distribution:
    """The probability of each rank, and the map from tokens to ranks at a position.

    Ids past the tokenizer's end always have the last ranks: a model gives them no weight either.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size = vocabulary.size
        self._total = vocabulary.size + vocabulary.padding

    @cached_property
    def _values(self) -> NDArray[np.float32]:
        weights = np.arange(1, self._total + 1, dtype=np.float64) ** -_EXPONENT
        values: NDArray[np.float32] = (np.log(weights) - math.log(weights.sum())).astype(np.float32)
        return values

    @cached_property
    def _cumulated(self) -> NDArray[np.float64]:
        weights = np.arange(1, self._size + 1, dtype=np.float64) ** -_EXPONENT
        cumulated: NDArray[np.float64] = np.cumsum(weights) / weights.sum()
        return cumulated

    @cached_property
    def _maps(self) -> NDArray[np.int64]:
        """Multipliers coprime to the vocabulary's size, which visit every token id once, and their inverses."""
        size = self._size
        starts = (max(size * (number + 1) // (_MAPS + 1), 1) for number in range(_MAPS))
        found = [next(each for each in range(start, start + size + 1) if math.gcd(each, size) == 1) for start in starts]
        return np.array([[each % size, pow(each, -1, size)] for each in found], dtype=np.int64)

    def width(self, count: int) -> int:
        """Return how many tokens a request for ``count`` gets; -1 asks for all."""
        return self._total if count == -1 else min(count, self._total)

    def limit(self, params: SamplingParams | None) -> int:
        """Return the last rank that a request's temperature, top-k, top-p and min-p let through."""
        if params is None:
            return self._size
        if params.temperature == 0:
            return 1
        limit = min(params.top_k, self._size) if params.top_k > 0 else self._size
        if params.top_p < 1:
            limit = min(limit, int(np.searchsorted(self._cumulated, params.top_p)) + 1)
        if params.min_p > 0:
            limit = min(limit, int(params.min_p ** (-1 / _EXPONENT)))
        return max(limit, 1)

    def table(
        self,
        words: NDArray[np.uint64],
        chosen: NDArray[np.int64],
        limits: NDArray[np.int64],
        *,
        top: int = 0,
        ids: Sequence[int] | None = None,
    ) -> Table:
        """Return the values at several positions: of the chosen tokens, and of the ``top`` ones or of given ``ids``.

        ``words`` has a hash per position, ``limits`` the last rank that each chosen token may have.
        """
        maps = self._maps[(words % np.uint64(len(self._maps))).astype(np.int64)]
        # The chosen tokens' ranks from 0 on, each drawn as often as its probability says.
        shares = (finalize_array(words) >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._cumulated[limits - 1]
        ranks = np.minimum(np.searchsorted(self._cumulated, shares, side="right"), limits - 1).astype(np.int64)
        starts = (chosen - maps[:, 0] * ranks) % self._size
        # A tokenizer may have more ids than the model; those are as unlikely as the model's last.
        last = self._total - 1
        ranks = np.where(chosen < self._size, ranks, np.minimum(chosen, last))
        if ids is not None:
            others = np.broadcast_to(np.asarray(ids, dtype=np.int64), (len(chosen), len(ids)))
            places = ((others - starts[:, None]) * maps[:, 1:]) % self._size
            places = np.where(others < self._size, places, np.minimum(others, last))
        else:
            places = np.broadcast_to(np.arange(top, dtype=np.int64), (len(chosen), top))
            others = (starts[:, None] + maps[:, :1] * places) % self._size
            others = np.where(places < self._size, others, places)
        tokens = np.concatenate((chosen[:, None], others), axis=1).astype(np.int32)
        values = self._values[np.concatenate((ranks[:, None], places), axis=1)]
        return tokens, values, (ranks + 1).astype(np.int32)


class RequestLogprobs:
    """The log probabilities that one request wants."""

    def __init__(self, distribution: Distribution, request: NewRequestData, params: SamplingParams, seed: int) -> None:
        self.distribution = distribution
        self.key = request_key(request, seed) ^ _OUTPUT_SALT
        self.limit = distribution.limit(params)
        self.token_ids = params.logprob_token_ids or None
        self.count = params.num_logprobs
        """Tokens besides the chosen one; -1 for all, None if only the prompt's values are wanted."""
        self._prompt_count = params.prompt_logprobs
        self._prompt = np.asarray(request.prompt_token_ids or (), dtype=np.int64)

    def prompt(self) -> Table | None:
        """Return the values of the prompt's tokens but the first; None if they are not wanted."""
        if self._prompt_count is None or len(self._prompt) < 2:
            return None
        places = np.arange(len(self._prompt), dtype=np.uint64)
        steps = finalize_array(self._prompt.astype(np.uint64) * np.uint64(0x2545F4914F6CDD1D) + finalize_array(places))
        # A running sum over the tokens before a position: equal for prompts that begin alike.
        words = finalize_array(np.cumsum(steps)[:-1] ^ np.uint64(_PROMPT_SALT))
        limits = np.full(len(words), self.distribution.limit(None))
        return self.distribution.table(words, self._prompt[1:], limits, top=self.distribution.width(self._prompt_count))


class LogprobModel:
    """Opens the log probabilities of the requests that want any."""

    def __init__(self, seed: int, vocabulary: Vocabulary) -> None:
        self._seed = seed
        self._distribution = Distribution(vocabulary)

    def open(self, request: NewRequestData) -> RequestLogprobs | None:
        """Return a request's log probabilities; None if it wants none."""
        params = request.sampling_params
        if params is None or (params.num_logprobs is None and params.prompt_logprobs is None):
            return None
        return RequestLogprobs(self._distribution, request, params, self._seed)


def output_table(outputs: Sequence[tuple[RequestLogprobs, int, Sequence[int]]]) -> Table:
    """Return one table, as wide as the widest, of several requests' output tokens, each from its position on."""
    if all(logprobs.token_ids is None for logprobs, _, _ in outputs):
        return _rows(outputs)
    tables = [_rows([each], each[0].token_ids) for each in outputs]
    width = max(ids.shape[1] for ids, _, _ in tables)
    wide = [(table, ((0, 0), (0, width - table[0].shape[1]))) for table in tables]
    return (
        np.concatenate([np.pad(ids, margin) for (ids, _, _), margin in wide]),
        np.concatenate([np.pad(values, margin, constant_values=-np.inf) for (_, values, _), margin in wide]),
        np.concatenate([ranks for _, _, ranks in tables]),
    )


def _rows(outputs: Sequence[tuple[RequestLogprobs, int, Sequence[int]]], ids: Sequence[int] | None = None) -> Table:
    distribution = outputs[0][0].distribution
    places = [(logprobs, index + place) for logprobs, index, tokens in outputs for place in range(len(tokens))]
    return distribution.table(
        np.array([splitmix64(logprobs.key, place) for logprobs, place in places], dtype=np.uint64),
        np.array([token for _, _, tokens in outputs for token in tokens], dtype=np.int64),
        np.array([logprobs.limit for logprobs, _ in places], dtype=np.int64),
        top=max(distribution.width(logprobs.count or 0) for logprobs, _, _ in outputs),
        ids=ids,
    )
