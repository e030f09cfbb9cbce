"""The engine client, in the front end: stat loggers go in, nothing serves before the records agree with the plan."""

from __future__ import annotations

import inspect
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm_graft import ledger
from vllm_graft.boot import disabled, lastline
from vllm_graft.boot.extension import REPORT, rows_here
from vllm_graft.boot.process import LOG, process
from vllm_graft.errors import GraftError, StartError
from vllm_graft.findings import Finding, worst_first
from vllm_graft.ledger import reading
from vllm_graft.plan import Plan

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

_PROVEN: Final = ("engine", "worker")
_TIMEOUT_S: Final = 60.0


def make_client(
    client: Any, call: Callable[..., None], given: tuple[Any, ...], named: dict[str, Any], *, offline: bool
) -> None:
    """What ``AsyncLLM.__init__`` and ``LLMEngine.__init__`` do with us."""
    plan = process.plan
    if disabled() or not plan or process.run is None:
        call(*given, **named)
        return
    arguments = _with_stat_loggers(call, given, named, plan, offline=offline)
    try:
        call(*arguments.args, **arguments.kwargs)
    except GraftError:
        raise
    except Exception as error:
        reason = lastline.start_error(process.run.id)
        if reason is None:
            raise
        raise reason from error
    if offline:
        compare(plan, gather(client.collective_rpc(REPORT, timeout=_TIMEOUT_S)))
    else:
        compare(plan, rows_here(), local_only=True)


def endpoint_plugins() -> list[GraftEndpoint]:
    """Our endpoint plugin, where a plan is in force."""
    if disabled() or not process.plan or process.run is None:
        return []
    return [GraftEndpoint(process.plan, process.run.id)]


def gather(answers: Iterable[str]) -> list[dict[str, object]]:
    """All processes of the run: those recorded on this machine, and those the workers answered for."""
    rows = {(row["host"], row["pid"]): row for row in rows_here()}
    for answer in answers:
        for row in json.loads(answer):
            rows.setdefault((row["host"], row["pid"]), row)
    return list(rows.values())


def compare(plan: Plan, rows: list[dict[str, object]], *, local_only: bool = False) -> None:
    """Stop the start where a process lacks what the plan names; with ``on_failure = "warn"`` say so and go on."""
    living = [row for row in rows if row["life"] in ("running", "unknown")]
    found = [finding for finding in reading.missing(living, plan) if finding.level == "error"]
    if not local_only:
        found += _silent_roles(plan, living)
    if not found:
        return
    for finding in found:
        LOG.error("vllm-graft: %s", finding.explain())
    if plan.strict:
        raise lastline.as_error(worst_first(found)[0])


def _silent_roles(plan: Plan, rows: list[Mapping[str, object]] | list[dict[str, object]]) -> list[Finding]:
    seen: set[str] = set()
    for row in rows:
        roles = row["roles"]
        assert isinstance(roles, list)
        seen.update(roles)
    return [
        Finding(
            "S007",
            "error",
            f"plan {plan.hash}",
            f"no {role} process has reported, so nothing is proven active there",
            role,
            "see that vllm-graft is installed there, and that VLLM_PLUGINS, if set, lists graft",
        )
        for role in _PROVEN
        if role not in seen and plan.needed_by({role})
    ]


def _with_stat_loggers(
    call: Callable[..., None], given: tuple[Any, ...], named: dict[str, Any], plan: Plan, *, offline: bool
) -> inspect.BoundArguments:
    arguments = inspect.signature(call).bind(*given, **named)
    if plan.of("stats"):
        from vllm_graft.bindings.stats import stat_loggers

        theirs = arguments.arguments.get("stat_loggers") or []
        arguments.arguments["stat_loggers"] = [*theirs, *stat_loggers(plan, ledger.current())]
        if offline:
            # LLM() turns statistics off unless told otherwise, and a planned sink would then hear nothing.
            arguments.arguments["log_stats"] = True
    return arguments


class GraftEndpoint:
    """Our endpoint plugin: the last comparison before an API server serves, and the routes under ``/graft``."""

    name = "graft"
    required_tasks = None

    def __init__(self, plan: Plan, run: str) -> None:
        self._plan = plan
        self._run = run
        self._client: EngineClient | None = None
        self._keys: list[str] = []

    def attach_router(self, app: FastAPI) -> None:
        """Called by vLLM while it builds the application."""
        if self._plan.endpoint:
            from vllm_graft.server.routes import attach

            attach(app, self._run, self.rows, self._plan, lambda: self._keys)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Called by vLLM in each API server before it serves; what it raises stops the start."""
        from vllm_graft.server.keys import server_keys

        self._client = engine_client
        self._keys = server_keys(args)
        if engine_client is not None:
            compare(self._plan, await self.rows())

    async def rows(self) -> list[dict[str, object]]:
        """Every process of this server, workers on other machines included."""
        if self._client is None:
            return rows_here()
        try:
            answers = await self._client.collective_rpc(REPORT, timeout=_TIMEOUT_S)
        except Exception as error:
            if isinstance(error, StartError):
                raise
            LOG.error("vllm-graft: the workers did not report: %s: %s", type(error).__name__, error)
            return rows_here()
        return gather(answers)
