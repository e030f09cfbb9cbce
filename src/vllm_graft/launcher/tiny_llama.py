"""The recipe of the tiny model: a two-layer Llama with seeded random weights, whose token ids are the text's bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vllm_graft.launcher import model_files

_SEED = 0
_HIDDEN, _INNER, _LAYERS, _CONTEXT = 64, 128, 2, 2048
# vLLM's CPU attention supports no head below 32, so the heads together are wider than the hidden state.
_HEADS, _KV_HEADS, _HEAD = 4, 2, 32
_PAD, _BOS, _EOS = 256, 257, 258
_SPECIAL = {"<|endoftext|>": _PAD, "<|im_start|>": _BOS, "<|im_end|>": _EOS}
_VOCABULARY = 256 + len(_SPECIAL)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    """Write the model's files into ``folder``."""
    model_files.write_weights(folder, _weights())
    model_files.write_tokenizer(
        folder,
        vocabulary=byte_vocabulary() | _SPECIAL,
        merges=[],
        special=list(_SPECIAL),
        roles={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        chat_template=_CHAT_TEMPLATE,
        context=_CONTEXT,
    )
    model_files.write_config(
        folder,
        vocab_size=_VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD,
        max_position_embeddings=_CONTEXT,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        pad_token_id=_PAD,
    )


def byte_vocabulary() -> dict[str, int]:
    """Map the letter that byte-level tokenizers write for each byte to the byte as its id."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    letters = {byte: chr(byte) for byte in shown}
    # Bytes that print badly get the letters from 256 upwards, in order.
    for place, byte in enumerate(byte for byte in range(256) if byte not in shown):
        letters[byte] = chr(256 + place)
    return {letters[byte]: byte for byte in range(256)}


def _weights() -> model_files.Weights:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (_VOCABULARY, _HIDDEN),
        "model.norm": (_HIDDEN,),
        "lm_head": (_VOCABULARY, _HIDDEN),
    }
    layer = {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
        "post_attention_layernorm": (_HIDDEN,),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    for number in range(_LAYERS):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    random = np.random.default_rng(_SEED)
    weights = {}
    for name, shape in shapes.items():
        # Wide weights spread the logits over several units, so that rounding cannot change the likeliest token.
        weight = np.ones(shape) if len(shape) == 1 else random.normal(0, 0.25, shape)
        weights[f"{name}.weight"] = weight.astype(np.float32)
    return weights
