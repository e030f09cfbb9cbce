"""Bodies that the application cannot read: a 400 with a word, and nothing else is touched."""

import asyncio
import json

import pytest

from vllm_graft.server.body_errors import install_body_errors


def post(app: object, path: str, body: object) -> tuple[int, dict[str, object]]:
    """Send a request through an application, without a server."""
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))  # type: ignore[operator]
    return int(str(sent[0]["status"])), json.loads(bytes(sent[1]["body"]))  # type: ignore[arg-type]


@pytest.fixture
def app() -> object:
    """An application whose requests are read as vLLM reads its own."""
    fastapi = pytest.importorskip("fastapi")
    from pydantic import BaseModel, TypeAdapter, model_validator

    class Body(BaseModel):
        options: object = None

        @model_validator(mode="before")
        @classmethod
        def look(cls, data: dict[str, object]) -> dict[str, object]:
            if data.get("options") == "memory":
                raise MemoryError
            if data.get("options") is not None:
                data["options"].get("x")  # type: ignore[attr-defined]
            return data

    made = fastapi.FastAPI()
    install_body_errors(made)

    async def good(body: Body) -> dict[str, bool]:
        return {"good": True}

    async def broken(body: Body) -> None:
        raise AttributeError("a fault of the server's own")

    async def raw(request: fastapi.Request) -> object:
        return {"good": await request.json()}

    async def several(request: fastapi.Request) -> dict[str, bool]:
        TypeAdapter(Body).validate_python(await request.json())
        return {"good": True}

    raw.__annotations__["request"] = several.__annotations__["request"] = fastapi.Request
    made.post("/raw")(raw)
    made.post("/several")(several)
    # As annotations of local classes they would be looked for in the module.
    good.__annotations__["body"] = broken.__annotations__["body"] = Body
    made.post("/good")(good)
    made.post("/broken")(broken)
    return made


def test_a_body_that_cannot_be_read_is_a_400(app: object, caplog: pytest.LogCaptureFixture):
    """Whatever its shape leads to; the log has the line of code."""
    assert post(app, "/good", {"options": {"x": 1}}) == (200, {"good": True})
    status, answer = post(app, "/good", {"options": 5})
    assert status == 400
    assert answer["error"]["message"] == (  # type: ignore[index]
        "the body of the request cannot be read: AttributeError: 'int' object has no attribute 'get'"
    )
    assert "/good: a body that cannot be read is a 400: AttributeError: 'int' object has no attribute" in caplog.text


def test_what_is_no_fault_of_the_body_is_not_hidden(app: object):
    """Memory that runs out while a body is read is the server's fault."""
    with pytest.raises(MemoryError):
        post(app, "/good", {"options": "memory"})


def test_a_fault_of_the_server_stays_one(app: object):
    """It is no fault of the request."""
    with pytest.raises(AttributeError, match="a fault of the server's own"):
        post(app, "/broken", {})


def test_a_body_that_a_handler_parses_itself(app):
    """As that of vLLM's ``/invocations`` does, which takes several kinds of requests."""
    assert post(app, "/raw", [1]) == (200, {"good": [1]})
    status, said = post(app, "/raw", b"[" * 100_000 + b"]" * 100_000)
    assert status == 400
    assert "cannot be read: RecursionError" in str(said)
    assert post(app, "/several", {"options": {}}) == (200, {"good": True})
    assert post(app, "/several", {"options": 5})[0] == 400
