"""Tiny mixture-of-experts models with seeded random weights, and Hugging Face's own answers to prompts."""

import json
from pathlib import Path

PROMPTS = [[5, 17, 33, 80, 3], list(range(20, 60)), [9] * 7, [100, 4, 77, 31, 56, 12, 90, 2, 8, 41, 64]]
TOKENS = 16
HIDDEN, LAYERS, EXPERTS, TOP_K, VOCABULARY = 64, 3, 8, 2, 128

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # Wide weights spread the logits, so that rounding cannot change the likeliest token.
    "initializer_range": 0.25,
}


def make(folder: Path, kind: str) -> Path:
    """Write a model of that kind, and the greedy answers of Hugging Face to ``PROMPTS``."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(7)
    if kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**_SHAPE, num_local_experts=EXPERTS))
    else:
        experts = {"num_experts": EXPERTS, "moe_intermediate_size": 96, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, **experts))
    model.eval().save_pretrained(folder)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            made = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        answers.append(made[0, len(prompt) :].tolist())
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    return folder
