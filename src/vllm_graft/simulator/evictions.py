"""KV blocks that a policy evicts one by one, on the modelled device: fewer tokens to read, and scores.

Which blocks a real model would look at is not known here. The scores are drawn at random, once for each block of a
request: what a step reads depends on how many blocks are kept, not on which.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from vllm_graft.bindings.attention.layers import EVICTIONS, SCORES

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_graft.simulator.batch import Batch


class Evictions:
    """The blocks that each request has lost, and the scores of those that it holds."""

    def __init__(self, block_size: int) -> None:
        self.score_every = 0
        """Steps with requests that decode, from one scoring to the next; 0 for a policy that wants no scores."""
        self._block_size = block_size
        self._lost: Counter[str] = Counter()
        self._steps = 0

    def apply(self, output: SchedulerOutput, batch: Batch) -> None:
        """Take the evicted tokens out of what the requests of a step read."""
        cached = output.scheduled_cached_reqs
        began = {request.req_id for request in output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        for request_id in (*output.finished_req_ids, *began):
            self._lost.pop(request_id, None)
        for request_id, gone in (getattr(output, EVICTIONS, None) or {}).items():
            self._lost[request_id] += len(gone)
        for share in batch.shares if self._lost else ():
            share.context -= self._lost[share.request_id] * self._block_size

    def score(self, batch: Batch, output: ModelRunnerOutput) -> None:
        """Put scores for the requests that decode beside the output of a step, if it is time."""
        decoding = [share for share in batch.shares if share.index is not None and share.new_tokens == 1]
        if not self.score_every or not decoding:
            return
        self._steps += 1
        if (self._steps - 1) % self.score_every:
            return
        found = {}
        for share in decoding:
            blocks = -(-share.context // self._block_size) + self._lost[share.request_id]
            found[share.request_id] = np.random.default_rng(zlib.crc32(share.request_id.encode())).random(blocks)
        setattr(output, SCORES, found)
