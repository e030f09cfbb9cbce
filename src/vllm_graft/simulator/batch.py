"""The batch of a step: which requests are due tokens, and from which position on.

vLLM writes its steps in two shapes. For the V1 runner a request that resumes after a preemption is one of the cached
ones; for the V2 runner it is a new one that brings its earlier output along in ``prefill_token_ids``. One rule serves
both: a token is due when the step reaches the end of the tokens known to the scheduler.

Only the device knows for sure which position a token has. With drafts under asynchronous scheduling the scheduler
counts as if every draft in flight were right, so the table keeps its own count of what it has given out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_graft.bindings.attention.request_windows import stamped_window

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from vllm_graft.simulator.logprobs import LogprobModel, RequestLogprobs
    from vllm_graft.simulator.tokens import TokenSource, TokenStream


@dataclass(slots=True)
class Share:
    """One request's part of a step."""

    request_id: str
    new_tokens: int
    """Tokens computed in this step, drafts included."""
    context: int
    """Tokens in the KV cache once the step is done, drafts included."""
    stream: TokenStream
    index: int | None
    """The position of the first output token that is due, or None in the middle of a prefill."""
    drafts: tuple[int, ...] = ()
    """The drafts to check in this step, as the scheduler wrote them."""
    logprobs: RequestLogprobs | None = None
    """The log probabilities that the request wants, if any."""
    window: int | None = None
    """The window that it asked for, narrower than the planned one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests that the device computes in one step."""

    shares: tuple[Share, ...]


@dataclass(slots=True)
class _Sequence:
    prompt_length: int
    stream: TokenStream
    logprobs: RequestLogprobs | None
    produced: int
    """Output tokens given out so far."""
    window: int | None


class RequestTable:
    """The requests that the scheduler has introduced and not finished."""

    def __init__(self, source: TokenSource, logprobs: LogprobModel | None = None) -> None:
        self._source = source
        self._logprobs = logprobs
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def advance(self, output: SchedulerOutput) -> Batch:
        """Take in a step of the scheduler and return its batch."""
        # An id may end and begin again in one step, so ends come first.
        for request_id in output.finished_req_ids:
            self._sequences.pop(request_id, None)
        # By request: the tokens computed so far, and those known to the scheduler.
        reach = {request.req_id: self._introduce(request) for request in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        # num_output_tokens counts the tokens that steps in flight will bring, so this holds under asynchronous
        # scheduling too.
        for request_id, computed, produced in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                sequence.produced = self._resumed(sequence, produced)
            reach[request_id] = (computed, sequence.prompt_length + produced)
        shares = []
        for request_id, count in output.num_scheduled_tokens.items():
            sequence = self._sequences[request_id]
            computed, known = reach[request_id]
            if (end := computed + count) < known:
                # In the middle of a chunked prefill: no token is due.
                shares.append(Share(request_id, count, end, sequence.stream, None, window=sequence.window))
                continue
            drafts = tuple(output.scheduled_spec_decode_tokens.get(request_id, ()))
            context = sequence.prompt_length + sequence.produced + len(drafts)
            asked = (sequence.logprobs, sequence.window)
            shares.append(Share(request_id, count, context, sequence.stream, sequence.produced, drafts, *asked))
        return Batch(tuple(shares))

    def settle(self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Count the tokens given out for a step."""
        for request_id, given in zip(request_ids, tokens, strict=True):
            if (sequence := self._sequences.get(request_id)) is not None:
                sequence.produced += len(given)

    def upcoming(self, batch: Batch) -> list[tuple[str, TokenStream, int]]:
        """Return id, stream and next position of each request of a batch that has left its prefill."""
        ids = [share.request_id for share in batch.shares if share.index is not None]
        pairs = [(request_id, self._sequences.get(request_id)) for request_id in ids]
        return [(request_id, each.stream, each.produced) for request_id, each in pairs if each is not None]

    def _introduce(self, request: NewRequestData) -> tuple[int, int]:
        """Add a new request; return its tokens computed so far, and those known to the scheduler."""
        # A prompt may be given as embeddings instead of tokens.
        prompt = request.prompt_token_ids if request.prompt_token_ids is not None else request.prompt_embeds
        length = len(prompt) if prompt is not None else 0
        # Filled for the V2 runner only, whose resumed requests come as new ones.
        known = len(request.prefill_token_ids) if request.prefill_token_ids is not None else length
        before = self._sequences.get(request.req_id)
        produced = self._resumed(before, known - length)
        logprobs = self._logprobs.open(request) if self._logprobs is not None else None
        window = stamped_window(request.sampling_params)
        self._sequences[request.req_id] = _Sequence(length, self._source.open(request), logprobs, produced, window)
        return request.num_computed_tokens, known

    @staticmethod
    def _resumed(sequence: _Sequence | None, reported: int) -> int:
        """Return how much output a request has when it resumes after a preemption.

        A scheduler that dropped what was in flight reports less than was given out. One that still waits for it reports
        more, as if every draft were right.
        """
        return reported if sequence is None else min(sequence.produced, reported)
