"""The output of a step in vLLM's form: tokens, their log probabilities, and the drafts for the next step.

A draft is right when it equals the token that the request's stream gives at its position; a hash decides how often.
Verification keeps the right ones up to the first wrong one and adds one token, so that a request's output is the same
with and without drafts and only the number of steps differs. Drafts know nothing of a grammar, as those of an n-gram
drafter: a grammar strikes most of them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from vllm_graft.simulator.logprobs import output_table
from vllm_graft.splitmix import splitmix64

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import GrammarOutput

    from vllm_graft.simulator.batch import Batch, Share
    from vllm_graft.simulator.tokens import TokenStream

    Masks = tuple[Sequence[NDArray[np.int32]], int]
    """A request's rows of allowed tokens, and how many of its drafts may be accepted."""

_WORDS: Final = 1 << 64
_RIGHT_SALT: Final = 0x6472616674
_WRONG_SALT: Final = 0x77726F6E67

PLACEHOLDER: Final = -1
"""The scheduler's entry for a draft whose token only the worker knows, under asynchronous scheduling."""


class StepOutput(AsyncModelRunnerOutput):
    """A step's tokens, available once the step has ended; vLLM takes it with and without asynchronous scheduling."""

    def __init__(self, output: ModelRunnerOutput, wait: Callable[[], None]) -> None:
        self._output = output
        self._wait = wait

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the end of the step."""
        self._wait()
        return self._output


def build_output(batch: Batch, grammar_output: GrammarOutput | None, drafter: Drafter | None) -> ModelRunnerOutput:
    """Build a step's output for the scheduler."""
    masks = _masks(batch, grammar_output)
    sampled = [_tokens(share, masks.get(share.request_id), drafter) for share in batch.shares]
    ids = [share.request_id for share in batch.shares]
    # The prompts' log probabilities go out whole and with the first token, which is when the engine expects them.
    prompts: dict[str, LogprobsTensors | None] = {}
    for share in batch.shares:
        if share.index == 0 and share.logprobs is not None and (table := share.logprobs.prompt()) is not None:
            prompts[share.request_id] = LogprobsTensors(*(torch.from_numpy(each) for each in table))
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: position for position, request_id in enumerate(ids)},
        sampled_token_ids=sampled,
        logprobs=_logprobs(batch, sampled),
        prompt_logprobs_dict=prompts,
    )


def _tokens(share: Share, masks: Masks | None, drafter: Drafter | None) -> list[int]:
    if share.index is None:
        return []
    drafts = share.drafts
    if masks is None and not drafts:
        return [share.stream.token(share.index, None)]
    # The drafter is deterministic, so proposing again gives the tokens of the step before.
    if PLACEHOLDER in drafts and drafter is not None:
        drafts = tuple(drafter.propose(share.stream, share.index, len(drafts)))
    rows, acceptable = masks or (None, None)
    return verify_drafts(share.stream, share.index, drafts[:acceptable], rows)


def _logprobs(batch: Batch, sampled: Sequence[Sequence[int]]) -> LogprobsLists | None:
    """Build the rows of the requests that want log probabilities, and the index at which each request's begin."""
    wanted = [
        (share.logprobs, share.index, tokens)
        if share.logprobs is not None and share.logprobs.count is not None and share.index is not None
        else None
        for share, tokens in zip(batch.shares, sampled, strict=True)
    ]
    outputs = [each for each in wanted if each is not None]
    if not outputs:
        return None
    rows = (0 if each is None else len(each[2]) for each in wanted)
    return LogprobsLists(*output_table(outputs), list(accumulate(rows, initial=0)))


def _masks(batch: Batch, grammar_output: GrammarOutput | None) -> dict[str, Masks]:
    """Find each structured request's rows: one for every draft and one for the token after them."""
    if grammar_output is None:
        return {}
    drafts = {share.request_id: len(share.drafts) for share in batch.shares}
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


class Drafter:
    """Proposes up to ``count`` tokens ahead, of which the share ``acceptance`` is right."""

    def __init__(self, count: int, acceptance: float, vocab_size: int) -> None:
        self.count = count
        self._acceptance = acceptance
        self._vocab_size = vocab_size

    def propose(self, stream: TokenStream, index: int, count: int) -> list[int]:
        """Return drafts for the ``count`` positions from ``index`` on."""
        drafts = []
        for position in range(index, index + count):
            draft = stream.token(position, None)
            if splitmix64(draft ^ _RIGHT_SALT, position) >= self._acceptance * _WORDS:
                away = 1 + splitmix64(draft ^ _WRONG_SALT, position) % max(self._vocab_size - 1, 1)
                draft = (draft + away) % self._vocab_size
            drafts.append(draft)
        return drafts


def verify_drafts(
    stream: TokenStream, index: int, drafts: Sequence[int], masks: Sequence[NDArray[np.int32]] | None
) -> list[int]:
    """Return the tokens of a step from ``index`` on: the drafts up to the first wrong one, and one more.

    ``masks`` has a grammar's row for every draft and for the token after them, or is None without a grammar.
    """
    tokens: list[int] = []
    for place in range(len(drafts) + 1):
        mask = masks[place] if masks is not None else None
        tokens.append(stream.token(index + place, mask))
        if place == len(drafts) or drafts[place] != tokens[-1]:
            break
    return tokens
