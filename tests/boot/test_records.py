"""What the records of a real server say when things go wrong in it: stuck, overwritten, out of room, crashed."""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_graft.cli import main
from vllm_graft.findings import Finding
from vllm_graft.testing import ServerProcess, Session

pytestmark = pytest.mark.server

MODULE = """
import os, threading, time
from pathlib import Path
from vllm_graft import StatSink, VLLMPatch, wrap

FLAGS = Path(os.environ["FLAGS"])

def held_up(flag):
    while (FLAGS / flag).exists():
        time.sleep(0.05)

class Steps(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="steps", processes={"engine"}):
    @wrap
    def schedule(self, call, *args, **kwargs):
        held_up("hang-engine")
        if (FLAGS / "crash-engine").exists():
            raise RuntimeError("boom \\x1b[31m in a step")
        return call(*args, **kwargs)

class Sink(StatSink):
    def finished(self, requests, batch):
        held_up("hang-sink")

def register():
    def later():
        while not (FLAGS / "overwrite").exists():
            time.sleep(0.05)
        from vllm.v1.core.sched.scheduler import Scheduler
        ours = Scheduler.schedule
        Scheduler.schedule = lambda *args, **kwargs: ours(*args, **kwargs)
        (FLAGS / "overwrite").unlink(missing_ok=True)
    import multiprocessing
    if multiprocessing.current_process().name.startswith("EngineCore"):
        threading.Thread(target=later, daemon=True).start()
"""

BODY = {"prompt": "hi", "max_tokens": 2, "model": "m"}


def prepare(session: Session) -> Session:
    entries = {
        "vllm_graft.plugins": {"steps": "stuck:Steps", "sink": "stuck:Sink"},
        "vllm.general_plugins": {"stuck": "stuck:register"},
    }
    session.package("stuck", entries, {"stuck": MODULE})
    session.plan('[defaults]\npatches = ["steps"]\nstats = ["sink"]\n')
    session.env["FLAGS"] = str(session.folder)
    session.env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    session.simulate()
    return session


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    made = prepare(Session(tmp_path_factory.mktemp("records")))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[ServerProcess]:
    """One server for all tests that it survives; the last test of this file is its end."""
    with session.server("--served-model-name", "m") as running:
        yield running


def findings(server: ServerProcess) -> dict[str, Finding]:
    view = server.run_view()
    return {finding.code: finding for finding in view.findings()} if view is not None else {}


def wait_for(condition: Callable[[], object], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert condition()


def pid_of(server: ServerProcess, role: str) -> int:
    view = server.run_view()
    assert view is not None
    return next(process.record.pid for process in view.processes if role in process.record.roles)


def ask(server: ServerProcess) -> dict[str, list[dict[str, str]]]:
    status, body = server.get("/graft/status")
    assert status == 200
    found: dict[str, list[dict[str, str]]] = json.loads(body)
    return found


def test_who_asks_while_another_waits_for_the_answer_waits_too(server: ServerProcess):
    """An answer that is still on its way is no all-clear."""
    engine = pid_of(server, "engine")
    os.kill(engine, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            first = pool.submit(ask, server)
            time.sleep(0.3)
            second = pool.submit(ask, server)
            time.sleep(0.5)
            assert not second.done()
        finally:
            os.kill(engine, signal.SIGCONT)
    names = [{row["name"] for row in each.result()["processes"]} for each in (first, second)]
    assert "EngineCore" in names[0]
    assert names[0] == names[1]
    assert first.result()["findings"] == second.result()["findings"] == []


def test_the_metrics_have_the_items(server: ServerProcess):
    """Beside vLLM's own, in either format."""
    assert server.post("/v1/completions", BODY)[0] == 200
    for accept, last in (("text/plain", "\n"), ("application/openmetrics-text; version=1.0.0", "\n# EOF\n")):
        status, text = server.get("/metrics", {"Accept": accept})
        assert status == 200
        assert 'vllm_graft_item_processes{item="sink",point="stats",role="frontend",state="applied"} 1' in text
        assert 'vllm_graft_item_processes{item="steps",point="patch",role="engine+worker",state="applied"} 1' in text
        assert "vllm:num_requests_running" in text
        assert text.endswith(last)
        assert text.count("# EOF") == last.count("# EOF")


def test_a_sink_that_does_not_return_is_a_finding_that_names_it(server: ServerProcess, session: Session):
    """Though it holds up the event loop, so that the server itself answers nobody."""
    flag = session.folder / "hang-sink"
    flag.touch()
    try:
        threading.Thread(target=server.post, args=("/v1/completions", BODY), daemon=True).start()
        wait_for(lambda: "S016" in findings(server))
        found = findings(server)["S016"]
    finally:
        flag.unlink()
    assert "(frontend, pid " in found.subject
    assert found.what.startswith("waits for a plugin that does not return (1")
    assert "stuck.py:" in found.where
    assert "in held_up, called for sink.finished" in found.where
    wait_for(lambda: "S016" not in findings(server))


def test_an_engine_that_makes_no_step_is_a_finding(server: ServerProcess, session: Session):
    """In the records, and in the route's answer, which does not wait for it for long."""
    flag = session.folder / "hang-engine"
    flag.touch()
    try:
        waiting = threading.Thread(target=server.post, args=("/v1/completions", BODY), daemon=True)
        waiting.start()
        wait_for(lambda: "S016" in findings(server))
        found = findings(server)["S016"]
        codes = {finding["code"]: finding for finding in ask(server)["findings"]}
    finally:
        flag.unlink()
    assert "EngineCore (engine+worker, pid " in found.subject
    assert found.what.startswith("has not finished a step while 1 request waits (1")
    assert "stuck.py:" in found.where
    assert "it did not answer within 10 s" in codes["S023"]["what"]
    assert "S016" in codes
    waiting.join(60)
    wait_for(lambda: findings(server) == {})


def test_an_overwritten_patch_is_noticed_without_anybody_asking(server: ServerProcess, session: Session):
    """By the process itself, in its record and in the log."""
    assert findings(server) == {}
    (session.folder / "overwrite").touch()
    wait_for(lambda: "S010" in findings(server))
    found = findings(server)["S010"]
    assert "Scheduler.schedule was set to" in found.what
    assert server.log is not None
    assert server.log.read_text().count("S010: patch steps is overwritten") == 1


def test_a_crashed_engine_has_died_though_its_server_ends_in_order(server: ServerProcess, session: Session):
    """The last test of this server: it does not survive it."""
    (session.folder / "crash-engine").touch()
    status, _ = server.post("/v1/completions", BODY)
    assert status == 500
    assert server.wait() == 0
    (view,) = session.views()
    lives = {process.record.name: process.life for process in view.processes}
    assert lives["EngineCore"] == "died"
    (found,) = view.findings()
    assert found.code == "S006"
    assert found.what.startswith("crashed: RuntimeError: boom \x1b[31m in a step at ")
    assert "\x1b" not in found.explain()


def test_one_of_two_engines_that_is_told_to_end_is_missed(graft: Session):
    """Its server goes on until requests come: all of its other processes have what the plan names."""
    prepare(graft)
    with graft.server("--served-model-name", "m", "--data-parallel-size", "2") as server:
        assert findings(server) == {}
        os.kill(pid_of(server, "engine"), signal.SIGTERM)

        def missed() -> list[str]:
            found = server.run_view()
            assert found is not None
            return [each.subject for each in found.findings() if each.what == "ended, but its server goes on"]

        wait_for(lambda: any(each.startswith("EngineCore_DP") for each in missed()), 10)
        assert server.health() == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_end_has_ended(graft: Session, number: int):
    """With a request under way, and as a terminal does it: by a signal to every process."""
    prepare(graft)
    server = graft.server("--served-model-name", "m", "--tensor-parallel-size", "2").start().wait_healthy()
    body = {**BODY, "max_tokens": 200}
    threading.Thread(target=lambda: _send(server, body), daemon=True).start()
    time.sleep(0.2)
    os.killpg(server.pid, number)
    server.wait()
    server.stop()
    assert [(process.record.name, process.life) for view in graft.views() for process in view.processes] == []


def _send(server: ServerProcess, body: object) -> None:
    try:
        server.post("/v1/completions", body)
    except OSError:
        return  # the server goes away before it answers


def test_two_servers_of_one_user_are_told_apart(graft: Session, capsys: pytest.CaptureFixture[str]):
    """Each route shows its own processes; the command names both, and which of them has lost one."""
    prepare(graft)
    graft.env["VLLM_WORKER_MULTIPROC_METHOD"] = None
    first = graft.server("--served-model-name", "m").start()
    second = graft.server("--served-model-name", "m").start()
    for server in (first, second):
        server.wait_healthy()
    views = {server.pid: server.run_view() for server in (first, second)}
    owned = {pid: {each.record.pid for each in view.processes} for pid, view in views.items() if view is not None}
    assert not owned[first.pid] & owned[second.pid]
    for server in (first, second):
        found = ask(server)
        assert {row["pid"] for row in found["processes"] if "registry" not in row["roles"]} <= owned[server.pid]
        assert server.pid in {row["pid"] for row in found["processes"]}
        assert found["findings"] == []
    status, shown = run_status(graft, capsys)
    assert (status, shown.count("every process has what its plan names")) == (0, 1)
    assert all(f" {server.pid} " in shown for server in (first, second))
    engine = pid_of(second, "engine")
    os.kill(engine, signal.SIGKILL)
    second.wait()
    status, shown = run_status(graft, capsys)
    assert status == 1
    assert shown.count("S006 error: ") == 1
    assert f"S006 error: EngineCore (engine+worker, pid {engine} on " in shown
    assert ask(first)["findings"] == []


def run_status(session: Session, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run `vllm-graft status` over the session's records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAFT_STATE_DIR", str(session.env["GRAFT_STATE_DIR"]))
        patch.setenv("COLUMNS", "200")
        return main(["status"]), capsys.readouterr().out


@pytest.fixture
def small_disk(graft: Session) -> Iterator[Path]:
    """A folder with a megabyte of room, which the session's records go to."""
    place = graft.folder / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False).returncode != 0:
        pytest.skip("only root can mount a small disk; tests/ledger has the same without one")
    graft.env["GRAFT_STATE_DIR"] = str(place)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_fills_while_it_serves_hides_nothing(
    graft: Session, small_disk: Path, capsys: pytest.CaptureFixture[str]
):
    """The server goes on; what changes reaches the records in place, and `status` says the same as the route."""
    prepare(graft)
    with graft.server("--served-model-name", "m") as server:
        assert run_status(graft, capsys)[0] == 0
        fill = small_disk / "fill"
        with fill.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        (graft.folder / "overwrite").touch()
        wait_for(lambda: not (graft.folder / "overwrite").exists())
        assert server.post("/v1/completions", BODY)[0] == 200
        wait_for(lambda: set(findings(server)) == {"S010"})
        assert {row["code"] for row in ask(server)["findings"]} == {"S010"}
        assert os.statvfs(small_disk).f_bavail == 0
        status, shown = run_status(graft, capsys)
        assert status == 1
        assert "S010 error: " in shown
        fill.unlink()
        time.sleep(5)
        assert set(findings(server)) == {row["code"] for row in ask(server)["findings"]} == {"S010"}
        assert "Traceback" not in server.tail(10_000)
    assert [process.life for view in graft.views() for process in view.processes if process.life != "ended"] == []


def test_a_disk_without_room_at_the_start_is_said_to_be_full(graft: Session):
    """Not that nothing is installed."""
    place = graft.folder / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place)], check=False).returncode != 0:
        pytest.skip("only root can mount a small disk; tests/ledger has the same without one")
    try:
        prepare(graft)
        graft.env["GRAFT_STATE_DIR"] = str(place)
        server = graft.server("--served-model-name", "m").start()
        assert server.wait() != 0
        log = server.tail(10_000)
        assert "has no record of any engine process: the disk of " in log
        assert "check that vllm-graft is installed" not in log
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
