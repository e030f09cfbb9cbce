"""Request keys of a policy in the API server: checked before anything is streamed.

The simulated device computes no attention, so the policy itself is left out; the front end needs none.
"""

import json
from collections.abc import Iterator

import pytest

from vllm_graft.testing import ServerProcess, Session

PLAN = '[defaults]\nattention = "scored-blocks"\non_failure = "warn"\n'
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
    session = Session(tmp_path_factory.mktemp("policy-keys"))
    session.simulate()
    session.plan(PLAN)
    with session.server("--served-model-name", "m", "--trust-request-chat-template") as started:
        yield started
    session.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", REQUESTS)
def test_a_value_that_the_policy_refuses_is_a_400(server: ServerProcess, path: str, stream: bool):
    """Also where the answer would be streamed; other names and good values are served."""
    for value, status in ((0.6, 400), (0, 400), ("much", 400), (0.5, 200), (0.1, 200)):
        body = {**REQUESTS[path], "stream": stream, "vllm_xargs": {"kv_keep": value, "other": 1}}
        found, answer = server.post(path, body)
        assert found == status, answer
        if status == 400:
            assert "kv_keep must be a number above 0 and up to 0.5" in json.loads(answer)["error"]["message"]
