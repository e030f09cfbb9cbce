"""KV windows on a real engine: the tokens of an explicit mask, whatever happens to a request on its way."""

import pytest

from vllm_graft.testing import Session

pytestmark = [pytest.mark.engine, pytest.mark.compiled]

PLAN = '[defaults]\nattention = "sink-window"\n[options.sink-window]\nsink_tokens = 4\nwindow = 128\n'


def test_tokens_are_those_of_the_explicit_mask(run, graft: Session, no_drafts: str):
    """For several block sizes, prefix caching on and off, prompts read in parts, drafts and preemption."""
    graft.plan(PLAN)
    found = run(
        graft,
        f"DRAFTS = {not no_drafts}"
        """
drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
ways = {
    "blocks of 32": dict(),
    "blocks of 64, no prefix cache": dict(block_size=64, enable_prefix_caching=False),
    "preempted": dict(),
}
if DRAFTS:
    ways["drafts"] = dict(speculative_config=drafts)
asked, found = prompts((40, 150, 300, 500)), {}
for name, arguments in ways.items():
    llm = engine(**arguments)
    scheduler, preempted = core(llm).scheduler, []
    def schedule(*args, scheduler=scheduler, original=scheduler.schedule, seen=preempted, steps=[0]):
        steps[0] += 1
        if steps[0] % 25 == 0:
            seen += [request.request_id for request in scheduler.running]
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return original(*args)
    if name == "preempted":
        scheduler.schedule = schedule
    first, _ = answers(llm, asked)
    second, cached = answers(llm, asked)
    pool = scheduler.kv_cache_manager.block_pool
    found[name] = dict(
        equal=[reference(p, a, arguments.get("block_size", 32)) for p, a in zip(asked, first)],
        again=first == second,
        cached=cached,
        preempted=len(preempted),
        left=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    )
    del llm
print(json.dumps(found))
""",
    )
    assert len(found) == (3 if no_drafts else 4)
    for name, facts in found.items():
        assert facts["equal"] == [1.0] * 4, name
        assert facts["again"], name
        assert facts["left"] == 0, name
    assert found["blocks of 32"]["cached"] == [32, 128, 288, 480]
    assert found["preempted"]["preempted"] > 10
    assert found["blocks of 64, no prefix cache"]["cached"] == [0] * 4


def test_a_draft_model_has_the_window_too(run, graft: Session, no_drafts: str):
    """A model that drafts for itself sees the same tokens as when it verifies, so every draft is accepted."""
    if no_drafts:
        pytest.skip(no_drafts)
    graft.plan(PLAN)
    graft.env["GRAFT_CHECK_KV"] = "1"
    found = run(
        graft,
        """
drafts = dict(method="draft_model", model=MODEL, num_speculative_tokens=3, enforce_eager=True)
# Some releases reserve a token of the step for the draft of every sequence there may be.
llm = engine(speculative_config=drafts, disable_log_stats=False, max_num_seqs=8)
asked = prompts((40, 150, 300, 500))
first, _ = answers(llm, asked)
second, cached = answers(llm, asked)
counts = {metric.name.rpartition("_num_")[2]: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
print(json.dumps(dict(
    equal=[reference(p, a, 32) for p, a in zip(asked, first)], again=first == second, cached=cached,
    drafted=counts["draft_tokens"], accepted=counts["accepted_tokens"],
)))
""",
    )
    assert found["equal"] == [1.0] * 4
    assert found["again"]
    assert found["cached"][3] > 0
    assert found["accepted"] == found["drafted"] > 400


def test_only_chosen_layers_have_the_window(run, graft: Session):
    """The others keep full attention, in a group of blocks of their own."""
    graft.plan(PLAN + 'layers = "1"\n')
    found = run(
        graft,
        """
llm = engine()
config = core(llm).scheduler.kv_cache_manager.kv_cache_config
groups = [type(each.kv_cache_spec).__name__ for each in config.kv_cache_groups]
asked = prompts((40, 400))
first, _ = answers(llm, asked)
second, cached = answers(llm, asked)
print(json.dumps(dict(
    groups=sorted(groups), again=first == second, cached=cached,
    equal=[reference(p, a, 32, windows={1}) for p, a in zip(asked, first)],
    all=[reference(p, a, 32) for p, a in zip(asked, first)],
)))
""",
    )
    assert found["groups"] == ["FullAttentionSpec", "SinkWindowSpec"]
    assert found["equal"] == [1.0, 1.0]
    assert found["all"][1] < 1.0
    assert found["again"]
    assert found["cached"][1] > 0


def test_memory_per_request_is_constant_and_freed_blocks_are_not_read(soak, graft: Session):
    """By the block pool's own count. Freed blocks are filled with NaN, which a single read would carry to the end."""
    graft.plan(PLAN)
    # One block of first tokens, the window of four, and the 256 tokens of a step.
    assert soak(graft, 300)["most"] <= 1 + 4 + 8 + 1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_thousand_requests_come_and_go_and_no_freed_block_is_read(soak, graft: Session):
    graft.plan(PLAN)
    assert soak(graft, 10_000, tokens="(1, 1, 2, 3, 12)")["most"] <= 1 + 4 + 8 + 1


def test_a_read_of_a_freed_block_ends_the_engine_with_the_name_of_the_layer(run, graft: Session):
    """The check itself is checked: a compaction that leaves a freed block in the table does not go unnoticed."""
    graft.plan(PLAN)
    graft.env["GRAFT_CHECK_KV"] = "1"
    found = run(
        graft,
        """
from vllm_graft.bindings.attention.backends import Compactor
Compactor.compact = lambda self, metadata: metadata
llm = engine(enable_prefix_caching=False)
try:
    answers(llm, prompts((400,)))
    said = ""
except Exception as error:
    said = str(error)
print(json.dumps(dict(said=said)))
""",
    )
    assert "model.layers.0.self_attn.attn: its output has NaN but its input does not" in found["said"]


def test_a_window_of_the_model_itself_is_compacted_with_the_same_tokens(run, graft: Session):
    """compact-window changes the work of the kernel, not its result."""
    graft.plan('[defaults]\nattention = "compact-window"\n')
    script = """
llm = engine(hf_overrides=dict(sliding_window=100))
asked = prompts((40, 150, 400, 700))
first, _ = answers(llm, asked)
second, cached = answers(llm, asked)
from vllm_graft.ledger import current
view = current().view()
print(json.dumps(dict(first=first, second=second, cached=cached, items=view.as_dict()["items"] if view else [])))
"""
    planned = run(graft, script)
    graft.plan("")
    stock = run(graft, script)
    assert planned["first"] == stock["first"] == planned["second"]
    assert planned["cached"] == stock["cached"]
    assert planned["items"][0]["state"] == "applied"
    assert stock["items"] == []


def test_other_shapes_of_requests_and_blocks(run, graft: Session):
    """Blocks of 128 tokens, prompts shorter than a block, one token, several samples of a prompt."""
    graft.plan(PLAN.replace("128", "256"))
    found = run(
        graft,
        """
llm = engine(block_size=128)
asked = prompts((1, 100, 128, 129, 700))
given, _ = answers(llm, asked, 60)
again, cached = answers(llm, asked, 60)
single, _ = answers(llm, asked, 1)
params = SamplingParams(temperature=0.0001, top_k=1, n=3, max_tokens=20, ignore_eos=True)
several, = llm.generate([dict(prompt_token_ids=asked[-1])], params, use_tqdm=False)
print(json.dumps(dict(
    equal=[reference(p, a, 128, window=256) for p, a in zip(asked, given)], again=given == again, cached=cached,
    single=[one[0] == all[0] for one, all in zip(single, given)],
    several=[list(each.token_ids) == given[-1][:20] for each in several.outputs],
)))
""",
    )
    assert found["equal"] == [1.0] * 5
    assert found["again"]
    assert found["cached"] == [0, 0, 0, 128, 640]
    assert found["single"] == [True] * 5
    assert found["several"] == [True] * 3


HYBRID = """
llm = engine(hf_overrides=dict(sliding_window=100, layer_types=["sliding_attention", "full_attention"]))
asked = prompts((40, 150, 400, 700))
first, _ = answers(llm, asked)
second, cached = answers(llm, asked)
groups = sorted(
    type(each.kv_cache_spec).__name__ for each in core(llm).scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
)
from transformers import AutoModelForCausalLM
network = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
shape = WindowShape.fit(4, 128, 32)
def share(prompt, answer, planned):
    ids = torch.tensor([prompt + answer])
    query, key = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])[None]
    masks = [(key <= query) & (query - key < 100), key <= query]
    if planned:
        masks[1] &= (key < shape.first) | (key >= query // shape.step * shape.step - shape.before)
    hooks = []
    for layer, seen in zip(network.model.layers, masks):
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        def use(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}
        hooks.append(layer.register_forward_pre_hook(use, with_kwargs=True))
    with torch.no_grad():
        chosen = network(ids).logits[0].argmax(-1)[len(prompt) - 1:-1].tolist()
    for hook in hooks:
        hook.remove()
    return sum(a == b for a, b in zip(chosen, answer)) / len(answer)
from vllm_graft.ledger import current
item, = current().view().as_dict()["items"]
print(json.dumps(dict(
    equal=[share(p, a, PLANNED) for p, a in zip(asked, first)], again=first == second, cached=cached, groups=groups,
    layers=item["figures"]["attention layers"], state=item["state"],
)))
"""


@pytest.mark.parametrize(
    ("plan", "planned", "groups", "layers"),
    [
        (PLAN, "True", ["SinkWindowSpec", "SlidingWindowSpec"], 2),
        ('[defaults]\nattention = "compact-window"\n', "False", ["FullAttentionSpec", "SlidingWindowSpec"], 1),
    ],
    ids=["sink-window", "compact-window"],
)
def test_a_model_with_windows_in_some_layers_keeps_them(run, graft: Session, plan, planned, groups, layers):
    """As Gemma has: its own windows are compacted, and the layers with full attention are those of the plan."""
    graft.plan(plan)
    graft.env["GRAFT_CHECK_KV"] = "1"
    found = run(graft, HYBRID.replace("PLANNED", planned))
    assert found["groups"] == groups
    assert found["equal"] == [1.0] * 4
    assert found["again"]
    assert found["cached"][-1] > 0
    assert (found["layers"], found["state"]) == (layers, "applied")


def test_two_workers_give_the_same_tokens(run, graft: Session):
    """Tensor parallel: each worker has half of the heads, and the block tables of all."""
    graft.plan(PLAN)
    script = """
llm = engine(tensor_parallel_size=WORKERS)
asked = prompts((150, 400))
first, _ = answers(llm, asked)
from vllm_graft.ledger import runs
living = [each.record for each in runs()[0].processes if each.life == "running"]
states = {record.name: [item.state for item in record.items] for record in living}
print(json.dumps(dict(tokens=first, equal=[reference(p, a, 32) for p, a in zip(asked, first)], states=states)))
"""
    found = run(graft, script.replace("WORKERS", "2"), inside=False)
    assert found["equal"] == [1.0, 1.0]
    assert len(found["states"]) == 4
    assert sum(states == ["applied"] for states in found["states"].values()) == 3


@pytest.mark.parametrize(
    ("plan", "arguments", "reason"),
    [
        (
            "window = 100",
            "",
            "a window of 100 tokens is too small: with KV-cache blocks of 32 tokens it moves by 64 tokens at a time",
        ),
        ("window = 128", "kv_cache_dtype='fp8_e5m2'", "its KV cache is quantized (fp8_e5m2)"),
        ("window = 128\nlayers = '7'", "", "it gives no layer a window, so no block is ever freed"),
        # The layers of the model have windows then, of which the policy changes none.
        (
            "window = 128\nlayers = '7'",
            "hf_overrides=dict(sliding_window=100)",
            "it gives no layer a window, so no block is ever freed",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(run, graft: Session, plan, arguments, reason):
    """Before the server serves, with the layer and the reason."""
    graft.plan(f'[defaults]\nattention = "sink-window"\n[options.sink-window]\n{plan}\n'.replace("'", '"'))
    found = run(
        graft,
        f"""
try:
    engine({arguments})
    said = "started"
except BaseException as error:
    said = str(error)
print(json.dumps(dict(said=said)))
""",
    )
    assert reason in found["said"]
    assert "attention 'sink-window'" in found["said"]
