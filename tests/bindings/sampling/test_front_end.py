"""Keys of samplers in the API server of every release: checked before anything is streamed, once for all prompts.

The simulated device computes no logits and takes no samplers. The front end needs no logits, so a plugin of
this test has the device take them; none of the requests here gets as far as an engine with a sampler's key.
"""

import json
from collections.abc import Iterator

import pytest

from vllm_graft.testing import ServerProcess, Session

LENIENT = """
def lift_refusal():
    import os
    if os.environ.get("GRAFT_SIMULATE"):
        from vllm_graft.simulator import refusals
        refused = ("model_config.logits_processors", "logits processors need logits")
        for name, table in list(vars(refusals).items()):
            if isinstance(table, tuple) and refused in table:
                setattr(refusals, name, tuple(row for row in table if row != refused))
"""

PLAN = """
[defaults]
samplers = ["dry", "xtc"]
on_failure = "warn"
"""

MESSAGES = [{"role": "user", "content": "x"}]
CHAT = {"model": "m", "messages": MESSAGES, "max_tokens": 2, "chat_template": "{{ messages[0].content }}"}
REQUESTS: dict[str, dict[str, object]] = {
    "/v1/completions": {"model": "m", "prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "m", "input": "x", "max_output_tokens": 16},
}

pytestmark = [pytest.mark.server]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all of them."""
    session = Session(tmp_path_factory.mktemp("front-end"))
    session.simulate()
    session.package("lenient", {"vllm.general_plugins": {"lenient": "lenient:lift_refusal"}}, {"lenient": LENIENT})
    session.plan(PLAN)
    with session.server("--served-model-name", "m", "--trust-request-chat-template") as started:
        yield started
    session.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("place", ["top level", "xargs"])
@pytest.mark.parametrize("path", REQUESTS)
def test_a_bad_key_is_a_400(server: ServerProcess, path: str, place: str, stream: bool):
    """Also where the answer would be streamed."""
    for extra in ({"dry_multiplier": -1}, {"dry_mutliplier": 1}, {"dry_penalty_last_n": 2**64}, {"xtc_threshold": 2}):
        body = {**REQUESTS[path], "stream": stream, **(extra if place == "top level" else {"vllm_xargs": extra})}
        status, answer = server.post(path, body)
        assert status == 400, answer
        assert json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("path", REQUESTS)
def test_other_names_and_values_that_mean_off_are_served(server: ServerProcess, path: str):
    """Whole and in a stream."""
    for extra in ({"threshold": 0.5}, {"dry_multiplier": 0}, {"my_probability": 1}):
        for stream in (False, True):
            status, answer = server.post(path, {**REQUESTS[path], "stream": stream, "vllm_xargs": extra})
            assert status == 200, answer
            assert '"error": {' not in answer


def test_many_names_and_many_prompts_are_served(server: ServerProcess):
    """Each name is looked at once."""
    names = {f"dry_penalty_lst_{number:03d}": 1 for number in range(500)}
    for extra in (names, {"vllm_xargs": names}):
        status, answer = server.post("/v1/completions", {**REQUESTS["/v1/completions"], "prompt": ["x"] * 300, **extra})
        assert status == 200, answer


@pytest.mark.parametrize("value", [5, "x", [1]], ids=str)
def test_a_body_that_vllm_stumbles_over_is_a_400(server: ServerProcess, value: object):
    """A stock server answers with a 500."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, answer = server.post(path, {**REQUESTS[path], "structured_outputs": value})
        assert status == 400, answer


@pytest.mark.parametrize("path", REQUESTS)
def test_a_priority_that_cannot_be_sent_is_a_400(server: ServerProcess, path: str):
    """In the header, where vLLM does not bound it as in the body; what it does not read as a number passes."""
    for stream in (False, True):
        body = {**REQUESTS[path], "stream": stream}
        for number in (2**64, -(2**70)):
            for value in (str(number), f" {number:_}"):
                status, answer = server.post(path, body, {"X-Vllm-Priority": value})
                assert status == 400, answer
                assert "x-vllm-priority holds a whole number that takes more than 64 bits" in answer
        for value in ("-7", "9" * 5000, "high"):
            assert server.post(path, body, {"X-Vllm-Priority": value})[0] == 200


def test_a_salt_that_cannot_be_sent_is_a_400(server: ServerProcess, scoring_takes_salts: bool):
    """On a route that has sampling parameters of its own making, too."""
    body = {"model": "m", "query": "x", "items": ["a"], "label_token_ids": [65, 66], "cache_salt": "\ud800"}
    status, answer = server.post("/generative_scoring", body)
    if not scoring_takes_salts:
        assert status == 200, answer
        return
    assert status == 400, answer
    assert "cache_salt contains an unpaired surrogate" in answer


def test_the_server_says_what_it_has(server: ServerProcess):
    """With what requests carry by default."""
    listed = json.loads(server.get("/graft/samplers")[1])["samplers"]
    assert [(row["name"], row["defaults"], row["every_request"]) for row in listed] == [
        ("dry", {}, False),
        ("xtc", {}, False),
    ]
