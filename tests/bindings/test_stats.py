"""Planned sinks: told of every batch in order, on a thread that holds up neither the server nor its end."""

import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from vllm_graft.bindings import stats
from vllm_graft.bindings.stats import SinkThread
from vllm_graft.contracts import StatSink
from vllm_graft.errors import StartError
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.record import Record
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.testing import Session

SEEN: list[tuple[str, object, int]] = []
BLOCK = threading.Event()


class Noting(StatSink):
    """Notes what it is told, and on which thread."""

    def __init__(self, options=None):
        super().__init__(options)
        SEEN.append(("made", None, threading.get_ident()))

    def finished(self, requests, batch):
        SEEN.append(("told", batch.engine, threading.get_ident()))

    def close(self):
        SEEN.append(("closed", None, threading.get_ident()))


class Blocking(Noting):
    """Waits in everything it does."""

    def finished(self, requests, batch):
        BLOCK.wait()

    def close(self):
        BLOCK.wait()


class Failing(Noting):
    """Cannot be made."""

    def __init__(self, options=None):
        raise OSError("no such folder")


class NotClosing(Noting):
    """Fails at its end."""

    def close(self):
        raise OSError("the disk is full")


@pytest.fixture
def run() -> Callable[..., SinkThread]:
    """Starts the thread of a sink, with a ledger in memory."""
    SEEN.clear()
    BLOCK.clear()

    def start(kind: type[StatSink], on_failure: str = "stop") -> SinkThread:
        item = PlanItem("stats", "noting", f"{__name__}:{kind.__name__}", "tests", ("frontend",))
        plan = Plan((item,), on_failure)
        ledger = Ledger()
        ledger.record = Record.of_this_process("run", plan.hash, "m", ["frontend"], "0.32.0", "V1")
        thread = SinkThread(item, plan, ledger)
        thread.ledger = ledger
        return thread

    yield start
    BLOCK.set()


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind.__name__: kind for kind in (Noting, Blocking, Failing, NotClosing)}
    monkeypatch.setattr(
        "vllm_graft.bindings.instantiate.load", lambda target, name, package: kinds[target.rpartition(":")[2]]
    )


def test_a_sink_is_made_told_and_closed_on_one_thread_in_order(run):
    """So it may keep what belongs to a thread, such as a connection to a database."""
    thread = run(Noting)
    for number in range(100):
        thread.feed(None, None, number)
    stats._close_all([thread])
    assert [(what, number) for what, number, _ in SEEN] == [
        ("made", None),
        *(("told", number) for number in range(100)),
        ("closed", None),
    ]
    assert len({ident for _, _, ident in SEEN}) == 1
    assert SEEN[0][2] != threading.get_ident()


def test_a_sink_that_waits_holds_up_nobody_and_is_put_aside(run, monkeypatch):
    """What waits for it is bounded."""
    monkeypatch.setattr(stats, "MOST_BATCHES", 10)
    thread = run(Blocking)
    started = time.monotonic()
    for number in range(100):
        thread.feed(None, None, number)
    assert time.monotonic() - started < 5
    assert thread._batches.qsize() <= 10
    assert "10 batches behind" in thread.guard.aside
    assert "is put aside" in thread.ledger.record.last_error


def test_a_close_that_hangs_is_left_behind(run, monkeypatch):
    """The end of a server waits for it for a while, and says so."""
    monkeypatch.setattr(stats, "CLOSE_S", 0.2)
    threads = [run(Blocking), run(Blocking)]
    threads[0].feed(None, None, 0)
    started = time.monotonic()
    stats._close_all(threads)
    assert time.monotonic() - started < 5
    for thread in threads:
        assert "did not close within 0.2 s" in thread.ledger.record.last_error


def test_a_close_that_raises_is_said(run):
    """Nobody would see it otherwise: the process is on its way out."""
    thread = run(NotClosing)
    stats._close_all([thread])
    assert "failed to close: OSError: the disk is full" in thread.ledger.record.last_error


def test_a_sink_that_cannot_be_made_stops_the_start_or_is_left_out(run):
    """The error is raised where the start can hear it."""
    with pytest.raises(StartError, match="no such folder"):
        run(Failing)
    thread = run(Failing, "warn")
    assert thread.guard is None
    thread.feed(None, None, 0)
    stats._close_all([thread])


def test_what_a_release_renamed_costs_the_sink_and_not_the_server(run):
    """vLLM's own statistics are read on the thread, inside the guard."""
    thread = run(Noting)
    thread.feed(None, SimpleNamespace(num_generation_tokens=1), 0)
    stats._close_all([thread])
    assert "finished_requests" in thread.guard.aside


SINKS = """
import os, pathlib, time
from vllm_graft import StatSink

class Closing(StatSink):
    def finished(self, requests, batch):
        pass
    def close(self):
        pathlib.Path(os.environ["NOTES"], f"closed-{os.getpid()}").touch()

class Sleeping(StatSink):
    def finished(self, requests, batch):
        pathlib.Path(os.environ["NOTES"], f"asleep-{os.getpid()}").touch()
        time.sleep(600)
"""


@pytest.mark.server
def test_sinks_neither_block_a_server_nor_its_end(graft: Session):
    """Two API servers: each answers while a sink of its own sleeps, and closes the other before it ends."""
    entries = {"closing": "sinks:Closing", "sleeping": "sinks:Sleeping"}
    graft.package("sinks", {"vllm_graft.plugins": entries}, {"sinks": SINKS})
    graft.plan('[defaults]\nstats = ["closing", "sleeping"]\n')
    graft.env["NOTES"] = str(graft.folder)
    graft.simulate()
    with graft.server("--api-server-count", "2", "--served-model-name", "m") as server:
        ask = {"model": "m", "prompt": "a", "max_tokens": 2}
        deadline = time.monotonic() + 120
        while len(list(graft.folder.glob("asleep-*"))) < 2:
            assert server.post("/v1/completions", ask)[0] == 200
            assert time.monotonic() < deadline
        started = time.monotonic()
        for _ in range(10):
            assert server.health() == 200
        assert time.monotonic() - started < 20
        found = json.loads(server.get("/graft/status")[1])
        servers = {row["pid"] for row in found["processes"] if row["name"].startswith("ApiServer")}
        assert len(servers) == 2
        started = time.monotonic()
    assert time.monotonic() - started < 35
    assert {int(path.name.partition("-")[2]) for path in graft.folder.glob("closed-*")} == servers
    assert "sleeping: did not close within 5 s" in server.tail(1000)
