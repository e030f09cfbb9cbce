"""What a step brings, in the form vLLM takes it: tokens, their log probabilities, and the drafts for the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from vllm_graft.plugins.platforms.simulated.drafts import PLACEHOLDER, Drafter, verified
from vllm_graft.plugins.platforms.simulated.logprobs import output_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import GrammarOutput

    from vllm_graft.plugins.platforms.simulated.batch import RequestTable, Share, Step

    Masks = tuple[Sequence[NDArray[np.int32]], int]
    """A request's rows of allowed tokens, and how many of its drafts may be accepted."""


class StepOutput(AsyncModelRunnerOutput):
    """A step's tokens, to be had once the step has ended; vLLM takes it with and without async scheduling."""

    def __init__(self, output: ModelRunnerOutput, wait: Callable[[], None]) -> None:
        self._output = output
        self._wait = wait

    def get_output(self) -> ModelRunnerOutput:
        """Waits for the end of the step."""
        self._wait()
        return self._output


def answer(step: Step, grammar_output: GrammarOutput | None, drafter: Drafter | None) -> ModelRunnerOutput:
    """A step's output for the scheduler."""
    masks = _masks(step, grammar_output)
    sampled = [_tokens(share, masks.get(share.request_id), drafter) for share in step.shares]
    ids = [share.request_id for share in step.shares]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: position for position, request_id in enumerate(ids)},
        sampled_token_ids=sampled,
        logprobs=_logprobs(step, sampled),
        prompt_logprobs_dict=_prompt_logprobs(step),
    )


def draft_tokens(step: Step, table: RequestTable, drafter: Drafter, count: int) -> DraftTokenIds:
    """The drafts of the requests in a step for what comes after the tokens given out."""
    upcoming = table.upcoming(step)
    return DraftTokenIds(
        [request_id for request_id, _, _ in upcoming],
        [drafter.propose(stream, index, count) for _, stream, index in upcoming],
    )


def _tokens(share: Share, masks: Masks | None, drafter: Drafter | None) -> list[int]:
    if share.index is None:
        return []
    drafts = share.drafts
    if masks is None and not drafts:
        return [share.stream.token(share.index, None)]
    if PLACEHOLDER in drafts and drafter is not None:
        drafts = tuple(drafter.propose(share.stream, share.index, len(drafts)))
    if masks is None:
        return verified(share.stream, share.index, drafts, None)
    rows, acceptable = masks
    return verified(share.stream, share.index, drafts[:acceptable], rows)


def _logprobs(step: Step, sampled: Sequence[Sequence[int]]) -> LogprobsLists | None:
    """The rows of the requests that want any, and where each request's begin."""
    if all(share.scores is None for share in step.shares):
        return None
    wanted = [
        (share.scores, share.index, tokens)
        if share.scores is not None and share.scores.count is not None and share.index is not None
        else None
        for share, tokens in zip(step.shares, sampled, strict=True)
    ]
    outputs = [each for each in wanted if each is not None]
    if not outputs:
        return None
    rows = (0 if each is None else len(each[2]) for each in wanted)
    return LogprobsLists(*output_table(outputs), list(accumulate(rows, initial=0)))


def _prompt_logprobs(step: Step) -> dict[str, LogprobsTensors | None]:
    """Whole, and with the first token, as the engine wants them: never in the middle of a prompt."""
    tables = {share.request_id: share.scores.prompt() for share in step.shares if share.scores and share.index == 0}
    return {
        request_id: LogprobsTensors(*(torch.from_numpy(each) for each in table))
        for request_id, table in tables.items()
        if table is not None
    }


def _masks(step: Step, grammar_output: GrammarOutput | None) -> dict[str, Masks]:
    """Each structured request's rows, one for every draft and one for the token after them."""
    if grammar_output is None:
        return {}
    drafts = {share.request_id: len(share.drafts) for share in step.shares}
    ids = grammar_output.structured_output_request_ids
    # A field of vLLM 0.32; before it, a draft that the grammar forbids fails at its own row.
    acceptable = getattr(grammar_output, "num_acceptable_drafts", None) or [drafts[each] for each in ids]
    masks: dict[str, Masks] = {}
    start = 0
    for request_id, accepted in zip(ids, acceptable, strict=True):
        end = start + drafts[request_id] + 1
        masks[request_id] = (grammar_output.grammar_bitmask[start:end], accepted)
        start = end
    return masks
