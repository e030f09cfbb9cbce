"""The stats point: planned sinks as one vLLM stat logger, each called through a guard of its own."""

from __future__ import annotations

import functools
import multiprocessing.util
from typing import TYPE_CHECKING, Any

from vllm_graft.bindings.making import make
from vllm_graft.contracts import BatchRecord, RequestRecord, StatSink
from vllm_graft.ledger import Guard, Ledger
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.points import point

if TYPE_CHECKING:
    from collections.abc import Callable

    Feed = Callable[[Any, Any, int], None]


def stat_loggers(plan: Plan, ledger: Ledger) -> list[type]:
    """The stat loggers to hand to vLLM's engine client: one class that feeds every planned sink."""
    feeds = [feed for item in plan.of("stats") if (feed := _sink(item, plan, ledger)) is not None]
    return [_logger_class(feeds)] if feeds else []


def _sink(item: PlanItem, plan: Plan, ledger: Ledger) -> Feed | None:
    """The guarded ``finished`` of one sink, fed with vLLM's own statistics."""
    sink = make(item, StatSink, plan, ledger)
    if sink is None:
        return None
    meter = ledger.hook(item.name, "finished", point("stats").budget_us)
    multiprocessing.util.Finalize(None, sink.close, exitpriority=10)

    def feed(scheduler: Any, iteration: Any, engine: int) -> None:
        # Inside the guard, so that a release that renames a field costs the sink and not the server.
        sink.finished(_requests(iteration), _batch(scheduler, iteration, engine))

    return Guard(feed, _ignore, meter, functools.partial(ledger.put_aside, item.name))


def _ignore(scheduler: Any, iteration: Any, engine: int) -> None:
    """What is called in the place of a sink that was put aside."""


def _logger_class(feeds: list[Feed]) -> type:
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    class GraftStatLogger(AggregateStatLoggerBase):
        """vLLM's side of the stats point."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
            self.engine_indexes = engine_indexes

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            for feed in feeds:
                feed(scheduler_stats, iteration_stats, engine_idx)

        def log_engine_initialized(self) -> None:
            """Nothing to say: the record already does."""

    return GraftStatLogger


def _batch(scheduler: Any, iteration: Any, engine: int) -> BatchRecord:
    return BatchRecord(
        engine=engine,
        generated_tokens=getattr(iteration, "num_generation_tokens", 0),
        preempted=getattr(iteration, "num_preempted_reqs", 0),
        running=getattr(scheduler, "num_running_reqs", None),
        waiting=getattr(scheduler, "num_waiting_reqs", None),
        kv_cache_usage=getattr(scheduler, "kv_cache_usage", None),
    )


def _requests(iteration: Any) -> list[RequestRecord]:
    if iteration is None:
        return []
    return [
        RequestRecord(
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
        for done in iteration.finished_requests
    ]
