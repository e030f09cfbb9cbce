"""The real CPU server with two API servers, an engine and a worker: all of them say what they have."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_graft.testing import ServerProcess, Session, assert_active, assert_called

pytestmark = [pytest.mark.server, pytest.mark.compiled]

KEY = {"Authorization": "Bearer secret"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "m"}


@pytest.fixture(scope="module")
def server(planned_module: Session) -> Iterator[ServerProcess]:
    """Two API servers behind one port, with an API key."""
    arguments = ("--api-server-count", "2", "--served-model-name", "m", "--api-key", "secret")
    with planned_module.server(*arguments) as running:
        yield running


def test_every_process_is_in_the_ledger_with_its_part_of_the_plan(server: ServerProcess):
    """Launcher, two API servers, engine core and worker."""
    view = server.run_view()
    assert view is not None
    names = sorted(process.record.name for process in view.processes if process.life == "running")
    assert names == ["ApiServer_0", "ApiServer_1", "EngineCore", "VllmWorker-0", "vllm"]
    assert {process.record.plan for process in view.processes} == {view.plan.hash}
    assert_active(view, "everywhere", roles=("frontend", "engine", "worker"))
    assert_active(view, "on-engine")
    assert_active(view, "on-worker")
    assert view.findings() == []


def test_hooks_are_counted_where_they_run(server: ServerProcess):
    """A request goes through the scheduler in the engine and the model in the worker."""
    status, body = server.post("/v1/chat/completions", CHAT, KEY)
    assert status == 200, body
    view = server.run_view()
    assert_called(view, "on-engine", at_least=4)
    assert_called(view, "on-worker", at_least=4)
    assert view is not None
    engine = next(process for process in view.processes if process.record.name == "EngineCore")
    assert engine.calls("on-worker") == 0


def test_the_status_route_says_the_same_from_inside(server: ServerProcess):
    """JSON for programs: every process, the plan, no finding."""
    status, body = server.get("/graft/status", KEY)
    assert status == 200
    found = json.loads(body)
    view = server.run_view()
    assert view is not None
    assert set(found) == set(view.as_dict())
    assert found["run"] == view.run
    assert found["findings"] == []
    names = {process["name"] for process in found["processes"]}
    assert {"ApiServer_0", "ApiServer_1", "EngineCore", "VllmWorker-0"} <= names
    worker = next(process for process in found["processes"] if process["name"] == "VllmWorker-0")
    assert worker["runner"] == "V1"
    assert {item["name"]: item["state"] for item in worker["items"]} == {
        "on-worker": "applied",
        "everywhere": "applied",
    }


def test_a_run_s_folder_that_somebody_removed_is_written_again_by_all(server: ServerProcess):
    """The launcher too, and the plan; until then nothing says that all is well, and nobody raises."""
    view = server.run_view()
    assert view is not None
    assert view.home is not None
    # Moved first: the server may write a record into the folder while it is being emptied.
    shutil.rmtree(view.home.rename(view.home.parent.with_name("removed")))
    everybody = ["ApiServer_0", "ApiServer_1", "EngineCore", "VllmWorker-0", "vllm"]
    deadline = time.monotonic() + 60
    while True:
        time.sleep(0.5)
        status, body = server.get("/graft/status", KEY)
        assert status == 200, body
        again = server.run_view()
        names = sorted(each.record.name for each in again.processes if each.life == "running") if again else []
        if names == everybody or time.monotonic() > deadline:
            break
    assert names == everybody
    assert again is not None
    assert (again.plan.hash, again.findings()) == (view.plan.hash, [])
    assert "Traceback" not in server.tail(2000)


def test_the_status_route_shows_a_page_to_a_browser(server: ServerProcess):
    """One plain page without a script."""
    status, body = server.get("/graft/status", {**KEY, "Accept": "text/html,*/*"})
    assert status == 200
    assert "Every process has what its plan names." in body
    assert "VllmWorker-0" in body
    assert "<script" not in body


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}])
def test_the_status_route_asks_for_the_servers_key(server: ServerProcess, headers: dict[str, str]):
    """vLLM guards only paths under /v1, so ours guard themselves."""
    status, body = server.get("/graft/status", headers)
    assert status == 401
    assert "processes" not in body


def test_the_metrics_have_the_items_whichever_api_server_answers(server: ServerProcess):
    """Once for all of them: every API server reads the same records."""
    state = 'vllm_graft_item_processes{item="on-worker",point="patch",role="worker",state="applied"} 1'
    for _ in range(6):
        status, text = server.get("/metrics")
        assert status == 200
        assert text.count(state) == 1
        assert 'vllm_graft_item_processes{item="request-log",point="stats",role="frontend",state="applied"} 2' in text


def run_command(session: Session, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in {**os.environ, **session.env}.items() if value is not None}
    command = [sys.executable, "-m", "vllm_graft.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def run_status(session: Session, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(session, "status", *arguments)


def test_the_status_command_shows_a_row_per_process(server: ServerProcess, planned_module: Session):
    """From the records, and from the server's own mouth."""
    shown = run_status(planned_module)
    assert shown.returncode == 0, shown.stderr
    assert "VllmWorker-0" in shown.stdout
    assert "every process has what its plan names" in shown.stdout
    asked = run_status(planned_module, "--url", server.url, "--api-key", "secret", "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)[0]["findings"] == []
    refused = run_status(planned_module, "--url", server.url, "--api-key", "wrong")
    assert refused.returncode == 2
    assert "give the server's key with --api-key" in refused.stderr


STRANGER = """
import os, sys
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.record import Record
Ledger().open(Record.of_this_process(sys.argv[1], sys.argv[2], "m", ["worker"], "0.32.0", "V1"))
os._exit(0)
"""


def test_the_doctor_asks_the_server_too(server: ServerProcess, planned_module: Session):
    """A sound server adds nothing; what it says of itself is added: here a record of a process that is gone."""
    asked = ("doctor", "--url", server.url, "--api-key", "secret", "--json")
    codes = {finding["code"] for finding in json.loads(run_command(planned_module, *asked).stdout)["findings"]}
    assert not any(code.startswith("S") for code in codes)
    view = server.run_view()
    assert view is not None
    environment = {name: value for name, value in {**os.environ, **planned_module.env}.items() if value is not None}
    subprocess.run([sys.executable, "-c", STRANGER, view.run, view.plan.hash], env=environment, check=True)
    time.sleep(1.1)  # each API server keeps what it was told for a second
    worse = run_command(planned_module, *asked)
    assert worse.returncode == 1
    assert "S006" in {finding["code"] for finding in json.loads(worse.stdout)["findings"]}
    refused = run_command(planned_module, "doctor", "--url", server.url, "--api-key", "wrong")
    assert refused.returncode == 2
    assert "give the server's key with --api-key" in refused.stderr


def test_a_killed_worker_is_visible(server: ServerProcess, planned_module: Session):
    """The last test of this server: it does not survive it."""
    view = server.run_view()
    assert view is not None
    worker = next(process for process in view.processes if process.record.name == "VllmWorker-0")
    os.kill(worker.record.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker.record.pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    shown = run_status(planned_module)
    assert shown.returncode == 1
    assert f"S006 error: VllmWorker-0 (worker, pid {worker.record.pid} on " in shown.stdout
    assert "exited without a clean shutdown" in shown.stdout
    server.stop()
    assert server.leftovers() == []
    after = run_status(planned_module)
    assert after.returncode == 1, "an unclean end stays visible after the server is gone"
