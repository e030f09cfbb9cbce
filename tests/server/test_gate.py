"""The gate in front of an application: what it hands on, what it writes into a request, whom it turns away."""

import asyncio
import hashlib
import json
import time
from types import SimpleNamespace

import pytest

from vllm_graft.contracts import AdmissionQueue, Load, Refusal, WaitingRequest
from vllm_graft.ledger import Ledger
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.server.callers import CURRENT_CALLER, Caller, CallersFile
from vllm_graft.server.engine_request import EngineRequest
from vllm_graft.server.gate import UNSEEN_S, Gate, _queue_options

CALLERS = f"""
[[caller]]
tenant = "acme"
key_sha256 = "{hashlib.sha256(b"secret").hexdigest()}"
best_priority = 2
priority = 3
"""


class Played:
    """An application that keeps what it was given, and a client that keeps what it was answered."""

    def __init__(self, **gate) -> None:
        self.seen: list[tuple[dict, bytes, list]] = []
        self.sent: list[dict] = []
        self.asking: list[object] = []
        self.gate = Gate(self.application, **gate)

    async def application(self, scope, receive, send):
        body, then = b"", []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                then.append(message)
                break
            body += message["body"]
        self.seen.append((scope, body, then))
        self.asking.append(CURRENT_CALLER.get())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def post(self, body, path="/v1/completions", headers=(), parts=1, **scope):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = max(1, -(-len(raw) // parts))
        chunks = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
        messages = [{"type": "http.request", "body": each, "more_body": True} for each in chunks]
        messages[-1]["more_body"] = False
        return self.play(messages, path, headers, **scope)

    def play(self, messages, path="/v1/completions", headers=(), headers_as_are=None, **scope):
        left = [*messages, {"type": "http.disconnect"}]

        async def receive():
            return left.pop(0)

        async def send(message):
            self.sent.append(message)

        given = [(b"content-type", b"application/json"), *((n.encode(), v.encode()) for n, v in headers)]
        given = headers_as_are or given
        facts = {"type": "http", "method": "POST", "path": path, "headers": given, **scope}
        self.sent.clear()
        asyncio.run(self.gate(facts, receive, send))
        return self.sent[0]["status"]

    @property
    def answer(self):
        headers = {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}
        return headers, json.loads(self.sent[1]["body"])["error"]


@pytest.fixture
def callers(tmp_path):
    path = tmp_path / "callers.toml"
    path.write_text(CALLERS)
    return CallersFile(str(path), Plan())


KEY = ("Authorization", "Bearer secret")


@pytest.mark.parametrize("parts", [1, 7])
def test_a_request_that_is_let_in_is_handed_on_as_it_came(parts):
    """Byte for byte; what the client says afterwards, such as that it is gone, is heard."""
    played = Played(admit=lambda request, load: None)
    raw = b'{"prompt":  "a", "priority": 4}'
    assert played.post(raw, parts=parts) == 200
    _, body, then = played.seen[0]
    assert body == raw
    assert then == [{"type": "http.disconnect"}]


@pytest.mark.parametrize(
    "facts",
    [{"path": "/health"}, {"method": "GET"}, {"path": "/v1/models"}, {"path": "/tokenize"}, {"path": "/sleep"}],
)
def test_what_is_no_work_for_the_engine_is_not_looked_at(facts):
    """The queue is not asked about it."""
    played = Played(admit=lambda request, load: Refusal("never"))
    method = {"method": facts.pop("method")} if "method" in facts else {}
    assert played.post({}, **facts, **method) == 200


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/metrics", "/metrics/", "/version", "/load", "/graft/status", "/base/health"]
)
def test_how_the_server_is_may_be_asked_by_anybody(callers, path):
    """A probe of a load balancer has no key; the routes under /graft ask for the server's own."""
    played = Played(callers=callers)
    assert played.post(b"", path=path, method="GET", root_path="/base") == 200
    assert played.asking == [None]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/abort_requests"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/v1/load_lora_adapter"),
        ("GET", "/v1/models"),
        ("POST", "/sleep"),
        ("POST", "/v1/completions/"),
        ("POST", "/healthy"),
        ("GET", "/of-a-later-release"),
    ],
)
def test_all_else_is_for_callers_only(callers, method, path):
    """Who is no caller sees and stops nobody's requests; who is one is known on every route."""
    played = Played(callers=callers)
    assert played.post({}, path=path, method=method) == 401
    assert played.post({}, path=path, method=method, headers=[KEY]) == 200
    assert played.asking == [ACME]
    assert played.post({}, path=path, method="OPTIONS") == 200


def test_a_websocket_passes():
    """The gate is for requests."""
    passed = []

    async def application(scope, receive, send):
        passed.append(scope["type"])

    asyncio.run(Gate(application)({"type": "websocket", "headers": []}, None, None))
    assert passed == ["websocket"]


@pytest.mark.parametrize("status", [400, 403, 429, 503, 418])
def test_who_is_turned_away_is_told_why_and_when_to_come_back(status):
    """In the shape of vLLM's own errors; nothing reaches the application."""
    told = []
    played = Played(
        admit=lambda request, load: Refusal("too many", 2.2, status), refused=lambda *facts: told.append(facts)
    )
    assert played.post({"priority": 5}) == status
    headers, error = played.answer
    assert headers["retry-after"] == "3"
    assert (error["message"], error["code"]) == ("too many", status)
    assert not played.seen
    assert [(request.priority, refusal.status) for request, refusal in told] == [(5, status)]


def test_no_retry_after_where_coming_back_makes_no_sense():
    """A wrong request stays wrong."""
    played = Played(admit=lambda request, load: Refusal("wrong", status=400))
    assert played.post({}) == 400
    assert "retry-after" not in played.answer[0]


def test_the_queue_sees_all_that_tells_clients_apart():
    """As it will see it in engine core, but for the length of the prompt."""
    seen: list[WaitingRequest] = []
    played = Played(admit=lambda request, load: seen.append(request))
    models = SimpleNamespace(is_base_model=lambda name: name == "base")
    app = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models))
    body = {"model": "adapter", "vllm_xargs": {"tenant": "a"}, "cache_salt": "s", "max_tokens": 7, "priority": 2}
    played.post(body, headers=[("X-Request-Id", "acme-1")], app=app)
    (request,) = seen
    assert (request.request_id, request.priority, request.max_tokens) == ("acme-1", 2, 7)
    assert (request.extra, request.cache_salt, request.lora) == ({"tenant": "a"}, "s", "adapter")
    played.post({**body, "model": "base"}, headers=[("X-Vllm-Priority", "1")], app=app)
    assert (seen[1].lora, seen[1].priority) == ("", 1)


@pytest.mark.parametrize("body", [b"", b"not json", b"[1]", b'{"priority": "high"}', b'{"vllm_xargs": 3}', b"\xff\xfe"])
def test_a_body_that_vllm_will_refuse_is_left_to_it(callers, body):
    """The gate takes nothing amiss; it has no priority then."""
    seen: list[WaitingRequest] = []
    played = Played(admit=lambda request, load: seen.append(request), callers=callers)
    assert played.post(body, headers=[KEY]) == 200
    assert played.seen[0][1] == body
    assert seen[0].priority == 3


def test_a_client_that_goes_away_while_it_speaks_is_nobody_s_business(callers):
    """vLLM hears that it is gone."""
    played = Played(admit=lambda request, load: Refusal("never"), callers=callers)
    played.play([{"type": "http.request", "body": b'{"pro', "more_body": True}], headers=[KEY])
    assert played.seen[0][1:] == (b"", [{"type": "http.disconnect"}])


def test_requests_that_the_engine_has_not_seen_yet_count_as_waiting():
    """Else a thousand could pass between two steps of the engine."""
    now, seen = [0.0], []
    played = Played(admit=lambda request, load: seen.append(load), load=lambda: Load(5, 2, 1.0), clock=lambda: now[0])
    for _ in range(3):
        played.post({})
    now[0] += UNSEEN_S + 0.01
    played.post({})
    assert [load.waiting for load in seen] == [5, 6, 7, 5]


ACME = ("tenant", Caller("acme", 2, 3))


def test_an_answer_of_a_queue_that_is_no_refusal_is_not_taken_for_consent():
    """As in engine core: what it meant by it is not known, so it is put aside, and the request is passed on."""

    class Mumbles(AdmissionQueue):
        def admit(self, request, load):
            return {"reason": "full"}

    ledger = Ledger()
    ledger.set_item("scheduler", "mumbles", "applied")
    options = _queue_options(PlanItem("scheduler", "mumbles", "m:C", "p", ("frontend",)), Mumbles(), ledger)
    assert options["admit"](WaitingRequest("a", 0, 0.0, 0, 1), Load()) is None
    assert ledger._items["mumbles"].state == "quarantined"
    assert "admit must return a Refusal or None, but returned dict" in ledger._items["mumbles"].reason


def test_who_asks_is_noted_for_the_time_of_the_request(callers):
    """The request itself is handed on as it came, whatever the client wrote into it."""
    played = Played(callers=callers)
    raw = b'{"prompt": "a",  "priority": 1, "priority": 0, "vllm_xargs": {"tenant": "other"}}'
    assert played.post(raw, headers=[KEY, ("X-Vllm-Priority", "0")]) == 200
    assert played.seen[0][1] == raw
    assert played.asking == [ACME]
    assert CURRENT_CALLER.get() is None


def test_without_a_queue_that_asks_no_body_is_read(callers):
    """An upload of any size is vLLM's business."""
    played = Played(callers=callers)
    taken = []

    async def receive():
        taken.append(1)
        return {"type": "http.disconnect"}

    async def application(scope, receive, send):
        played.asking.append(CURRENT_CALLER.get())

    gate = Gate(application, callers=callers)
    headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(gate(scope, receive, None))
    assert (played.asking, taken) == ([ACME], [])


def test_who_is_no_caller_is_turned_away(callers):
    """Before the queue is asked, and before the body is read."""
    played = Played(admit=lambda request, load: pytest.fail("asked"), callers=callers)
    assert played.post({"priority": 1}, headers=[("Authorization", "Bearer guess")]) == 401
    assert played.play([]) == 401
    assert played.answer[0]["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("X-Tenant", "acme")], 200),
        ([("X-Tenant", "acme"), ("x-tenant", "mighty")], 400),
        ([("X-Tenant", "acme"), ("X-Tenant", "acme")], 400),
        ([("X-Tenant", "mighty, acme")], 400),
        ([("X-Tenant", "acme"), KEY, KEY], 400),
    ],
)
def test_a_header_that_says_who_asks_is_there_once(tmp_path, headers, status):
    """One of two is the client's own; which of them the gateway wrote is not known."""
    path = tmp_path / "callers.toml"
    path.write_text('tenant_header = "X-Tenant"\n[[caller]]\ntenant = "acme"\n[others]\n')
    played = Played(callers=CallersFile(str(path), Plan()))
    assert played.post({}, headers=headers) == status
    if status == 400:
        assert "more than one value" in played.answer[1]["message"] or "more than once" in played.answer[1]["message"]


LARGE = 20_000_000


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": [' + b"1," * (LARGE // 2) + b'1], "priority": 4, "vllm_xargs": {"tenant": "a"}}',
        b'{"priority": 4, "vllm_xargs": {"tenant": "a"}, "prompt": "' + b"x" * LARGE + b'"}',
    ],
    ids=["numbers", "text"],
)
def test_a_huge_body_is_not_built_on_the_event_loop(raw):
    """Its few fields are read in a fraction of the time that Python's parser takes."""
    seen: list[WaitingRequest] = []
    played = Played(admit=lambda request, load: seen.append(request))
    assert played.post(raw) == 200
    assert (seen[0].priority, seen[0].extra) == (4, {"tenant": "a"})
    started = time.process_time()
    json.loads(raw)
    whole = time.process_time() - started
    asked = EngineRequest({"type": "http", "method": "POST", "path": "/v1/completions", "headers": JSON})
    started = time.process_time()
    asyncio.run(asked.read(_once(raw)))
    assert time.process_time() - started < max(whole, 0.5)
    assert set(asked.body) == {"priority", "vllm_xargs"}


JSON = [(b"content-type", b"application/json")]


def _once(raw):
    async def receive():
        return {"type": "http.request", "body": raw}

    return receive


@pytest.mark.parametrize(
    ("raw", "priority"),
    [
        (b"[" * 5_000_000, 0),
        (b'{"a": ' * 5_000_000, 0),
        (b'{"priority": 4, "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0),
        (b'{"priority": 4, "temperature": NaN}', 4),
        ('{"priority": 4}'.encode("utf-16"), 4),
        (b'{"priority": 1, "priority": 4}', 4),
        (b'{"priority": ' + b"9" * 5000 + b"}", 0),
        (b'{"priority": 4, "vllm_xargs": {"a": "' + b"x" * 100_000 + b'"}}', 4),
    ],
    ids=["lists", "tables", "deep", "nan", "utf-16", "twice", "digits", "large-field"],
)
def test_a_hostile_body_is_read_as_vllm_reads_it_or_not_at_all(raw, priority):
    """What cannot be read is handed on for vLLM to refuse, byte for byte."""
    seen: list[WaitingRequest] = []
    played = Played(admit=lambda request, load: seen.append(request))
    assert played.post(raw) == 200
    assert seen[0].priority == priority
    assert played.seen[0][1] == raw


def test_the_queue_is_asked_with_the_capped_priority(callers):
    """A client that asks for the first class and may not have it is judged by what it gets."""
    seen: list[WaitingRequest] = []
    played = Played(admit=lambda request, load: seen.append(request), callers=callers)
    played.post({"priority": 1}, headers=[KEY])
    assert (seen[0].priority, seen[0].extra) == (2, {"tenant": "acme"})


def test_an_upload_is_let_through_as_it_is(callers):
    """Its body is no JSON and is not looked at."""
    seen: list[WaitingRequest] = []
    played = Played(admit=lambda request, load: seen.append(request), callers=callers)
    headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"multipart/form-data; boundary=x")]
    played.play([{"type": "http.request", "body": b"--x--"}], "/v1/audio/transcriptions", headers_as_are=headers)
    assert played.seen[0][1] == b"--x--"
    assert (seen[0].priority, played.asking) == (3, [ACME])


def test_a_websocket_of_nobody_is_closed(callers):
    """Before it was accepted; that of a caller is let through, with who asks."""
    passed, sent = [], []

    async def application(scope, receive, send):
        passed.append(CURRENT_CALLER.get())

    async def send(message):
        sent.append(message)

    gate = Gate(application, callers=callers)
    for headers in ([], [(b"authorization", b"Bearer secret")]):
        asyncio.run(gate({"type": "websocket", "path": "/v1/realtime", "headers": headers}, None, send))
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert passed == [ACME]


def test_json_that_is_nested_too_deep_is_left_to_vllm():
    """It has no priority then."""
    seen: list[WaitingRequest] = []
    played = Played(admit=lambda request, load: seen.append(request))
    raw = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert played.post(raw) == 200
    assert (played.seen[0][1] == raw, seen[0].priority) == (True, 0)
