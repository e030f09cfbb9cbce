"""The tokens of the simulated accelerator: a hash of the seed, the request and the position.

The same prompt with the same seed gives the same tokens in any batch, after a preemption, and in every process and
release. A request goes on to its ``max_tokens`` unless a grammar or a natural length ends it.

Hard constraints of a request are kept: ``allowed_token_ids``, a ``logit_bias`` of -100 or +100, and ``bad_words``,
whose last token is never used. Weaker biases change nothing: any token is a possible outcome.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from vllm_graft.splitmix import splitmix64

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.config import ModelConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

_WORDS: Final = 1 << 64
_FEW: Final = 64
_STRONG_BIAS: Final = 100.0
_LENGTH_SALT: Final = 0x6C656E677468
# If the tokenizer is not loaded, the configuration is all there is to tell text from control.
_SPECIAL: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


class TokenStream(Protocol):
    """The tokens of one request."""

    def token(self, index: int, mask: NDArray[np.int32] | None) -> int:
        """Return the output token at ``index``; ``mask`` is the grammar's row of allowed tokens, one bit each."""
        ...


class TokenSource(Protocol):
    """The seam for tokens: a subclass of the worker may put another source in place of ``HashedTokens``."""

    def open(self, request: NewRequestData) -> TokenStream:
        """Return the tokens of a request; called again when the request comes back after a preemption."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids ``0`` to ``size - 1``, of which ``special`` are not ordinary text."""

    size: int
    special: frozenset[int] = frozenset()
    padding: int = 0
    """Ids of the model past the tokenizer's last one: many configurations round the size up. They are never text."""


def read_vocabulary(model_config: ModelConfig) -> Vocabulary:
    """Read a model's vocabulary from its configuration, and from its ``tokenizer.json`` if there is one."""
    size: int = model_config.get_vocab_size()
    special = _ids(*(getattr(model_config.hf_text_config, name, None) for name in _SPECIAL))
    if model_config.skip_tokenizer_init:
        special |= ending_ids(model_config)
    file = Path(model_config.tokenizer or model_config.model) / "tokenizer.json"
    known = read_tokenizer(file) if file.is_file() else Vocabulary(size)
    return Vocabulary(min(size, known.size), special | known.special, max(size - known.size, 0))


def read_tokenizer(file: Path) -> Vocabulary:
    """Read the vocabulary of a ``tokenizer.json``."""
    content = json.loads(file.read_text(encoding="utf-8"))
    words = content.get("model", {}).get("vocab", ())
    ids = words.values() if isinstance(words, dict) else range(len(words))
    added = frozenset(token["id"] for token in content.get("added_tokens") or ())
    return Vocabulary(1 + max(max(ids, default=0), max(added, default=0)), added)


def ending_ids(model_config: ModelConfig) -> frozenset[int]:
    """Return the tokens at which vLLM ends a text by itself if it has no tokenizer."""
    return _ids(model_config.try_get_generation_config().get("eos_token_id"))


def _ids(*values: object) -> frozenset[int]:
    """Collect token ids that stand alone or in lists."""
    lists = [value if isinstance(value, list | tuple) else (value,) for value in values]
    return frozenset(token for each in lists for token in each if isinstance(token, int))


class LengthModel:
    """Natural lengths of answers: lognormal around a mean, the ending token included, never below 1.

    A model ends its answers by itself, and a scheduler sees requests come and go because of it. With the usual sigma,
    half of the answers are shorter than 0.78 of the mean and one in twenty is longer than 2.5 of it.
    """

    def __init__(self, mean: float, sigma: float = 0.7) -> None:
        if mean <= 0:
            raise ValueError(f"the mean of natural lengths must be above 0, not {mean}")
        self._logarithm = NormalDist(math.log(mean) - sigma * sigma / 2, sigma)

    def length(self, number: int) -> int:
        """Map a uniform 64-bit number to a length."""
        # The largest numbers would round to 1.0, where the inverse is not defined.
        share = min((number + 0.5) / _WORDS, 1 - 2**-53)
        return max(1, round(math.exp(self._logarithm.inv_cdf(share))))


class HashedTokens:
    """Ordinary tokens by hash; a special one only if a request or its grammar demands it, or the text ends."""

    def __init__(self, seed: int, vocabulary: Vocabulary, lengths: LengthModel | None = None) -> None:
        self._seed = seed
        self._vocabulary = vocabulary
        self._lengths = lengths

    def open(self, request: NewRequestData) -> HashedStream:
        """Return the tokens of one request, by its prompt, its adapter, and its own seed if it has one."""
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
        self._stops: frozenset[int] = frozenset()
        self._banned: frozenset[int] = frozenset()
        self._allowed: list[int] | None = None
        """The only tokens that the request allows; None for all that are not banned."""
        self._ending: int | None = None
        """The token by which vLLM sees the end of a text; None if the request ignores it."""
        self._minimum = 0
        if params is not None:
            self._stops = frozenset(params.all_stop_token_ids)
            self._minimum = params.min_tokens
            biases = (params.logit_bias or {}).items()
            banned = {token for token, bias in biases if bias <= -_STRONG_BIAS}
            self._banned = frozenset(banned.union(word[-1] for word in params.bad_words_token_ids or ()))
            # vLLM clamps biases to -100 and 100, which no other logit outweighs.
            forced = [token for token, bias in biases if bias >= _STRONG_BIAS]
            allowed = list(params.allowed_token_ids or forced)
            allowed = [token for token in allowed if token in forced] or allowed
            self._allowed = [token for token in allowed if token not in self._banned] or allowed or None
            if length is not None and not params.ignore_eos:
                self._ending = params.eos_token_id
                if self._ending is None:
                    # Without a tokenizer there is no end token, but the model's generation configuration may name one.
                    self._ending = min(vocabulary.special.intersection(params.stop_token_ids or ()), default=None)
        if self._ending in self._banned or (self._allowed and self._ending not in self._allowed):
            self._ending = None
        self._avoid = vocabulary.special | self._stops | self._banned
        self._last = max((length or 1) - 1, self._minimum)
        # A field of vLLM 0.29 and later: tokens that a request wants replayed.
        self._trace: Sequence[int] = getattr(params, "trace_decode_token_ids", None) or ()

    def token(self, index: int, mask: NDArray[np.int32] | None) -> int:
        """Return the output token at ``index``, one of those that ``mask`` allows."""
        if self._trace and index < len(self._trace):
            return self._trace[index]
        number = splitmix64(self._key, index)
        # vLLM sets all bits of a row to say "no constraint here", while a model still reasons.
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
        for step in range(self._vocab_size):
            token = (number + step) % self._vocab_size
            if token not in self._avoid:
                return token
        return number % self._vocab_size

    def _constrained(self, index: int, number: int, allowed: NDArray[np.bool_]) -> int:
        """End the text as soon as the grammar permits; until then choose any allowed token."""
        ends = [token for token in sorted(self._stops) if 0 <= token < len(allowed) and allowed[token]]
        if ends and (index >= self._minimum or len(ends) == np.count_nonzero(allowed)):
            return ends[0]
        # min_tokens is not reached: vLLM masks stop tokens until then.
        allowed[ends] = False
        wanted = [token for token in self._allowed or () if 0 <= token < len(allowed) and allowed[token]]
        choice = wanted or np.flatnonzero(allowed)
        if self._banned:
            choice = [token for token in choice if token not in self._banned] or choice
        if not len(choice):
            # The grammar allows nothing: whatever is returned, the scheduler fails this one request.
            return self._ordinary(number)
        return int(choice[skew(number, len(choice))])


def allowed_tokens(mask: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Unpack a grammar's row into one truth value per token id."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(np.bool_)


def skew(number: int, count: int) -> int:
    """Map a uniform 64-bit number to an index below ``count`` so that grammars come to an end soon.

    Among few tokens the last is preferred: it is seldom white space, which JSON allows without end. Among many, early
    ones are: tokenizers put single characters first, and those close a string.
    """
    if count <= _FEW:
        return min(number % (2 * count), count - 1)
    return min(int(math.exp(number / _WORDS * math.log(count + 1))) - 1, count - 1)


def request_key(request: NewRequestData, seed: int) -> int:
    """Hash a request to 64 bits, by its prompt, its adapter, and its own seed or else the engine's."""
    own = request.sampling_params.seed if request.sampling_params is not None else None
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    # Not Python's hash(): it differs from process to process.
    digest = hashlib.blake2b(f"{seed if own is None else own}/{adapter}/".encode(), digest_size=8)
    digest.update(array("q", request.prompt_token_ids or ()).tobytes())
    return int.from_bytes(digest.digest(), "little")
