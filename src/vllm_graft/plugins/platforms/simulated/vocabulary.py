"""Which token ids are ordinary text: those below the tokenizer's end that nobody gave a meaning of their own.

The model's configuration names a few special ids. Where the model's folder has a ``tokenizer.json`` it names the
others, and says where the real vocabulary ends: many a configuration rounds its size up.
"""

from __future__ import annotations

import json
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
    named = _ids(*(getattr(model_config.hf_text_config, name, None) for name in _NAMES))
    if model_config.skip_tokenizer_init:
        named |= ending_ids(model_config)
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


def ending_ids(model_config: ModelConfig) -> frozenset[int]:
    """The tokens at which vLLM ends a text by itself, where it has no tokenizer to ask."""
    return _ids(model_config.try_get_generation_config().get("eos_token_id"))


def _ids(*values: object) -> frozenset[int]:
    """Token ids that stand alone or in lists."""
    lists = [value if isinstance(value, list | tuple) else (value,) for value in values]
    return frozenset(token for each in lists for token in each if isinstance(token, int))
