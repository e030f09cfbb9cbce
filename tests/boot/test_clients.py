"""The engine client of a front end, and the loops of engines and workers."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_graft.boot import loops, start
from vllm_graft.boot.clients import GraftEndpoint, make_client
from vllm_graft.boot.process import process
from vllm_graft.errors import StartError
from vllm_graft.ledger import current
from vllm_graft.ledger.record import Record
from vllm_graft.plan import Plan, PlanItem, Run

PLAN = Plan((PlanItem("scheduler", "fair", "m:Q", "p", ("engine",)),), model="m")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """The record of this process, which has a plan."""
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path))
    ledger = current()
    made = Record.of_this_process("1-aa", PLAN.hash, "m", ["frontend"], "0.32.0", "V1")
    ledger.begin_run("1-aa", PLAN)
    ledger.open(made)
    process.plan, process.run = PLAN, Run("1-aa", os.getpid())
    yield made
    process.drop_plan()


def connect(size: int = 1, backend: str | None = None) -> None:
    """Make the client of an ``AsyncLLM`` whose configuration says so much."""
    parallel = SimpleNamespace(distributed_executor_backend=backend, data_parallel_size=size, nnodes=1)
    client = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    make_client(client, lambda *given, **named: None, (), {}, offline=False)


@pytest.mark.parametrize("facts", [{"size": 2}, {"backend": "ray"}])
def test_engines_that_nobody_asks_are_said_to_be_so(
    record: Record, facts: dict[str, object], caplog: pytest.LogCaptureFixture
):
    """An HTTP server asks them later, and has nothing to say here."""
    connect(**facts)  # type: ignore[arg-type]
    assert caplog.text.count("S026 warning") == 1
    caplog.clear()

    async def run_server_worker() -> None:
        connect(**facts)  # type: ignore[arg-type]

    asyncio.run(run_server_worker())
    assert "S026" not in caplog.text


def test_engines_of_this_machine_are_compared(record: Record, caplog: pytest.LogCaptureFixture):
    """Their records are here."""
    with pytest.raises(StartError, match="is not proven active in any engine process: none has reported"):
        connect()
    assert "S026" not in caplog.text


def test_the_loop_of_a_worker_or_engine_makes_it_ready(record: Record):
    """By that a headless node knows that it has started."""
    seen = []
    loops.run_worker(lambda: seen.append(record.ready))
    record.ready = False
    core = SimpleNamespace(scheduler=None)
    loops.run_engine(core, lambda: seen.append(record.ready))
    assert seen == [True, True]


@pytest.mark.parametrize(("rank", "headless", "kind"), [(0, True, "engines"), (1, True, "workers"), (1, False, "")])
def test_a_node_without_a_front_end_says_what_runs_there(
    record: Record, rank: int, headless: bool, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """The engine core of workers alone is elsewhere, and not missing."""
    monkeypatch.setattr(start.sampling, "user_processors", lambda config: [])
    config = SimpleNamespace(
        speculative_config=None, parallel_config=SimpleNamespace(node_rank_within_dp=rank), use_v2_model_runner=False
    )
    start._note_engine(PLAN, Run("1-aa", os.getpid(), headless=headless), config, {})  # type: ignore[arg-type]
    assert record.headless == kind


def test_what_was_put_aside_since_the_last_look_is_shown(record: Record):
    """A second look within a second would otherwise say that all is well."""
    ledger = current()
    ledger.set_item("scheduler", "fair", "applied")
    record.roles.append("engine")
    endpoint = GraftEndpoint(PLAN, "1-aa")

    async def look() -> list[str]:
        return [finding.code for finding in (await endpoint.status())[1]]

    async def look_twice() -> tuple[list[str], list[str]]:
        before = await look()
        ledger.put_aside("fair", "on purpose")
        return before, await look()

    before, after = asyncio.run(look_twice())
    assert "S005" not in before
    assert "S005" in after
