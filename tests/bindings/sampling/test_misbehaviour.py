"""Samplers that misbehave in a real server: each costs itself, and no other request notices."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_graft.testing import ServerProcess, Session

pytestmark = [pytest.mark.server, pytest.mark.compiled]

MISDEEDS = '''
import math
import os
import sys
import time

import torch

from vllm_graft import Key, Sampler, SamplingStrategy

class Misdeed(SamplingStrategy):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.keys = (Key(cls.__name__.lower(), "bool", False, switch=True),)
    def open(self, slot, params):
        return True
    def step(self, logits, rows):
        """Nothing, where the misdeed is another."""

class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")

class Exits(Misdeed):
    def step(self, logits, rows):
        sys.exit(3)

class Interrupts(Misdeed):
    def open(self, slot, params):
        raise KeyboardInterrupt

class Mumbles(Misdeed):
    def step(self, logits, rows):
        raise Unspeakable

class Mutters(Misdeed):
    def step(self, logits, rows):
        raise ValueError("half \\ud800")

class Garbles(Mutters):
    """The same, at the cost of the request."""

class Overreaches(Misdeed):
    """Forces a token for everybody it can see."""
    def step(self, logits, rows):
        logits[:] = -math.inf
        logits[:, 66] = 0.0

class Undermines(Misdeed):
    """Writes wherever it can and then raises."""
    def step(self, logits, rows):
        logits.fill_(0.0)
        logits[:, 66] = 50.0
        raise RuntimeError("half-way")

class Resizes(Misdeed):
    def step(self, logits, rows):
        logits.resize_(1, 4)

class Blurs(Misdeed):
    def step(self, logits, rows):
        logits.fill_(math.nan)

class Explodes(Misdeed):
    def step(self, logits, rows):
        logits.fill_(math.inf)

class Sleeps(Misdeed):
    def step(self, logits, rows):
        time.sleep(1.5)

class Dozes(Misdeed):
    def open(self, slot, params):
        time.sleep(1.5)
        return False

class Returns(Misdeed):
    """Keeps to vLLM's convention: what it returns counts."""
    def step(self, logits, rows):
        forced = logits.new_full(logits.shape, -math.inf)
        forced[:, 65] = 0.0
        return forced

class Forks(Misdeed):
    """Means to end the child."""
    def step(self, logits, rows):
        if not os.fork():
            sys.exit()

class Seeds(Misdeed):
    """For the whole process, with the seed that vLLM gives it by default."""
    def step(self, logits, rows):
        torch.manual_seed(0)

class Tampers(Sampler):
    """Writes into the list of tokens that vLLM keeps."""
    keys = (Key("tampers", "bool", False, switch=True),)
    def sample(self, logits, params):
        for each in params:
            each.generated.clear()
        return logits.argmax(-1)
'''

NAMES = (
    "exits", "interrupts", "mumbles", "mutters", "garbles", "overreaches", "undermines", "resizes", "blurs", "explodes",
    "sleeps", "dozes", "returns", "tampers", "forks", "seeds",
)  # fmt: skip

LONG = 100
ASK = {"prompt": "x", "max_tokens": 6, "model": "m", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server with all of them planned."""
    session = Session(tmp_path_factory.mktemp("misbehaviour"))
    entries = {name: f"misdeeds:{name.capitalize()}" for name in NAMES}
    session.package("misdeeds", {"vllm_graft.plugins": entries}, {"misdeeds": MISDEEDS})
    session.plan(f'[defaults]\nsamplers = {json.dumps(NAMES)}\n[options.garbles]\non_error = "request"\n')
    with session.server("--served-model-name", "m", "--max-num-seqs", "16") as started:
        yield started
    session.close()


def text(server: ServerProcess, **more: object) -> str:
    status, body = server.post("/v1/completions", {**ASK, **more})
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["text"])


@pytest.fixture(scope="module")
def plain(server: ServerProcess) -> str:
    """What a request gets that asks for nothing."""
    return text(server)


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> list[str]:
    """What four long ones get."""
    return [text(server, max_tokens=LONG)] * 4


def beside(server: ServerProcess, name: str, number: int = 4) -> tuple[list[str], list[str]]:
    """The answers of requests that ask for a sampler, and of others that are under way when they come."""
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(text, server, max_tokens=LONG) for _ in range(4)]
        time.sleep(0.2)
        own = [pool.submit(text, server, **{name: True}) for _ in range(number)]
        return [each.result() for each in own], [each.result() for each in others]


def reason(server: ServerProcess, name: str) -> str:
    """Why a sampler is quarantined."""
    (worker,) = [view for view in server.run_view().processes if "worker" in view.record.roles]
    item = worker.record.item(name)
    assert item is not None
    assert item.state == "quarantined", item
    return item.reason


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exits", "SystemExit: 3 at "),
        ("interrupts", "KeyboardInterrupt: "),
        ("mumbles", "Unspeakable: (its message cannot be shown: str() raised ValueError)"),
        ("undermines", "RuntimeError: half-way at "),
        ("resizes", "but left or returned (1, 4) float32 on cpu"),
        ("blurs", "step gave NaN or +inf"),
        ("explodes", "step gave NaN or +inf"),
        ("tampers", "has no attribute 'clear'"),
        ("seeds", "step has changed torch's random seed"),
    ],
)
def test_a_misdeed_costs_the_sampler_and_nobody_else(
    server: ServerProcess, plain: str, undisturbed: list[str], name: str, said: str
):
    """Its request goes on as if it had never been called, others do not notice, and status has the reason."""
    assert beside(server, name, 1) == ([plain], undisturbed)
    assert said in reason(server, name)
    assert server.health() == 200


def test_a_child_of_a_sampler_answers_nobody(server: ServerProcess, plain: str, undisturbed: list[str]):
    """A second worker would take in what is for the first, and both would answer."""
    assert beside(server, "forks", 1) == ([plain], undisturbed)
    assert text(server) == plain
    assert server.health() == 200


def test_a_message_that_cannot_be_sent_costs_no_answer(server: ServerProcess, plain: str, undisturbed: list[str]):
    """An unpaired surrogate would end the engine's answers to everybody, and hide the sampler's failure."""
    assert beside(server, "mutters", 1) == ([plain], undisturbed)
    status, body = server.post("/v1/completions", {**ASK, "mutters": True})
    assert (status, r"half \\ud800" in body) == (503, True)
    status, body = server.get("/graft/status")
    assert (status, r"half \\ud800" in body) == (200, True)
    status, body = server.post("/v1/completions", {**ASK, "garbles": True})
    assert status == 500, body
    assert text(server) == plain


def test_rows_of_other_requests_are_out_of_reach(server: ServerProcess, undisturbed: list[str]):
    """It forces a token wherever it can write: in its own rows only."""
    own, others = beside(server, "overreaches")
    assert set(own) == {"B" * 6}
    assert others == undisturbed


def test_what_a_step_returns_counts(server: ServerProcess, undisturbed: list[str]):
    """As in vLLM's own interface."""
    assert beside(server, "returns") == (["A" * 6] * 4, undisturbed)


@pytest.mark.parametrize(("name", "requests"), [("sleeps", 1), ("dozes", 3)])
def test_one_that_sleeps_is_put_aside_at_its_third_call(server: ServerProcess, plain: str, name: str, requests: int):
    """Two long calls are forgiven; six of them, for one request, would take nine seconds."""
    started = time.monotonic()
    for _ in range(requests):
        assert text(server, **{name: True}) == plain
    assert time.monotonic() - started < 15
    assert "3 calls each took more than 1 s over the budget of " in reason(server, name)
