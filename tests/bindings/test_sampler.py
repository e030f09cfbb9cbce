"""Planned strategies: slots that stay while indices move, the right rows only, bad values and failures."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from vllm_graft.bindings import sampler
from vllm_graft.bindings.sampler import QUALNAME, Batch, arguments
from vllm_graft.errors import ConfigError
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.testing import Session, assert_active

ITEM = PlanItem("sampler", "force", "m:C", "p", ("worker",), {}, "graft.toml:2")


class Opens:
    """Stands for a planned strategy: opens what carries its key."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.opened: list[int] = []

    def open(self, slot: int, extra: dict[str, object]) -> bool:
        if self.key in extra:
            self.opened.append(slot)
        return self.key in extra


def change(added: list[tuple[int, str]] = [], removed: list[int] = [], moved: list[tuple[int, int, str]] = []):  # noqa: B006
    """vLLM's account of what changed in a batch."""
    return SimpleNamespace(
        added=[(index, SimpleNamespace(extra_args={key: 1} if key else None), None, []) for index, key in added],
        removed=removed,
        moved=[(first, second, SimpleNamespace(name=name)) for first, second, name in moved],
    )


def batch() -> Batch:
    return Batch([Opens("a"), Opens("b")])  # type: ignore[list-item]


def test_each_strategy_has_the_requests_that_carry_its_key():
    """Rows of others are none of its business."""
    made = batch()
    made.update(change(added=[(0, "a"), (1, ""), (2, "b"), (3, "a")]))
    assert [list(opened) for opened in made.open] == [[0, 3], [2]]


def test_a_moved_request_keeps_its_slot():
    """The index is vLLM's, the slot is the strategy's."""
    made = batch()
    made.update(change(added=[(0, "a"), (1, "a")]))
    slot = made.open[0][1]
    made.update(change(moved=[(1, 0, "UNIDIRECTIONAL")]))
    assert made.open[0] == {0: slot}


def test_a_swap_exchanges_two_requests():
    """Also one of which the strategy has nothing to do with."""
    made = batch()
    made.update(change(added=[(0, "a"), (1, "b")]))
    first, second = made.open[0][0], made.open[1][1]
    made.update(change(moved=[(0, 1, "SWAP")]))
    assert made.open == [{1: first}, {0: second}]


def test_an_index_filled_again_in_the_same_step_is_not_among_the_removed():
    """What was there before must not leak into the newcomer."""
    made = batch()
    made.update(change(added=[(0, "a")]))
    made.update(change(added=[(0, "b")]))
    assert [list(opened) for opened in made.open] == [[], [0]]


def test_slots_are_used_again_and_never_shared():
    """As many slots as requests at a time."""
    made = batch()
    for _ in range(5):
        made.update(change(added=[(0, "a"), (1, "a")]))
        assert sorted(made.open[0].values()) == [0, 1]
        made.update(change(removed=[0, 1]))
        assert made.open[0] == {}


def test_the_users_own_logits_processors_are_kept():
    """Ours comes after them, once."""
    mine = SimpleNamespace(logits_processors=["my.mod:Mine"])
    assert arguments(mine, Plan((ITEM,))) == {"logits_processors": ["my.mod:Mine", QUALNAME]}  # type: ignore[arg-type]
    again = SimpleNamespace(logits_processors=["my.mod:Mine", QUALNAME])
    assert arguments(again, Plan((ITEM,)))["logits_processors"].count(QUALNAME) == 1  # type: ignore[arg-type]
    assert arguments(mine, Plan()) == {}  # type: ignore[arg-type]


def test_a_v2_runner_that_takes_no_samplers_is_refused(monkeypatch: pytest.MonkeyPatch):
    """In 0.26 to 0.30 the order VLLM_USE_V2_MODEL_RUNNER=1 and a sampler contradict one another."""
    monkeypatch.setattr(sampler, "v2_takes_samplers", lambda: False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(
        ConfigError, match=r"VLLM_USE_V2_MODEL_RUNNER=1: the sampler 'force' \(graft.toml:2\) cannot run"
    ):
        arguments(SimpleNamespace(logits_processors=None), Plan((ITEM,)))  # type: ignore[arg-type]
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    assert arguments(SimpleNamespace(logits_processors=None), Plan((ITEM,)))  # type: ignore[arg-type]


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
