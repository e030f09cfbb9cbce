"""The patch async-history: what a logits processor of an installed package sees under asynchronous scheduling."""

import json
import subprocess

import pytest

from vllm_graft.testing import Session

PLAN = '[defaults]\npatches = ["async-history"]\n'

PROCESSORS = """
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

def follows(tokens):
    return (7 * sum(tokens) + 3 * len(tokens)) % 50 + 20

def follow(tokens, logits):
    wanted = follows(tokens)
    logits[:] = float("-inf")
    logits[wanted] = 0.0
    return logits

class Chain(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False
    def new_req_logits_processor(self, params):
        return follow
"""

# The part of the model runner, played on its real batch: sample, leave a placeholder, go on with the next step.
ON_THE_BATCH = """
import inspect, json
import torch
from chain import Chain
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm_graft.patching import Engine
from vllm_graft.plugins.patches.async_history import AsyncHistory

def history(kinds):
    made = {
        "max_num_reqs": 4, "max_model_len": 64, "max_num_batched_tokens": 64, "device": torch.device("cpu"),
        "vocab_size": 100, "block_sizes": [16], "kernel_block_sizes": [16], "max_num_blocks_per_req": [4],
        "logitsprocs": LogitsProcessors(kind.__new__(kind) for kind in kinds),
    }
    known = inspect.signature(InputBatch).parameters
    batch = InputBatch(**{name: value for name, value in made.items() if name in known})
    batch.logitsprocs.argmax_invariant.clear()
    batch.logitsprocs.non_argmax_invariant.clear()
    request = CachedRequestState("r", [1, 2], [], SamplingParams(max_tokens=9), None, ([0],), 0, [])
    batch.add_request(request)
    batch.refresh_metadata()
    ready = type("Ready", (), {"synchronize": lambda self: None})()
    for token in (41, 42, 43):
        request.output_token_ids.append(-1)
        batch.prev_req_id_to_index = {"r": 0}
        batch.set_async_sampled_token_ids(torch.tensor([[token]]), ready)
        batch.refresh_metadata()
        batch.update_async_output_token_ids()
    return request.output_token_ids

class Named(Chain):
    pass
Named.__module__ = "vllm_logits.processors"

engine = Engine()
found = {"stock": history([Chain])}
engine.apply([AsyncHistory])
found["patched"] = history([Chain])
found["like vLLM's own by name"] = history([Named])
found["vLLM's own"] = history(BUILTIN_LOGITS_PROCESSORS)
engine.revert(AsyncHistory)
found["reverted"] = history([Chain])
print("FOUND " + json.dumps(found))
"""


def laid_out(graft: Session, *, installed: bool) -> Session:
    entries = {"vllm.logits_processors": {"chain": "chain:Chain"}} if installed else {}
    graft.package("chain", entries, {"chain": PROCESSORS})
    return graft


def found(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """What a script found."""
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))[6:])


def test_a_batch_fills_in_the_tokens_once_a_foreign_processor_counts(graft: Session):
    """Processors that are vLLM's own read no tokens: for them alone nothing is filled in, and no step waits."""
    graft.simulate()
    unseen, real = [-1, -1, -1], [41, 42, 43]
    assert found(laid_out(graft, installed=False).script(ON_THE_BATCH)) == {
        "stock": unseen,
        "patched": real,
        "like vLLM's own by name": real,
        "vLLM's own": unseen,
        "reverted": unseen,
    }


# vLLM turns asynchronous scheduling off on CPUs, because there is no device to overlap with. Turned on again, with
# streams and events that have nothing to wait for, the real runner and scheduler do what they do on a GPU.
ASYNC_ON_CPU = """
import contextlib, json, os
import torch

class Still:
    def __init__(self, *args, **kwargs): ...
    def record(self, *args): ...
    def synchronize(self): ...
    def wait(self, *args): ...
    def wait_stream(self, *args): ...

torch.Event = torch.cuda.Event = torch.cuda.Stream = Still
torch.cuda.current_stream = Still
torch.cuda.stream = lambda stream: contextlib.nullcontext()

from vllm.platforms.cpu import CpuPlatform
from vllm_graft.patching import Engine, VLLMPatch, wrap

class Asynchronous(VLLMPatch[CpuPlatform], name="asynchronous"):
    @wrap
    @classmethod
    def check_and_update_config(cls, call, vllm_config):
        call(vllm_config)
        vllm_config.scheduler_config.async_scheduling = os.environ["ASYNCHRONOUS"] == "1"

Asynchronous.apply()

from chain import follows
from vllm import LLM, SamplingParams

lengths = [3, 17, 9, 5, 12, 8, 6, 15]
llm = LLM(MODEL, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=3, skip_tokenizer_init=True)
params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False) for n in lengths]
prompts = [{"prompt_token_ids": [10 + n, 11, 12]} for n in range(len(lengths))]
outputs = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
right = all(follows(tokens[:n]) == tokens[n] for tokens in outputs for n in range(len(tokens)))
blind = all(follows([-1] * n) == tokens[n] for tokens in outputs for n in range(len(tokens)))
core = llm.llm_engine.engine_core.engine_core
found = {
    "scheduler": type(core.scheduler).__name__,
    "lengths": [len(tokens) for tokens in outputs] == lengths,
    "follows": "the tokens" if right else "placeholders" if blind else "neither",
}
print("FOUND " + json.dumps(found), flush=True)
"""


@pytest.mark.engine
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("asynchronous", "planned", "follows"),
    [(False, False, "the tokens"), (True, False, "placeholders"), (True, True, "the tokens")],
    ids=["synchronous", "asynchronous", "asynchronous-with-the-patch"],
)
def test_what_an_installed_processor_follows(graft: Session, asynchronous: bool, planned: bool, follows: str):
    """Each token is to follow from all before it, in batches that requests join and leave; the engine is real."""
    if planned:
        graft.plan(PLAN)
    graft.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    graft.env["ASYNCHRONOUS"] = "1" if asynchronous else "0"
    assert found(laid_out(graft, installed=True).script(ASYNC_ON_CPU)) == {
        "scheduler": "AsyncScheduler" if asynchronous else "Scheduler",
        "lengths": True,
        "follows": follows,
    }
