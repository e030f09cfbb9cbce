"""Where the simulated accelerator's tokens come from: a hash of the seed, the request and the position.

The same prompt with the same seed gives the same tokens in any batch, after a preemption, and in every process and
release. A request goes on to its ``max_tokens`` unless a grammar or a model of natural lengths ends it.

What a request forbids or demands outright is kept: ``allowed_token_ids``, a ``logit_bias`` of -100 or +100, and
``bad_words``, whose last token is not used at all. Weaker biases are soft wishes: any token is a possible outcome.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vllm_graft.hashing import splitmix64

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_graft.plugins.platforms.simulated.lengths import LengthModel
    from vllm_graft.plugins.platforms.simulated.vocabulary import Vocabulary

_WORDS = 1 << 64
_FEW = 64
_STRONG_BIAS = 100.0
_LENGTH_SALT = 0x6C656E677468


class TokenStream(Protocol):
    """The tokens of one request."""

    def token(self, index: int, mask: NDArray[np.int32] | None) -> int:
        """The output token at ``index``; ``mask`` is the grammar's row of allowed tokens, one bit each, or None."""
        ...


class TokenSource(Protocol):
    """The seam for tokens: what stands where a model would compute and sample."""

    def open(self, request: NewRequestData) -> TokenStream:
        """The tokens of a request that the scheduler names for the first time, or again after a preemption."""
        ...


class HashedTokens:
    """Ordinary tokens by hash: never a special one, unless a request or its grammar asks for it, or the text ends."""

    def __init__(self, seed: int, vocabulary: Vocabulary, lengths: LengthModel | None = None) -> None:
        self._seed = seed
        self._vocabulary = vocabulary
        self._lengths = lengths

    def open(self, request: NewRequestData) -> HashedStream:
        """The tokens of one request, by its prompt, its adapter, and its own seed where it has one."""
        key = request_key(request, self._seed)
        length = self._lengths.length(splitmix64(key ^ _LENGTH_SALT, 0)) if self._lengths is not None else None
        return HashedStream(key, self._vocabulary, request.sampling_params, length)


class HashedStream:
    """The tokens of one request, each computed from its position alone."""

    def __init__(
        self, key: int, vocabulary: Vocabulary, params: SamplingParams | None = None, length: int | None = None
    ) -> None:
        self._key = key
        self._vocab_size = vocabulary.size
        self._stops = frozenset(params.all_stop_token_ids) if params is not None else frozenset()
        self._minimum = params.min_tokens if params is not None else 0
        banned, self._allowed = _demands(params) if params is not None else (frozenset(), None)
        self._banned = banned
        self._avoid = vocabulary.special | self._stops | banned
        self._ending = _ending(params, vocabulary) if params is not None and length is not None else None
        if self._ending in banned or (self._allowed and self._ending not in self._allowed):
            self._ending = None
        self._last = max((length or 1) - 1, self._minimum)
        # A field of vLLM 0.29 and later: the tokens a request wants to see replayed.
        self._trace: Sequence[int] = getattr(params, "trace_decode_token_ids", None) or ()

    def token(self, index: int, mask: NDArray[np.int32] | None) -> int:
        """The output token at ``index``, one of those ``mask`` allows."""
        if self._trace and index < len(self._trace):
            return self._trace[index]
        number = splitmix64(self._key, index)
        # A row with all bits set is vLLM's way to say "no constraint here" (while a model still reasons).
        if mask is not None and not bool((mask == -1).all()):
            return self._constrained(index, number, allowed_tokens(mask, self._vocab_size))
        if self._ending is not None and index >= self._last:
            return self._ending
        if self._allowed:
            early = index < self._minimum
            choice = [token for token in self._allowed if not (early and token in self._stops)] or self._allowed
            return choice[number % len(choice)]
        return self._ordinary(number)

    def _ordinary(self, number: int) -> int:
        token = number % self._vocab_size
        if token not in self._avoid:
            return token
        for step in range(1, self._vocab_size):
            token = (number + step) % self._vocab_size
            if token not in self._avoid:
                return token
        return number % self._vocab_size

    def _constrained(self, index: int, number: int, allowed: NDArray[np.bool_]) -> int:
        """Ends the text as soon as the grammar permits; until then any allowed token will do."""
        ends = [token for token in sorted(self._stops) if 0 <= token < len(allowed) and allowed[token]]
        if ends and (index >= self._minimum or len(ends) == np.count_nonzero(allowed)):
            return ends[0]
        allowed[ends] = False
        wanted = [token for token in self._allowed or () if 0 <= token < len(allowed) and allowed[token]]
        choice = wanted or np.flatnonzero(allowed)
        if self._banned:
            choice = [token for token in choice if token not in self._banned] or choice
        if not len(choice):
            # A grammar that allows nothing: whatever is returned, the scheduler fails this one request.
            return self._ordinary(number)
        return int(choice[skewed(number, len(choice))])


def _demands(params: SamplingParams) -> tuple[frozenset[int], list[int] | None]:
    """(the tokens a request forbids, the only ones it allows or None)."""
    biases = (params.logit_bias or {}).items()
    banned = {token for token, bias in biases if bias <= -_STRONG_BIAS}
    banned.update(word[-1] for word in params.bad_words_token_ids or ())
    forced = [token for token, bias in biases if bias >= _STRONG_BIAS]
    allowed = list(params.allowed_token_ids or forced)
    allowed = [token for token in allowed if token in forced] or allowed
    return frozenset(banned), [token for token in allowed if token not in banned] or allowed or None


def _ending(params: SamplingParams, vocabulary: Vocabulary) -> int | None:
    """The token by which vLLM sees that a text has ended; None where the request wants to go on regardless.

    Without a tokenizer there is no end token, but the model's generation configuration may name one to stop at.
    """
    if params.ignore_eos:
        return None
    if params.eos_token_id is not None:
        return int(params.eos_token_id)
    return min(vocabulary.special.intersection(params.stop_token_ids or ()), default=None)


def request_key(request: NewRequestData, seed: int) -> int:
    """The number that stands for a request: by its prompt, its adapter, and its own seed or else the engine's."""
    own = request.sampling_params.seed if request.sampling_params is not None else None
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    return stream_key(seed if own is None else own, adapter, request.prompt_token_ids or ())


def stream_key(seed: int, adapter: str, prompt: Sequence[int]) -> int:
    """The 64-bit number that stands for a request: the same for the same seed, adapter and prompt."""
    digest = hashlib.blake2b(f"{seed}/{adapter}/".encode(), digest_size=8)
    digest.update(array("q", prompt).tobytes())
    return int.from_bytes(digest.digest(), "little")


def allowed_tokens(mask: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """For each token id whether its bit is set in a grammar's row."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(np.bool_)


def skewed(number: int, count: int) -> int:
    """An index below ``count`` by which grammars come to an end soon: often the last of few, rarely a late one of many.

    Among few tokens the last is seldom white space, which JSON allows without end. Among many, tokenizers put single
    characters first, and those close a string.
    """
    if count <= _FEW:
        return min(number % (2 * count), count - 1)
    share = number / _WORDS
    return min(int(math.exp(share * math.log(count + 1))) - 1, count - 1)
