"""An HTTP request for the engine, read as far as a queue needs it."""

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
"""From vLLM 0.28 on, this header wins over the body's ``priority``."""

PATHS: Final = frozenset(
    """
    /v1/completions /v1/chat/completions /v1/chat/completions/batch /v1/responses /v1/messages /cohere/v2/chat
    /inference/v1/generate /generative_scoring /v1/systemone /invocations /v1/embeddings /v2/embed /pooling /classify
    /score /v1/score /rerank /v1/rerank /v2/rerank /v1/audio/transcriptions /v1/audio/translations
    """.split()  # noqa: SIM905
)
"""The paths on which vLLM takes work for its engine."""

_FIELDS: Final = (
    *("model", "priority", "max_tokens", "max_completion_tokens"),
    *("sampling_params", "vllm_xargs", "cache_salt"),
)
"""The fields of a body that a queue sees."""

_LARGEST_FIELD: Final = 64 * 1024
"""A larger field is not read. vLLM reads it, and reports what is wrong with it."""

_LARGEST_FOREIGN: Final = 1024 * 1024
"""A body that only Python's own, slow parser takes (NaN, UTF-16) is read up to this size."""


class EngineRequest:
    """One request for the engine. ``body`` has its fields after ``read``; empty if it is not JSON that can be read."""

    def __init__(self, scope: Message) -> None:
        self._scope = scope
        self.is_preflight = scope.get("method") == "OPTIONS"
        """True if this is a browser's CORS preflight, which carries no key."""
        self._headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            self._headers.setdefault(name.lower(), []).append(value)
        self.body: dict[str, Any] = {}
        self.disconnected = False
        """True if the client disconnected before its body was complete."""

    @property
    def is_work(self) -> bool:
        """True if the request gives the engine work."""
        if self._scope["type"] == "websocket":
            return True
        return self._scope["method"] == "POST" and self.path in PATHS

    @property
    def path(self) -> str:
        """The path below the server's mount point, without a final slash."""
        path: str = self._scope.get("path", "")
        return path.removeprefix(self._scope.get("root_path", "")).rstrip("/") or "/"

    async def read(self, receive: Receive) -> Receive:
        """Read the body if it is JSON; return a ``receive`` that replays it byte for byte."""
        kind = self.header("content-type").partition(";")[0].strip().lower()
        is_json = kind == "application/json" or kind.endswith("+json")
        if self._scope["type"] != "http" or not is_json:
            return receive
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                self.disconnected = True
                return _replay(message, receive)
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        raw = b"".join(parts)
        self.body = _parse(raw)
        return _replay({"type": "http.request", "body": raw, "more_body": False}, receive)

    @property
    def priority(self) -> int:
        """The requested priority, as vLLM reads it; 0 if there is none."""
        try:
            return int(self.header(PRIORITY_HEADER))
        except ValueError:
            value = self.body.get("priority")
            return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def header(self, name: str) -> str:
        """Return the first value of a header; empty if it is missing."""
        return next(iter(self.headers(name)), "")

    def headers(self, name: str) -> list[str]:
        """Return every value of a header, in the order they came."""
        return [str(value, "latin-1") for value in self._headers.get(name.lower().encode("latin-1"), ())]

    def waiting(self) -> WaitingRequest:
        """Return the request as a queue sees it; its prompt is not tokenized yet."""
        body = self.body
        params = _object(body.get("sampling_params"))
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or params.get("max_tokens")
        salt, model = body.get("cache_salt"), body.get("model")
        # An adapter goes by the name of a model.
        models = getattr(getattr(self._scope.get("app"), "state", None), "openai_serving_models", None)
        lora = ""
        if isinstance(model, str) and model and models is not None and not models.is_base_model(model):
            lora = model
        return WaitingRequest(
            request_id=self.header("x-request-id"),
            priority=self.priority,
            arrival=time.time(),
            prompt_tokens=0,
            max_tokens=wanted if isinstance(wanted, int) else 0,
            extra=_object(body.get("vllm_xargs")) or _object(params.get("extra_args")),
            cache_salt=salt if isinstance(salt, str) else "",
            lora=lora,
        )


def _parse(raw: bytes) -> dict[str, Any]:
    """Parse the fields of a body that a queue sees; leave the rest, and what is invalid, to vLLM.

    Other fields are skipped, not built: a body of a hundred megabytes holds up the event loop for a tenth of a second.
    """
    import msgspec

    try:
        found = _decoder().decode(raw)
        parts = {name: getattr(found, name) for name in _FIELDS}
        return {name: msgspec.json.decode(part) for name, part in parts.items() if 0 < len(part) <= _LARGEST_FIELD}
    except (ValueError, RecursionError):  # every msgspec error is a ValueError
        if len(raw) > _LARGEST_FOREIGN:
            return {}
    try:
        return _object(json.loads(raw))
    except (ValueError, RecursionError):
        return {}


@functools.cache
def _decoder() -> Any:
    """Make a decoder that leaves the fields as raw bytes."""
    import msgspec

    fields = [(name, msgspec.Raw, msgspec.Raw(b"")) for name in _FIELDS]
    return msgspec.json.Decoder(msgspec.defstruct("Body", fields))


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _replay(first: Message, then: Receive) -> Receive:
    """Return a ``receive`` that begins with one message and goes on with the client's."""
    pending = [first]

    async def receive() -> Message:
        return pending.pop() if pending else await then()

    return receive
