"""Workloads for the simulated accelerator: what arrives when, a driver that plays it, and what came of it.

from vllm_graft.plugins.platforms.simulated.workload import read, run

workload = read("burst.toml")
report = run(workload, {"model": "llama-3-8b", "max_num_seqs": 128}, {"device": "H200", "speed": "virtual"})
print(report.ttft.p99, report.as_dict()["output_tokens_per_s"])

request.py      one request: Request, Prefix
workload.py     many of them in order: Workload, and read() for a file
fields.py       how a file's values are checked
description.py  the TOML description that generates a workload
draws.py        the random numbers of a description
lengths.py      the lengths that a description may ask for
prompts.py      the prompt of a request, as token ids
result.py       what became of one request: Result
report.py       what became of all of them: Report, Spread
engine.py       vLLM's engine for a run: arguments, environment, statistics
drive.py        run(): plays a workload
virtual.py      ... in virtual time, in this process
realtime.py     ... by the clock, against vLLM's asynchronous engine
"""

from __future__ import annotations

from vllm_graft.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vllm_graft.plugins.platforms.simulated.workload.drive import Progress as Progress
    from vllm_graft.plugins.platforms.simulated.workload.drive import run as run
    from vllm_graft.plugins.platforms.simulated.workload.report import Report as Report
    from vllm_graft.plugins.platforms.simulated.workload.report import Spread as Spread
    from vllm_graft.plugins.platforms.simulated.workload.request import Prefix as Prefix
    from vllm_graft.plugins.platforms.simulated.workload.request import Request as Request
    from vllm_graft.plugins.platforms.simulated.workload.result import Result as Result
    from vllm_graft.plugins.platforms.simulated.workload.workload import Workload as Workload
    from vllm_graft.plugins.platforms.simulated.workload.workload import read as read

__all__ = ["Prefix", "Progress", "Report", "Request", "Result", "Spread", "Workload", "read", "run"]

_HOMES = {
    "Prefix": "request",
    "Progress": "drive",
    "Report": "report",
    "Request": "request",
    "Result": "result",
    "Spread": "report",
    "Workload": "workload",
    "read": "workload",
    "run": "drive",
}

__getattr__ = loader(__name__, _HOMES)
