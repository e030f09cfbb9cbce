"""A request for the engine as it comes in over HTTP: what a queue wants to know of it."""

from __future__ import annotations

import functools
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

_FIELDS: Final = (
    *("model", "priority", "max_tokens", "max_completion_tokens"),
    *("sampling_params", "vllm_xargs", "cache_salt"),
)
"""The fields of a body that a queue may know of."""

_LARGEST_FIELD: Final = 64 * 1024
"""A field of more bytes than this is not read. vLLM reads it, and says what is wrong with it."""

_LARGEST_FOREIGN: Final = 1024 * 1024
"""A body that only Python's own parser takes (NaN, UTF-16) is read up to this size: that parser is slow."""


class Asked:
    """One request for the engine. ``body`` is its JSON once it was read; empty where it has none that can be read."""

    def __init__(self, scope: Message) -> None:
        self._scope = scope
        self._headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            self._headers.setdefault(name.lower(), []).append(value)
        self.body: dict[str, Any] = {}
        self.gone = False
        """Whether the client went away before it had said all."""

    @classmethod
    def of(cls, scope: Message) -> Asked | None:
        """Return the request of a scope; None for a scope that is none, such as an application's lifespan."""
        return cls(scope) if scope["type"] in ("http", "websocket") else None

    @property
    def is_work(self) -> bool:
        """Whether the engine gets something to do."""
        if self._scope["type"] == "websocket":
            return True
        return self._scope["method"] == "POST" and self.path in PATHS

    @property
    def path(self) -> str:
        """The path below the one that the server is mounted at, without a slash at the end."""
        path: str = self._scope.get("path", "")
        return path.removeprefix(self._scope.get("root_path", "")).rstrip("/") or "/"

    @property
    def is_preflight(self) -> bool:
        """Whether a browser asks what it may send; it sends no key with that."""
        return self._scope.get("method") == "OPTIONS"

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
        """The value of a header, the first of several; empty where it is not there."""
        return next(iter(self.headers(name)), "")

    def headers(self, name: str) -> list[str]:
        """Every value of a header, in the order they came."""
        return [str(value, "latin-1") for value in self._headers.get(name.lower().encode("latin-1"), ())]

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


def _json(raw: bytes) -> dict[str, Any]:
    """Return the fields of a body that a queue may know of; what cannot be read is left out, vLLM refuses it.

    All else is skipped, not built: a body of a hundred megabytes costs the event loop a tenth of a second.
    """
    import msgspec

    try:
        found = _decoder().decode(raw)
        parts = {name: getattr(found, name) for name in _FIELDS}
        return {name: msgspec.json.decode(part) for name, part in parts.items() if 0 < len(part) <= _LARGEST_FIELD}
    except (ValueError, RecursionError):  # every error of msgspec's is a ValueError
        return _json_of_python(raw) if len(raw) <= _LARGEST_FOREIGN else {}


def _json_of_python(raw: bytes) -> dict[str, Any]:
    try:
        return _table(json.loads(raw))
    except (ValueError, RecursionError):
        return {}


@functools.cache
def _decoder() -> Any:
    """A decoder that leaves the fields as the bytes they came in."""
    import msgspec

    fields = [(name, msgspec.Raw, msgspec.Raw(b"")) for name in _FIELDS]
    return msgspec.json.Decoder(msgspec.defstruct("Body", fields))


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _once(first: Message, then: Receive) -> Receive:
    """Messages that begin with one of ours and go on with the client's."""
    given = [first]

    async def receive() -> Message:
        return given.pop() if given else await then()

    return receive
