"""Request keys of a policy in the API server: checked before anything is streamed."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import pytest

from vllm_graft.bindings.attention import requests
from vllm_graft.contracts import KVPolicy, OptionValue
from vllm_graft.plan import PlanItem
from vllm_graft.plugins.attention.sink_window import SinkWindow
from vllm_graft.testing import ServerProcess, Session

PLAN = """[defaults]
attention = "scored-blocks"
[options.scored-blocks]
first = 16
recent = 16
min_tokens = 32
every = 1
"""
MESSAGES = [{"role": "user", "content": "x"}]
CHAT = {"model": "m", "messages": MESSAGES, "max_tokens": 2, "chat_template": "{{ messages[0].content }}"}
REQUESTS: dict[str, dict[str, object]] = {
    "/v1/completions": {"model": "m", "prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "m", "input": "x", "max_output_tokens": 16},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokens_endpoint: tuple[str, ...]) -> Iterator[ServerProcess]:
    session = Session(tmp_path_factory.mktemp("policy-keys"))
    session.simulate()
    session.plan(PLAN)
    with session.server("--served-model-name", "m", "--trust-request-chat-template", *tokens_endpoint) as started:
        yield started
    session.close()


@pytest.mark.server
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", REQUESTS)
def test_a_value_that_the_policy_refuses_is_a_400(server: ServerProcess, path: str, stream: bool):
    """Also where the answer would be streamed; other names and good values are served."""
    for value, status in ((0.6, 400), (0, 400), (-1, 400), ("much", 400), ([0.5], 400), (0.5, 200), (0.1, 200)):
        body = {**REQUESTS[path], "stream": stream, "vllm_xargs": {"kv_keep": value, "other": 1}}
        found, answer = server.post(path, body)
        assert found == status, answer
        if status == 400:
            assert "kv_keep must be a number above 0 and up to 0.5" in json.loads(answer)["error"]["message"]


@pytest.mark.server
@pytest.mark.parametrize("path", REQUESTS)
def test_a_key_counts_at_the_top_level_too(server: ServerProcess, path: str):
    """vLLM drops a name there that it does not know, and the request would keep more than it asked for."""
    assert server.post(path, {**REQUESTS[path], "kv_keep": 0.5})[0] == 200
    found, answer = server.post(path, {**REQUESTS[path], "kv_keep": 0.6})
    assert found == 400, answer
    assert "kv_keep must be a number above 0 and up to 0.5" in json.loads(answer)["error"]["message"]


@pytest.mark.server
@pytest.mark.parametrize("path", REQUESTS)
def test_a_misspelt_key_is_a_400(server: ServerProcess, path: str):
    for body in ({"vllm_xargs": {"kvkeep": 0.5}}, {"kv-keep": 0.5}):
        found, answer = server.post(path, {**REQUESTS[path], **body})
        assert found == 400, answer
        message = json.loads(answer)["error"]["message"]
        assert "is not a key of this server's KV policy (did you mean 'kv_keep'?)" in message


@pytest.mark.server
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_sampling_parameters_that_are_sent_whole_are_checked_before_the_answer(server: ServerProcess, stream: bool):
    """The endpoint for tokens takes vLLM's own parameters as they are."""
    for keys, said in (({"kv_keep": 0.6}, "kv_keep must be a number"), ({"kvkeep": 0.5}, "did you mean 'kv_keep'?")):
        params = {"max_tokens": 2, "extra_args": keys}
        body = {"model": "m", "token_ids": [1, 2], "sampling_params": params, "stream": stream}
        found, answer = server.post("/inference/v1/generate", body)
        assert (found, said in answer) == (400, True), answer


@pytest.mark.server
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_beams_are_served_without_keys_of_the_policy_alone(server: ServerProcess, path: str):
    """vLLM drops the keys of a request for beam search, so it would keep more than it asked for."""
    body = {**REQUESTS[path], "use_beam_search": True, "n": 2}
    assert server.post(path, body)[0] == 200
    assert server.post(path, {**body, "vllm_xargs": {"other": 1}})[0] == 200
    for keys in ({"vllm_xargs": {"kv_keep": 0.5}}, {"kv_keep": 0.5}):
        found, answer = server.post(path, {**body, **keys})
        assert found == 400, answer
        assert "kv_keep: cannot be combined with use_beam_search" in json.loads(answer)["error"]["message"]


@pytest.mark.server
def test_a_prompt_of_one_token_may_ask_for_its_logprobs(server: ServerProcess):
    """A table without rows cannot be sent, and the engine would never answer again."""
    for keys in ({"prompt_logprobs": 2}, {"kv_keep": 0.5}):
        assert server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2, **keys})[0] == 200


@pytest.mark.server
def test_the_metrics_show_blocks_held_and_freed(server: ServerProcess):
    """Of two samples of a prompt; once they have ended nothing is held."""
    body = {"model": "m", "prompt": "x" * 120, "max_tokens": 80, "n": 2, "ignore_eos": True}
    assert server.post("/v1/completions", body)[0] == 200
    line = re.compile(r'vllm_graft_item_figure{(?=.*item="scored-blocks").*figure="KV blocks (held|freed)".*} (\S+)')
    deadline = time.monotonic() + 20
    while True:
        found = {name: float(value) for name, value in line.findall(server.get("/metrics")[1])}
        if found.get("freed", 0) >= 4 and found["held"] == 0:
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


class Mistaken(KVPolicy):
    """Fails on its keys in every way that an author may."""

    keys = ("kv_own",)

    @classmethod
    def check_request(cls, keys: Mapping[str, object], options: Mapping[str, OptionValue]) -> None:
        if keys["kv_own"] == "changes":
            keys.pop("other", None)  # type: ignore[attr-defined]
        raise {"exits": SystemExit(3), "stops": KeyError("size"), "refuses": ValueError("no")}[str(keys["kv_own"])]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("exits", "kv_own: SystemExit: 3"),
        ("stops", "kv_own: KeyError: 'size'"),
        ("refuses", "no"),
        ("changes", "kv_own: AttributeError: 'mappingproxy' object has no attribute 'pop'"),
    ],
)
def test_a_check_that_fails_refuses_its_request_alone(monkeypatch: pytest.MonkeyPatch, value: str, said: str):
    """A SystemExit would end the server, and any other error would be a 500."""
    monkeypatch.setattr(requests, "_planned_keys", lambda: requests.PolicyKeys(Mistaken, {}))
    requests.check(SimpleNamespace(extra_args={"other": 1}))
    with pytest.raises(ValueError, match=f"^{said}$"):
        requests.check(SimpleNamespace(extra_args={"kv_own": value}))


def test_names_that_resemble_a_key_pass_where_the_plan_says_so():
    """Keys of planned samplers, names under ``other_keys``, and every name with ``unknown_keys = "pass"``."""
    names = ["kv_window", "other", "kv_widow"]
    assert requests.PolicyKeys(SinkWindow, {}).misspelt(names) == ("kv_widow", "kv_window")
    assert requests.PolicyKeys(SinkWindow, {}, others=frozenset({"kv_widow"})).misspelt(names) is None
    assert requests.PolicyKeys(SinkWindow, {}, strict=False).misspelt(names) is None


def test_a_policy_that_cannot_be_imported_refuses_no_request():
    """The process that makes it says what is wrong; a lenient plan goes on without it."""
    item = PlanItem("attention", "gone", "no_such_module:Policy", "pkg", ("worker",))
    assert requests.policy_keys(SimpleNamespace(of=lambda point: [item])) == ()  # type: ignore[arg-type]
