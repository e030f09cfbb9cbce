"""The patch stat-logger-guard on the real API server, and what happens without it; the device is simulated."""

import json

import pytest

from vllm_graft.testing import Session, assert_active

pytestmark = pytest.mark.server

COMPLETION = {"prompt": "hi", "max_tokens": 3, "model": "m"}

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
    session.simulate()
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
