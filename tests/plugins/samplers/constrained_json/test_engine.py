"""The embedded model in the real engine: every answer parses, other requests are not touched, answers repeat."""

import json

import pytest

from vllm_graft.testing import Session, embedded_model

pytestmark = [pytest.mark.engine, pytest.mark.compiled, pytest.mark.slow]

SCRIPT = """
import json
from vllm import LLM, SamplingParams
from vllm_graft.ledger import runs

llm = LLM(MODEL, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=24)

def ask(**said):
    keys = said.pop("keys", dict(json_sampler=True))
    return SamplingParams(extra_args=keys, **said)

asked = [ask(temperature=0, max_tokens=m) for m in (2, 7, 28)]
asked += [ask(temperature=1.0, top_p=0.9, seed=s, max_tokens=20) for s in (1, 2)]
asked += [ask(temperature=0.8, seed=3, max_tokens=12, keys=dict(json_sampler=True, json_max_depth=1))]
asked += [ask(temperature=0, max_tokens=12, keys=None)]
talk = [dict(role="user", content="Describe a cat as a JSON object with its name, age and three habits.")]
rounds = [[out.outputs[0].text for out in llm.chat([talk] * len(asked), asked, use_tqdm=False)] for _ in range(2)]
stock = llm.chat([talk], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].outputs[0].text
# More than a hundred steps in which two dozen draw from nearly all tokens: who overran its budget in each is put aside.
many = [ask(temperature=1.0, top_p=0.95, seed=s, max_tokens=110, ignore_eos=True) for s in range(24)]
crowd = [out.outputs[0].text for out in llm.generate(["A list, as JSON:"] * len(many), many, use_tqdm=False)]
states = {item.name: item.state for view in runs() for each in view.processes for item in each.record.items}
print(json.dumps(dict(rounds=rounds, stock=stock, states=states, crowd=crowd)))
"""


def test_the_model_writes_json(graft: Session):
    graft.plan('[defaults]\nsamplers = ["constrained-json"]\n')
    graft.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Threads of the engine would spin against the other test processes.
    graft.env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = graft.script(SCRIPT.replace("MODEL", repr(str(embedded_model()))))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    first, second = found["rounds"]
    for text in first[:-1]:
        assert isinstance(json.loads(text), dict), text
    assert first == second
    assert first[-1] == found["stock"]
    assert len(json.loads(first[2])) > 0
    assert found["states"] == {"constrained-json": "applied"}
    assert len(found["crowd"]) == 24
    for text in found["crowd"]:
        assert isinstance(json.loads(text), dict), text
