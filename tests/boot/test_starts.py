"""Every way to start vLLM, and every way a start must fail, on the real CPU engine."""

import json
import sys
from pathlib import Path

import pytest

from vllm_graft.errors import StartError
from vllm_graft.testing import Session, assert_active, assert_called

pytestmark = [pytest.mark.server, pytest.mark.compiled]

COMPLETION = {"prompt": "hi", "max_tokens": 3, "model": "m"}


@pytest.mark.plain_start
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
    # Before vLLM has set its logging up, which the release decides, the line has no prefix.
    said = [line[line.index("vllm-graft:") :] for line in log.splitlines() if "vllm-graft:" in line]
    assert said == ["vllm-graft: GRAFT_DISABLE is set; this is the stock server"]
