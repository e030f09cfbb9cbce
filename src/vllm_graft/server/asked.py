"""A request as it comes in over HTTP: what a queue wants to know of it, and who asks written into it."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from vllm_graft.contracts import WaitingRequest

Message = MutableMapping[str, Any]

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

_WITH_XARGS: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/invocations",
    }
)


class Asked:
    """One request for the engine. ``body`` is its JSON; empty where it has none that can be read."""

    def __init__(self, scope: Message, receive: Callable[[], Awaitable[Message]], raw: bytes | None) -> None:
        self._scope = scope
        self._receive = receive
        self._raw = raw
        self._headers = {name.lower(): value for name, value in reversed(scope["headers"])}
        self._path = _path(scope)
        self._changed = False
        self.body: dict[str, Any] = _json(raw) if raw is not None and self._is_json() else {}

    @classmethod
    async def read(cls, scope: Message, receive: Callable[[], Awaitable[Message]]) -> Asked | None:
        """Take a request's body in; None for what is no work for the engine."""
        if scope["type"] != "http" or scope["method"] != "POST" or _path(scope) not in PATHS:
            return None
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return cls(scope, receive, None)
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        return cls(scope, receive, b"".join(parts))

    @property
    def gone(self) -> bool:
        """Whether the client went away before it had said all."""
        return self._raw is None

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

    def set_caller(self, key: str, tenant: str, priority: int) -> None:
        """Put who asks in the place of what the client wrote about that."""
        self._headers[PRIORITY_HEADER.encode()] = str(priority).encode()
        self._changed = True
        if not self.body:
            return
        self.body["priority"] = priority
        if self._path in _WITH_XARGS:
            self.body["vllm_xargs"] = {**_table(self.body.get("vllm_xargs")), key: tenant}
        elif isinstance(self.body.get("sampling_params"), dict):
            params = self.body["sampling_params"]
            params["extra_args"] = {**_table(params.get("extra_args")), key: tenant}

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

    def handed_on(self) -> tuple[Message, Callable[[], Awaitable[Message]]]:
        """The scope and the messages for whoever comes next: the request anew."""
        if self._raw is None:
            return self._scope, _once({"type": "http.disconnect"}, self._receive)
        raw, scope = self._raw, self._scope
        if self._changed:
            raw = json.dumps(self.body).encode() if self.body else raw
            self._headers[b"content-length"] = str(len(raw)).encode()
            kept = [pair for pair in scope["headers"] if pair[0].lower() not in (_LENGTH, _PRIORITY)]
            scope = {**scope, "headers": [*kept, *((name, self._headers[name]) for name in (_LENGTH, _PRIORITY))]}
        return scope, _once({"type": "http.request", "body": raw, "more_body": False}, self._receive)

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


_LENGTH: Final = b"content-length"
_PRIORITY: Final = PRIORITY_HEADER.encode()


def _path(scope: Message) -> str:
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if root else path


def _json(raw: bytes) -> dict[str, Any]:
    try:
        return _table(json.loads(raw))
    except ValueError:
        return {}  # vLLM says what is wrong with it


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _once(first: Message, then: Callable[[], Awaitable[Message]]) -> Callable[[], Awaitable[Message]]:
    """Messages that begin with one of ours and go on with the client's."""
    given = [first]

    async def receive() -> Message:
        return given.pop() if given else await then()

    return receive
