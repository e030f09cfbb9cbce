"""Requests and steps as vLLM's scheduler writes them, and programs on the simulated accelerator."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_graft.launcher.models import tiny_model
from vllm_graft.simulator.tokens import HashedTokens, Vocabulary
from vllm_graft.testing import zygote

# Several tests share the configurations in model_configs.py.
sys.path.insert(0, str(Path(__file__).parent))

EOS = 2


class Make:
    """Stand-ins for what the scheduler sends."""

    eos = EOS

    @staticmethod
    def params(**given):
        usual = {
            "seed": None,
            "min_tokens": 0,
            "eos_token_id": EOS,
            "ignore_eos": False,
            "stop_token_ids": [],
            "all_stop_token_ids": {EOS},
            "allowed_token_ids": None,
            "logit_bias": None,
            "bad_words_token_ids": None,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "num_logprobs": None,
            "prompt_logprobs": None,
            "logprob_token_ids": None,
        }
        return SimpleNamespace(**{**usual, **given})

    @classmethod
    def new(cls, name="a", prompt=(5, 6, 7), *, computed=0, prefill=None, lora=None, **given):
        """A request as the scheduler introduces it; the V2 runner's carries all its tokens in ``prefill``."""
        return SimpleNamespace(
            req_id=name,
            prompt_token_ids=list(prompt),
            prompt_embeds=None,
            prefill_token_ids=prefill,
            num_computed_tokens=computed,
            sampling_params=cls.params(**given),
            lora_request=SimpleNamespace(lora_name=lora) if lora else None,
        )

    @staticmethod
    def step(scheduled, *, fresh=(), cached=(), resumed=(), finished=(), drafts=None):
        """One scheduler output; ``cached`` holds (name, computed tokens, output tokens)."""
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=list(fresh),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[each[0] for each in cached],
                num_computed_tokens=[each[1] for each in cached],
                num_output_tokens=[each[2] for each in cached],
                resumed_req_ids=set(resumed),
            ),
            scheduled_spec_decode_tokens=drafts or {},
            finished_req_ids=set(finished),
        )

    @classmethod
    def stream(cls, vocabulary=None, *, engine_seed=0, lengths=None, **given):
        source = HashedTokens(engine_seed, vocabulary or Vocabulary(1000, frozenset({0, 1, EOS})), lengths)
        return source.open(cls.new(**given))

    @staticmethod
    def mask(*ids, size=1000):
        """A grammar's row that allows these tokens."""
        bits = np.zeros((size + 31) // 32 * 32, dtype=np.uint8)
        bits[list(ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.fixture
def make():
    return Make


PRELUDE = """
import gc
import json
import math
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}

def answers(llm, prompts, params):
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [each.outputs[0] for each in llm.generate(given, params, use_tqdm=False)]

def tokens(llm, prompts, **kwargs):
    return [list(each.token_ids) for each in answers(llm, prompts, SamplingParams(**kwargs))]

def engine(**kwargs):
    return LLM(model=MODEL, **{"max_model_len": 256, "max_num_seqs": 64, "disable_log_stats": False, **kwargs})

def counted(llm, name):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)

if __name__ == "__main__":
"""


SURROUNDINGS = {"GRAFT_SIMULATE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture
def surroundings():
    """The environment of what runs on the simulated accelerator."""
    return {**os.environ, **SURROUNDINGS}


def run(code, *, setup="", **environ):
    """A program in a process of its own, on the simulated accelerator, with what the prelude defines."""
    body = textwrap.indent(textwrap.dedent(code), "    ")
    return zygote.run(
        [sys.executable, "-c", f"MODEL = {str(tiny_model())!r}\n{textwrap.dedent(setup)}{PRELUDE}{body}"],
        env={**os.environ, **SURROUNDINGS, **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=280,
        check=False,
    )


TROUBLE = ("Cannot access accelerator", "Traceback")


def segments():
    """The segments of shared memory on this machine."""
    return set(Path("/dev/shm").glob("psm_*"))


def orphans(before):
    """Segments made since, which no living process has mapped; other tests may run at the same time.

    vLLM's own workers may leave one to Python's resource tracker, which says so and removes it.
    """
    deadline = time.monotonic() + 5
    while True:
        mapped = "".join(_text(file) for file in Path("/proc").glob("[0-9]*/maps"))
        left = [path for path in segments() - before if str(path) not in mapped and path.exists()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _text(file):
    try:
        return file.read_text()
    except OSError:  # the process has ended meanwhile
        return ""


def passes(code, **given):
    """Runs a program that ends well, without noise and without leaving shared memory behind; its output."""
    before = segments()
    done = run(textwrap.dedent(code) + '\nprint("DONE")\n', **given)
    assert done.returncode == 0, done.stdout
    assert "DONE" in done.stdout
    assert not [sign for sign in TROUBLE if sign in done.stdout], done.stdout
    assert not orphans(before), done.stdout
    return done.stdout


@pytest.fixture
def program():
    """``program(code)`` runs on the simulated accelerator and must end well."""
    return passes
