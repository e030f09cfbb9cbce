"""The model of the tutorial on a real engine, against its formulas written out in plain torch."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_graft.testing import Session

pytestmark = [pytest.mark.engine, pytest.mark.compiled]

PAGE = Path(__file__).parents[3] / "docs" / "tutorial" / "first-model.md"
PROMPTS = [[5, 17, 33, 80, 3], list(range(20, 60)), [9] * 7]
TOKENS = 12

GENERATE = """
import json
from vllm import LLM, SamplingParams
from vllm_graft.ledger import runs
llm = LLM({model!r}, enforce_eager=True, max_model_len=256, skip_tokenizer_init=True{more})
params = SamplingParams(max_tokens={tokens}, temperature=0, ignore_eos=True, detokenize=False)
answers = llm.generate([dict(prompt_token_ids=each) for each in {prompts!r}], params, use_tqdm=False)
rows = [row for view in runs() for row in view.rows() if "worker" in row["roles"]]
found = [[item["state"], item["reason"]] for row in rows for item in row["items"]]
print(json.dumps(dict(tokens=[list(each.outputs[0].token_ids) for each in answers], items=found)))
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.+?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def make_model(folder: Path) -> dict[str, Any]:
    """Write the page's configuration and random weights; return both."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config: dict[str, Any] = json.loads(blocks("json")[0])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    hidden, size, inner = config["hidden_size"], config["head_dim"], config["expert_size"]
    shapes = {"embed": (config["vocab_size"], hidden), "head": (config["vocab_size"], hidden), "norm": (hidden,)}
    for number in range(config["num_hidden_layers"]):
        layer = f"layers.{number}"
        shapes |= {f"{layer}.attention_norm": (hidden,), f"{layer}.experts_norm": (hidden,)}
        shapes[f"{layer}.attention.q"] = (config["num_attention_heads"] * size, hidden)
        shapes |= {f"{layer}.attention.{part}": (config["num_key_value_heads"] * size, hidden) for part in "kv"}
        shapes[f"{layer}.attention.out"] = (hidden, config["num_attention_heads"] * size)
        shapes[f"{layer}.router"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            shapes |= {f"{layer}.experts.{expert}.{part}_proj": (inner, hidden) for part in ("gate", "up")}
            shapes[f"{layer}.experts.{expert}.down_proj"] = (hidden, inner)
    draw = torch.Generator().manual_seed(13)
    weights = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) / 4
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return {"config": config, "weights": weights}


def reference(model: dict[str, Any], tokens: list[int]) -> int:
    """The likeliest token after these, without any of vLLM's layers."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention, silu

    config, weights = model["config"], model["weights"]

    def normed(name: str, x: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def linear(name: str, x: Any) -> Any:
        return x @ weights[f"{name}.weight"].T

    half = config["head_dim"] // 2
    angles = torch.arange(len(tokens))[:, None] * config["rope_theta"] ** (-torch.arange(half) / half)

    def heads(name: str, x: Any, *, rotated: bool) -> Any:
        found = linear(name, x).unflatten(-1, (-1, config["head_dim"])).transpose(0, 1)
        if not rotated:
            return found
        first, second = found.chunk(2, dim=-1)
        sine, cosine = angles.sin(), angles.cos()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

    hidden = weights["embed.weight"][tokens]
    for number in range(config["num_hidden_layers"]):
        layer = f"layers.{number}"
        x = normed(f"{layer}.attention_norm", hidden)
        query, key, value = (heads(f"{layer}.attention.{part}", x, rotated=part != "v") for part in "qkv")
        sharing = len(query) // len(key)
        key, value = key.repeat_interleave(sharing, 0), value.repeat_interleave(sharing, 0)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + linear(f"{layer}.attention.out", seen.transpose(0, 1).flatten(1))
        x = normed(f"{layer}.experts_norm", hidden)
        scores, ids = linear(f"{layer}.router", x).sigmoid().topk(config["num_experts_per_tok"])
        scores = scores * (scores >= scores[:, :1] / 2)
        scores = scores / scores.sum(-1, keepdim=True)
        added = torch.zeros_like(hidden)
        for row in range(len(x)):
            for expert, score in zip(ids[row].tolist(), scores[row], strict=True):
                name = f"{layer}.experts.{expert}"
                inner = silu(linear(f"{name}.gate_proj", x[row])) * linear(f"{name}.up_proj", x[row])
                added[row] += score * linear(f"{name}.down_proj", inner)
        hidden = hidden + added
    return int(linear("head", normed("norm", hidden[-1:])).argmax())


def prepare(session: Session) -> dict[str, Any]:
    names = ("acme_models", "acme_moe_config", "acme_moe")
    modules = dict(zip(names, blocks("python"), strict=True))
    session.package("acme-moe", {"vllm_graft.plugins": {"acme-moe": "acme_models:AcmeMoe"}}, modules)
    session.plan(blocks("toml")[1])
    session.env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    return make_model(session.folder / "model")


def generated(session: Session, more: str = "") -> dict[str, Any]:
    facts = {"model": str(session.folder / "model"), "tokens": TOKENS, "prompts": PROMPTS}
    done = session.script(GENERATE.format(**facts, more=more))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def test_its_tokens_are_those_of_its_formulas(graft: Session):
    model = prepare(graft)
    found = generated(graft)
    for prompt, answer in zip(PROMPTS, found["tokens"], strict=True):
        expected: list[int] = []
        for _ in range(TOKENS):
            expected.append(reference(model, [*prompt, *expected]))
        assert answer == expected
    assert found["items"] == [["applied", "built acme_moe:AcmeMoeForCausalLM for AcmeMoeForCausalLM"]]


def test_what_its_check_refuses_is_refused(graft: Session):
    config = prepare(graft)["config"]
    (graft.folder / "model" / "config.json").write_text(json.dumps({**config, "num_experts": 2}), encoding="utf-8")
    facts = {"model": str(graft.folder / "model"), "tokens": TOKENS, "prompts": PROMPTS}
    done = graft.script(GENERATE.format(**facts, more=""))
    assert done.returncode != 0
    assert "it refuses this model: a token cannot go to more experts than there are" in done.stderr
