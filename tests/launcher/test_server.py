"""A server as a child process: how it is stopped before it has served, and what answers on its port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from vllm_graft.errors import ConfigError, StartError
from vllm_graft.launcher import server as module
from vllm_graft.launcher.server import ServerProcess, free_port
from vllm_graft.ledger import state_folder

DEAF = """
import os, signal, sys, time
from vllm_graft.ledger import current
from vllm_graft.ledger.record import Record
from vllm_graft.plan import Plan
signal.signal(signal.SIGTERM, signal.SIG_IGN)
run, ledger = f"{os.getpid()}-aa", current()
ledger.begin_run(run, Plan())
ledger.open(Record.of_this_process(run, Plan().hash, "m", [ROLE], "0.32.0", "V1"))
if READY:
    ledger.set_ready()
open(FILE, "w").close()
time.sleep(300)
"""
"""A program that records itself as a server does, and hears no signal, as vLLM while it loads a model."""


def deaf(tmp_path: Path, *arguments: str, ready: bool, role: str = "frontend") -> ServerProcess:
    code = DEAF.replace("READY", str(ready)).replace("FILE", repr(str(tmp_path / "up"))).replace("ROLE", repr(role))
    env = {"GRAFT_STATE_DIR": str(tmp_path)}
    started = ServerProcess(arguments, env=env, program=[sys.executable, "-c", code], log=tmp_path / "log").start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline, started.tail()
        time.sleep(0.05)
    return started


def test_a_server_that_starts_unseen_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its record says that it has not served, though its health cannot be asked for."""
    monkeypatch.setattr(module, "_STOP_S", 60.0)
    monkeypatch.setattr(module, "_STOP_EARLY_S", 0.5)
    started = deaf(tmp_path, "--config=x.yaml", ready=False)
    began = time.monotonic()
    assert started.stop() == -signal.SIGKILL
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("role", ["frontend", "engine"])
def test_one_that_may_serve_is_given_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str):
    """A client may still wait for its answer; the engine of a node without a front end serves, too."""
    monkeypatch.setattr(module, "_STOP_S", 2.0)
    monkeypatch.setattr(module, "_STOP_EARLY_S", 0.0)
    started = deaf(tmp_path, "--config=x.yaml", ready=True, role=role)
    began = time.monotonic()
    started.stop()
    assert time.monotonic() - began >= 2.0


@pytest.mark.parametrize("argument", ["--port=0", "--uds=/tmp/socket", "--ssl-keyfile=key.pem"])
def test_one_whose_health_cannot_be_asked_for_serves_by_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
):
    """Else `serve` would show no table, and call its end one before it served."""
    monkeypatch.setattr(module, "_STOP_S", 0.0)
    monkeypatch.setattr(ServerProcess, "health", lambda self: 0)
    started = deaf(tmp_path, argument, ready=True)
    try:
        assert started.wait_healthy(timeout_s=10) is started
    finally:
        started.stop()


@pytest.mark.parametrize("argument", ["--port=0", "--uds=/tmp/socket", "--config=x.yaml"])
def test_another_server_at_the_usual_address_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
):
    """It neither keeps this one from starting, nor makes it healthy before it has loaded its model."""
    monkeypatch.setattr(module, "_STOP_EARLY_S", 0.0)
    monkeypatch.setattr(ServerProcess, "health", lambda self: 200)
    assert ServerProcess([]).is_address_taken()
    assert not ServerProcess([argument]).is_address_taken()
    started = deaf(tmp_path, argument, ready=False)
    try:
        with pytest.raises(StartError, match="did not answer within 1 s"):
            started.wait_healthy(timeout_s=1)
    finally:
        started.stop()


def test_a_proxy_is_not_taken_for_the_server(monkeypatch: pytest.MonkeyPatch):
    """It answers for any address, so that `serve` would find its own taken, and never start."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        try:
            assert ServerProcess(["--port", str(free_port())]).health() == 0
        finally:
            proxy.shutdown()


def test_what_does_not_speak_http_is_not_healthy():
    """It is no error of ours that something else listens on the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        assert ServerProcess(["--port", str(listener.getsockname()[1])]).health() == 0
        thread.join(10)


WATCH = """
import sys
from vllm_graft.cli.serve import watch
from vllm_graft.launcher.server import ServerProcess, free_port
child = "import time; open(FILE, 'w').close(); time.sleep(300)"
sys.exit(watch(ServerProcess(["--port", str(free_port())], program=[sys.executable, "-c", child])))
"""


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGTERM])
def test_serve_stops_its_server_on_a_signal(tmp_path: Path, signum: signal.Signals):
    """A closed terminal too: the server has a session of its own, and would go on alone."""
    ends(tmp_path, signum)


def test_a_signal_while_the_process_is_made_leaves_no_server(tmp_path: Path):
    """The signal comes when the child exists and ``Popen`` has not returned yet."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED],
        env={**os.environ, "GRAFT_STATE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    pid = int(done.stdout.split()[0])
    left = Path(f"/proc/{pid}").exists()
    if left:
        os.kill(pid, signal.SIGKILL)
    assert (done.returncode, left) == (0, False), done.stderr


SIGNALLED = """
import os, signal, subprocess, sys
from vllm_graft.cli.serve import watch
from vllm_graft.launcher.server import ServerProcess, free_port

class Signalled(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

program = [sys.executable, "-c", "import time; time.sleep(300)"]
sys.exit(watch(ServerProcess(["--port", str(free_port())], program=program, popen=Signalled)))
"""


def test_serve_goes_on_under_nohup(tmp_path: Path):
    """Who starts it with SIGHUP ignored wants it to outlive the terminal."""
    ends(tmp_path, signal.SIGTERM, first=signal.SIGHUP, command=["nohup"])


def ends(tmp_path: Path, signum: signal.Signals, first: signal.Signals | None = None, command: list[str] | None = None):
    """Start ``serve`` over a program that sleeps, send it signals, and see that nothing is left."""
    up = tmp_path / "up"
    code = WATCH.replace("FILE", repr(str(up)))
    with (tmp_path / "log").open("wb") as log:
        served = subprocess.Popen(
            [*(command or []), sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "GRAFT_STATE_DIR": str(tmp_path)},
        )
    deadline = time.monotonic() + 60
    while not up.exists():
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    children = Path(f"/proc/{served.pid}/task/{served.pid}/children").read_text().split()
    assert children
    if first is not None:
        served.send_signal(first)
        time.sleep(0.5)
        assert served.poll() is None
    served.send_signal(signum)
    status = served.wait(60)
    left = [int(pid) for pid in children if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (status, left) == (0, [])


@pytest.mark.parametrize("port", ["abc", "-5", "65536", "1e3", "²"])
def test_a_port_that_is_none_is_refused(port: str):
    """Before anything is started, and without a traceback."""
    with pytest.raises(ConfigError, match="--port: must be a port, 0 to 65535, but is"):
        ServerProcess(["--port", port])


def test_an_ipv6_address_is_written_in_brackets():
    """Without them it is no address, and no answer would ever be seen."""
    assert ServerProcess(["--host", "::1", "--port", "81"]).url == "http://[::1]:81"
    assert ServerProcess(["--host", "::"]).url == "http://127.0.0.1:8000"


def test_its_records_are_looked_for_where_its_processes_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An environment file has no shell that would expand a tilde or cut blanks."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GRAFT_STATE_DIR", "~/records ")
    assert ServerProcess([], env={})._state() == state_folder(create=True)
