"""The watch over a process: signs of life, and what holds it up."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_graft.findings import Finding
from vllm_graft.ledger import Guard, Ledger, Progress, Watch, comparison, runs
from vllm_graft.ledger.counters import BEAT
from vllm_graft.ledger.record import Record
from vllm_graft.plan import Plan, PlanItem

PLAN = Plan((PlanItem("stats", "sink", "m:D", "p", ("frontend",)),), model="m")


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of a front end with one sink."""
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path / "state"))
    made = Ledger()
    made.begin_run("run", PLAN)
    made.set_item("stats", "sink", "applied")
    made.open(Record.of_this_process("run", PLAN.hash, "m", ["frontend"], "0.32.0", "V1"))
    made.set_ready()
    return made


def found() -> list[Finding]:
    return runs()[0].findings()


def wait_for(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)
    assert condition()  # type: ignore[operator]


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """What a call of a plugin waits for."""
    event = threading.Event()
    yield event
    event.set()


def test_a_plugin_that_does_not_return_is_named_with_its_line(ledger: Ledger, hanging: threading.Event):
    """Read from the stack of whatever thread it hangs in, at no cost to the calls of others."""

    def finished() -> None:
        hanging.wait()

    guard = Guard(finished, lambda: None, ledger.hook("sink", "finished", 50.0), lambda reason: None)
    thread = threading.Thread(target=guard, daemon=True)
    thread.start()
    watch = Watch(ledger, patience_s=0.05)
    wait_for(lambda: watch.tick() or found())
    (finding,) = found()
    assert (finding.code, finding.level) == ("S016", "warning")
    assert "waits for a plugin that does not return (" in finding.what
    assert "threading.py" in finding.where
    assert "called for sink.finished" in finding.where
    hanging.set()
    thread.join()
    watch.tick()
    assert found() == []


def test_an_engine_that_makes_no_step_is_a_finding_while_requests_wait(ledger: Ledger):
    """A step that ends, or nothing to do, ends it."""
    step: list[Progress | None] = [Progress(object(), 3, threading.get_ident())]
    watch = Watch(ledger, patience_s=0.0)
    watch.progress = lambda: step[0]
    watch.tick()
    assert found() == [], "one look cannot tell"
    watch.tick()
    (finding,) = found()
    assert finding.code == "S016"
    assert finding.what.startswith("has not finished a step while 3 requests wait (")
    assert " in tick" in finding.where or " in _engine_stall" in finding.where
    step[0] = Progress(object(), 3, threading.get_ident())
    watch.tick()
    assert found() == []
    watch.tick()
    assert len(found()) == 1
    step[0] = None
    watch.tick()
    assert found() == []


def test_what_is_held_up_for_a_minute_is_an_error(ledger: Ledger):
    """And how long it is grows by itself, though the record is written once."""
    watch = Watch(ledger, patience_s=0.0)
    watch.progress = lambda: Progress(ledger, 1, threading.get_ident())
    watch.tick()
    watch._since -= comparison.STALLED_S + 1
    watch.tick()
    (finding,) = found()
    assert finding.level == "error"
    assert finding.what.startswith("has not finished a step while 1 request waits (6")


def test_a_process_without_a_sign_of_life_is_a_finding(ledger: Ledger):
    """One that is stopped by a signal cannot say so itself."""
    watch = Watch(ledger)
    watch.tick()
    assert found() == []
    ledger.cells.cells[BEAT] -= int(1000 * (comparison.SILENT_S + 5))
    (finding,) = found()
    assert (finding.code, finding.level) == ("S016", "error")
    assert "has given no sign of life for 35 s" in finding.what


def test_the_watch_runs_by_itself_and_again_after_a_fork(ledger: Ledger):
    """A forked child has no threads of its parent's."""
    looks = []
    watch = Watch(ledger, lambda: looks.append(os.getpid()), every_s=0.01)
    watch.start()
    watch.start()
    wait_for(lambda: len(looks) > 1)
    assert [thread.name for thread in threading.enumerate()].count("graft-watch") == 1
    pid = os.fork()
    if pid == 0:
        looks.clear()
        watch.start()
        time.sleep(1)
        os._exit(0 if looks else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    watch.stop()


def test_a_look_that_fails_is_logged_once_and_tried_again(ledger: Ledger, caplog: pytest.LogCaptureFixture):
    """What is read belongs to threads that go on meanwhile."""
    looks = []

    def look() -> None:
        looks.append(1)
        raise RuntimeError("changed size during iteration")

    watch = Watch(ledger, look, every_s=0.01)
    watch.start()
    wait_for(lambda: len(looks) > 3)
    watch.stop()
    assert caplog.text.count("the watch over this process could not look: RuntimeError") == 1


def test_a_stopped_process_is_silent(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    """As SIGSTOP leaves it."""
    monkeypatch.setattr(comparison, "SILENT_S", 0.3)
    pid = os.fork()
    if pid == 0:
        ledger.forked()
        ledger.set_item("stats", "sink", "applied")
        ledger.open(Record.of_this_process("run", PLAN.hash, "m", ["frontend"], "0.32.0", "V1"))
        ledger.set_ready()
        Watch(ledger, every_s=0.01).start()
        time.sleep(60)
    try:
        wait_for(lambda: any(process.record.pid == pid and process.beat for process in runs()[0].processes))
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: any(f"pid {pid} " in finding.subject for finding in found()))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
