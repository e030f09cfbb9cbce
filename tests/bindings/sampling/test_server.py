"""Planned samplers in a real server: the right rows only, keys wherever clients put them, bad values, failures."""

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_graft.testing import ServerProcess, Session, assert_active

ACME = '''
from vllm_graft import Key, Sampler, SamplingStrategy

class Force(SamplingStrategy):
    """Forces one token, so that nobody can mistake what it did."""
    keys = ("force",)
    def __init__(self, options=None):
        super().__init__(options)
        self.tokens = {}
    @classmethod
    def check(cls, params):
        if int(params["force"]) < 0:
            raise ValueError("force must be a token id, but is %r" % params["force"])
    def open(self, slot, params):
        self.tokens[slot] = int(params["force"])
        return True
    def step(self, logits, rows):
        logits[rows.rows] = float("-inf")
        for row, slot in rows.pairs:
            logits[row, self.tokens[slot]] = 0.0

class Second(Sampler):
    """Picks the token of that rank."""
    keys = (Key("rank", "int", 0, low=0, high=9, switch=True),)
    def sample(self, logits, params):
        order = logits.argsort(dim=-1, descending=True)
        return [int(order[row, each["rank"]]) for row, each in enumerate(params)]
'''

BETA = '''
import random

from vllm_graft import Key, SamplingStrategy

class Bend(SamplingStrategy):
    """Turns the logits round: the least probable token becomes the most probable, the forbidden stay so."""
    keys = (Key("bend", "bool", False, switch=True),)
    stage = "transform"
    def open(self, slot, params):
        return True
    def step(self, logits, rows):
        own = logits[rows.rows]
        logits[rows.rows] = -own.masked_fill(own == float("-inf"), float("inf"))

class Flat(SamplingStrategy):
    """Makes all tokens alike, so that whatever comes after it decides."""
    keys = (Key("flat", "bool", False, switch=True),)
    def open(self, slot, params):
        return True
    def step(self, logits, rows):
        logits[rows.rows] = 0.0

class Fragile(SamplingStrategy):
    """Spoils what it is given, and raises one time in five."""
    keys = (Key("fragile", "bool", False, switch=True),)
    def __init__(self, options=None):
        super().__init__(options)
        self.random = random.Random(4)
    def open(self, slot, params):
        return True
    def step(self, logits, rows):
        logits[rows.rows] = float("nan")
        if self.random.random() < 0.2:
            raise RuntimeError("no such table")
        logits[rows.rows] = 0.0

class Raises(SamplingStrategy):
    """Always raises."""
    keys = (Key("raises", "bool", False, switch=True),)
    def open(self, slot, params):
        return True
    def step(self, logits, rows):
        raise RuntimeError("no such row")
'''

OWN = '''
from vllm.v1.sample.logits_processor import LogitsProcessor

class Mine(LogitsProcessor):
    """A logits processor of the user's own, that does nothing."""
    def __init__(self, vllm_config, device, is_pin_memory): ...
    @classmethod
    def validate_params(cls, sampling_params):
        assert (sampling_params.extra_args or {}).get("dry_bsae", 0) < 9
    def is_argmax_invariant(self):
        return True
    def update_state(self, batch_update): ...
    def apply(self, logits):
        return logits
'''

PLAN = """
[defaults]
samplers = ["force", "second", "bend", "flat", "fragile", "raises", "dry", "xtc", "no-repeat-ngram"]
[options.fragile]
on_error = "request"
"""

ASK = {"prompt": "x", "max_tokens": 5, "model": "m", "temperature": 0, "ignore_eos": True}


def lay_out(session: Session) -> None:
    """Two packages, each with strategies of its own."""
    acme = {"force": "acme:Force", "second": "acme:Second"}
    beta = {"bend": "beta:Bend", "flat": "beta:Flat", "fragile": "beta:Fragile", "raises": "beta:Raises"}
    session.package("acme", {"vllm_graft.plugins": acme}, {"acme": ACME})
    session.package("beta", {"vllm_graft.plugins": beta}, {"beta": BETA})
    session.package("own", {}, {"own": OWN})
    session.plan(PLAN)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokens_endpoint: tuple[str, ...]) -> Iterator[ServerProcess]:
    """One server with all of them."""
    session = Session(tmp_path_factory.mktemp("samplers"))
    lay_out(session)
    arguments = ("--max-num-seqs", "64", "--trust-request-chat-template", "--logits-processors", "own:Mine")
    with session.server("--served-model-name", "m", *tokens_endpoint, *arguments) as started:
        yield started
    session.close()


def complete(server: ServerProcess, **more: object) -> tuple[int, dict]:
    status, body = server.post("/v1/completions", {**ASK, **more})
    return status, json.loads(body)


def text(server: ServerProcess, **more: object) -> str:
    status, body = complete(server, **more)
    assert status == 200, body
    return str(body["choices"][0]["text"])


pytestmark = [pytest.mark.server, pytest.mark.compiled]


def test_two_packages_strategies_chosen_per_request(server: ServerProcess):
    """All at once in one batch, each request asking for something else, some for nothing."""
    plain, bent = text(server), text(server, bend=True)
    assert bent != plain
    wanted: list[dict[str, object]] = [{"force": 65}, {}, {"bend": True}, {"force": 66}, {}, {"force": 67}, {"rank": 0}]
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = list(pool.map(lambda extra: text(server, vllm_xargs=extra), wanted))
    assert answers == ["AAAAA", plain, bent, "BBBBB", plain, "CCCCC", plain]


def test_keys_at_the_top_level_and_in_xargs(server: ServerProcess):
    """As other servers' clients send them; xargs count more, and chat requests have them too."""
    assert text(server, force=65) == "AAAAA"
    assert text(server, vllm_xargs={"force": 66}) == "BBBBB"
    assert text(server, force=65, vllm_xargs={"force": 66}) == "BBBBB"
    chat = {
        "model": "m",
        "max_tokens": 3,
        "temperature": 0,
        "messages": [{"role": "user", "content": "x"}],
        "force": 67,
    }
    chat["chat_template"] = "{{ messages[0].content }}"
    status, body = server.post("/v1/chat/completions", {**chat, "ignore_eos": True})
    assert status == 200, body
    assert json.loads(body)["choices"][0]["message"]["content"] == "CCC"


REFUSED = [
    ({"force": -3}, "force must be a token id, but is -3"),
    ({"force": "many"}, "invalid literal"),
    ({"rank": 77}, "rank must be a whole number, with a value from 0 to 9, but is 77"),
    ({"dry_multiplier": -0.5}, "dry_multiplier must be a number, with a value of at least 0, but is -0.5"),
    ({"dry_multiplier": "x"}, "but is 'x'"),
    ({"dry_mutliplier": 0.8}, "dry_mutliplier is not a key of this server's samplers (did you mean 'dry_multiplier'?)"),
    ({"xtc_propability": 0.8}, "did you mean 'xtc_probability'?"),
    ({"top_n_sigma": 1.0}, "the sampler 'top-n-sigma' cannot be used: this server does not load it"),
    ({"dry_range": 3, "dry_penalty_last_n": 4}, "conflict: both set"),
]


@pytest.mark.parametrize(("extra", "said"), REFUSED, ids=[str(extra)[:30] for extra, _ in REFUSED])
@pytest.mark.parametrize("where", ["top level", "xargs"])
def test_bad_requests_are_told_what_is_wrong(server: ServerProcess, extra: dict[str, object], said: str, where: str):
    """A 400 with key, value and what is allowed."""
    status, body = complete(server, **(extra if where == "top level" else {"vllm_xargs": extra}))
    assert status == 400, body
    assert said in json.dumps(body, ensure_ascii=False)


CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 2,
    "chat_template": "{{ messages[0].content }}",
}
STREAMS: dict[str, dict[str, object]] = {
    "/v1/completions": {**ASK, "stream": True},
    "/v1/chat/completions": {**CHAT, "stream": True},
    "/v1/responses": {"model": "m", "input": "x", "max_output_tokens": 16, "stream": True},
    "/v1/messages": {"model": "m", "messages": CHAT["messages"], "max_tokens": 2, "stream": True},
    "/v1/chat/completions/batch": {**CHAT, "messages": [CHAT["messages"]]},
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_bad_key_is_a_400_before_anything_is_streamed(server: ServerProcess, messages_take_keys: bool, path: str):
    """Wherever it stands; a stream that has begun could not say so any more."""
    if path == "/v1/messages" and not messages_take_keys:
        pytest.skip("/v1/messages of the installed vLLM has no vllm_xargs")
    places: list[dict[str, object]] = [{"vllm_xargs": {"dry_multiplier": -1}}, {"vllm_xargs": {"dry_mutliplier": 1}}]
    if path not in ("/v1/messages", "/v1/chat/completions/batch"):
        places += [{"dry_multiplier": -1}, {"dry_mutliplier": 1}]
    for extra in places:
        status, body = server.post(path, {**STREAMS[path], **extra})
        assert status == 400, body
        assert "multiplier" in body


def test_sampling_parameters_that_are_sent_whole_are_checked_before_the_stream(server: ServerProcess):
    """The endpoint for tokens takes vLLM's own parameters as they are."""
    params = {"max_tokens": 2, "extra_args": {"dry_multiplier": -1}}
    body = {"model": "m", "token_ids": [1, 2], "sampling_params": params, "stream": True}
    status, answer = server.post("/inference/v1/generate", body)
    assert status == 400, answer
    assert "dry_multiplier must be a number" in answer
    status, answer = server.post(
        "/inference/v1/generate", {**body, "sampling_params": {"max_tokens": 2, "top_k": 2**64}}
    )
    assert status == 400, answer


UNSENDABLE: list[dict[str, object]] = [
    {"dry_penalty_last_n": 2**64},
    {"no_repeat_ngram_window": -(10**30)},
    {"dry_multiplier": 2**64},
    {"dry_multiplier": float("nan")},
    {"dry_multiplier": float("inf")},
    {"dry_sequence_breakers": ["\ud800"]},
    {"dry_multiplier": json.loads("[" * 900 + "]" * 900)},
    {"top_k": 2**64, "temperature": 1},
    {"structured_outputs": 5},
    {"structured_outputs": "x"},
    {"vllm_xargs": {"somebody": 2**64}},
    {"vllm_xargs": {"somebody": "\ud800"}},
    {"vllm_xargs": {"some\ud800body": 1}},
]


@pytest.mark.parametrize("extra", UNSENDABLE, ids=range(len(UNSENDABLE)))
def test_what_no_engine_can_be_sent_is_a_400_with_a_word(server: ServerProcess, extra: dict[str, object]):
    """Ours or vLLM's own: a stock server fails on some of these with a 500."""
    status, body = complete(server, **extra)
    assert status == 400, body
    assert body["error"]["message"]


HALF = "\ud800"
GENERATE: dict[str, object] = {"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
HALVES: list[tuple[str, dict[str, object]]] = [
    *((path, {**body, "request_id": HALF}) for path, body in STREAMS.items() if path != "/v1/messages"),
    ("/inference/v1/generate", {**GENERATE, "request_id": HALF}),
    *(
        ("/v1/responses", {**STREAMS["/v1/responses"], **extra})
        for extra in (
            {"user": HALF},
            {"metadata": {"a": HALF}},
            {"tools": [{"type": "function", "name": HALF, "parameters": {}}]},
            {"text": {"format": {"type": "json_schema", "name": HALF, "schema": {}}}},
        )
    ),
]


@pytest.mark.parametrize(("path", "body"), HALVES, ids=range(len(HALVES)))
@pytest.mark.parametrize("stream", [False, True])
def test_half_of_a_surrogate_pair_is_a_400_before_anything_is_streamed(
    server: ServerProcess, path: str, body: dict[str, object], stream: bool
):
    """A stock server answers with a 500, in a stream with an error, or ends the connection."""
    if path != "/v1/chat/completions/batch":
        body = {**body, "stream": stream}
    status, answer = server.post(path, body)
    assert status == 400, answer
    assert "contains an unpaired surrogate, so it cannot be sent" in answer


def test_names_of_other_packages_pass(server: ServerProcess):
    """A word of our keys is nobody's misspelling; so does what the user's own logits processor reads."""
    plain = text(server)
    for name in ("threshold", "probability", "my_threshold"):
        assert text(server, vllm_xargs={name: 0.5}) == plain
    assert text(server, vllm_xargs={"dry_bsae": 0.5}) == plain
    assert complete(server, vllm_xargs={"dry_baes": 0.5})[0] == 400


def test_many_names_and_many_prompts_do_not_hold_the_server_up(server: ServerProcess):
    """The names are looked at once, and not for each prompt."""
    names = {f"dry_penalty_lst_{number:03d}": 1 for number in range(500)}
    started = time.monotonic()
    for extra in (names, {"vllm_xargs": names}):
        status, body = complete(server, prompt=["x"] * 300, max_tokens=1, **extra)
        assert status == 200, body
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("place", ["top level", "xargs"])
def test_beam_search_is_refused_to_who_asks_for_a_sampler(server: ServerProcess, place: str):
    """vLLM hands no keys on there; a request that asks for nothing has its beams."""
    extra = {"force": 65} if place == "top level" else {"vllm_xargs": {"force": 65}}
    status, body = complete(server, use_beam_search=True, n=2, max_tokens=2, **extra)
    assert status == 400, body
    assert "force: the sampler 'force' cannot be used: beam search" in json.dumps(body)
    assert complete(server, use_beam_search=True, n=2, max_tokens=2)[0] == 200


def test_what_means_off_is_let_through(server: ServerProcess):
    """Clients send every key they know; only those that ask for something count."""
    off = {"dry_multiplier": 0, "xtc_probability": 0, "top_n_sigma": -1, "nsigma": 0, "mirostat_mode": 0, "tfs": 1}
    assert text(server, **{key: value for key, value in off.items() if key != "nsigma"}) == text(server)


def test_a_thousand_bad_requests_are_a_thousand_400s(server: ServerProcess):
    """And the server still answers."""
    generator = random.Random(7)
    extras = [dict(generator.choice(REFUSED)[0]) for _ in range(1000)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda extra: complete(server, vllm_xargs=extra)[0], extras))
    assert answers == [400] * 1000
    assert text(server, force=65) == "AAAAA"


def test_log_probabilities_stay_the_models(server: ServerProcess):
    """Whatever was picked, the client sees what the model thought of it."""
    _, plain = complete(server, logprobs=3, max_tokens=1)
    _, second = complete(server, logprobs=3, max_tokens=1, rank=1)
    best, picked = plain["choices"][0]["logprobs"], second["choices"][0]["logprobs"]
    assert picked["top_logprobs"][0].items() >= best["top_logprobs"][0].items()
    ranked = sorted(best["top_logprobs"][0].values(), reverse=True)
    assert picked["token_logprobs"][0] == pytest.approx(ranked[1])
    assert best["token_logprobs"][0] == pytest.approx(ranked[0])


def test_strategies_work_after_vllms_penalties(server: ServerProcess):
    """As they do on the V2 runner: what they leave is what is picked from, and no penalty comes on top of it."""
    status, body = complete(server, flat=True, presence_penalty=2.0, frequency_penalty=2.0, logprobs=1, max_tokens=6)
    assert status == 200, body
    assert len(set(body["choices"][0]["logprobs"]["tokens"])) == 1
    plain = complete(server, presence_penalty=2.0, frequency_penalty=2.0, logprobs=1, max_tokens=6)[1]
    assert len(set(plain["choices"][0]["logprobs"]["tokens"])) > 1


@pytest.mark.parametrize(
    "extra", [{"bend": True}, {"xtc_probability": 1.0, "xtc_threshold": 0.0}, {"dry_multiplier": 9}]
)
def test_what_a_grammar_forbids_stays_forbidden(server: ServerProcess, extra: dict[str, object]):
    """Structured outputs mask the logits before any strategy sees them."""
    allowed = {"choice": ["abcabcabc", "bcabcabca"]}
    status, body = complete(
        server,
        prompt="abcabc",
        max_tokens=20,
        temperature=0.9,
        seed=3,
        ignore_eos=False,
        structured_outputs=allowed,
        **extra,
    )
    assert status == 200, body
    assert body["choices"][0]["text"] in allowed["choice"]


def test_several_answers_to_one_request_are_each_their_own(server: ServerProcess):
    """n > 1: the seeds differ, the strategy holds for all."""
    status, body = complete(server, n=3, temperature=1.0, seed=5, no_repeat_ngram_size=1, max_tokens=12)
    assert status == 200, body
    answers = [choice["text"] for choice in body["choices"]]
    assert len(set(answers)) == 3
    again = [choice["text"] for choice in complete(server, n=3, temperature=1.0, seed=5, no_repeat_ngram_size=1, max_tokens=12)[1]["choices"]]  # fmt: skip  # noqa: E501
    assert again == answers


def test_a_long_prompt_that_is_read_in_parts(server: ServerProcess):
    """Chunked prefill: nothing is picked until all of it is in, and nothing is changed but the pick."""
    long = "abcdefgh" * 24
    assert text(server, prompt=long, force=65, max_tokens=3) == "AAA"
    banned = text(server, prompt=long, no_repeat_ngram_size=2, max_tokens=8)
    plain = text(server, prompt=long, max_tokens=8)
    pairs = {long[at : at + 2] for at in range(len(long) - 1)}
    assert not any((long[-1] + banned)[at : at + 2] in pairs for at in range(len(banned)))
    assert len(plain) <= 8


def test_a_strategy_that_raises_at_random_loses_no_other_request(server: ServerProcess):
    """A thousand requests, a third of them at risk: those end well or with an error of their own, all others well."""
    plain = text(server, max_tokens=3)
    kinds: list[dict[str, object]] = [{"fragile": True}, {}, {"force": 65}]

    def one(number: int) -> tuple[int, int, str]:
        status, body = complete(server, max_tokens=3, **kinds[number % 3])
        return number % 3, status, str(body["choices"][0]["text"]) if status == 200 else json.dumps(body)

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(one, range(1000)))
    assert {(status, said) for kind, status, said in answers if kind == 1} == {(200, plain)}
    assert {(status, said) for kind, status, said in answers if kind == 2} == {(200, "AAA")}
    at_risk = [status for kind, status, _ in answers if kind == 0]
    assert set(at_risk) == {200, 500}
    assert 0.02 < at_risk.count(500) / len(at_risk) < 0.3
    (worker,) = [view for view in server.run_view().processes if "worker" in view.record.roles]
    assert worker.record.item("fragile").state == "applied"
    assert server.health() == 200


def test_or_it_is_put_aside_and_its_running_requests_go_on(server: ServerProcess, messages_take_keys: bool):
    """The policy where the plan says nothing: the logits pass as they are, and status says so.

    Whoever asks for it from then on, even at once, is told by the front end that it is not there.
    """
    plain = text(server)
    assert text(server, raises=True) == plain
    for number in range(3):
        status, body = server.post("/v1/completions", {**ASK, "raises": True, "stream": number % 2 == 1})
        assert status == 503, (status, body)
    answer = complete(server, raises=True)
    assert (
        "raises: the sampler 'raises' cannot be used: it was put aside after a failure (RuntimeError: no such row"
        in (str(answer[1]))
    )
    for path, body in STREAMS.items():
        asked = path != "/v1/messages" or messages_take_keys
        assert server.post(path, {**body, "vllm_xargs": {"raises": 1}})[0] == (503 if asked else 200), path
    assert text(server, force=65, raises=False) == "AAAAA"
    (row,) = [row for row in json.loads(server.get("/graft/samplers")[1])["samplers"] if row["name"] == "raises"]
    assert row["refused"].startswith("it was put aside: RuntimeError: no such row")
    view = server.run_view()
    (worker,) = assert_active(view, "force")
    assert worker.calls("force") >= 10
    raised = worker.record.item("raises")
    assert raised is not None
    assert raised.state == "quarantined"
    assert "RuntimeError: no such row" in raised.reason


def test_the_server_says_what_it_has(server: ServerProcess):
    """GET /graft/samplers: what is loaded with its keys, and what ships besides."""
    status, body = server.get("/graft/samplers")
    assert status == 200
    listed = json.loads(body)
    by_name = {row["name"]: row for row in listed["samplers"]}
    assert list(by_name) == ["force", "second", "bend", "flat", "fragile", "raises", "dry", "xtc", "no-repeat-ngram"]
    assert by_name["second"]["contract"] == "Sampler"
    assert by_name["bend"]["package"] == "beta"
    (multiplier, *_) = by_name["dry"]["keys"]
    assert multiplier["name"] == "dry_multiplier"
    assert multiplier["switch"] is True
    assert multiplier["min"] == 0
    assert {row["name"] for row in listed["not_loaded"]} >= {"top-n-sigma", "constrained-json"}
