"""Planned samplers in a real server: the right rows only, keys wherever clients put them, bad values, failures."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_graft.testing import Session, assert_active

SOURCE = '''
from vllm_graft import SamplingStrategy

class Force(SamplingStrategy):
    """Forces one token, so that nobody can mistake what it did."""
    keys = ("force",)
    def __init__(self, options=None):
        super().__init__(options)
        self.tokens = {}
    @classmethod
    def check(cls, params):
        if int(params["force"]) < 0:
            raise ValueError("force must be a token id, and is %r" % params["force"])
    def open(self, slot, params):
        self.tokens[slot] = int(params["force"])
        return True
    def step(self, logits, rows):
        logits[rows.rows] = float("-inf")
        for row, slot in zip(rows.rows.tolist(), rows.slots.tolist()):
            logits[row, self.tokens[slot]] = 0.0

class Raises(SamplingStrategy):
    keys = ("raises",)
    def open(self, slot, params):
        return True
    def step(self, logits, rows):
        raise RuntimeError("no such table")
'''


@pytest.mark.server
@pytest.mark.compiled
def test_strategies_on_the_real_server(graft: Session):
    """Six requests at once, each asking for something else; then bad values, then a strategy that raises."""
    entries = {"force": "strategies:Force", "raises": "strategies:Raises"}
    graft.package("strategies", {"vllm_graft.plugins": entries}, {"strategies": SOURCE})
    graft.plan('[defaults]\nsamplers = ["force", "raises"]\n')
    ask = {"prompt": ["x"], "max_tokens": 5, "model": "m", "temperature": 0, "ignore_eos": True}
    with graft.server("--served-model-name", "m") as server:

        def text(**extra: object) -> str:
            status, body = server.post("/v1/completions", {**ask, **({"vllm_xargs": extra} if extra else {})})
            assert status == 200, body
            return str(json.loads(body)["choices"][0]["text"])

        plain = text()
        wanted: list[dict[str, object]] = [{"force": 65}, {}, {"force": 66}, {}, {"force": 67}, {"force": 65}]
        with ThreadPoolExecutor(len(wanted)) as pool:
            answers = list(pool.map(lambda extra: text(**extra), wanted))
        assert answers == ["AAAAA", plain, "BBBBB", plain, "CCCCC", "AAAAA"]
        status, body = server.post("/v1/completions", {**ask, "vllm_xargs": {"force": -3}})
        assert status == 400
        assert "force must be a token id, and is -3" in body
        status, body = server.post("/v1/completions", {**ask, "vllm_xargs": {"force": "many"}})
        assert status == 400, body
        assert text(raises=1) == plain
        assert text(force=65) == "AAAAA"
        view = server.run_view()
        (worker,) = assert_active(view, "force")
        assert worker.calls("force") >= 15
        raised = worker.record.item("raises")
        assert raised is not None
        assert raised.state == "quarantined"
        assert "RuntimeError: no such table" in raised.reason


@pytest.mark.engine
def test_a_sampler_where_nothing_computes_logits_stops_the_start(graft: Session):
    """The simulated accelerator has no logits to change, and says so before it serves."""
    graft.simulate()
    graft.package("strategies", {"vllm_graft.plugins": {"force": "strategies:Force"}}, {"strategies": SOURCE})
    graft.plan('[defaults]\nsamplers = ["force"]\n')
    done = graft.script("from vllm import LLM\nLLM(MODEL, max_model_len=256)")
    assert done.returncode != 0
    line = done.stderr.strip().splitlines()[-1]
    assert "logits processors need logits" in line, done.stderr[-2000:]
