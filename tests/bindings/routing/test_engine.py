"""A planned router on real engines: stock models by its leave, changed exactly as it says, and none that fails."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.bindings import moe_models

from vllm_graft.testing import Session, tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.compiled]

ROUTERS = """
from vllm_graft.contracts import MoeRouter

MODE = "stock"


class Moody(MoeRouter):
    '''Does as the script that runs it says.'''

    def route(self, hidden, logits, top_k):
        if MODE == "odd":
            weights, ids = logits.softmax(-1)[:, 1::2].topk(top_k)
            return 2 * ids + 1, weights / weights.sum(-1, keepdim=True)
        ids, weights = self.stock(hidden, logits)
        if MODE == "range":
            return ids + 100, weights
        if MODE == "nan":
            return ids, weights / 0 * 0
        if MODE == "raise":
            raise RuntimeError("not in the mood")
        return ids, weights


class Wrong(MoeRouter):
    def route(self, hidden, logits, top_k):
        return self.stock(hidden, logits)[0]
"""

GENERATE = """
import json
from vllm import LLM, SamplingParams
llm = LLM({model!r}, dtype="float32", skip_tokenizer_init=True, max_model_len=256, enable_prefix_caching=False, {more})
params = SamplingParams(max_tokens={tokens}, temperature=0, ignore_eos=True, detokenize=False, logprobs=0)
prompts = [dict(prompt_token_ids=each) for each in {prompts!r}]
found = dict()
for mode in {modes!r}:
    if mode:
        import acme_routers
        acme_routers.MODE = mode
    answers = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    found[mode] = [list(each.token_ids) for each in answers]
    steps = [[next(iter(step.values())) for step in each.logprobs] for each in answers]
    found[mode + " logprobs"] = [repr([step.logprob for step in each]) for each in steps]
from vllm_graft.ledger import runs
found["compiled"] = int(llm.llm_engine.vllm_config.compilation_config.mode)
found["items"] = [item for view in runs() for row in view.rows() for item in row["items"]]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("moe")
    return {kind: moe_models.make(folder / kind, kind) for kind in ("qwen3-moe", "mixtral")}


def generated(
    session: Session, model: Path, *modes: str, more: str = "enforce_eager=True", inside: bool = True
) -> dict[str, Any]:
    """What an engine answered in each mode of the router, which only one in this very process can change."""
    session.env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if inside else "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if inside else "0|1",
        "OMP_NUM_THREADS": "1",
    }
    facts = {"model": str(model), "tokens": moe_models.TOKENS, "prompts": moe_models.PROMPTS, "modes": modes}
    done = session.script(GENERATE.format(**facts, more=more))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def plan_moody(session: Session, more: str = "", item: str = "moody") -> None:
    entries = {"moody": "acme_routers:Moody", "wrong": "acme_routers:Wrong"}
    session.package("acme-routers", {"vllm_graft.plugins": entries}, {"acme_routers": ROUTERS})
    session.plan(f'[defaults]\nrouter = "{item}"\n{more}')


def odd_experts(folder: Path, layers: tuple[int, ...]) -> list[list[int]]:
    """Hugging Face's greedy answers, with the odd experts alone in some layers."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for index in layers:

        def route(gate: Any, args: Any, output: Any) -> Any:
            logits = torch.nn.functional.linear(args[0].reshape(-1, moe_models.HIDDEN), gate.weight)
            weights, ids = logits.softmax(-1)[:, 1::2].topk(moe_models.TOP_K)
            return output[0], weights / weights.sum(-1, keepdim=True), 2 * ids + 1

        network.model.layers[index].mlp.gate.register_forward_hook(route)
    answers = []
    for prompt in moe_models.PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            options = {"max_new_tokens": moe_models.TOKENS, "do_sample": False, "eos_token_id": None}
            answers.append(network.generate(ids, **options, pad_token_id=0)[0, len(prompt) :].tolist())
    return answers


def answers_of(model: Path) -> list[list[int]]:
    found: list[list[int]] = json.loads((model / "answers.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def moody(graft: Session) -> Session:
    plan_moody(graft, '[options.moody]\nlayers = "0, 2-"\n')
    return graft


def test_a_router_that_asks_the_model_changes_no_bit_and_another_exactly_what_it_says(moody: Session, models):
    """And one that names experts which do not exist is put aside, within the very step."""
    model = models["qwen3-moe"]
    routed = generated(moody, model, "stock", "odd", "range")
    moody.env["GRAFT_DISABLE"] = "1"
    stock = generated(moody, model, "")
    assert stock[""] == answers_of(model)
    assert routed["stock"] == stock[""]
    assert routed["stock logprobs"] == stock[" logprobs"]
    assert routed["odd"] == odd_experts(model, (0, 2))
    assert routed["odd"] != stock[""]
    assert routed["range logprobs"] == stock[" logprobs"]
    (item,) = routed["items"]
    assert item["state"] == "quarantined"
    assert "model.layers.0.mlp.experts: ValueError: route() returned the expert 10" in item["reason"]
    assert item["figures"] == {"routed layers": 2}
    assert "2 of 3 layers: 0, 2" in item["hooks"]
    assert item["hooks"]["route"]["calls"] > 2 * moe_models.TOKENS


def test_in_compiled_code_too(moody: Session, models):
    """The router runs in each step, and not only while the model is traced."""
    model = models["mixtral"]
    found = generated(moody, model, "stock", "odd", "raise", more="enforce_eager=False")
    assert found["stock"] == answers_of(model)
    assert found["compiled"]
    assert found["odd"] == odd_experts(model, (0, 2))
    assert found["raise"] == answers_of(model)
    (item,) = found["items"]
    assert item["state"] == "quarantined"
    assert "model.layers.0.block_sparse_moe.experts: RuntimeError: not in the mood" in item["reason"]


def failed(session: Session, model: Path, more: str = "enforce_eager=True") -> str:
    """The end of a start that did not come about."""
    session.env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    session.env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    facts = {"model": str(model), "tokens": 1, "prompts": [[1]], "modes": ("",)}
    done = session.script(GENERATE.format(**facts, more=more))
    assert done.returncode != 0
    return done.stderr[-6000:]


def test_one_that_fails_its_trial_stops_the_start_or_is_left_out(graft: Session, models):
    model = models["mixtral"]
    plan_moody(graft, item="wrong")
    said = failed(graft, model)
    assert "model.layers.0.block_sparse_moe.experts: router 'wrong' (from " in said
    assert "it failed when it was tried on a few tokens: ValueError: route() returned Tensor instead of (ids" in said
    plan_moody(graft, item="wrong", more='on_failure = "warn"\n')
    found = generated(graft, model, "")
    assert found[""] == answers_of(model)
    (item,) = found["items"]
    assert item["state"] == "refused"
    assert item["reason"].count("it failed when it was tried") == moe_models.LAYERS


@pytest.mark.parametrize(
    ("model", "layers", "reason"),
    [
        ("tiny", "all", "the model has no mixture-of-experts layer of vLLM's"),
        ("qwen3-moe", "7-", "its option `layers` is '7-', but those with experts are 0-2"),
    ],
)
def test_a_model_of_which_no_layer_would_be_routed_is_refused(graft: Session, models, model, layers, reason):
    plan_moody(graft, f'[options.moody]\nlayers = "{layers}"\n')
    assert f"cannot be used: {reason}. Next: correct the option" in failed(graft, models.get(model) or tiny_model())


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="vLLM binds each worker to a core of its own")
def test_each_of_two_workers_has_the_router(graft: Session, models):
    plan_moody(graft)
    model = models["qwen3-moe"]
    more = "enforce_eager=True, tensor_parallel_size=2"
    found = generated(graft, model, "", more=more, inside=False)
    assert found[""] == answers_of(model)
    states = [(item["state"], item["figures"]) for item in found["items"] if item["figures"]]
    assert states == [("applied", {"routed layers": 3})] * 2
