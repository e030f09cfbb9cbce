"""A modelled device under the real engine: its time to the nanosecond, its memory, and what cannot be."""

import json

import pytest

from vllm_graft.simulator.model_shape import find_model
from vllm_graft.testing import Session

pytestmark = pytest.mark.engine

LLAMA_8B = find_model("llama-3-8b").config

REFUSALS = """
import json, os
from vllm.engine.arg_utils import EngineArgs

def tried(environ, model="llama", **arguments):
    os.environ.update(environ)
    try:
        EngineArgs(model, skip_tokenizer_init=True, **arguments).create_engine_config()
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    for name in environ:
        del os.environ[name]
    print("SAID", json.dumps(said), flush=True)

tried({"GRAFT_SIMULATE": "H20"})
tried({"GRAFT_SIMULATE": "small"})
tried({"GRAFT_SIMULATE": "small"}, tensor_parallel_size=8)
tried({"GRAFT_SIMULATE": "H200", "GRAFT_SIMULATED_SPEED": "virtual", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
tried({"GRAFT_SIMULATE": "H200", "GRAFT_SIMULATED_SPEED": "soon"})
tried({"GRAFT_SIMULATE": "H200", "GRAFT_SIMULATED_OUTPUT_TOKENS": "20"})
tried({"GRAFT_SIMULATE": "H200", "GRAFT_SIMULATED_OUTPUT_TOKENS": "20"}, "endless")
tried({"GRAFT_SIMULATE": "H200"}, "endless")
"""

TIMES = """
import json, time
from vllm import LLM, SamplingParams
from vllm_graft.simulator.memory import build_roofline
from vllm_graft.simulator.settings import carried_settings

def expected(config):
    class Work:
        def __init__(self, new, context):
            self.new_tokens, self.context = new, context
    model = build_roofline(config, carried_settings(config))
    return sum(model.seconds([work]) for work in (Work(300, 300), Work(1, 301), Work(1, 302)))

llm = LLM("sliding", skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=8)
from vllm_graft.simulator.memory import kv_cache_specs
print("SPECS", sorted({type(spec).__name__ for spec in kv_cache_specs(llm.llm_engine.vllm_config).values()}))
params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
out = llm.generate([{"prompt_token_ids": [7] * 3000}], params, use_tqdm=False)
print("SLID", len(out[0].outputs[0].token_ids), flush=True)
llm.llm_engine.engine_core.shutdown()

for arguments in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
    llm = LLM("llama", skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=8, **arguments)
    began = time.time()
    params = SamplingParams(max_tokens=3, detokenize=False)
    out = llm.generate([{"prompt_token_ids": [7] * 300}], params, use_tqdm=False)
    config = llm.llm_engine.vllm_config
    print("TIMED", json.dumps({
        "tokens": len(out[0].outputs[0].token_ids),
        "took": time.time() - began,
        "expected": expected(config),
        "blocks": config.cache_config.num_gpu_blocks,
        "load": llm.collective_rpc("simulated_load")[0],
    }), flush=True)
    moves = (("sleep", (1,)), ("wake_up", ()), ("sleep", (2,)), ("wake_up", ()), ("reload_weights", ()))
    for method, given in moves:
        began = time.time()
        llm.collective_rpc(method, args=given)
        print("MOVED", method, round(time.time() - began, 4), flush=True)
    began = time.time()
    llm.collective_rpc("execute_dummy_batch")
    print("DUMMY", time.time() > began, flush=True)
    try:
        llm.collective_rpc("save_sharded_state")
    except Exception as error:
        print("REFUSED", error, flush=True)
    llm.llm_engine.engine_core.shutdown()
print("REAL", abs(time.time() - began) > 1e6, flush=True)
"""


@pytest.fixture
def simulated(graft: Session) -> Session:
    """A folder with a model that is a configuration alone, and a small device."""
    graft.simulate()
    (graft.folder / "llama").mkdir()
    (graft.folder / "llama" / "config.json").write_text(json.dumps(LLAMA_8B))
    (graft.folder / "sliding").mkdir()
    slides = {**LLAMA_8B, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024}
    (graft.folder / "sliding" / "config.json").write_text(json.dumps(slides))
    (graft.folder / "endless").mkdir()
    (graft.folder / "endless" / "config.json").write_text(json.dumps({**LLAMA_8B, "eos_token_id": None}))
    graft.plan('[device.small]\nbased_on = "L40S"\nmemory_gb = 16\n')
    return graft


def said(graft: Session, script: str, word: str) -> list[str]:
    """What a script printed after a word, line by line."""
    done = graft.script(script)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line.removeprefix(word + " ") for line in done.stdout.splitlines() if line.startswith(word + " ")]


def test_what_cannot_be_is_refused_before_anything_starts(simulated: Session):
    """Who, what, where and the next step, in the process the user sees."""
    lines = [json.loads(line) for line in said(simulated, REFUSALS, "SAID")]
    unknown, too_small, split, shared, speed, ends, endless, unasked = lines
    assert "GRAFT_SIMULATE: there is no device 'H20' (did you mean 'H200'?)" in unknown
    assert "the model's weights take 16.1 GB of each small" in too_small
    assert "Next: raise --tensor-parallel-size" in too_small
    assert split == ""
    assert "virtual time works only in a single process" in shared
    assert "GRAFT_SIMULATED_SPEED: speed must be a number above 0 or 'virtual', but is 'soon'" in speed
    assert (ends, unasked) == ("", "")
    assert "output_tokens would have no effect: there is no tokenizer" in endless


@pytest.mark.slow
def test_virtual_time_is_the_models_time_on_one_device_and_on_several(simulated: Session):
    """One prefill and two decodes take what the model of a step says, whatever the machine does."""
    simulated.simulate("H200", speed="virtual")
    done = simulated.script(TIMES)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    runs = [json.loads(line.removeprefix("TIMED ")) for line in lines if line.startswith("TIMED ")]
    assert [run["tokens"] for run in runs] == [3, 3, 3]
    for run in runs:
        assert run["took"] == pytest.approx(run["expected"], abs=1e-6)
    one, tensor, pipeline = runs
    assert tensor["took"] < one["took"] < pipeline["took"]
    assert tensor["blocks"] > 2 * one["blocks"]
    assert one["load"]["steps"] == 3
    assert one["load"]["busy_s"] == pytest.approx(one["took"], abs=1e-6)
    assert pipeline["load"]["busy_s"] < 0.6 * pipeline["took"]
    assert "SPECS ['SlidingWindowSpec']" in lines, "a window without a list of layers is every layer's"
    assert "SLID 40" in lines
    moved = [line.split()[1:] for line in lines if line.startswith("MOVED ")][:5]
    link = "0.6424"  # 16.06 GB of weights over 25 GB/s; a sleep of level 2 forgets them, and they come back by a reload
    assert moved == [["sleep", link], ["wake_up", link], ["sleep", "0.0"], ["wake_up", "0.0"], ["reload_weights", link]]
    assert lines.count("DUMMY True") == 3
    refused = [line for line in lines if line.startswith("REFUSED ")]
    assert len(refused) == 3, "one worker for all ranks refuses like any other"
    assert all("saving weights is not possible" in line for line in refused)
    assert "REAL True" in lines, "Python has its clocks back once the engine is gone"
