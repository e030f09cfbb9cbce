"""Every way to start vLLM, and every way a start must fail, on the real CPU engine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_graft.errors import StartError
from vllm_graft.testing import Session, assert_active, assert_called

pytestmark = pytest.mark.server

COMPLETION = {"prompt": "hi", "max_tokens": 3, "model": "m"}


def test_tensor_parallel_workers_all_have_their_part(planned: Session):
    """Two workers, each with its own record; the server is stopped in order and leaves nothing behind."""
    planned.env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    with planned.server("--tensor-parallel-size", "2", "--served-model-name", "m") as server:
        assert server.post("/v1/completions", COMPLETION)[0] == 200
        view = server.run_view()
        workers = assert_active(view, "on-worker")
        assert sorted(worker.record.name for worker in workers) == ["VllmWorker-0", "VllmWorker-1"]
        assert all(worker.calls("on-worker") >= 3 for worker in workers)
        assert view is not None
        assert view.findings() == []
        state = planned.state
    assert server.leftovers() == []
    left = [view.rows() for view in planned.views()]
    assert left == [], f"a server that was stopped in order is not reported: {left} in {state}"


def test_a_worker_that_cannot_apply_an_item_stops_the_start(planned: Session):
    """The last line names process, item, reason and next step; vLLM's own last line would not."""
    planned.env["BREAK_IN"] = "VllmWorker"
    server = planned.server()
    with pytest.raises(StartError, match="before it served"):
        server.start().wait_healthy()
    last = server.tail(1)
    assert "VllmWorker-0 (worker, pid " in last
    assert "patch on-worker is refused: the item 'on-worker' of boot-patches cannot be imported" in last
    assert "ImportError: libfoo.so.1 is not on this machine" in last
    assert "Next: " in last


def test_with_on_failure_warn_the_server_starts_and_says_so(planned: Session):
    """The same fault with a relaxed plan: it serves, and status is not green."""
    planned.plan('[defaults]\npatches = ["on-worker", "on-engine"]\non_failure = "warn"\n')
    planned.env["BREAK_IN"] = "VllmWorker"
    with planned.server("--served-model-name", "m") as server:
        assert server.post("/v1/completions", COMPLETION)[0] == 200
        found = json.loads(server.get("/graft/status")[1])
        assert [finding["code"] for finding in found["findings"]] == ["S002"]
        assert "libfoo.so.1 is not on this machine" in found["findings"][0]["what"]
        assert_called(server.run_view(), "on-engine")


def vllm_script() -> list[str]:
    return [str(Path(sys.executable).with_name("vllm")), "serve"]


def test_plain_vllm_serve_picks_the_plan_up(planned: Session):
    """No launcher of ours: vLLM's own command, with the package merely installed."""
    with planned.server("--served-model-name", "m", program=vllm_script()) as server:
        assert server.post("/v1/completions", COMPLETION)[0] == 200
        assert_active(server.run_view(), "everywhere", roles=("frontend", "engine", "worker"))
        assert_called(server.run_view(), "on-worker")


def test_graft_disable_gives_the_stock_server_and_one_line(planned: Session):
    """No record, no route, one line in the log, even with a plan and a variable of ours set."""
    planned.env.update(GRAFT_DISABLE="1", VLLM_CUSTOM_PATCHES="on-engine")
    with planned.server("--served-model-name", "m") as server:
        assert server.post("/v1/completions", COMPLETION)[0] == 200
        assert server.get("/graft/status")[0] == 404
        assert server.run_view() is None
        assert server.log is not None
        log = server.log.read_text(encoding="utf-8")
    said = [line for line in log.splitlines() if "vllm-graft:" in line]
    assert said == ["vllm-graft: GRAFT_DISABLE is set; this is the stock server"]


FAULTY = """
from vllm.v1.metrics.loggers import StatLoggerBase

class Faulty(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0): ...
    def log_engine_initialized(self): ...
    def record(self, *args, **kwargs):
        raise RuntimeError("metrics backend unreachable")
"""


def faulty(session: Session) -> Session:
    session.package(
        "faulty-stats", {"vllm.stat_logger_plugins": {"f": "faulty_stats:Faulty"}}, {"faulty_stats": FAULTY}
    )
    session.env["VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"] = "1"
    return session


def test_without_the_guard_a_faulty_stat_logger_fails_every_request(graft: Session):
    """What stock vLLM does: the first request fails, and so do all others, for good."""
    with faulty(graft).server("--served-model-name", "m") as server:
        assert [server.post("/v1/completions", COMPLETION)[0] for _ in range(2)] == [500, 500]
        assert server.health() == 503


def test_with_the_guard_the_server_lives_and_names_the_logger(graft: Session):
    """The logger is put aside, everything else goes on, our own sink included."""
    plan = '[defaults]\npatches = ["stat-logger-guard"]\nstats = ["request-log"]\n'
    graft.plan(plan + '[options.request-log]\npath = "log.jsonl"\n')
    with faulty(graft).server("--served-model-name", "m") as server:
        assert [server.post("/v1/completions", COMPLETION)[0] for _ in range(3)] == [200, 200, 200]
        assert server.health() == 200
        view = server.run_view()
        assert_active(view, "stat-logger-guard")
        assert view is not None
        front = next(process for process in view.processes if "frontend" in process.record.roles)
        assert "faulty_stats.Faulty.record is put aside" in front.record.last_error
        assert "RuntimeError: metrics backend unreachable" in front.record.last_error
        assert front.readings["stat-logger-guard"]["faulty_stats.Faulty.record"].errors == 1
        assert front.readings["request-log"]["finished"].calls > 3
    lines = (graft.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["generated_tokens"] for line in lines] == [3, 3, 3]


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
