"""Workloads for the simulated accelerator: what arrives when, a player, and a report.

from vllm_graft.simulator.workload import read, run

workload = read("burst.toml")
report = run(workload, {"model": "llama-3-8b", "max_num_seqs": 128}, {"device": "H200", "speed": "virtual"})
print(report.ttft.p99, report.as_dict()["output_tokens_per_s"])

requests.py  WorkloadRequest, Workload, read() for a file, and the TOML description that generates a workload
player.py    run(): plays a workload with vLLM's engine, in virtual time or by the clock
report.py    Result of one request, WorkloadReport of all of them
"""

from __future__ import annotations

from vllm_graft.simulator.workload.player import RunProgress, run
from vllm_graft.simulator.workload.report import Result, Spread, WorkloadReport
from vllm_graft.simulator.workload.requests import Prefix, Workload, WorkloadRequest, read

__all__ = ["Prefix", "Result", "RunProgress", "Spread", "Workload", "WorkloadReport", "WorkloadRequest", "read", "run"]
