"""On set-ups without a fault nothing is raised, and nothing is said at level error."""

import json
import subprocess
import sys

from vllm_graft.doctor import examine

SCRIPT = """
import json, sys, time
from vllm_graft.doctor import Environment, examine

env = Environment.gather()
examine(env)
start = time.perf_counter()
findings = examine(env)
seconds = time.perf_counter() - start
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"vllm", "torch", "numpy", "transformers"})
print(json.dumps({"findings": [found.as_dict() for found in findings], "seconds": seconds, "heavy": heavy}))
"""


def test_a_clean_environment_has_no_findings(clean, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert clean() == []


def test_the_real_environment_has_no_errors_and_is_read_without_importing_vllm(tmp_path):
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row for row in told["findings"] if row["level"] == "error"] == []
    assert told["heavy"] == []
    assert told["seconds"] < 1


STATS = """
from vllm.v1.metrics.loggers import StatLoggerBase
class Stats(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0): ...
    def record(self, *args, **kwargs): ...
    def log_engine_initialized(self): ...
def register(): ...
"""


def test_who_does_what_a_finding_says_is_not_told_off_for_it(site, tmp_path, monkeypatch):
    """The lists that D005 and D006 propose name vLLM's own plugins too, which then have nothing to do."""
    monkeypatch.chdir(tmp_path)
    entries = {
        "vllm.endpoint_plugins": {"routes": "mine:register"},
        "vllm.stat_logger_plugins": {"stats": "mine:Stats"},
    }
    site.package("mine", entries, {"mine": STATS})
    site.path += sys.path
    (finding,) = site.found("D006")
    site.environ["VLLM_PLUGINS"] = finding.fix.removeprefix("set VLLM_PLUGINS=").partition(", which")[0]
    assert {finding.level for finding in examine(site.environment())} <= {"info"}
    site.environ["VLLM_PLUGINS"] = "graft,routes"
    (finding,) = (finding for finding in site.found("D005") if finding.level == "warning")
    site.environ["VLLM_PLUGINS"] = finding.fix.removeprefix("to have them, set VLLM_PLUGINS=")
    assert {finding.level for finding in examine(site.environment())} <= {"info"}
