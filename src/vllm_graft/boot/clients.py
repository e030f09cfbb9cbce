"""The engine client, in the front end: stat loggers go in, nothing serves before the records agree with the plan."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm_graft import ledger
from vllm_graft.boot import disabled, lastline
from vllm_graft.boot.extension import REPORT, TIMEOUT_S
from vllm_graft.boot.process import LOG, process
from vllm_graft.boot.role import calls_below
from vllm_graft.errors import GraftError, StartError
from vllm_graft.findings import Finding
from vllm_graft.ledger import folder, reading
from vllm_graft.plan import Plan

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

_ANSWER_S: Final = 10.0
"""How long engines have to answer when somebody asks for the status."""

_FRESH_S: Final = 1.0
_LEAVE_S: Final = 5.0
"""How long an API server takes to end besides its sinks."""

_HTTP: Final = "run_server_worker"
"""The function in which vLLM's HTTP server makes its client (0.26 to 0.32)."""

_LOOK: Final = "look for an earlier error of these processes in the server's log"


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
        answers = _ask_engine(client.engine_core)
        compare(plan, gather(answers).rows, _silent(answers))
    elif ledger.current().home is not None and _all_here(client):
        compare(plan, gather([]).rows)
    elif not calls_below(_HTTP):
        # An HTTP server asks its engines before it serves (see GraftEndpoint); nobody else does.
        LOG.warning("vllm-graft: %s", not_compared(plan).explain())
    ledger.current().set_ready()
    process.watch.start()


def closing_seconds() -> float:
    """Return how long API servers may take to end: time for their sinks, where the plan has any."""
    if disabled() or not process.plan or not process.plan.of("stats"):
        return 0.0
    from vllm_graft.bindings.stats import CLOSE_S

    return CLOSE_S + _LEAVE_S


def endpoint_plugins() -> list[GraftEndpoint]:
    """Our endpoint plugin, where a plan is in force."""
    if disabled() or not process.plan or process.run is None:
        return []
    return [GraftEndpoint(process.plan, process.run.id)]


def _all_here(client: Any) -> bool:
    """Whether every process of this client's engine records on this machine, as far as its configuration tells."""
    parallel = client.vllm_config.parallel_config
    return parallel.distributed_executor_backend != "ray" and parallel.data_parallel_size * _nodes(parallel) == 1


def not_compared(plan: Plan) -> Finding:
    """Say that nobody has asked the engines of a client for what is active in them."""
    return Finding(
        "S026",
        "warning",
        f"plan {plan.hash}",
        "is not compared with the engines of this AsyncLLM: they may run on other machines, and nobody asked them",
        "data parallelism, several nodes, Ray, or records in memory",
        "run `vllm-graft status` on every node, or serve with `vllm serve`, which asks every engine before it serves",
    )


def _nodes(parallel: Any) -> int:
    nodes: int = getattr(parallel, "nnodes", 1)
    return nodes


def _silent(answers: Iterable[str]) -> int:
    return sum(not json.loads(answer) for answer in answers)


@dataclass(frozen=True, slots=True)
class Gathering:
    """All that the processes of a run say of themselves and of each other.

    rows:    every process, as it said itself where it could be asked, else as it was recorded last
    damaged: what could not be read on this machine
    """

    rows: list[dict[str, object]]
    damaged: list[Finding]


def gather(answers: Iterable[str]) -> Gathering:
    """Return all processes of the run: those recorded on this machine, and those the engines answered for.

    An answer is a list of processes, or an object that names one without a record. What a process says of itself counts
    more than its record, which on a full disk may be hours old.
    """
    process.look()
    found, damaged = ledger.current().look_around()
    for answer in answers:
        content = json.loads(answer)
        found += content if isinstance(content, list) else [reading.row_without_record(**content)]
    rows: dict[object, dict[str, object]] = {}
    for row in found:
        # Nodes may share a host name, and processes on them an id.
        key = (row["host"], row["pid"], row["since"], row["name"])
        if key not in rows or row.get("live"):
            rows[key] = row
    return Gathering(list(rows.values()), damaged)


def _ask_engine(core: Any) -> list[str]:
    """Ask the one engine behind ``LLM``: in a process of its own, or in this one."""
    call = getattr(core, "call_utility", None)
    answers: list[str] = call(REPORT) if call is not None else core.engine_core.graft_report()
    return answers


async def _ask_engines(core: Any, seconds: float = TIMEOUT_S) -> list[str]:
    """Ask every engine that a server's client manages; one that cannot answer is named in its place.

    vLLM's own ``collective_rpc`` of a data-parallel client returns the first engine's answer only (0.26 to 0.32).
    """
    ranks = [int.from_bytes(identity, "little") for identity in core.core_engines]
    calls = [asyncio.wait_for(core._call_utility_async(REPORT, engine=each), seconds) for each in core.core_engines]
    results = await asyncio.gather(*calls, return_exceptions=True)
    answers: list[str] = []
    for rank, result in zip(ranks, results, strict=True):
        if isinstance(result, BaseException):
            answers.append(json.dumps(_without_answer(rank, result, seconds)))
        else:
            answers += result
    return answers


def unasked_ranks(size: int, engines: Sequence[bytes]) -> Finding | None:
    """Say which data-parallel ranks this front end does not manage, and so cannot ask; None where it manages all."""
    managed = {int.from_bytes(identity, "little") for identity in engines}
    others = [str(rank) for rank in range(size) if rank not in managed]
    if not others:
        return None
    return Finding(
        "S025",
        "warning",
        f"data-parallel rank {', '.join(others)}",
        "answers to another front end, so this one cannot tell what is active there",
        "external or hybrid load balancing",
        "see that /graft/status of every front end shows the same plan",
    )


def _without_answer(rank: int, error: BaseException, seconds: float) -> dict[str, object]:
    """Describe an engine that did not answer, as ``reading.row_without_record`` takes it."""
    if not isinstance(error, Exception):
        raise error
    facts: dict[str, object] = {"name": f"data-parallel rank {rank}", "roles": ["engine", "worker"]}
    # vLLM hands on the text of the AttributeError that an engine core without our method answers with.
    if REPORT in str(error) and "attribute" in str(error):
        return facts
    if isinstance(error, TimeoutError):
        return {**facts, "last_error": f"it gave no answer within {seconds:g} s"}
    return {**facts, "last_error": f"{type(error).__name__}: {error}"}


def compare(plan: Plan, rows: list[dict[str, object]], silent: int = 0) -> None:
    """Stop the start where a process lacks what the plan names; with ``on_failure = "warn"`` say so and go on.

    ``silent`` is the number of workers that answered without a record.
    """
    living = [row for row in rows if row["life"] in ("running", "unknown")]
    found = [finding for finding in reading.missing(living, plan) if finding.level == "error"]
    found += reading.unproven(rows, plan, _shortage())
    if silent and plan.needed_by({"worker"}):
        what = f"{silent} of its workers have no record, so nothing is proven active there"
        found.append(Finding("S007", "error", f"plan {plan.hash}", what, "worker", _LOOK))
    if not found:
        return
    for finding in found:
        LOG.error("vllm-graft: %s", finding.explain())
    if plan.strict:
        raise lastline.as_error(found)


def _shortage() -> str:
    place = ledger.current().home or folder.state_folder()
    return folder.shortage(place) if place is not None else ""


def _with_stat_loggers(
    call: Callable[..., None], given: tuple[Any, ...], named: dict[str, Any], plan: Plan, *, offline: bool
) -> inspect.BoundArguments:
    arguments = inspect.signature(call).bind(*given, **named)
    if plan.of("stats"):
        from vllm_graft.bindings.stats import stat_loggers

        theirs = arguments.arguments.get("stat_loggers") or []
        arguments.arguments["stat_loggers"] = [*theirs, *stat_loggers(plan, ledger.current(), threads=not offline)]
        if offline:
            # LLM() turns statistics off unless told otherwise, and a planned sink would then hear nothing.
            arguments.arguments["log_stats"] = True
    return arguments


class GraftEndpoint:
    """Our endpoint plugin: the last comparison before an API server serves, our routes and our metrics."""

    name = "graft"
    required_tasks = None

    def __init__(self, plan: Plan, run: str) -> None:
        self._plan = plan
        self._run = run
        self._client: EngineClient | None = None
        self._keys: list[str] = []
        self._unasked: list[Finding] = []
        self._found: Gathering | None = None
        self._found_at = 0.0
        self._look: asyncio.Task[Gathering] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Called by vLLM while it builds the application."""
        from vllm_graft.server.bodies import install_body_errors
        from vllm_graft.server.gate import install_gate
        from vllm_graft.server.metrics import install_metrics
        from vllm_graft.server.status import install_status

        install_gate(app, self._plan, ledger.current())
        install_body_errors(app)
        if self._plan.endpoint:
            install_status(app, self._run, self.status, self._plan, lambda: self._keys)
        install_metrics(app, self._plan)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Called by vLLM in each API server before it serves; what it raises stops the start."""
        from vllm_graft.server.status import server_keys

        self._client = engine_client
        self._keys = server_keys(args)
        if engine_client is not None:
            if self._plan.of("sampler"):
                from vllm_graft.bindings.sampling.requests import check_early

                check_early(engine_client)
            if self._plan.callers:
                from vllm_graft.server.callers import install_stamp

                install_stamp(engine_client, process.engine)
            core = _core_of(engine_client)
            answers = await _ask_engines(core)
            compare(self._plan, gather(answers).rows, _silent(answers))
            unasked = unasked_ranks(engine_client.vllm_config.parallel_config.data_parallel_size, core.core_engines)
            if unasked is not None:
                self._unasked = [unasked]
                LOG.warning("vllm-graft: %s", unasked.explain())

    async def status(self) -> tuple[list[dict[str, object]], list[Finding]]:
        """Every process of this server and what is wrong with it; asked for at most once a second.

        Whoever asks while somebody else's question is under way waits for the same answer. An engine that does not
        answer has a row without a record, which shows as a finding.
        """
        if self._found is None or time.monotonic() - self._found_at >= _FRESH_S:
            if self._look is None or self._look.done():
                self._look = asyncio.ensure_future(self._gather())
            # Shielded, because a client that goes away must not take the answer from the others.
            self._found = await asyncio.shield(self._look)
            self._found_at = time.monotonic()
        found = self._found
        of_rows = reading.findings_of(found.rows, self._plan, _shortage())
        return found.rows, [*of_rows, *found.damaged, *self._unasked]

    async def _gather(self) -> Gathering:
        answers = await _ask_engines(_core_of(self._client), _ANSWER_S) if self._client is not None else []
        return await asyncio.to_thread(gather, answers)


def _core_of(client: Any) -> Any:
    """Return the part of an engine client that speaks to single engines, or refuse a vLLM that has none."""
    core = getattr(client, "engine_core", None)
    if not hasattr(core, "core_engines") or not hasattr(core, "_call_utility_async"):
        raise StartError(
            f"this vLLM's engine client ({type(client).__name__}) has no way to ask each engine what it has",
            where="engine_core._call_utility_async",
            fix="install a vLLM of the tested range or a newer vllm-graft, or set GRAFT_DISABLE=1",
        )
    return core
