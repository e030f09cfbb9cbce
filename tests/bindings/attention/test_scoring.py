"""Scores of KV blocks: what the workers compute, how it reaches the policy, and what a shipped policy does with it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.testing import Session

POLICIES = """
import json, os
from vllm_graft.plugins.attention.scored_blocks import ScoredBlocks

class Logged(ScoredBlocks):
    '''The shipped policy, with a file of what it was asked and what it answered.'''
    def evict(self, request):
        gone = list(super().evict(request))
        with open(os.environ["EVICTED"], "a") as file:
            left = [request.request_id, request.tokens, gone, request.scores, len(request.held) - len(gone)]
            print(json.dumps(left), file=file)
        return gone
"""
PLAN = """[defaults]
attention = "logged"
[options.logged]
first = 32
recent = 64
min_tokens = 128
"""


@pytest.fixture
def logged(graft: Session) -> Session:
    graft.package("logged-policy", {"vllm_graft.plugins": {"logged": "logged:Logged"}}, {"logged": POLICIES})
    graft.env["EVICTED"] = str(graft.folder / "evicted")
    return graft


def asked(session: Session) -> list[tuple[str, int, list[int], dict[str, float], int]]:
    return [json.loads(line) for line in (session.folder / "evicted").read_text().splitlines()]


@pytest.mark.engine
@pytest.mark.compiled
def test_scores_are_the_attention_that_mean_keys_draw(run, logged: Session):
    """They equal those of the queries and keys of a reference, in the layers that are chosen."""
    logged.plan(PLAN + "every = 1000\nkeep = 1.0\n")
    found = run(
        logged,
        """
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
prompt, = prompts((200,))
llm = engine(max_num_batched_tokens=128)
(answer,), _ = answers(llm, [prompt], 40)
seen, stock = [], modeling_llama.eager_attention_forward
def watch(module, query, key, *args, **kwargs):
    seen.append((query[0], key[0], module.scaling))
    return stock(module, query, key, *args, **kwargs)
modeling_llama.eager_attention_forward = watch
network = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
with torch.no_grad():
    network(torch.tensor([prompt + answer[:1]]))
query, key, scale = seen[1]
means = torch.stack([part.mean(1) for part in key.split(32, 1)]).repeat_interleave(2, 1)
expected = (torch.einsum("hd,bhd->hb", query[:, -1], means) * scale).softmax(-1).mean(0)
print(json.dumps(dict(expected=expected.tolist(), layers=len(seen))))
""",
    )
    given = {int(block): score for block, score in asked(logged)[-1][3].items()}
    assert len(found["expected"]) == 7
    assert given == pytest.approx(dict(enumerate(found["expected"])), abs=1e-5)


@pytest.mark.engine
@pytest.mark.compiled
def test_a_share_of_the_blocks_is_kept_and_tokens_are_those_of_a_mask_without_the_rest(run, logged: Session):
    """By the block pool's own count, while requests come and go; each query sees what was left before its step."""
    logged.plan(PLAN + "every = 4\nkeep = 0.4\n")
    found = run(
        logged,
        """
import os
from transformers import AutoModelForCausalLM
llm = engine(max_num_batched_tokens=128)
manager = core(llm).scheduler.kv_cache_manager
pool, held, report = manager.block_pool, [], manager.coordinator.single_type_managers[0].report
def count():
    held.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
    report()
manager.coordinator.single_type_managers[0].report = count
network = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
def share(asked, answer, hit, evicted):
    ids = torch.tensor([asked + answer])
    seen = torch.tril(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool))
    for position in range(len(asked), ids.shape[1]):
        for _, tokens, gone, *_ in evicted:
            for block in gone if tokens <= position else ():
                seen[position, block * 32:(block + 1) * 32] = False
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        chosen = network(ids, attention_mask=mask).logits[0].argmax(-1)[len(asked) - 1:-1].tolist()
    return sum(a == b for a, b in zip(chosen, answer)) / len(answer)
asked = prompts((400,))
(alone,), (hit,) = answers(llm, asked, 200)
evicted = [json.loads(line) for line in open(os.environ["EVICTED"])]
most, last = max(held), held[-1]
equal = [share(asked[0], alone, hit, evicted)]
crowd = prompts((300, 40, 250, 500, 20, 180, 350, 90))
given, hits = answers(llm, crowd, 120)
log = [json.loads(line) for line in open(os.environ["EVICTED"])][len(evicted):]
names = sorted({line[0] for line in log}, key=lambda name: int(name.split("-")[0]))
for number, prompt in enumerate(crowd):
    own = [line for line in log if line[0] == names[number]]
    equal.append(share(prompt, given[number], hits[number], own))
from vllm_graft.ledger import current
item, = current().view().as_dict()["items"]
print(json.dumps(dict(
    equal=equal, most=most, last=last, item=item, alone=len(evicted), names=names,
    left=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    remembered=len(manager.coordinator.single_type_managers[0]._scores),
)))
""",
    )
    assert found["equal"] == [1.0] * 9
    # 600 tokens are 18 full blocks, 0.4 of which are 8, and one that is being filled; the prompt alone took 13.
    assert found["most"] >= 13
    assert found["last"] == 9
    assert found["left"] == found["remembered"] == 0
    for _, tokens, gone, scores, held in asked(logged)[: found["alone"]]:
        assert all(0 <= score <= 1 for score in scores.values())
        assert all(1 <= block < tokens // 32 - 2 for block in gone)
        assert held - 1 <= max(-(-2 * (tokens // 32) // 5), 3) or not scores
    assert found["item"]["state"] == "applied"
    assert found["item"]["figures"]["KV scorings"] > 50
    assert found["item"]["figures"]["KV blocks freed"] > 20


@pytest.mark.engine
@pytest.mark.compiled
def test_a_request_may_keep_less_than_the_others(run, logged: Session):
    """A value that is no smaller share is refused before the request is made; samplers let the key pass."""
    samplers = '[defaults]\nsamplers = ["dry"]\nunknown_keys = "refuse"\n'
    logged.plan(PLAN.replace("[defaults]\n", samplers) + "every = 4\nkeep = 0.8\n")
    found = run(
        logged,
        """
llm = engine()
def params(keep):
    return SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, extra_args=dict(kv_keep=keep))
asked = [dict(prompt_token_ids=each) for each in prompts((400, 400))]
llm.generate(asked, [params(0.3), params(0.8)], use_tqdm=False)
try:
    llm.generate(asked[:1], [params(0.9)], use_tqdm=False)
    said = ""
except ValueError as error:
    said = str(error)
print(json.dumps(dict(said=said)))
""",
    )
    assert found["said"] == "kv_keep must be a number above 0 and up to 0.8, but is '0.9'"
    held = {line[0]: line[4] for line in asked(logged) if line[1] // 32 == 14}
    # 0.3 and 0.8 of the 14 blocks that are full; the next one is taken afterwards.
    assert sorted(held.values()) == [5, 12]


@pytest.mark.engine
@pytest.mark.compiled
def test_scores_reach_the_policy_from_worker_processes(run, logged: Session):
    """With tensor parallelism those of the first worker, beside the output that engine core takes from it."""
    logged.plan(PLAN + "every = 4\nkeep = 0.5\n")
    run(
        logged,
        """
llm = engine(tensor_parallel_size=2)
answers(llm, prompts((300, 260)), 80)
print(json.dumps(dict()))
""",
        inside=False,
    )
    lines = asked(logged)
    assert len({line[0] for line in lines if line[3]}) == 2
    assert sum(len(line[2]) for line in lines) > 4


@pytest.mark.engine
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("options", "arguments", "reason"),
    [
        ('layers = "7"', "", "it chose no layer of the model, so no block is ever scored"),
        ("", "speculative_config=dict(method='ngram', num_speculative_tokens=2, prompt_lookup_max=3)", "drafts that"),
    ],
)
def test_an_engine_that_cannot_score_is_refused(run, graft: Session, options: str, arguments: str, reason: str):
    """Nothing that was asked for is skipped in silence."""
    graft.plan(f'[defaults]\nattention = "scored-blocks"\n[options.scored-blocks]\n{options}\n')
    found = run(
        graft,
        f"""
try:
    engine({arguments})
    said = ""
except Exception as error:
    said = str(error)
print(json.dumps(dict(said=said)))
""",
    )
    assert "attention 'scored-blocks'" in found["said"]
    assert reason in found["said"]


def scoring() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("vllm_graft.bindings.attention.scoring")


def layer(heads: int = 4, kv_heads: int = 2, size: int = 8) -> Any:
    """A layer whose implementation does nothing, to be watched."""
    nothing = {"do_kv_cache_update": lambda *args: None, "forward": lambda *args: "output"}
    return SimpleNamespace(
        impl=SimpleNamespace(scale=0.5, **nothing), num_heads=heads, num_kv_heads=kv_heads, head_size=size
    )


def test_sums_are_those_of_the_keys_that_a_block_holds():
    """However prompts are cut into steps; padding is left out, and a block that is handed out again begins anew."""
    import torch

    found, given = scoring().ScoringLayer(layer()), torch.randn(40, 2, 8)
    found.allocate(10, 16, 4, torch.device("cpu"), torch.float32)
    found.sums[5] = 7.0
    slots = torch.tensor([*range(80, 96), *range(48, 64), *range(144, 152)])
    for begin, end in ((0, 7), (7, 20), (20, 40)):
        padded = torch.cat((slots[begin:end], torch.tensor([-1, -1])))
        found.add_keys(torch.cat((given[begin:end], torch.ones(2, 2, 8))), padded)
    for block, keys in ((5, given[:16]), (3, given[16:32]), (9, given[32:])):
        assert torch.allclose(found.sums[block], keys.sum(0), atol=1e-5)
    assert not found.sums[[1, 2, 4, 6, 7, 8]].any()


def test_a_watched_layer_computes_what_it_did():
    """Before buffers are made, and in a warm-up without metadata, nothing is kept."""
    import torch

    watched = layer()
    found, query = scoring().ScoringLayer(watched), torch.randn(6, 4, 8)
    metadata = SimpleNamespace(query_start_loc=torch.tensor([0, 1, 5, 6]))
    assert watched.impl.forward(watched, query, None, None, None, metadata) == "output"
    found.allocate(4, 16, 8, torch.device("cpu"), torch.float32)
    assert watched.impl.forward(watched, query, None, None, None, None) == "output"
    assert not found.queries.any()
    assert watched.impl.forward(watched, query, None, None, None, metadata) == "output"
    assert torch.equal(found.queries[:3], query[[0, 4, 5]])


def test_the_block_with_the_key_that_is_looked_for_has_the_best_score():
    """Among random ones, at every place; evicted blocks and what is after the end have none."""
    import torch

    torch.manual_seed(0)
    keys, needle = torch.randn(12, 16, 2, 32), torch.randn(2, 32)
    for place in range(1, 10):
        sums = keys.clone()
        sums[place, 5] = 4 * needle
        table = torch.tensor([[*range(1, 12)], [1, 2, 0, *range(4, 12)]])
        lengths = torch.tensor([160, 70])
        queries = needle.repeat_interleave(2, 0).expand(2, 4, 32)
        found = scoring().block_scores(queries, sums.sum(1), table, lengths, 16, 32**-0.5)
        assert found[0].nan_to_num().argmax() == place - 1
        assert found[0].nansum().item() == pytest.approx(1)
        assert found[1].isnan().tolist() == [False, False, True, False, False] + [True] * 6


def test_requests_are_scored_in_parts_as_at_once(monkeypatch):
    """Only those that decode, every so many steps."""
    import torch

    module = scoring()
    scorer = module.BlockScorer(3)
    scorer.watch("a", layer())
    scorer.watch("b", layer())
    scorer._block_size = 16
    for each in scorer.layers.values():
        each.allocate(20, 16, 8, torch.device("cpu"), torch.float32)
        each.sums.normal_()
        each.queries.normal_()
    step = SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, 1, 9, 10, 10]), block_table_tensor=torch.randint(1, 20, (4, 8)),
        seq_lens=torch.tensor([30, 50, 100, 0]), max_seq_len=100,
    )  # fmt: skip
    rows = []
    for gathered in (1 << 20, 1):
        monkeypatch.setattr(module, "_GATHERED", gathered)
        for number in range(3):
            scorer.note_step(step)
            scorer.score_step(["x", "y", "z"])
            found = scorer.take_scores()
            assert sorted(found) == (["x", "z"] if number == 0 else [])
            rows += [found] if found else []
    for name, blocks in (("x", 2), ("z", 7)):
        assert rows[0][name] == pytest.approx(rows[1][name])
        assert len(rows[0][name]) == blocks
    # A step whose rows are not known, as that of a dummy run, is passed over.
    scorer.score_step(["x"])
    assert scorer.take_scores() == {}


def test_nothing_on_the_way_waits_for_the_device():
    """Tensors without values go all the way: a CUDA graph can capture it, and the host need not know what it holds."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    watched = layer()
    scorer = scoring().BlockScorer(1)
    scorer.watch("a", watched)
    scorer._block_size = 16
    rows = torch.tensor([0, 2])
    with FakeTensorMode() as fake:
        scorer.layers["a"].allocate(20, 16, 8, torch.device("cpu"), torch.bfloat16)
        key, slots, starts = torch.randn(6, 2, 8), torch.empty(8, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
        watched.impl.do_kv_cache_update(watched, key, key, None, slots)
        metadata = SimpleNamespace(query_start_loc=starts)
        watched.impl.forward(watched, torch.randn(6, 4, 8), key, key, None, metadata)
        table, lengths = torch.empty(3, 8, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        step = SimpleNamespace(block_table_tensor=table, seq_lens=lengths, max_seq_len=100)
        assert scorer._score(step, fake.from_tensor(rows)).shape == (2, 7)
