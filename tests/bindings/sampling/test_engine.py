"""Samplers offline: engines that cannot have them, requests that are preempted, a model that stops looping."""

import json

import pytest

from vllm_graft.testing import Session, embedded_model

pytestmark = [pytest.mark.engine, pytest.mark.compiled]

PLAN = '[defaults]\nsamplers = ["dry", "xtc", "no-repeat-ngram", "top-n-sigma"]\n'
ENGINE = "dtype='float32', enforce_eager=True, max_model_len=256"


def result(session: Session, script: str) -> dict:
    """What a script printed last."""
    session.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = session.script(script)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


STATES = """
from vllm_graft.ledger import runs
states = {item.name: item.state for view in runs() for each in view.processes for item in each.record.items}
codes = sorted({finding.code for view in runs() for finding in view.findings()})
"""


def test_v1_with_speculative_decoding_goes_without_and_says_so(graft: Session):
    """The engine starts, whoever asks for a sampler is refused, everybody else is served; a required one stops it."""
    graft.plan(PLAN + "[options.dry]\nrequired = true\n")
    lenient = graft.folder / "lenient.toml"
    lenient.write_text(PLAN)
    found = result(
        graft,
        f"""
import json, os
from vllm import LLM, SamplingParams
drafts = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
try:
    LLM(MODEL, {ENGINE}, speculative_config=drafts)
    required = "started"
except Exception as error:
    required = str(error)
os.environ["GRAFT_CONFIG"] = {str(lenient)!r}
llm = LLM(MODEL, {ENGINE}, speculative_config=drafts)
plain = llm.generate("abcabc", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0].outputs[0].token_ids
try:
    llm.generate("abcabc", SamplingParams(max_tokens=4, extra_args=dict(dry_multiplier=1.0)))
    asked = "served"
except Exception as error:
    asked = str(error)
{STATES}
print(json.dumps(dict(required=required, tokens=len(plain), asked=asked, states=states, codes=codes)))
""",
    )
    assert "the sampler 'dry' is required but cannot be used: the V1 model runner takes no" in found["required"]
    assert found["tokens"] == 4
    assert "dry_multiplier: the sampler 'dry' cannot be used: the V1 model runner takes no" in found["asked"]
    assert set(found["states"].values()) == {"skipped"}
    assert found["codes"] == ["S011"]


def test_a_pooling_model_goes_without_samplers(graft: Session):
    """It picks no tokens; one plan may serve a model that does and one that does not."""
    graft.plan(PLAN)
    found = result(
        graft,
        f"""
import json
from vllm import LLM
llm = LLM(MODEL, {ENGINE}, runner="pooling", convert="embed")
size = len(llm.embed("abc")[0].outputs.embedding)
{STATES}
print(json.dumps(dict(size=size, states=states, codes=codes)))
""",
    )
    assert found["size"] > 0
    assert set(found["states"].values()) == {"skipped"}
    assert found["codes"] == ["S011"]


def test_requests_that_are_preempted_get_the_same_tokens(graft: Session):
    """A cache that holds a few of the requests at a time, beside one that holds all."""
    graft.plan(PLAN)
    found = result(
        graft,
        f"""
import json
from vllm import LLM, SamplingParams
mixes = [
    dict(dry_multiplier=0.8, dry_allowed_length=1, dry_sequence_breakers=[]),
    dict(no_repeat_ngram_size=2),
    dict(xtc_probability=0.6, xtc_threshold=0.001),
    dict(dry_multiplier=2.0, xtc_probability=1.0, xtc_threshold=0.001, top_n_sigma=3.0),
    None,
]
params = [
    SamplingParams(max_tokens=60, temperature=1.0, top_k=1, seed=n, ignore_eos=True, extra_args=mixes[n % 5])
    for n in range(20)
]
prompts = ["abc" * (1 + n % 4) for n in range(20)]
def tokens(**more):
    more |= dict(enable_prefix_caching=False, disable_log_stats=False, max_num_seqs=20, block_size=32)
    llm = LLM(MODEL, {ENGINE}, **more)
    answers = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    llm.llm_engine.engine_core.shutdown()
    return answers, preempted
roomy, none = tokens()
tight, some = tokens(num_gpu_blocks_override=12)
print(json.dumps(dict(same=roomy == tight, none=none, some=some - none, answers=roomy)))
""",
    )
    assert found["same"]
    assert found["none"] == 0
    assert found["some"] > 0
    for number in range(1, 20, 5):
        pairs = list(zip(found["answers"][number], found["answers"][number][1:], strict=False))
        assert len(pairs) == len(set(pairs)), "no pair comes twice with no_repeat_ngram_size=2"


def test_a_prompt_that_makes_the_model_loop_stops_looping_with_dry(graft: Session):
    """The embedded language model, greedy, on words that invite it to go round in circles."""
    graft.plan(PLAN)
    found = result(
        graft,
        f"""
import json
from vllm import LLM, SamplingParams
llm = LLM({str(embedded_model())!r}, {ENGINE})
prompt = "I am what I am and I am"
asked = [None, dict(dry_multiplier=0.8, dry_allowed_length=2)]
params = [SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, extra_args=extra) for extra in asked]
print(json.dumps([list(one.outputs[0].token_ids) for one in llm.generate([prompt] * 2, params, use_tqdm=False)]))
""",
    )
    plain, dry = (repeated(tokens) for tokens in found)
    assert plain > 0.8, "without it the model repeats itself"
    assert dry < 0.25


def repeated(tokens: list[int], length: int = 4) -> float:
    """The share of runs of so many tokens that have been there before."""
    runs = [tuple(tokens[at : at + length]) for at in range(len(tokens) - length + 1)]
    return 1 - len(set(runs)) / len(runs)


def test_a_sampler_where_nothing_computes_logits_stops_the_start(graft: Session):
    """The simulated accelerator has no logits to change, and says so before it serves."""
    graft.simulate()
    graft.plan(PLAN)
    done = graft.script("from vllm import LLM\nLLM(MODEL, max_model_len=256)")
    assert done.returncode != 0
    line = done.stderr.strip().splitlines()[-1]
    assert "logits processors need logits" in line, done.stderr[-2000:]


SEED = '''
import math
import random

from vllm_graft import Key, SamplerBase, SamplingStrategy


class ConstrainedJSONSampler(SamplerBase):
    """Custom sampler that constrains output to valid JSON, as the guide to plugins has it; only the import is ours."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.digit_tokens = set()
        self.string_tokens = set()
        self.bracket_tokens = set()
        self.colon_tokens = set()
        self.comma_tokens = set()
        for token_id in range(tokenizer.vocab_size):
            text = tokenizer.decode([token_id])
            if text.strip() in '0123456789':
                self.digit_tokens.add(token_id)
            if '"' in text:
                self.string_tokens.add(token_id)
            if text.strip() in '{}[]':
                self.bracket_tokens.add(token_id)

    def sample(self, logits: list, sampling_params: list) -> list:
        results = []
        for i, (logit_row, params) in enumerate(zip(logits, sampling_params)):
            state = params.get("json_state", "value")
            allowed_tokens = self._get_allowed_tokens(state)
            masked_logits = []
            for token_id, logit in enumerate(logit_row):
                if token_id in allowed_tokens:
                    masked_logits.append(logit)
                else:
                    masked_logits.append(float('-inf'))
            token_id = self._sample_from_logits(
                masked_logits,
                temperature=params.get("temperature", 1.0),
                top_p=params.get("top_p", 1.0)
            )
            results.append(token_id)
        return results

    def _get_allowed_tokens(self, state: str) -> set:
        if state == "value":
            return self.digit_tokens | self.string_tokens | self.bracket_tokens
        elif state == "key":
            return self.string_tokens
        elif state == "colon":
            return self.colon_tokens
        elif state == "comma_or_close":
            return self.comma_tokens | self.bracket_tokens
        return set(range(self.tokenizer.vocab_size))

    def _sample_from_logits(self, logits: list, temperature: float, top_p: float) -> int:
        if temperature > 0:
            logits = [l / temperature for l in logits]
        max_logit = max(logits)
        exp_logits = [math.exp(l - max_logit) for l in logits]
        total = sum(exp_logits)
        probs = [e / total for e in exp_logits]
        sorted_indices = sorted(range(len(probs)), key=lambda i: -probs[i])
        cumsum = 0
        cutoff_idx = len(sorted_indices)
        for idx, i in enumerate(sorted_indices):
            cumsum += probs[i]
            if cumsum >= top_p:
                cutoff_idx = idx + 1
                break
        allowed = sorted_indices[:cutoff_idx]
        allowed_probs = [probs[i] for i in allowed]
        total_allowed = sum(allowed_probs)
        allowed_probs = [p / total_allowed for p in allowed_probs]
        r = random.random()
        cumsum = 0
        for i, p in zip(allowed, allowed_probs):
            cumsum += p
            if r <= cumsum:
                return i
        return allowed[-1]


class Force(SamplingStrategy):
    """Forces one token."""

    keys = (Key("force", "int", -1, low=-1, switch=True),)

    def __init__(self, model, options=None):
        super().__init__(options)
        self.tokens = model.per_slot(0, integer=True)

    def open(self, slot, params):
        self.tokens[slot] = params["force"]
        return True

    def step(self, logits, rows):
        for row, slot in rows.pairs:
            kept = logits[row, int(self.tokens[slot])].item()
            logits[row] = float("-inf")
            logits[row, int(self.tokens[slot])] = kept
'''


def test_the_guides_sampler_runs_as_it_is_and_requests_have_keys_by_default(graft: Session):
    """Its constructor gets the tokenizer, and without keys it has every request; a default is overridden or off."""
    entries = {"guide-json": "guide:ConstrainedJSONSampler", "force": "guide:Force"}
    graft.package("guide", {"vllm_graft.plugins": entries}, {"guide": SEED})
    graft.plan("""
[defaults]
samplers = ["force", "guide-json"]
[options.force]
defaults = {force = 53}
[options.guide-json]
every_request = true
budget_us = 10000000
""")
    found = result(
        graft,
        f"""
import json
from vllm import LLM, SamplingParams
llm = LLM(MODEL, {ENGINE})
asked = [None, dict(force=57), dict(force=-1), dict(other=1)]
params = [SamplingParams(max_tokens=4, ignore_eos=True, extra_args=extra) for extra in asked]
texts = [answer.outputs[0].text for answer in llm.generate(["x"] * 4, params)]
try:
    llm.generate("x", SamplingParams(max_tokens=4, extra_args=dict(force=-7)))
    bad = "served"
except Exception as error:
    bad = str(error)
{STATES}
print(json.dumps(dict(texts=texts, bad=bad, states=states, codes=codes)))
""",
    )
    assert found["states"] == {"force": "applied", "guide-json": "applied"}
    assert found["codes"] == []
    default, own, off, others = found["texts"]
    assert (default, own, others) == ("5555", "9999", "5555")
    assert len(off) == 4 or "\ufffd" in off
    assert "force must be a whole number, with a value of at least -1, but is -7" in found["bad"]
