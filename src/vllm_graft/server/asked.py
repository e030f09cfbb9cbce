"""A request for the engine as it comes in over HTTP: what a queue wants to know of it."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from vllm_graft.contracts import WaitingRequest

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

PRIORITY_HEADER: Final = "x-vllm-priority"
"""vLLM 0.28 and newer let this header win over the body's ``priority``."""

PATHS: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/cohere/v2/chat",
        "/inference/v1/generate",
        "/generative_scoring",
        "/v1/systemone",
        "/invocations",
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    }
)
"""Where vLLM takes work for its engine."""


class Asked:
    """One request for the engine. ``body`` is its JSON once it was read; empty where it has none that can be read."""

    def __init__(self, scope: Message) -> None:
        self._scope = scope
        self._headers = {name.lower(): value for name, value in reversed(scope["headers"])}
        self.body: dict[str, Any] = {}
        self.gone = False
        """Whether the client went away before it had said all."""

    @classmethod
    def of(cls, scope: Message) -> Asked | None:
        """The request of a scope; None for what is no work for the engine."""
        if scope["type"] == "websocket":
            return cls(scope)
        if scope["type"] != "http" or scope["method"] != "POST" or _path(scope) not in PATHS:
            return None
        return cls(scope)

    async def read(self, receive: Receive) -> Receive:
        """Take the body in, where it is JSON; what is received afterwards begins with it anew, byte for byte."""
        if self._scope["type"] != "http" or not self._is_json():
            return receive
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                self.gone = True
                return _once(message, receive)
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        raw = b"".join(parts)
        self.body = _json(raw)
        return _once({"type": "http.request", "body": raw, "more_body": False}, receive)

    @property
    def priority(self) -> int:
        """The priority that the client asks for, as vLLM would read it; 0 where it names none."""
        try:
            return int(self.header(PRIORITY_HEADER))
        except ValueError:
            value = self.body.get("priority")
            return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def header(self, name: str) -> str:
        """The value of a header, empty where it is not there."""
        return str(self._headers.get(name.lower().encode("latin-1"), b""), "latin-1")

    def waiting(self) -> WaitingRequest:
        """The request as a queue sees it; its prompt is not counted yet."""
        body = self.body
        params = _table(body.get("sampling_params"))
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or params.get("max_tokens")
        salt = body.get("cache_salt")
        return WaitingRequest(
            request_id=self.header("x-request-id"),
            priority=self.priority,
            arrival=time.time(),
            prompt_tokens=0,
            max_tokens=wanted if isinstance(wanted, int) else 0,
            extra=_table(body.get("vllm_xargs")) or _table(params.get("extra_args")),
            cache_salt=salt if isinstance(salt, str) else "",
            lora=self._lora(),
        )

    def _is_json(self) -> bool:
        kind = self.header("content-type").partition(";")[0].strip().lower()
        return kind == "application/json" or kind.endswith("+json")

    def _lora(self) -> str:
        """The adapter that a request names as its model."""
        model = self.body.get("model")
        models = getattr(getattr(self._scope.get("app"), "state", None), "openai_serving_models", None)
        if not isinstance(model, str) or not model or models is None:
            return ""
        return "" if models.is_base_model(model) else model


def _path(scope: Message) -> str:
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if root else path


def _json(raw: bytes) -> dict[str, Any]:
    try:
        return _table(json.loads(raw))
    except (ValueError, RecursionError):
        return {}  # vLLM says what is wrong with it


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _once(first: Message, then: Receive) -> Receive:
    """Messages that begin with one of ours and go on with the client's."""
    given = [first]

    async def receive() -> Message:
        return given.pop() if given else await then()

    return receive
