"""Workloads on vLLM's real engine, in virtual time: the same every time, on every release, and under a plan."""

import json

import pytest

from vllm_graft.testing import Session

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GOLDEN = """
[workload]
seed = 3
seconds = 12

[[phase]]
seconds = 2
rate = 20

[[phase]]
seconds = 4
rate = 2

[prompt]
mean = 200
sigma = 0.8
min = 5
max = 900

[output]
mean = 60
sigma = 0.7
min = 2
max = 200

[[group]]
name = "chat"
share = 3

[[group]]
name = "bulk"
priority = 4
output = 150

[[prefix]]
name = "system"
tokens = 100
share = 0.4
"""

DEVICE = """
[device.golden]
memory_gb = 100
bandwidth_gb_s = 4000
tflops = 900
link_gb_s = 400
link_us = 8
host_gb_s = 25
compute = 0.6
weights = 0.9
kv = 0.8
layer_us = 50
request_us = 7
reserve_gb = 1
"""
"""A device of its own, so that a new calibration of those that ship changes nothing here."""

DIGESTS = {
    True: "2eef8132ef8d3e9fbc6cbcaaf98c356680dfa7864399851d0a19e976d17ced3e",
    False: "8a488df9f522ebc45b2897c96fe3a92ffa9976399946078d890e63ca7c6e3b4e",
}
"""Of the workload above, with and without asynchronous scheduling; the same on vLLM 0.26.0 to 0.32.0.

They change with the model of a step and with the invented tokens, and with nothing else: take the new ones over only
after a change to those, and only if all releases agree on them.
"""

TWICE = """
import json
from vllm_graft.simulator.workload import WorkloadRequest, Workload, read, run
simulated = {"device": "golden", "speed": "virtual", "kv_bytes": 2500 * 131072}
engine = {"model": "llama-3-8b", "max_model_len": 1200, "max_num_seqs": 24, "max_num_batched_tokens": 512}
load = Workload([*read("golden.toml"), WorkloadRequest(1.0, 5, prompt_tokens=1300, id="too-long")])
for scheduling in (True, True, False):
    report = run(load, {**engine, "async_scheduling": scheduling}, simulated)
    print("REPORT " + json.dumps(report.as_dict()), flush=True)
"""


def test_virtual_time_gives_the_same_every_time_and_on_every_release(graft: Session):
    """Prefills beside decodes, preemption, the prefix cache and a request that is too long; three engines in a row."""
    (graft.folder / "golden.toml").write_text(GOLDEN, encoding="utf-8")
    graft.plan(DEVICE)
    done = graft.script(TWICE)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, third = (json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("REPORT "))
    assert first["digest"] == second["digest"]
    for report, scheduling in ((first, True), (third, False)):
        assert report["async_scheduling"] == scheduling
        assert (report["rejected"], report["aborted"]) == (1, 0)
        assert "1200" in next(iter(report["reasons"]))
        assert report["preemptions"] > 0
        assert report["cached_tokens"] > 0
        assert report["kv_tokens"] == 2496
        assert report["modelled_s"] > report["makespan_s"] > 10
        assert report["digest"] == DIGESTS[scheduling], report["vllm"]


QUIET = """
import json
from vllm_graft.simulator.workload import WorkloadRequest, Workload, run
load = Workload([WorkloadRequest(round(0.908485 * n, 6), 5, prompt_tokens=10, id=f"r{n}") for n in range(40)])
for device in DEVICES:
    report = run(load, {"model": "llama-3-8b", "max_model_len": 200}, {"device": device, "speed": "virtual"})
    print("REPORT " + json.dumps(report.as_dict()), flush=True)
"""

LATE = """
import time
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

class Late(AsyncScheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.opens_at = time.time() + 3.0
    def schedule(self, *args, **kwargs):
        if time.time() < self.opens_at:
            return SchedulerOutput.make_empty()
        return super().schedule(*args, **kwargs)
"""


def test_a_device_that_idles_between_requests(graft: Session):
    """The clock jumps from one arrival to the next, also to those that a float cannot hold to the nanosecond."""
    done = graft.script(QUIET.replace("DEVICES", "('H200', 'instant')"), timeout_s=200)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert [report["done"] for report in reports] == [40, 40]
    for report in reports:
        assert 0.908485 * 39 <= report["modelled_s"] < 0.908485 * 39 + 0.1
        assert report["queue_s"]["max"] < 0.01


def test_a_scheduler_that_waits_for_a_moment(graft: Session):
    """Nothing is launched until then, and time passes all the same."""
    graft.package("acme", {}, {"acme": LATE})
    late = QUIET.replace("DEVICES", "('H200',)").replace(
        '"max_model_len"', '"scheduler_cls": "acme.Late", "max_model_len"'
    )
    done = graft.script(late, timeout_s=200)
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = (json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("REPORT "))
    assert report["done"] == 40
    assert 2.9 < report["queue_s"]["max"] < 3.1


PARALLEL = """
import json
from vllm_graft.simulator.workload import WorkloadRequest, Workload, run
load = Workload([WorkloadRequest(0.02 * n, 10, prompt_tokens=50, id=f"r{n}") for n in range(30)])
for size in (1, 2):
    args = {"model": "qwen3-30b-a3b", "max_model_len": 200, "data_parallel_size": size}
    report = run(load, args, {"device": "H200", "speed": 2})
    print("REPORT " + json.dumps(report.as_dict()), flush=True)
"""


def test_data_parallel_engines_by_the_clock(graft: Session):
    """Two engines of a mixture of experts serve together; each holds half of the experts, and has room for more."""
    done = graft.script(PARALLEL)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("REPORT "))
    assert (one["engines"], two["engines"]) == (1, 2)
    assert (one["done"], two["done"]) == (30, 30)
    assert two["kv_tokens"] > 2.5 * one["kv_tokens"]
    assert two["steps"] > 0
