"""A real vLLM API server as a child process: started, waited for, stopped, nothing left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from vllm_graft import sockets
from vllm_graft.errors import ConfigError, LedgerError, StartError
from vllm_graft.ledger import RunView, folder, runs
from vllm_graft.ledger.counters import SUFFIX, mark_ended
from vllm_graft.ledger.record import process_stat
from vllm_graft.points import Role
from vllm_graft.vllm_arguments import VllmArguments

_STOP_S: Final = 40.0  # the time that a serving server has for an orderly end

_STOP_EARLY_S: Final = 4.0
"""The time before it has served: no request is lost, and vLLM handles no signal while it loads or compiles."""

_LAST_PORT: Final = 65535

_UNSEEN: Final = ("--uds", "--ssl", "--config")
"""Beginnings of the arguments that move a server away from the address where ``/health`` is asked: its record tells
whether it serves."""

_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses without the proxy that the environment may name: it would answer in place of a server here."""

_LEAVE_S: Final = 2.0
"""The time that processes may outlive the main one before they are killed, and the time for killing them."""


class ServerProcess:
    """One vLLM server. ``with ServerProcess([...]) as server`` starts it, waits until it is healthy, and stops it.

    arguments: the words after ``vllm serve``
    env:       added to this process's environment; a value of None removes a variable
    log:       the file for its output; None leaves it on this terminal
    cwd:       its working directory, where ``graft.toml`` is looked for
    program:   the command; by default ``boot.launch``, which also works if vLLM's metadata is missing
    popen:     the class that starts the process; tests pass one that forks a process with vLLM imported
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        log: Path | None = None,
        cwd: Path | None = None,
        program: Sequence[str] | None = None,
        popen: type[subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        self.arguments = list(arguments)
        self.log = log
        self._env = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
        self._cwd = cwd
        self._popen = popen
        self._program = list(program or [sys.executable, "-m", "vllm_graft.boot.launch", "serve"])
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._sockets: Path | None = None
        self._served = False
        told = VllmArguments(tuple(arguments))
        self.host = told.value("--host") or "127.0.0.1"
        self.port = _port(told.value("--port") or "8000")
        # The system chooses a port for 0.
        self._unseen = told.any_begins(*_UNSEEN) or self.port == 0

    @property
    def url(self) -> str:
        """The server's address."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the server's main process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> ServerProcess:
        """Start the process without waiting for it."""
        self._output = self.log.open("ab") if self.log is not None else None
        # vLLM leaves its sockets behind when it is killed; they go with this folder.
        self._sockets = sockets.make(self._env)
        lent = {sockets.VARIABLE: str(self._sockets)} if self._sockets is not None else {}
        self._process = self._popen(
            [*self._program, *self.arguments],
            env={**self._env, **lent},
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT if self._output is not None else None,
            start_new_session=True,
        )
        return self

    def wait_healthy(self, timeout_s: float = 300.0, while_waiting: Callable[[], None] | None = None) -> ServerProcess:
        """Wait until it serves; StartError with the end of the log if the server ends first."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (status := self.poll()) is not None:
                what = f"the server ended with status {status} before it served{self._ending()}"
                raise StartError(what, where=" ".join(self.arguments), fix="see the last line of the server's output")
            ready = self._recorded_ready("frontend") if self._unseen else None
            if self.health() == 200 if ready is None else ready:
                self._served = True
                return self
            if while_waiting is not None:
                while_waiting()
            time.sleep(0.25)
        what = f"the server did not answer within {timeout_s:.0f} s{self._ending()}"
        raise StartError(what, where=self.url, fix="check its output to see what it is waiting for")

    def poll(self) -> int | None:
        """Return the exit status, or None while the server runs."""
        assert self._process is not None
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the server to end and return its exit status."""
        assert self._process is not None
        return self._process.wait()

    def is_address_taken(self) -> bool:
        """Return whether something answers at the server's address; False if it may have another one."""
        return not self._unseen and self.health() != 0

    def health(self) -> int:
        """Return the HTTP status of ``/health``; 0 if nothing answers."""
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, http.client.HTTPException):
            # HTTPException: something that does not speak HTTP listens there.
            return 0

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """GET a path; return HTTP status and body."""
        return self._send(urllib.request.Request(f"{self.url}{path}", headers=dict(headers or {})))

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """POST a JSON body; return HTTP status and body of the answer."""
        data = json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        return self._send(urllib.request.Request(f"{self.url}{path}", data=data, headers=sent))

    def run_view(self) -> RunView | None:
        """Return the ledger's view of this server; None if it runs without a plan."""
        mine = [view for view in runs(self._state()) if view.run.startswith(f"{self.pid}-")]
        return mine[-1] if mine else None

    def _recorded_ready(self, *roles: Role) -> bool | None:
        """Return whether a process of one of these roles, or of any, has recorded that it is ready.

        None if there is no record.
        """
        with contextlib.suppress(LedgerError):
            if (view := self.run_view()) is not None:
                asked = [each.record for each in view.processes if not roles or {*roles} & {*each.record.roles}]
                return any(record.ready for record in asked)
        return None

    def _state(self) -> Path | None:
        return folder.named_home(self._env) or folder.state_folder()

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of the log; empty if the output is on the terminal."""
        if self.log is None or not self.log.is_file():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def _ending(self) -> str:
        return f"; its output ends with:\n{self.tail()}" if self.log is not None else ""

    def stop(self) -> int:
        """Stop the server cleanly, then kill what is left of its session; return its exit status."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            if self._unseen and not self._served:
                # A stock server has no record, and counts as serving. A headless node has engines and no front end.
                self._served = self._recorded_ready() is not False
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S if self._served else _STOP_EARLY_S)
        self._end_session()
        status = self._process.wait()
        sockets.remove(self._sockets)
        if self._output is not None:
            self._output.close()
            self._output = None
        return status

    def leftovers(self) -> list[int]:
        """Return the living processes of the server's session."""
        found = []
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            fields = process_stat(pid)
            if fields and fields[0] != "Z" and int(fields[3]) == self.pid:
                found.append(pid)
        return found

    def __enter__(self) -> ServerProcess:
        try:
            return self.start().wait_healthy()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _send(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with _DIRECT.open(request, timeout=120) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _end_session(self) -> None:
        deadline = time.monotonic() + _LEAVE_S
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.1)
        view = None if self._served else self.run_view()
        if view is not None and view.home is not None:
            # These processes are stopped deliberately, not crashed. A record that is kept in memory has no file.
            for process in view.processes:
                if process.life == "running":
                    with contextlib.suppress(OSError):
                        mark_ended(view.home / f"{process.record.pid}{SUFFIX}")
        deadline = time.monotonic() + _LEAVE_S
        while (pids := self.leftovers()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _port(text: str) -> int:
    """Return the port that an argument names; ConfigError if it names none."""
    if not text.isdecimal() or int(text) > _LAST_PORT:
        what = f"must be a port, 0 to {_LAST_PORT}, but is {text[:40]!r}"
        raise ConfigError(what, where="--port", fix="correct the value")
    return int(text)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
