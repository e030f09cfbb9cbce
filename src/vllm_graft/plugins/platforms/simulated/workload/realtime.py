"""A workload by the clock: against vLLM's asynchronous engine, whose core has a process of its own, as in a server.

Time may pass faster than it does by a factor; everything is reported in modelled seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

from vllm_graft import sockets
from vllm_graft.errors import StartError
from vllm_graft.plugins.platforms.simulated.workload.engine import (
    preemption_counter,
    rejections,
    sampling,
    surroundings,
)
from vllm_graft.plugins.platforms.simulated.workload.prompts import prompt_of

if TYPE_CHECKING:
    from vllm_graft.plugins.platforms.simulated.workload.drive import Tape
    from vllm_graft.plugins.platforms.simulated.workload.request import Request

_LEAD_S: Final = 0.2
"""Between the moment everything is ready and the run's start."""

_ASK_S: Final = 5.0
"""How long a dying engine is asked for its load."""


def play(tape: Tape) -> None:
    """Plays the tape's workload; Ctrl-C ends it early."""
    with sockets.lent(os.environ) as variables, surroundings(variables):
        asyncio.run(_play(tape))


async def _play(tape: Tape) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.perf_counter()
    counter = preemption_counter(alone=False)
    try:
        engine = AsyncLLM.from_vllm_config(tape.config, stat_loggers=[counter])
    except RuntimeError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise KeyboardInterrupt from None
        raise StartError(
            f"the engine did not start: {error}", where="engine core", fix="mend what it says above"
        ) from error
    try:
        tape.measured["start_s"] = time.perf_counter() - began
        # Made beforehand, as a client's are: by the clock they would count as the engine's time.
        prompts = [prompt_of(request, tape.vocabulary) for request in tape.workload]
        before = await _load(engine)
        start = time.monotonic() + _LEAD_S
        await _all(tape, engine, prompts, start)
        wall = time.monotonic() - start
        tape.measured |= {"modelled_s": wall * tape.settings.speed, "wall_s": wall}
        tape.measured["preemptions"] = counter.seen  # type: ignore[attr-defined]
        after = await _load(engine)
        tape.measured["steps"] = max(int(after["steps"] - before["steps"]), 0)
        tape.measured["device_busy_s"] = max(after["busy_s"] - before["busy_s"], 0.0)
        cache = tape.config.cache_config
        tape.measured["kv_tokens"] = (cache.num_gpu_blocks or 0) * cache.block_size
    finally:
        engine.shutdown()


async def _all(tape: Tape, engine: Any, prompts: list[dict[str, Any]], start: float) -> None:
    """Every request at its time; cancelled by a signal, it ends as if all were done."""
    from vllm.v1.engine.exceptions import EngineDeadError

    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    tasks = [
        asyncio.create_task(_one(tape, engine, request, prompt, start))
        for request, prompt in zip(tape.workload, prompts, strict=True)
    ]
    with contextlib.suppress(ValueError, RuntimeError):  # only the main thread may, and only it needs to
        loop.add_signal_handler(signal.SIGTERM, main.cancel)
    try:
        await asyncio.gather(*tasks)
    except (asyncio.CancelledError, EngineDeadError) as error:
        # Ctrl-C reaches the engine's process too, which may be the first to go; and vLLM cancels what waits for an
        # engine that is gone.
        if main.cancelling():
            tape.measured["interrupted"] = True
            return
        raise StartError(
            "the engine died in the middle of the run", where="engine core", fix="look for its last words above"
        ) from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _one(tape: Tape, engine: Any, request: Request, prompt: dict[str, Any], start: float) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    speed = tape.settings.speed
    await asyncio.sleep(start + request.at / speed - time.monotonic())
    last = None
    try:
        params = sampling(request, tape.settings)
        async for output in engine.generate(prompt, params, request.id, priority=request.priority):
            last = output
    except EngineDeadError:
        # In newer releases one of the errors by which vLLM turns a request away, and no such thing.
        raise
    except rejections() as error:
        tape.rejected(request, error, (time.monotonic() - start) * speed)
        return
    if last is not None:
        tape.ended(request, last, start, (time.monotonic() - start) * speed, speed)


async def _load(engine: Any) -> dict[str, float]:
    """Steps and modelled seconds so far; nothing where the engine has gone."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        loads = await asyncio.wait_for(engine.collective_rpc("simulated_load"), _ASK_S)
    except (EngineDeadError, TimeoutError):
        return {"steps": 0, "busy_s": 0.0}
    return max(loads, key=lambda each: each["steps"])
