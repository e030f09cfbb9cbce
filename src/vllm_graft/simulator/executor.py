"""One process for all devices of a simulated engine, whatever its parallel sizes multiply to.

vLLM starts a process per device. A simulated device needs none, and a laptop has no room for eight: one worker answers
for all of them, with the time that they would take together. Virtual time requires it, since a clock that jumps belongs
to one process; elsewhere it is chosen by name:

    --distributed-executor-backend vllm_graft.simulator.executor.SimulatedExecutor
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class SimulatedExecutor(UniProcExecutor):
    """vLLM's executor for one process, allowed to stand for several devices and pipeline stages."""

    supports_pp = True
