"""Which token ids are ordinary text: those below the tokenizer's end that nobody gave a meaning of their own.

The model's configuration names a few special ids. Where the model's folder has a ``tokenizer.json`` it names the
others, and says where the real vocabulary ends: many a configuration rounds its size up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids ``0`` to ``size - 1``, of which ``special`` are no ordinary text."""

    size: int
    special: frozenset[int] = frozenset()
    padding: int = 0
    """How many ids the model has past the tokenizer's last one; they are never text."""


def vocabulary(model_config: ModelConfig) -> Vocabulary:
    """The vocabulary of a model, from its configuration and its tokenizer's file where there is one."""
    size: int = model_config.get_vocab_size()
    named = _named_ids(model_config.hf_text_config)
    file = Path(model_config.tokenizer or model_config.model) / "tokenizer.json"
    known = read_tokenizer(file) if file.is_file() else Vocabulary(size)
    return Vocabulary(min(size, known.size), named | known.special, max(size - known.size, 0))


def read_tokenizer(file: Path) -> Vocabulary:
    """The vocabulary that a ``tokenizer.json`` describes."""
    content = json.loads(file.read_text(encoding="utf-8"))
    words = content.get("model", {}).get("vocab", ())
    ids = words.values() if isinstance(words, dict) else range(len(words))
    added = frozenset(token["id"] for token in content.get("added_tokens") or ())
    return Vocabulary(1 + max(max(ids, default=0), max(added, default=0)), added)


def _named_ids(hf_config: object) -> frozenset[int]:
    found: set[int] = set()
    for name in _NAMES:
        value = getattr(hf_config, name, None)
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, Iterable):
            found.update(value)
    return frozenset(found)
