"""D016: a scheduler class that cannot run ahead, while asynchronous scheduling is on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor import server
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding

CODE = "D016"
TITLE = "A scheduler derived from Scheduler instead of AsyncScheduler"

_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNCHRONOUS: Final = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"


def check(env: Environment) -> Iterator[Finding]:
    """Find a scheduler class that vLLM 0.26 to 0.32 accept, although it cannot schedule asynchronously.

    They log that asynchronous scheduling is off, and still keep two batches in flight: a scheduler that counts no
    outstanding tokens has nothing to put into the second. Others measured 78 % more latency (vLLM #43724).
    """
    name = env.arguments.value("--scheduler-cls")
    if env.vllm is None or not name or not server.is_asynchronous(env):
        return
    if env.classes.is_a(name, _SCHEDULER) == "yes" and env.classes.is_a(name, _ASYNCHRONOUS) == "no":
        what = (
            "it derives from Scheduler and not from AsyncScheduler, so no step is scheduled before the last one is "
            "done; 78 % more latency has been measured (vLLM #43724)"
        )
        fix = (
            "derive it from vllm.v1.core.sched.async_scheduler.AsyncScheduler, which also runs synchronously, "
            "or start with --no-async-scheduling"
        )
        yield Finding(CODE, "warning", f"scheduler {name}", what, "--scheduler-cls", fix)
