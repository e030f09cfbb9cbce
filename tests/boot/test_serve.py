"""`vllm-graft serve` around vLLM's API server, on the simulated accelerator: from its start to a signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_graft.testing import Session

pytestmark = pytest.mark.server


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_the_table_and_stops_on_a_signal(planned: Session, signum: signal.Signals):
    """`vllm-graft serve` watches the server from start to stop and leaves no process behind."""
    planned.simulate()
    server = planned.server()
    environment = {name: value for name, value in {**os.environ, **planned.env}.items() if value is not None}
    command = [sys.executable, "-m", "vllm_graft.cli", "serve", *server.arguments]
    output = planned.folder / "serve.txt"
    with output.open("w") as file:
        process = subprocess.Popen(command, env=environment, cwd=planned.folder, stdout=file, stderr=file)
        deadline = time.monotonic() + 200
        while "every process has what its plan names" not in output.read_text(encoding="utf-8"):
            assert process.poll() is None, output.read_text(encoding="utf-8")[-3000:]
            assert time.monotonic() < deadline, output.read_text(encoding="utf-8")[-3000:]
            time.sleep(0.3)
        pids = [view.record.pid for run in planned.views() for view in run.processes]
        assert len(pids) >= 2
        process.send_signal(signum)
        assert process.wait(timeout=60) == 0
    assert "vllm-graft: the server has stopped" in output.read_text(encoding="utf-8")
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
