"""KV windows on a real engine: the tokens of an explicit mask, whatever happens to a request on its way."""

import pytest

from vllm_graft.testing import Session

pytestmark = [pytest.mark.engine, pytest.mark.compiled]

PLAN = '[defaults]\nattention = "sink-window"\n[options.sink-window]\nsink_tokens = 4\nwindow = 128\n'


def test_tokens_are_those_of_the_explicit_mask(run, graft: Session):
    """For several block sizes, prefix caching on and off, prompts read in parts, drafts and preemption."""
    graft.plan(PLAN)
    found = run(
        graft,
        """
drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
ways = {
    "blocks of 32": dict(),
    "blocks of 64, no prefix cache": dict(block_size=64, enable_prefix_caching=False),
    "preempted": dict(),
    "drafts": dict(speculative_config=drafts),
}
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
    for name, facts in found.items():
        assert facts["equal"] == [1.0] * 4, name
        assert facts["again"], name
        assert facts["left"] == 0, name
    assert found["blocks of 32"]["cached"] == [32, 128, 288, 480]
    assert found["preempted"]["preempted"] > 10
    assert found["blocks of 64, no prefix cache"]["cached"] == [0] * 4


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


def test_memory_per_request_is_constant_and_freed_blocks_are_not_read(run, graft: Session):
    """By the block pool's own count. Freed blocks are filled with NaN, which a single read would carry to the end."""
    graft.plan(PLAN)
    found = run(
        graft,
        """
import math, random
llm = engine(max_num_batched_tokens=128)
manager, runner = core(llm).scheduler.kv_cache_manager, core(llm).model_executor.driver_worker.worker.model_runner
pool = manager.block_pool
free, take = pool.free_blocks, pool.get_new_blocks
def fill(blocks, value):
    ids = [block.block_id for block in blocks if not block.is_null]
    for cache in runner.kv_caches:
        cache[ids] = value
def freeing(blocks, *args, **kwargs):
    blocks = list(blocks)
    free(blocks, *args, **kwargs)
    fill([block for block in blocks if block.ref_cnt == 0 and block.block_hash is None], math.nan)
def taking(*args, **kwargs):
    blocks = take(*args, **kwargs)
    fill(blocks, 0.0)
    return blocks
pool.free_blocks, pool.get_new_blocks = freeing, taking

random.seed(0)
engine_, most, finished, aborted, nan = llm.llm_engine, {}, 0, 0, 0
waiting = [(str(n), random.choice((20, 100, 300, 600)), random.randint(1, 150)) for n in range(60)]
lengths = {name: length + tokens for name, length, tokens in waiting}
texts = {name: prompts((length,))[0] for name, length, tokens in waiting}
while waiting or engine_.has_unfinished_requests():
    while waiting and random.random() < 0.5:
        name, length, tokens = waiting.pop()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        engine_.add_request(name, dict(prompt_token_ids=texts[name]), params)
    if random.random() < 0.02 and core(llm).scheduler.running:
        engine_.abort_request([random.choice(core(llm).scheduler.running).request_id], internal=True)
        aborted += 1
    for output in engine_.step():
        finished += output.finished
        nan += any(math.isnan(each.logprob) for step in output.outputs[0].logprobs or [] for each in step.values())
    for one in manager.coordinator.single_type_managers:
        for name, blocks in one.req_to_blocks.items():
            held = sum(not block.is_null for block in blocks)
            most[name] = max(most.get(name, 0), held)
from vllm_graft.ledger import current
row = current().view().as_dict()
print(json.dumps(dict(
    most=max(most.values()), longest=max(lengths.values()), finished=finished, aborted=aborted, nan=nan,
    left=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), items=row["items"],
)))
""",
    )
    assert found["longest"] > 700
    # One block of first tokens, the window of four, and the 128 tokens of a step.
    assert found["most"] <= 1 + 4 + 4 + 1
    assert found["nan"] == 0
    assert found["left"] == 0
    assert found["finished"] >= 40
    (item,) = found["items"]
    assert item["state"] == "applied"
    assert item["figures"]["attention layers"] == 2
    assert item["figures"]["KV blocks freed"] > 50
    assert item["figures"]["KV blocks held"] == 0


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
