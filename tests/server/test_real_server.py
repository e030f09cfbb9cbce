"""The gate in vLLM's real API server, on the simulated accelerator: what clients are answered, what the engine sees."""

import hashlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

import pytest

from vllm_graft.launcher.server import ServerProcess
from vllm_graft.testing import Session

pytestmark = pytest.mark.server

KEY = "acme-key"

QUEUE = """
import json, os
from vllm_graft import AdmissionQueue
from vllm_graft.contracts import Refusal, WaitingHeap

class Noting(AdmissionQueue):
    def __init__(self, options=None):
        super().__init__(options)
        self.heap = WaitingHeap()

    def admit(self, request, load):
        if request.max_tokens == 13:
            return Refusal("thirteen is too many", 7, 503)
        if request.max_tokens == 14:
            raise RuntimeError("on purpose")
        if request.max_tokens == 15 and request.prompt_tokens:  # known in engine core only
            return Refusal("fifteen is half \\ud800 too many")

    def labels(self, request):
        return {"class": str(request.priority)}

    def push(self, request):
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps([request.priority, dict(request.extra)]) + "\\n")
        self.heap.add(request.arrival, request)

    def peek(self):
        return self.heap.first()

    def pop(self):
        return self.heap.take()

    def remove(self, request):
        self.heap.discard(request)
"""

CALLERS = f"""
[[caller]]
tenant = "acme"
key_sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"
best_priority = 2
priority = 3
"""


def post(
    server: ServerProcess, body: object, path: str = "/v1/completions", **headers: str
) -> tuple[int, Mapping[str, str]]:
    """The status and the headers of the answer, which was read to its end; bytes are sent as they are."""
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data=data, headers=sent)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return answer.status, dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, {**error.headers, "body": error.read().decode()}


def test_who_asks_and_who_is_turned_away(graft: Session):
    """The engine sees the caller's tenant and capped priority; a refusal is an answer with a Retry-After, also for a
    stream; what is no work for the engine passes; an ``admit`` that raises is put aside, and shown."""
    graft.package("noting", {"vllm_graft.plugins": {"noting": "noting:Noting"}}, {"noting": QUEUE})
    graft.plan('[defaults]\nscheduler = "noting"\ncallers = "callers.toml"\n')
    (graft.folder / "callers.toml").write_text(CALLERS)
    notes = graft.folder / "notes"
    graft.env["NOTES"] = str(notes)
    graft.simulate()
    with graft.server() as server:
        key = f"Bearer {KEY}"
        model = json.loads(server.get("/v1/models", {"Authorization": key})[1])["data"][0]["id"]
        ask = {"model": model, "prompt": "a", "max_tokens": 2}
        assert server.get("/v1/models")[0] == 401
        assert post(server, {"model": model, "prompt": "a"}, "/tokenize")[0] == 401
        assert post(server, {"model": model, "prompt": "a"}, "/tokenize", Authorization=key)[0] == 200
        assert server.get("/health")[0] == server.get("/metrics")[0] == 200
        assert post(server, ask)[0] == 401
        assert post(server, {**ask, "priority": 1}, Authorization="Bearer guess")[0] == 401
        asked = {**ask, "priority": 1, "vllm_xargs": {"tenant": "mighty", "other": "kept"}}
        assert post(server, asked, Authorization=key)[0] == 200
        assert post(server, {**ask, "stream": True}, Authorization=key, X_Vllm_Priority="-9")[0] == 200
        chat = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "priority": 5}
        assert post(server, chat, "/v1/chat/completions", Authorization=key)[0] == 200
        seen = [json.loads(line) for line in notes.read_text().splitlines()]
        assert [priority for priority, _ in seen] == [2, 3, 5]
        assert [extra["tenant"] for _, extra in seen] == ["acme"] * 3
        assert seen[0][1]["other"] == "kept"

        beams = {**ask, "use_beam_search": True, "n": 2, "priority": 1, "cache_salt": "mighty"}
        assert post(server, beams, Authorization=key)[0] == 200
        seen = [json.loads(line) for line in notes.read_text().splitlines()]
        assert len(seen) > 4
        assert {(priority, extra["tenant"]) for priority, extra in seen[3:]} == {(3, "acme")}

        for stream in (False, True):
            status, headers = post(server, {**ask, "max_tokens": 13, "stream": stream}, Authorization=key)
            assert (status, headers["retry-after"]) == (503, "7")
            assert json.loads(headers["body"])["error"]["message"] == "thirteen is too many"
        assert len(notes.read_text().splitlines()) == len(seen)
        assert 'vllm_graft_gate_refused_total{class="3",status="503"} 2.0' in server.get("/metrics")[1]
        assert states(server) == {"noting": "applied", "callers": "applied"}

        for raw in (b"[" * 1_000_000, b'{"a": ' * 200_000, b'{"prompt": [' + b"1," * 5_000_000 + b"1]}", b"\xff"):
            assert 400 <= post(server, raw, Authorization=key)[0] < 500
        for unsendable in ({"vllm_xargs": {"other": "\ud800"}}, {"top_k": 2**64, "temperature": 1}):
            for stream in (False, True):
                assert post(server, {**ask, **unsendable, "stream": stream}, Authorization=key)[0] == 400
        assert post(server, {**ask, "structured_outputs": 5}, "/invocations", Authorization=key)[0] == 400
        # Refused by the engine, whose answer to it must not cost the answers to others.
        assert post(server, {**ask, "max_tokens": 15}, Authorization=key)[0] == 200
        assert post(server, ask, Authorization=key)[0] == 200
        assert server.health() == 200

        (graft.folder / "callers.toml").write_text(CALLERS + "[others]\nbest_priority = 4\n")
        wait(lambda: post(server, ask)[0] == 200, "a changed file of callers takes effect")
        assert json.loads(notes.read_text().splitlines()[-1]) == [4, {"tenant": "others"}]

        assert post(server, {**ask, "max_tokens": 14}, Authorization=key)[0] == 200
        assert post(server, {**ask, "max_tokens": 13}, Authorization=key)[0] == 200
        wait(lambda: states(server)["noting"] == "quarantined", "the failed queue is shown")
        view = server.run_view()
        assert view is not None
        found = {(each.code, each.subject) for each in view.findings() if "frontend" in each.where}
        assert found == {("S005", "scheduler noting")}


def states(server: ServerProcess) -> dict[str, str]:
    """The items of the API server's own process."""
    found = json.loads(server.get("/graft/status")[1])
    (row,) = [row for row in found["processes"] if "frontend" in row["roles"] and row["life"] == "running"]
    return {item["name"]: item["state"] for item in row["items"]}


def wait(done, what: str, seconds: float = 60.0) -> None:
    """Until something is so."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not seen within {seconds:.0f} s: {what}"
        time.sleep(0.2)


def test_a_long_queue_turns_the_last_class_away(graft: Session):
    """With 429 and a Retry-After while it is too long; the first class is let in all the while, and nobody is lost."""
    graft.plan(
        '[defaults]\nscheduler = "priority-fairness"\n'
        "[options.priority-fairness]\nadmission = true\nmax_wait_sec = 1.0\n"
    )
    graft.simulate("L40S")
    with graft.server("--max-num-seqs", "1") as server:
        model = json.loads(server.get("/v1/models")[1])["data"][0]["id"]
        ask = {"model": model, "prompt": "a", "max_tokens": 240, "ignore_eos": True}
        answers: list[int] = []
        enough = threading.Event()

        def client() -> None:
            while not enough.is_set():
                answers.append(post(server, {**ask, "priority": 1})[0])

        def short(priority: int) -> tuple[int, Mapping[str, str]]:
            return post(server, {**ask, "max_tokens": 1, "priority": priority})

        assert short(5)[0] == 200
        assert short(9)[0] == 400
        clients = [threading.Thread(target=client) for _ in range(20)]
        for each in clients:
            each.start()
        refused: list[Mapping[str, str]] = []

        def turned_away() -> bool:
            status, headers = short(5)
            if status == 429:
                refused.append(headers)
            return status == 429

        try:
            wait(turned_away, "the last class is turned away")
        finally:
            enough.set()
        assert int(refused[0]["retry-after"]) >= 1
        assert "class 5 is let in up to" in json.loads(refused[0]["body"])["error"]["message"]
        for each in clients:
            each.join()
        assert len(answers) > 20
        assert set(answers) == {200}
        assert short(5)[0] == 200


def test_a_wrong_file_of_callers_stops_the_start(graft: Session):
    """Before the engine is made, with the file and the next step."""
    graft.plan('[defaults]\ncallers = "callers.toml"\n')
    (graft.folder / "callers.toml").write_text('[[caller]]\ntenant = "acme"\nkey_sha256 = "acme-key"\n')
    graft.simulate()
    server = graft.server().start()
    assert server.wait() != 0
    assert "callers.toml: caller 1: key_sha256 must be SHA-256 hashes" in server.tail()
    assert "acme-key" not in server.tail()


def test_callers_without_an_api_server_stop_the_start(graft: Session):
    """With gRPC nobody would be asked who he is. What that needs is not installed here, so the words are given."""
    graft.plan('[defaults]\ncallers = "callers.toml"\n')
    (graft.folder / "callers.toml").write_text(CALLERS)
    graft.simulate()
    done = graft.script(
        "import sys\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "sys.argv.append('--grpc')\n"
        "EngineArgs(model=MODEL, max_model_len=64).create_engine_config()"
    )
    assert done.returncode != 0
    assert "with --grpc there is no API server that could tell callers apart" in done.stderr
