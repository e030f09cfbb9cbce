"""The bytes of tokens, for the kinds of tokenizers there are."""

from __future__ import annotations

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.plugins.samplers.constrained_json.vocabulary import token_bytes


class Tokenizer:
    def __init__(self, vocabulary: dict[str, int], special: tuple[int, ...] = (), added: dict[str, int] | None = None):
        self.vocabulary, self.all_special_ids, self.added = vocabulary, special, added or {}

    def get_vocab(self):
        return {**self.vocabulary, **self.added}

    def get_added_vocab(self):
        return self.added


class Tekken:
    def id_to_byte_piece(self, token: int) -> bytes:
        return b"" if token < 3 else bytes([token - 3]) if token < 259 else b'{"'


def test_the_bytes_are_those_that_decoding_gives(tokenizer):
    """The embedded model's: any text comes back from the bytes of its tokens."""
    texts = token_bytes(tokenizer)
    for text in ('{"naïve": ["€ 1.5e3", "日本語 😀"]}', "\n\n  tabs\tand\r\nbreaks "):
        assert b"".join(texts[token] for token in tokenizer.encode(text)).decode() == text
    assert not set(tokenizer.all_special_ids) & texts.keys()


def test_pieces_with_byte_fallback():
    vocabulary = {f"<0x{byte:02X}>": byte + 3 for byte in range(256)} | {"<s>": 0, "▁the": 300, "é": 301}
    texts = token_bytes(Tokenizer(vocabulary, special=(0,), added={"<tool>": 400}))
    assert (texts[300], texts[301], texts[3 + 0x7B]) == (b" the", "é".encode(), b"{")
    assert not {0, 400} & texts.keys()


def test_a_tokenizer_that_keeps_bytes_itself():
    class Mistral(Tokenizer):
        tokenizer = Tekken()

        def __len__(self):
            return 260

    texts = token_bytes(Mistral({}, special=(0, 1, 2)))
    assert texts[259] == b'{"'
    assert len(texts) == 257


def test_one_that_has_no_bytes_is_refused():
    with pytest.raises(ConfigError, match="a token for every byte"):
        token_bytes(Tokenizer({"the": 0, "##ing": 1}))
