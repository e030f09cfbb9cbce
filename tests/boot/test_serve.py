"""`vllm-graft serve` around vLLM's API server, on the simulated accelerator: from its start to a signal."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from vllm_graft.testing import Session, zygote

pytestmark = pytest.mark.server


STUCK = """
import multiprocessing, os, pathlib, signal, time
def register():
    if multiprocessing.current_process().name.startswith("EngineCore"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(os.environ["STUCK"]).write_text(str(os.getpid()))
        time.sleep(600)
"""


def state_of(pid: str) -> str:
    """The kernel's letter for a process; Z has ended, and waits for its parent to take note. Empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_start_that_is_stopped_ends_at_once(planned: Session):
    """An engine that loads or compiles hears no signal: it is ended all the same, and has not died."""
    planned.simulate()
    planned.package("stuck", {"vllm.general_plugins": {"stuck": "stuck:register"}}, {"stuck": STUCK})
    mark = planned.folder / "stuck"
    planned.env["STUCK"] = str(mark)
    server = planned.server()
    environment = {name: value for name, value in {**os.environ, **planned.env}.items() if value is not None}
    command = [sys.executable, "-m", "vllm_graft.cli", "serve", *server.arguments]
    with (planned.folder / "serve.txt").open("w") as file:
        process = zygote.ForkedPopen(command, env=environment, cwd=planned.folder, stdout=file, stderr=file)
        deadline = time.monotonic() + 200
        while not mark.exists() or not mark.read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        # Ten seconds is what is promised; a busy machine gets some more.
        assert time.monotonic() - started < 20
    assert state_of(mark.read_text()) in ("", "Z")
    assert [view for view in planned.views() if view.findings()] == []


def start_serve(planned: Session, *arguments: str) -> tuple[zygote.ForkedPopen, Path]:
    """Start `vllm-graft serve`, simulated, and wait until it serves; return the process and the file of its output."""
    planned.simulate()
    environment = {name: value for name, value in {**os.environ, **planned.env}.items() if value is not None}
    command = [sys.executable, "-m", "vllm_graft.cli", "serve", *planned.server(*arguments).arguments]
    output = planned.folder / "serve.txt"
    with output.open("w") as file:
        process = zygote.ForkedPopen(command, env=environment, cwd=planned.folder, stdout=file, stderr=file)
    deadline = time.monotonic() + 200
    while "every process has what its plan names" not in output.read_text(encoding="utf-8"):
        assert process.poll() is None, output.read_text(encoding="utf-8")[-3000:]
        assert time.monotonic() < deadline, output.read_text(encoding="utf-8")[-3000:]
        time.sleep(0.3)
    return process, output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_the_table_and_stops_on_a_signal(planned: Session, signum: signal.Signals):
    """`vllm-graft serve` watches the server from start to stop and leaves no process behind."""
    process, output = start_serve(planned)
    pids = [view.record.pid for run in planned.views() for view in run.processes]
    assert len(pids) >= 2
    process.send_signal(signum)
    assert process.wait(timeout=60) == 0
    assert "vllm-graft: the server has stopped" in output.read_text(encoding="utf-8")
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize(
    ("victim", "arguments", "status", "said"),
    [
        ("EngineCore", (), 1, "S006 error: EngineCore"),
        ("vllm", (), 128 + signal.SIGKILL, "vllm-graft: the server was ended by SIGKILL"),
        ("ApiServer_1", ("--api-server-count", "2"), 1, "S006 error: ApiServer_1"),
        ("VllmWorker-1", ("--tensor-parallel-size", "2"), 1, "S006 error: VllmWorker-1"),
    ],
)
def test_a_server_that_lost_a_process_does_not_end_with_status_0(
    planned: Session, victim: str, arguments: tuple[str, ...], status: int, said: str
):
    """vLLM's own status is 0 where its engine was killed, and whoever restarts servers would leave it at that."""
    process, output = start_serve(planned, *arguments)
    views = [view for run in planned.views() for view in run.processes]
    (pid,) = [view.record.pid for view in views if view.record.name == victim]
    os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=120) == status
    assert said in output.read_text(encoding="utf-8")
    assert [pid for pid in (view.record.pid for view in views) if state_of(str(pid)) not in ("", "Z")] == []
    died = {view.record.name for run in planned.views() for view in run.processes if view.life == "died"}
    # An engine cannot go on without its worker: its steps end with an error, and vLLM takes down what is left.
    also = {"EngineCore"} if victim == "VllmWorker-1" else set()
    assert died == {victim} | also or victim == "vllm"
