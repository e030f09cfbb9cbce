"""The stats contract: a sink that receives every finished request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_graft.contracts.item import Item


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request, as the front end saw it. Times are seconds."""

    request_id: str
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The yield of one batch of engine outputs, and the state of the queues. None: the engine did not say."""

    engine: int
    generated_tokens: int
    preempted: int
    running: int | None
    waiting: int | None
    kv_cache_usage: float | None


class StatSink(Item):
    """Receives what finished, once per batch of engine outputs, in the front end.

    Implement ``finished``. In a server a sink has a thread of its own, on which it is made, fed each batch in turn,
    and closed; with ``LLM`` it is called in the thread of the caller. Python runs one thread at a time, so it must be
    quick anyway (50 microseconds per batch): append to a queue here and write elsewhere. With several API servers
    each has a sink of its own and sees only its own requests. A sink that raises, that overruns its budget again and
    again, or that falls 10,000 batches behind is put aside: requests go on, and ``vllm-graft status`` shows it as
    quarantined with the error. ::

        class Tokens(StatSink):
            def __init__(self, options=None):
                super().__init__(options)
                self.total = 0

            def finished(self, requests, batch):
                self.total += sum(r.generated_tokens for r in requests)
    """

    def finished(self, requests: Sequence[RequestRecord], batch: BatchRecord) -> None:
        """Take in one batch: the requests it finished (often none) and what it produced."""
        raise NotImplementedError(f"{type(self).__name__} must implement finished(requests, batch)")

    def close(self) -> None:
        """Flush and close when the server stops, within 5 seconds. Called at most once, and not after a crash."""
