"""Answer requests whose body vLLM cannot read with a 400, while vLLM itself answers with a 500.

vLLM looks into bodies before they are validated: ``structured_outputs`` that is not an object ends in an
AttributeError, lists nested a thousand times in a RecursionError (seen on 0.32.0). A priority in a header is read as a
number of any size, of which it finds out that it cannot be sent to an engine when a stream may have begun.
"""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.contracts import Refusal
from vllm_graft.contracts.request_keys import find_unsendable
from vllm_graft.ledger.guard import reason_of
from vllm_graft.server.engine_request import PRIORITY_HEADER
from vllm_graft.server.gate import App, ASGIScope, Receive, Send, respond

if TYPE_CHECKING:
    from fastapi import FastAPI

_READERS: Final = (("fastapi", "request_body_to_args"), ("starlette", "json"), ("pydantic", "validate_python"))
"""The functions that parse a body before anything is answered: FastAPI's, and those that a handler calls which takes
several kinds of requests, such as that of ``/invocations``: ``Request.json`` and ``TypeAdapter.validate_python``."""

_FAULTS: Final = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The exceptions of a malformed body. Any other, such as a MemoryError, is not the request's fault."""

_PRIORITY: Final = PRIORITY_HEADER.encode()

_LOG: Final = logging.getLogger("vllm.graft")


class BodyErrors:
    """An ASGI middleware that costs nothing until a body cannot be read."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Pass everything on; answer in place of vLLM if it raised while it read the body."""
        priority = dict(scope.get("headers", ())).get(_PRIORITY) if scope["type"] == "http" else None
        if priority is not None and (reason := _find_unsendable_number(priority)):
            said = f"the header {PRIORITY_HEADER} {reason}, so it cannot be sent to the engine"
            await respond(send, Refusal(said, status=400))
            return
        try:
            await self._app(scope, receive, send)
        except _FAULTS as error:
            if scope["type"] != "http" or not _while_reading(error):
                raise
            _LOG.warning("vllm-graft: %s: a body that cannot be read is a 400: %s", scope["path"], reason_of(error))
            said = f"the body of the request cannot be read: {type(error).__name__}: {str(error)[:200]}"
            await respond(send, Refusal(said, status=400))


def _find_unsendable_number(header: bytes) -> str:
    """Return why a number cannot be sent, as the end of a sentence; empty if vLLM would not read it as a number."""
    try:
        return find_unsendable(int(str(header, "latin-1")))
    except ValueError:
        return ""


def _while_reading(error: Exception) -> bool:
    """Return whether an exception was raised while a body was parsed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = {(str(each.f_globals.get("__name__")).partition(".")[0], each.f_code.co_name) for each in frames}
    return not places.isdisjoint(_READERS)


def install_body_errors(app: FastAPI) -> None:
    """Put the middleware innermost into vLLM's application."""
    from starlette.middleware import Middleware

    middleware: Any = BodyErrors
    app.user_middleware.append(Middleware(middleware))
