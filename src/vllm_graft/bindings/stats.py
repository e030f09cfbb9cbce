"""The stats point: planned sinks as one vLLM stat logger, each called through a guard of its own.

vLLM calls a stat logger on the event loop of its server, where a sink that waits would hold up every answer. So there
each sink lives on a thread of its own, which makes it, feeds it in order and closes it. With ``LLM`` there is no event
loop, and sinks are called where vLLM calls them.
"""

from __future__ import annotations

import multiprocessing.util
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.instantiate import guard_method, instantiate
from vllm_graft.contracts import BatchRecord, RequestRecord, StatSink
from vllm_graft.ledger import Guard, Ledger
from vllm_graft.ledger.guard import reason_of
from vllm_graft.plan import Plan, PlanItem

if TYPE_CHECKING:
    from collections.abc import Callable

    Feed = Callable[[Any, Any, int], None]
    Sink = tuple[Guard[..., None], Callable[[], None]]
    """The guarded ``finished`` of a sink, fed with vLLM's own statistics, and its ``close``."""

MOST_BATCHES: Final = 10_000
"""The most batches that may wait for a sink; one further behind is put aside. A busy server makes 100 per s."""

CLOSE_S: Final = 5.0
"""The time that the end of a server waits for its sinks: for the batches in their queues, and for their ``close``."""


def stat_loggers(plan: Plan, ledger: Ledger, *, threads: bool) -> list[type]:
    """Return the stat loggers to hand to vLLM's engine client: one class that feeds every planned sink.

    ``threads`` gives each sink a thread of its own.
    """
    if threads:
        running = [thread for item in plan.of("stats") if (thread := SinkThread(item, plan, ledger)).guard is not None]
        feeds: list[Feed] = [thread.feed for thread in running]
        # vLLM's API servers are multiprocessing children, which end without atexit but run these finalizers.
        multiprocessing.util.Finalize(None, _close_all, args=(running,), exitpriority=10)
    else:
        made = [sink for item in plan.of("stats") if (sink := _sink(item, plan, ledger)) is not None]
        feeds = [feed for feed, _ in made]
        for _, close in made:
            multiprocessing.util.Finalize(None, close, exitpriority=10)
    if not feeds:
        return []
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    # An aggregate class gets one instance for all engines; of a plain StatLoggerBase vLLM makes one per data-parallel
    # rank. The methods have the same signatures from 0.26 to 0.32.
    class GraftStatLogger(AggregateStatLoggerBase):
        """vLLM's side of the stats point."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
            self.engine_indexes = engine_indexes

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            for feed in feeds:
                feed(scheduler_stats, iteration_stats, engine_idx)

        def log_engine_initialized(self) -> None:
            """Log nothing: the line of the plan names the sinks."""

    return [GraftStatLogger]


class SinkThread:
    """A thread on which one sink is made, fed every batch in order, and closed.

    A sink that falls ``MOST_BATCHES`` behind is put aside: what waits for it would fill the memory.
    """

    def __init__(self, item: PlanItem, plan: Plan, ledger: Ledger) -> None:
        self.name = item.name
        self._ledger = ledger
        self._batches: SimpleQueue[tuple[Any, Any, int] | None] = SimpleQueue()
        made: Future[Sink | None] = Future()
        run = (item, plan, made)
        self._thread = threading.Thread(target=self._run, args=run, name=f"graft-sink-{item.name}", daemon=True)
        self._thread.start()
        sink = made.result()
        self.guard = sink[0] if sink is not None else None
        """None without a sink: a lenient plan goes on without one that cannot be made."""

    def feed(self, scheduler: Any, iteration: Any, engine: int) -> None:
        """Hand a batch to the thread. Called on the event loop."""
        if self.guard is None or self.guard.aside:
            return
        if self._batches.qsize() >= MOST_BATCHES:
            self.guard.put_aside(f"it is {MOST_BATCHES} batches behind; later ones are dropped")
            return
        self._batches.put((scheduler, iteration, engine))

    def end(self) -> None:
        """Have the sink closed after the batches in its queue."""
        self._batches.put(None)

    def wait(self, until: float) -> None:
        """Wait for the sink's end until a moment of the monotonic clock, and record if it is not reached."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            left = max(self._batches.qsize() - 1, 0)
            what = f"did not close within {CLOSE_S:g} s of the server's end, with {left} batches still to be delivered"
            self._ledger.note_error(self.name, what)

    def _run(self, item: PlanItem, plan: Plan, made: Future[Sink | None]) -> None:
        try:
            sink = _sink(item, plan, self._ledger)
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(sink)
        if sink is None:
            return
        guard, close = sink
        while (batch := self._batches.get()) is not None:
            guard(*batch)
        try:
            close()
        except BaseException as error:  # SystemExit would end the thread without a trace
            self._ledger.note_error(self.name, f"failed to close: {reason_of(error)}")


def _close_all(threads: list[SinkThread]) -> None:
    until = time.monotonic() + CLOSE_S
    for thread in threads:
        thread.end()
    for thread in threads:
        thread.wait(until)


def _sink(item: PlanItem, plan: Plan, ledger: Ledger) -> Sink | None:
    sink = instantiate(item, StatSink, plan, ledger)
    if sink is None:
        return None

    def feed(scheduler: Any, iteration: Any, engine: int) -> None:
        # All inside the guard, so that a release that renames a field costs the sink and not the server.
        requests = [
            RequestRecord(
                # The external id, as the client knows it. FinishedRequestStats has neither priority nor tenant, in any
                # release.
                request_id=done.request_id or "",
                finish_reason=str(done.finish_reason),
                prompt_tokens=done.num_prompt_tokens,
                generated_tokens=done.num_generation_tokens,
                cached_tokens=done.num_cached_tokens,
                queued_s=done.queued_time,
                prefill_s=done.prefill_time,
                decode_s=done.decode_time,
                total_s=done.e2e_latency,
            )
            for done in (iteration.finished_requests if iteration is not None else ())
        ]
        batch = BatchRecord(
            engine=engine,
            generated_tokens=getattr(iteration, "num_generation_tokens", 0),
            preempted=getattr(iteration, "num_preempted_reqs", 0),
            # With several API servers vLLM attaches these to one of them per step, so the others see None.
            running=getattr(scheduler, "num_running_reqs", None),
            waiting=getattr(scheduler, "num_waiting_reqs", None),
            kv_cache_usage=getattr(scheduler, "kv_cache_usage", None),
        )
        sink.finished(requests, batch)

    return guard_method(item, "finished", feed, ledger), sink.close
