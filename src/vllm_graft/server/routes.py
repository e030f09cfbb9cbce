"""The routes under ``/graft``: what every process of this server says of itself, and the samplers it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from vllm_graft.bindings.sampling.requests import listing
from vllm_graft.findings import Finding
from vllm_graft.ledger import current
from vllm_graft.ledger.asides import Asides
from vllm_graft.ledger.reading import queues_apart
from vllm_graft.plan import Plan, carried_run
from vllm_graft.server.keys import allowed
from vllm_graft.server.page import status_page

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

Status = Callable[[], Awaitable[tuple[list[dict[str, object]], list[Finding]]]]
"""Gives every process of the server, and what is wrong with any of them."""


def attach(app: FastAPI, run: str, look: Status, plan: Plan, keys: Callable[[], list[str]]) -> None:
    """Add the routes; ``keys`` gives the API keys once they are known."""
    from starlette.responses import HTMLResponse, JSONResponse

    asides = Asides(current())

    async def status(request: Request) -> Response:
        if not allowed(request.headers.get("authorization"), keys()):
            return JSONResponse({"error": "this server asks for an API key"}, 401)
        found = await status_of(run, look, plan)
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(status_page(found))
        return JSONResponse(found)

    async def samplers(request: Request) -> Response:
        if not allowed(request.headers.get("authorization"), keys()):
            return JSONResponse({"error": "this server asks for an API key"}, 401)
        return JSONResponse(listing(plan, carried_run(), asides.reasons()))

    app.router.add_route("/graft/status", status, methods=["GET"])
    app.router.add_route("/graft/samplers", samplers, methods=["GET"])


def _without_option_values(plan: Plan) -> dict[str, object]:
    """The plan for the network: an option's value may be a secret, its name is not."""
    bare = tuple(dataclasses.replace(item, options=dict.fromkeys(item.options, "")) for item in plan)
    return {**dataclasses.replace(plan, items=bare).as_dict(), "hash": plan.hash}


async def status_of(run: str, look: Status, plan: Plan) -> dict[str, object]:
    """The document that ``GET /graft/status`` answers with: the keys of a server in ``vllm-graft status --json``."""
    rows, findings = await look()
    processes, queues = queues_apart(rows)
    return {
        "run": run,
        "model": plan.model,
        "running": True,
        "plan": _without_option_values(plan),
        "processes": processes,
        "queues": queues,
        "findings": [finding.as_dict() for finding in findings],
    }
