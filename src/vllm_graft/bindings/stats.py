"""The stats point: planned sinks as one vLLM stat logger, each called through a guard of its own."""

from __future__ import annotations

import functools
import multiprocessing.util
from typing import TYPE_CHECKING, Any

from vllm_graft.contracts import BatchRecord, RequestRecord, StatSink
from vllm_graft.errors import GraftError, StartError
from vllm_graft.ledger import Guard, Ledger
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.plan.catalogue import load
from vllm_graft.points import point

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Sink = Callable[[Sequence[RequestRecord], BatchRecord], None]


def stat_loggers(plan: Plan, ledger: Ledger) -> list[type]:
    """The stat loggers to hand to vLLM's engine client: one class that feeds every planned sink."""
    sinks = [sink for item in plan.of("stats") if (sink := _sink(item, plan, ledger)) is not None]
    return [_logger_class(sinks)] if sinks else []


def _sink(item: PlanItem, plan: Plan, ledger: Ledger) -> Sink | None:
    """The guarded ``finished`` of one sink; where the sink cannot be made, a strict plan stops the start."""
    try:
        made = load(item.target, item.name, item.package)(dict(item.options))
    except Exception as error:
        reason = str(error) if isinstance(error, GraftError) else f"{type(error).__name__}: {error}"
        ledger.set_item(item.point, item.name, "refused", reason)
        ledger.save()
        if plan.strict:
            raise StartError(
                f"stats {item.name!r} (from {item.origin}) cannot be made: {reason}",
                where=item.target,
                fix="mend the sink or its options, or take it out of the plan",
            ) from error
        return None
    assert isinstance(made, StatSink)
    meter = ledger.hook(item.name, "finished", point("stats").budget_us)
    ledger.set_item(item.point, item.name, "applied")
    ledger.save()
    multiprocessing.util.Finalize(None, made.close, exitpriority=10)
    return Guard(made.finished, _ignore, meter, functools.partial(ledger.put_aside, item.name))


def _ignore(requests: Sequence[RequestRecord], batch: BatchRecord) -> None:
    """What is called in the place of a sink that was put aside."""


def _logger_class(sinks: list[Sink]) -> type:
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
            batch = _batch(scheduler_stats, iteration_stats, engine_idx)
            requests = _requests(iteration_stats)
            for sink in sinks:
                sink(requests, batch)

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
