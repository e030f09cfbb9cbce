"""The patch cpu-seeds: a seeded request whose prompt is read in parts, in a real engine on a CPU."""

import json

import pytest

from vllm_graft.testing import Session

pytestmark = [pytest.mark.engine, pytest.mark.compiled]

# A step has room for 16 tokens: the prompt of 100 is read in seven parts, beside a request that is being answered.
SCRIPT = """
import json
from vllm import LLM, SamplingParams
from vllm_graft.ledger import runs

def tokens(room):
    llm = LLM(MODEL, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4, seed=3,
              max_num_batched_tokens=room, enable_chunked_prefill=True, enable_prefix_caching=False)
    params = [SamplingParams(max_tokens=12, seed=seed, ignore_eos=True, detokenize=False) for seed in (7, 8)]
    prompts = [{"prompt_token_ids": [20, 21]}, {"prompt_token_ids": [20 + n % 9 for n in range(100)]}]
    answers = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return [list(answer.outputs[0].token_ids) for answer in answers]

found = dict(parts=tokens(16), whole=tokens(256))
items = [item for view in runs() for each in view.rows() for item in each["items"] if item["name"] == "cpu-seeds"]
found["item"] = {key: items[0][key] for key in ("state", "calls")}
print("FOUND " + json.dumps(found), flush=True)
"""


def test_a_seeded_prompt_is_read_in_parts(graft: Session):
    """Without the patch the engine dies of it; with it, the answers are those of prompts that are read at once."""
    graft.plan('[defaults]\npatches = ["cpu-seeds"]\n')
    graft.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = graft.script(SCRIPT)
    assert "FOUND " in done.stdout, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))[6:])
    assert [len(each) for each in found["parts"]] == [12, 12]
    assert found["parts"] == found["whole"]
    assert found["item"]["state"] == "applied"
    assert found["item"]["calls"] > 20
    graft.env["GRAFT_DISABLE"] = "1"
    stock = graft.script(SCRIPT)
    assert stock.returncode != 0
    assert "CPU Generator does not use offset" in stock.stderr
