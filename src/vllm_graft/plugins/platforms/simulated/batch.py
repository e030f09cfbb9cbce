"""Which requests of a scheduler's step are due tokens, and from which position on.

vLLM writes its steps in two shapes. For the V1 runner a request that comes back after a preemption is one of the
cached ones; for the V2 runner it is a new one that brings its earlier output along in ``prefill_token_ids``. One rule
serves both: a token is due when the step reaches the end of the tokens known to the scheduler.

Which token it is, only the device knows for sure. With drafts under asynchronous scheduling the scheduler counts as if
every draft in flight were right, so the table keeps its own count of what it has given out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from vllm_graft.plugins.platforms.simulated.logprobs import LogprobModel, Scores
    from vllm_graft.plugins.platforms.simulated.tokens import TokenSource, TokenStream


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
    scores: Scores | None = None
    """The log probabilities that the request wants, if any."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the device is asked to compute at once."""

    shares: tuple[Share, ...]


@dataclass(slots=True)
class _Sequence:
    prompt_length: int
    stream: TokenStream
    scores: Scores | None
    produced: int
    """Output tokens given out so far."""


class RequestTable:
    """The requests the device knows of, as the scheduler introduced them."""

    def __init__(self, source: TokenSource, logprobs: LogprobModel | None = None) -> None:
        self._source = source
        self._logprobs = logprobs
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def advance(self, output: SchedulerOutput) -> Step:
        """Takes one step's news from the scheduler and says what the step is made of."""
        for request_id in output.finished_req_ids:
            self._sequences.pop(request_id, None)
        reach = {request.req_id: self._introduce(request) for request in output.scheduled_new_reqs}
        reach.update(self._continued(output))
        drafts = output.scheduled_spec_decode_tokens
        return Step(
            tuple(
                [
                    self._share(request_id, count, tuple(drafts.get(request_id, ())), *reach[request_id])
                    for request_id, count in output.num_scheduled_tokens.items()
                ]
            )
        )

    def settle(self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Notes what was given out for a step."""
        for request_id, given in zip(request_ids, tokens, strict=True):
            if (sequence := self._sequences.get(request_id)) is not None:
                sequence.produced += len(given)

    def upcoming(self, step: Step) -> list[tuple[str, TokenStream, int]]:
        """Of the requests in a step that have left their prefill: the stream, and the position not yet given out."""
        pairs = [(share.request_id, self._sequences.get(share.request_id)) for share in step.shares if _is_due(share)]
        return [(request_id, each.stream, each.produced) for request_id, each in pairs if each is not None]

    def _introduce(self, request: NewRequestData) -> tuple[int, int]:
        """(tokens computed so far, tokens known) of a new request."""
        length = _prompt_length(request)
        known = len(request.prefill_token_ids) if request.prefill_token_ids is not None else length
        before = self._sequences.get(request.req_id)
        produced = self._resumed(before, known - length)
        scores = self._logprobs.open(request) if self._logprobs is not None else None
        self._sequences[request.req_id] = _Sequence(length, self._source.open(request), scores, produced)
        return request.num_computed_tokens, known

    def _continued(self, output: SchedulerOutput) -> dict[str, tuple[int, int]]:
        """The same of the requests that were introduced before.

        ``num_output_tokens`` counts the tokens that steps still in flight will bring, so this holds under
        asynchronous scheduling too.
        """
        cached = output.scheduled_cached_reqs
        reach: dict[str, tuple[int, int]] = {}
        for request_id, computed, produced in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                sequence.produced = self._resumed(sequence, produced)
            reach[request_id] = (computed, sequence.prompt_length + produced)
        return reach

    @staticmethod
    def _resumed(sequence: _Sequence | None, reported: int) -> int:
        """The output of a request that comes back after a preemption.

        The scheduler may have dropped what was in flight, and then reports less than was given out. Or it may still
        wait for it, and then reports more, as if every draft were right.
        """
        return reported if sequence is None else min(sequence.produced, reported)

    def _share(self, request_id: str, count: int, drafts: tuple[int, ...], computed: int, known: int) -> Share:
        sequence = self._sequences[request_id]
        end = computed + count
        if end < known:
            return Share(request_id, count, end, sequence.stream, None)
        context = sequence.prompt_length + sequence.produced + len(drafts)
        return Share(request_id, count, context, sequence.stream, sequence.produced, drafts, sequence.scores)


def _is_due(share: Share) -> bool:
    return share.index is not None


def _prompt_length(request: NewRequestData) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return request.prompt_embeds.shape[0] if request.prompt_embeds is not None else 0
