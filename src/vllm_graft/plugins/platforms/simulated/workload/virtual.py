"""A workload in virtual time: the engine in this process, and a clock that jumps to whatever comes next."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.plugins.platforms.simulated.timing import VIRTUAL_CLOCK
from vllm_graft.plugins.platforms.simulated.workload.engine import preemption_counter, rejections, sampling
from vllm_graft.plugins.platforms.simulated.workload.prompts import prompt_of

if TYPE_CHECKING:
    from vllm_graft.plugins.platforms.simulated.workload.drive import Tape
    from vllm_graft.plugins.platforms.simulated.workload.request import Request


_GARBAGE: Final = (50_000, 20, 100)
"""How many new objects make Python look for unreachable cycles. A run makes many that live for a while, and few cycles;
looking as often as Python does by default takes a tenth of the run's time."""

_LOOK_S: Final = 0.001
"""How far the clock moves at a time while a queue holds every request back: it may wait for a moment to come."""


def play(tape: Tape) -> None:
    """Plays the tape's workload; Ctrl-C ends it early."""
    from vllm.v1.engine.llm_engine import LLMEngine

    real = VIRTUAL_CLOCK.real
    began = real()
    VIRTUAL_CLOCK.restart()
    counter = preemption_counter(alone=True)
    try:
        engine = LLMEngine.from_vllm_config(tape.config, stat_loggers=[counter])
        try:
            tape.measured["start_s"] = real() - began
            began, used = real(), time.process_time()
            start = VIRTUAL_CLOCK.now()
            try:
                with _seldom_collecting():
                    _loop(tape, engine, start)
            except KeyboardInterrupt:
                tape.measured["interrupted"] = True
            tape.measured |= _load(engine, tape)
            tape.measured |= {"modelled_s": VIRTUAL_CLOCK.now() - start, "wall_s": real() - began}
            tape.measured["cpu_s"] = time.process_time() - used
            tape.measured["preemptions"] = counter.seen  # type: ignore[attr-defined]
        finally:
            engine.engine_core.shutdown()
    finally:
        VIRTUAL_CLOCK.remove()


@contextlib.contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Has Python look for garbage less often, and never among what the engine's start has made."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _loop(tape: Tape, engine: Any, start: float) -> None:
    coming, playing = deque(tape.workload), dict[str, "Request"]()
    idle = _Idle(engine, tape)
    while coming or playing:
        now = VIRTUAL_CLOCK.now()
        while coming and start + coming[0].at <= now:
            request = coming.popleft()
            if _admitted(tape, engine, request, start):
                playing[request.id] = request
        if not playing:
            if coming:
                VIRTUAL_CLOCK.reach(start + coming[0].at)
            continue
        for output in engine.step():
            if output.finished:
                tape.ended(playing.pop(output.request_id), output, start, VIRTUAL_CLOCK.now() - start)
        if playing and VIRTUAL_CLOCK.now() == now and idle.lasts():
            soon = now + _LOOK_S
            VIRTUAL_CLOCK.reach(min(soon, start + coming[0].at) if coming else soon)


class _Idle:
    """Whether the engine has stopped: requests wait, and its scheduler lets none through, step after step."""

    def __init__(self, engine: Any, tape: Tape) -> None:
        self._engine = engine
        self._most = tape.config.parallel_config.pipeline_parallel_size + 2
        self._launched = -1.0
        self._rounds = 0

    def lasts(self) -> bool:
        """Asked after a round that took no time: whether more rounds launched nothing than steps can be in flight."""
        launched = _steps(self._engine)["steps"]
        self._rounds = self._rounds + 1 if launched == self._launched else 0
        self._launched = launched
        return self._rounds > self._most


def _admitted(tape: Tape, engine: Any, request: Request, start: float) -> bool:
    try:
        engine.add_request(
            request.id,
            prompt_of(request, tape.vocabulary),
            sampling(request, tape.settings),
            arrival_time=start + request.at,
            priority=request.priority,
        )
    except rejections() as error:
        tape.rejected(request, error, VIRTUAL_CLOCK.now() - start)
        return False
    return True


def _steps(engine: Any) -> dict[str, float]:
    loads: list[dict[str, float]] = engine.collective_rpc("simulated_load")
    return max(loads, key=lambda each: each["steps"])


def _load(engine: Any, tape: Tape) -> dict[str, Any]:
    load = _steps(engine)
    cache = tape.config.cache_config
    return {
        "steps": int(load["steps"]),
        "device_busy_s": load["busy_s"],
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
    }
