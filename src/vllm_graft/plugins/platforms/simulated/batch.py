"""Which requests of a scheduler's step are due a token, and at which position.

vLLM writes its steps in two shapes. For the V1 runner a request that comes back after a preemption is one of the
cached ones; for the V2 runner it is a new one that brings its earlier output along in ``prefill_token_ids``. One rule
serves both: a token is due when the step ends where the tokens known to the scheduler end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from vllm_graft.plugins.platforms.simulated.tokens import TokenSource, TokenStream


@dataclass(frozen=True, slots=True)
class Share:
    """One request's part of a step."""

    request_id: str
    new_tokens: int
    """Tokens computed in this step."""
    context: int
    """Tokens in the KV cache once the step is done."""
    stream: TokenStream
    index: int | None
    """The position of the output token that is due, or None in the middle of a prefill."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the device is asked to compute at once."""

    shares: tuple[Share, ...]


@dataclass(slots=True)
class _Sequence:
    prompt_length: int
    stream: TokenStream


class RequestTable:
    """The requests the device knows of, as the scheduler introduced them."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def advance(self, output: SchedulerOutput) -> Step:
        """Takes one step's news from the scheduler and says what the step is made of."""
        for request_id in output.finished_req_ids:
            self._sequences.pop(request_id, None)
        reach = {request.req_id: self._introduce(request) for request in output.scheduled_new_reqs}
        reach.update(self._continued(output))
        scheduled = output.num_scheduled_tokens.items()
        return Step(tuple(self._share(request_id, count, *reach[request_id]) for request_id, count in scheduled))

    def _introduce(self, request: NewRequestData) -> tuple[int, int]:
        """(tokens computed so far, tokens known) of a new request."""
        length = _prompt_length(request)
        self._sequences[request.req_id] = _Sequence(length, self._source.open(request))
        known = len(request.prefill_token_ids) if request.prefill_token_ids is not None else length
        return request.num_computed_tokens, known

    def _continued(self, output: SchedulerOutput) -> dict[str, tuple[int, int]]:
        """The same of the requests that were introduced before.

        ``num_output_tokens`` counts the tokens that steps still in flight will bring, so this holds under
        asynchronous scheduling too.
        """
        cached = output.scheduled_cached_reqs
        return {
            request_id: (computed, self._sequences[request_id].prompt_length + produced)
            for request_id, computed, produced in zip(
                cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
            )
        }

    def _share(self, request_id: str, count: int, computed: int, known: int) -> Share:
        sequence = self._sequences[request_id]
        end = computed + count
        index = end - sequence.prompt_length if end >= known else None
        return Share(request_id, count, end, sequence.stream, index)


def _prompt_length(request: NewRequestData) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return request.prompt_embeds.shape[0] if request.prompt_embeds is not None else 0
