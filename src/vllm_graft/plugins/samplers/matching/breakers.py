"""Tokens that contain a text: an index over the characters of the whole vocabulary, made once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any, Final

import numpy as np

from vllm_graft.plugins.samplers.matching.sets import TokenSet

_LOG: Final = logging.getLogger("vllm.graft")
_CACHED_LISTS: Final = 64
_CACHED_TEXTS: Final = 512
_SEPARATOR: Final = 0x110000
"""One more than the last character there is, so that no text reaches over the end of another."""
_BITS: Final = 21
"""The bits that a character takes, the separator included."""


class Breakers:
    """The tokens that contain one of several texts.

    A text that no token contains stands for the last token of its encoding; one that the tokenizer cannot encode, for
    none. The vocabulary is decoded at the first call; after that a new text costs a fraction of a millisecond.
    """

    def __init__(self, load_tokenizer: Callable[[], object], vocabulary: int) -> None:
        self._load = load_tokenizer
        self._vocabulary = vocabulary
        self._index: TextIndex | None = None
        # One of each per object, so that nothing outlives the strategy.
        find = lru_cache(_CACHED_TEXTS)(self._find)
        none = TokenSet.of((), vocabulary)
        self._tokens_of_list = lru_cache(_CACHED_LISTS)(lambda texts: reduce(or_, map(find, texts), none))

    def tokens(self, texts: Iterable[str]) -> TokenSet:
        """Return the tokens at which one of these texts ends a match."""
        return self._tokens_of_list(tuple(sorted({text for text in texts if text})))

    def _find(self, text: str) -> TokenSet:
        tokenizer: Any = self._load()
        if self._index is None:
            self._index = TextIndex(decode_vocabulary(tokenizer, self._vocabulary))
        found = self._index.containing(text)
        if found.any():
            return TokenSet.where(found)
        try:
            encoding = list(tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:
            # A string that this tokenizer does not take, such as an unpaired surrogate, is no reason to lose the
            # strategy: all other requests have it too.
            _LOG.warning("vllm-graft: dry: the breaker %a matches nothing: %s: %a", text, type(error).__name__, error)
            encoding = []
        return TokenSet.of(encoding[-1:], self._vocabulary)


class TextIndex:
    """Texts, by the pairs of neighbouring characters in them.

    A pair stands in far fewer places than a character: a new text of two and more is found in tens of microseconds.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._count = len(texts)
        sizes = np.array([len(text) + 1 for text in texts], dtype=np.int64)
        self._owner = np.arange(len(texts), dtype=np.int32).repeat(sizes)
        self._characters = _codes("".join(f"{text}\0" for text in texts)).copy()
        self._characters[sizes.cumsum() - 1] = _SEPARATOR
        pairs = _pairs(np.append(self._characters, np.uint32(_SEPARATOR)))
        self._order = pairs.argsort(kind="stable").astype(np.int32)
        self._sorted = pairs[self._order]

    def containing(self, text: str) -> np.ndarray:
        """Return for each text whether it contains this one."""
        wanted = _codes(text)
        # Pairs are sorted by their first character, so that those of one character lie together.
        least = _pairs(wanted) if len(wanted) > 1 else wanted.astype(np.int64) << _BITS
        beyond = least + (1 if len(wanted) > 1 else 1 << _BITS)
        low, high = self._sorted.searchsorted(least), self._sorted.searchsorted(beyond)
        rarest = int((high - low).argmin())
        at = self._order[low[rarest] : high[rarest]] - rarest
        at = at[(at >= 0) & (at + len(wanted) <= len(self._characters))]
        for offset, code in enumerate(wanted):
            if not len(at):
                break
            if offset not in (rarest, rarest + 1):
                at = at[self._characters[at + offset] == code]
        found = np.zeros(self._count, dtype=bool)
        found[self._owner[at]] = True
        return found


def decode_vocabulary(tokenizer: Any, vocabulary: int) -> list[str]:
    """Decode each token of the vocabulary; empty if the tokenizer has none."""
    greatest = getattr(tokenizer, "max_token_id", None)
    known = min(vocabulary, greatest + 1 if isinstance(greatest, int) else len(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "decode_batch"):
        # In one call, which is many times as fast as one for each token.
        texts = list(backend.decode_batch([[token] for token in range(known)], skip_special_tokens=False))
    else:
        texts = [tokenizer.decode([token]) for token in range(known)]
    return texts + [""] * (vocabulary - known)


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def _pairs(codes: np.ndarray) -> np.ndarray:
    """Return each character with the next one, as a number."""
    return (codes[:-1].astype(np.int64) << _BITS) | codes[1:]
