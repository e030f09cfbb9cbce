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


def run_script(session: Session, script: str, *, inside: bool = True) -> dict:
    """What a script printed last."""
    session.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if inside else "1"
    session.env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    session.env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if "tensor_parallel_size" in script else "auto"
    done = session.script(ANSWERS + script)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    # With worker processes, their last words come after ours.
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


@pytest.fixture
def run() -> Callable[..., dict]:
    return run_script
