"""Workloads for the simulated accelerator: what arrives when, a player, and a report.

from vllm_graft.simulator.workload import read, run

workload = read("burst.toml")
report = run(workload, {"model": "llama-3-8b", "max_num_seqs": 128}, {"device": "H200", "speed": "virtual"})
print(report.ttft.p99, report.as_dict()["output_tokens_per_s"])

requests.py     WorkloadRequest, Workload, and read() for a file
description.py  the TOML description that generates a workload
player.py       run(): plays a workload, in virtual time or by the clock
engine.py       vLLM's engine for a run: environment, arguments, statistics
report.py       Result of one request, WorkloadReport of all of them
"""

from __future__ import annotations

from vllm_graft.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vllm_graft.simulator.workload.player import RunProgress as RunProgress
    from vllm_graft.simulator.workload.player import run as run
    from vllm_graft.simulator.workload.report import Result as Result
    from vllm_graft.simulator.workload.report import Spread as Spread
    from vllm_graft.simulator.workload.report import WorkloadReport as WorkloadReport
    from vllm_graft.simulator.workload.requests import Prefix as Prefix
    from vllm_graft.simulator.workload.requests import Workload as Workload
    from vllm_graft.simulator.workload.requests import WorkloadRequest as WorkloadRequest
    from vllm_graft.simulator.workload.requests import read as read

__all__ = ["Prefix", "Result", "RunProgress", "Spread", "Workload", "WorkloadReport", "WorkloadRequest", "read", "run"]

_HOMES = {
    "Prefix": "requests",
    "Result": "report",
    "RunProgress": "player",
    "Spread": "report",
    "Workload": "requests",
    "WorkloadReport": "report",
    "WorkloadRequest": "requests",
    "read": "requests",
    "run": "player",
}

__getattr__ = loader(__name__, _HOMES)
