"""The bytes that each token of a model's vocabulary stands for, for the kinds of tokenizers that work on bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from vllm_graft.contracts import ConfigError

_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Map token ids to bytes, without special and added tokens; raise a ConfigError for an unknown tokenizer."""
    # Mistral's own tokenizer keeps bytes itself, and its vocabulary of texts has lost them.
    inner: Any = getattr(tokenizer, "tokenizer", None)
    if hasattr(inner, "id_to_byte_piece"):
        found = {token: inner.id_to_byte_piece(token) for token in range(len(tokenizer))}
    else:
        vocabulary: Mapping[str, int] = tokenizer.get_vocab()
        if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            # SentencePiece: a lower block stands for a blank, and some pieces name one byte.
            bytes_of = {text: bytes.fromhex(byte[1]) for text in vocabulary if (byte := _BYTE.fullmatch(text))}
            found = {token: bytes_of.get(text) or text.replace("▁", " ").encode() for text, token in vocabulary.items()}
        else:
            signs = _byte_signs()
            # A string with a character that stands for no byte was added to the vocabulary.
            known = ((text, token) for text, token in vocabulary.items() if all(sign in signs for sign in text))
            found = {token: bytes(signs[sign] for sign in text) for text, token in known}
    # Special tokens end or structure a text for vLLM, which cuts them out of the answer.
    left_out = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    kept = {token: text for token, text in found.items() if text and token not in left_out}
    # Closing a document may need each of these bytes.
    needed = [bytes([byte]) for byte in b'{}[]",:0\\udtrefalsnc8' + bytes([0x80, 0x90, 0xA0])]
    there = set(kept.values())
    if missing := [byte for byte in needed if byte not in there]:
        raise ConfigError(
            f"constrained-json needs a tokenizer that has a token for every byte, but {type(tokenizer).__name__} "
            f"has none for {', '.join(map(repr, missing[:4]))}",
            where="the model's tokenizer",
            fix="remove constrained-json from the plan of this model, and use vLLM's structured outputs",
        )
    return kept


def _byte_signs() -> dict[str, int]:
    """Map the characters of byte-level BPE to bytes: printable ones stand for themselves, others from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
