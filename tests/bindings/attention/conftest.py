"""Scripts on a real engine, with what they share: prompts, answers, and a reference with the mask written out."""

import json
from collections.abc import Callable

import pytest

from vllm_graft.testing import Session

ANSWERS = """
import json, torch
from vllm import LLM, SamplingParams
from vllm_graft.bindings.attention.compaction import WindowShape

def prompts(lengths, vocabulary=250):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, vocabulary, (n,), generator=generator).tolist() for n in lengths]

def answers(llm, prompts, tokens=80):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    found = llm.generate([dict(prompt_token_ids=each) for each in prompts], params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found], [each.num_cached_tokens for each in found]

def engine(**arguments):
    usual = dict(dtype="float32", enforce_eager=True, max_model_len=1024, max_num_batched_tokens=256, block_size=32)
    return LLM(MODEL, **{**usual, **arguments})

def core(llm):
    return llm.llm_engine.engine_core.engine_core

def reference(prompt, answer, block_size, windows=None, sinks=4, window=128):
    '''The share of tokens that a forward pass with the mask written out would choose too.'''
    from transformers import AutoModelForCausalLM
    network = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    shape = WindowShape.fit(sinks, window, block_size)
    ids = torch.tensor([prompt + answer])
    query, key = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])[None]
    seen = (key <= query) & ((key < shape.first) | (key >= query // shape.step * shape.step - shape.before))
    def mask(seen):
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    for index, layer in enumerate(network.model.layers):
        if windows is not None and index not in windows:
            def full(module, args, kwargs):
                return args, {**kwargs, "attention_mask": mask(key <= query)}
            layer.register_forward_pre_hook(full, with_kwargs=True)
    with torch.no_grad():
        chosen = network(ids, attention_mask=mask(seen)).logits[0].argmax(-1)[len(prompt) - 1:-1].tolist()
    return sum(a == b for a, b in zip(chosen, answer)) / len(answer)
"""


def set_up(session: Session, *, inside: bool = True, threads: str = "nobind") -> None:
    """Set the environment of a small engine, in the script's own process or in one of its own."""
    session.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if inside else "1"
    session.env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    session.env["VLLM_CPU_OMP_THREADS_BIND"] = threads
    # A tiny model gains nothing by threads, and those of two test processes would spin against each other.
    session.env["OMP_NUM_THREADS"] = "1"
    # vLLM compiles its search for drafts anew in every process, for many seconds.
    session.env["NUMBA_DISABLE_JIT"] = "1"


def run_script(session: Session, script: str, *, inside: bool = True) -> dict:
    """What a script printed last."""
    set_up(session, inside=inside, threads="0|1" if "tensor_parallel_size" in script else "nobind")
    done = session.script(ANSWERS + script)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    # With worker processes, their last words come after ours.
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


STOCK_DRAFTS = """
from vllm import LLM, SamplingParams
drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
llm = LLM(MODEL, dtype="float32", enforce_eager=True, max_model_len=256, speculative_config=drafts)
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
llm.generate([dict(prompt_token_ids=[5, 6, 7, 8] * 10)], params, use_tqdm=False)
"""
UNVERIFIED = "TypeError: Cannot inspect kernel parameters for function"
"""What vLLM's own rejection sampler ends with where it has neither a Triton for CPUs nor a kernel in its place."""


@pytest.fixture(scope="session")
def no_drafts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Why the installed vLLM cannot decode with drafts on this machine, or nothing if it can.

    Asked of a stock engine, without a plan and without plugins. Any other failure is not excused.
    """
    session = Session(tmp_path_factory.mktemp("stock"))
    set_up(session)
    session.env["VLLM_PLUGINS"] = ""
    done = session.script(STOCK_DRAFTS)
    session.close()
    if done.returncode == 0:
        return ""
    said = done.stdout + done.stderr
    assert UNVERIFIED in said, said[-3000:]
    return f"the installed vLLM cannot verify drafts on a CPU, with or without a plan ({UNVERIFIED})"


SOAK = """
import math, random
from vllm_graft.ledger import current
llm = engine(max_num_batched_tokens=256, max_num_seqs=32, num_gpu_blocks_override=60, MORE)
scheduler, engine_ = core(llm).scheduler, llm.llm_engine
manager, pool = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool
draw, most, finished, aborted, nan, longest, sent = random.Random(0), 0, 0, 0, 0, 0, 0
preempted = []
preempt = scheduler._preempt_request
def count(*args, **kwargs):
    preempted.append(1)
    return preempt(*args, **kwargs)
scheduler._preempt_request = count
def schedule(*args, original=scheduler.schedule, steps=[0]):
    steps[0] += 1
    if steps[0] % 60 == 0:
        preempted.extend(scheduler.running)
        scheduler.reset_prefix_cache(reset_running_requests=True)
    return original(*args)
scheduler.schedule = schedule
heads = prompts((600, 600, 600))
while sent < REQUESTS or engine_.has_unfinished_requests():
    for _ in range(draw.choice((0, 0, 1, 12))):
        if sent < REQUESTS and len(scheduler.waiting) < 30:
            prompt = draw.choice(heads)[: draw.choice((0, 0, 40, 200, 600))] + prompts((draw.choice((1, 20, 70)),))[0]
            tokens = draw.choice(TOKENS)
            longest = max(longest, len(prompt) + tokens)
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
            engine_.add_request(str(sent), dict(prompt_token_ids=prompt), params)
            sent += 1
    if draw.random() < 0.1 and scheduler.running:
        engine_.abort_request([draw.choice(scheduler.running).request_id], internal=True)
        aborted += 1
    for output in engine_.step():
        finished += output.finished
        nan += any(math.isnan(each.logprob) for step in output.outputs[0].logprobs or [] for each in step.values())
    for one in manager.coordinator.single_type_managers:
        for name, blocks in one.req_to_blocks.items():
            most = max(most, sum(not block.is_null for block in blocks))
print(json.dumps(dict(
    most=most, longest=longest, finished=finished, aborted=aborted, nan=nan, preempted=len(preempted),
    left=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), items=current().view().as_dict()["items"],
)))
"""
"""Random arrivals, aborts and preemptions in a pool that is too small."""


def soak_engine(session: Session, requests: int, *, tokens: str = "(1, 1, 2, 5, 30, 150)", more: str = "") -> dict:
    """What came of a soak with the check of freed blocks."""
    session.env["GRAFT_CHECK_KV"] = "1"
    found = run_script(session, SOAK.replace("REQUESTS", str(requests)).replace("TOKENS", tokens).replace("MORE", more))
    assert found["finished"] + found["aborted"] >= requests
    assert found["aborted"] > requests // 500
    assert found["longest"] > 650
    assert found["preempted"] > 0
    assert found["nan"] == 0
    assert found["left"] == 0
    (item,) = found["items"]
    assert item["state"] == "applied"
    assert item["figures"]["attention layers"] == 2
    assert item["figures"]["KV blocks filled"] > requests // 10
    assert item["figures"]["KV blocks freed"] > 20
    assert item["figures"]["KV blocks held"] == 0
    return found


@pytest.fixture
def soak() -> Callable[..., dict]:
    return soak_engine


@pytest.fixture
def run() -> Callable[..., dict]:
    return run_script
