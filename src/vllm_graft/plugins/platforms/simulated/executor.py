"""One process for all devices of a simulated engine, however many its parallel sizes multiply to.

vLLM starts a process per device. A simulated device needs none, and a laptop has no room for eight: here one worker
answers for all of them, with the time that all of them would take together. Virtual time needs it, since a clock that
jumps belongs to one process; elsewhere it is asked for by name:

    --distributed-executor-backend vllm_graft.plugins.platforms.simulated.executor.SimulatedExecutor
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class SimulatedExecutor(UniProcExecutor):
    """vLLM's executor for one process, which here may stand for several devices and pipeline stages."""

    supports_pp = True
