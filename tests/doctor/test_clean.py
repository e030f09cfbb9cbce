"""On set-ups without a fault nothing is raised, and nothing is said at level error."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys, time
from vllm_graft.doctor import Facts, examine

facts = Facts.gather()
examine(facts)
start = time.perf_counter()
findings = examine(facts)
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
