"""Policies that evict blocks one by one: asked in engine core, followed by the block tables of the workers.

``EvictingManager`` asks the policy whenever a request has filled a block, frees what it names, and keeps a note for the
workers, which ``drain_evictions`` attaches to the step's schedule. A worker's block tables only ever grow; there
``apply_evictions_v1`` and ``apply_evictions_v2`` write the null block over what is gone, and the metadata builder
leaves null blocks out.

What a token's keys and values are then depends on what was evicted before, not on its position alone. So nothing that
was computed after a request's first eviction goes into the prefix cache.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_graft.bindings.attention.layers import EVICTIONS, SCORES
from vllm_graft.contracts import RequestBlocks

if TYPE_CHECKING:
    from vllm.v1.request import Request

Ask = Callable[[RequestBlocks], "Collection[int] | None"]


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """The KV cache of layers with full attention, out of which a policy evicts blocks."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> EvictingSpec:
        """Return the spec of a layer with full attention, with eviction."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(spec) if field.init})

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """Merge the specs of layers that all follow evictions; a layer that does not must not share their blocks.

        vLLM takes an AssertionError as the answer that layers differ.
        """
        if not all(isinstance(spec, EvictingSpec) for spec in specs):
            raise AssertionError("blocks of some layers are evicted, but others would read them")
        return super().merge(specs)

    def copy_with_new_block_size(self, block_size: int) -> EvictingSpec:
        """Refuse kernels that want smaller blocks: in their tables the null block is several, with other numbers."""
        if block_size != self.block_size:
            raise ValueError(
                f"the kernel reads blocks of {block_size} tokens, but blocks of {self.block_size} are evicted; start "
                f"with --block-size {block_size}"
            )
        return self


class EvictingManager(FullAttentionManager):
    """Frees the blocks that the policy names. Without one it is vLLM's own manager."""

    def __init__(self, kv_cache_spec: EvictingSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.ask: Ask | None = None
        """Asks the policy, guarded; it answers None once the policy is put aside."""
        self.workers_follow = False
        """True if the scheduler passes evictions on to the workers; one that bypasses our patch would drop them."""
        self.freed = 0
        """The blocks that were freed while their requests ran."""
        self.report: Callable[[], None] | None = None
        """Called before each step of the engine."""
        self.on_lost_evictions: Callable[[], None] = lambda: None
        """Called once if nothing may be evicted, because no worker would know."""
        self.request: Request | None = None
        """The request that slots are being allocated for."""
        self._asked: dict[str, int] = {}
        """The blocks that each request had filled when the policy was asked last."""
        self._cacheable_tokens: dict[str, int] = {}
        """The tokens of each request that were computed before its first eviction."""
        self._pending_evictions: dict[str, list[int]] = {}
        self._keys: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        """The keys of each request, and the copy of them that the policy gets."""
        self.decay = 0.0
        """The weight of earlier scores in the running average."""
        self.scored = 0
        """How often a request's blocks were scored."""
        self._scores: dict[str, np.ndarray] = {}
        """The running average of each request's scores by block, NaN if there is none."""

    def new_step_starts(self) -> None:
        """Report what is held, once for each step."""
        super().new_step_starts()
        if self.report is not None:
            self.report()

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Ask the policy if the request has filled another block; called before each step of a request takes blocks."""
        filled = processed_computed_tokens // self.block_size
        request, blocks = self.request, self.req_to_blocks.get(request_id)
        if self.ask is None or not blocks or request is None or request.request_id != request_id:
            return
        if filled <= self._asked.get(request_id, 0):
            return
        if not self.workers_follow:
            self.ask = None
            self.on_lost_evictions()
            return
        self._asked[request_id] = filled
        held = tuple(index for index, block in enumerate(blocks) if block is not self._null_block)
        evictable = tuple(index for index in held if index < filled)
        gone = self.ask(
            RequestBlocks(
                request_id=request_id,
                tokens=processed_computed_tokens,
                block_size=self.block_size,
                held=held,
                evictable=evictable,
                prompt=request.num_prompt_tokens,
                keys=self._keys_of(request),
                scores=self._scores_of(request_id, held),
            )
        )
        if gone:
            self._evict(request_id, blocks, list(gone), processed_computed_tokens)

    def _evict(self, request_id: str, blocks: list[Any], gone: list[int], computed: int) -> None:
        self._cacheable_tokens.setdefault(request_id, computed)
        freed = [blocks[index] for index in gone]
        for index in gone:
            blocks[index] = self._null_block
        self.block_pool.free_blocks(freed)
        self.freed += len(freed)
        self._pending_evictions.setdefault(request_id, []).extend(gone)

    def add_scores(self, request_id: str, latest: np.ndarray) -> None:
        """Add the latest scores of a request's blocks to the running average."""
        self.scored += 1
        earlier = self._scores.get(request_id)
        if earlier is not None:
            known = min(len(earlier), len(latest))
            mean = self.decay * earlier[:known] + (1 - self.decay) * latest[:known]
            # A block that is new among the latest has no earlier score.
            mean = np.where(np.isnan(mean), latest[:known], mean)
            latest = np.concatenate((mean, latest[known:]))
        self._scores[request_id] = latest

    def _keys_of(self, request: Request) -> dict[str, object]:
        """Return a copy of a request's keys, so that a policy cannot change the request's own lists.

        Copied once per request, although the policy is asked with every block: a client's list may be long.
        """
        extra = getattr(request.sampling_params, "extra_args", None)
        if not extra:
            return {}
        copied = self._keys.get(request.request_id)
        # A streaming session may bring other parameters later.
        if copied is None or copied[0] is not extra:
            copied = self._keys[request.request_id] = (extra, copy.deepcopy(extra))
        return dict(copied[1])

    def _scores_of(self, request_id: str, held: Sequence[int]) -> dict[int, float]:
        scores = self._scores.get(request_id)
        if scores is None:
            return {}
        found = {index: float(scores[index]) for index in held if index < len(scores)}
        return {index: score for index, score in found.items() if not math.isnan(score)}

    def drain_evictions(self) -> dict[str, list[int]]:
        """Return the blocks that were evicted since the last call, by request."""
        evictions, self._pending_evictions = self._pending_evictions, {}
        return evictions

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Put whole blocks into the prefix cache, up to the request's first eviction."""
        cacheable = self._cacheable_tokens.get(request.request_id, num_tokens)
        super().cache_blocks(request, min(num_tokens, cacheable), *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Forget a request that ends or is preempted; a preempted one is computed anew from its beginning."""
        for known in (self._asked, self._cacheable_tokens, self._pending_evictions, self._scores, self._keys):
            known.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)


def validate(answer: object, evictable: Collection[int], request_id: str) -> list[int]:
    """Return a policy's answer as a list; raise ValueError for a block it may not evict, TypeError for no list."""
    if not isinstance(answer, Collection) or isinstance(answer, str | bytes):
        raise TypeError(f"evict() must return a collection of block indices, but returned {answer!r}")
    found: set[int] = set()
    for each in answer:
        index = _index(each)
        if index is None or index not in evictable:
            what = f"block {each!r}, which is not among the {len(evictable)} evictable ones of {request_id}"
            raise ValueError(f"evict() returned {what}")
        found.add(index)
    return sorted(found)


def _index(value: Any) -> int | None:
    """Return a value as an index, of NumPy's types too; None for what is not an index, such as True or 1.0."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def evicting_managers(manager: Any) -> list[EvictingManager]:
    """Return the managers of vLLM's ``KVCacheManager`` that ask a policy."""
    return [each for each in manager.coordinator.single_type_managers if isinstance(each, EvictingManager)]


def attach_evictions(managers: Sequence[EvictingManager], output: Any) -> None:
    """Attach the evicted blocks of a step to its schedule."""
    evictions: dict[str, list[int]] = {}
    for manager in managers:
        evictions |= manager.drain_evictions()
    if evictions:
        setattr(output, EVICTIONS, evictions)


def take_in_scores(managers: Sequence[EvictingManager], scheduler: Any, output: Any) -> None:
    """Hand the scores beside a step's output to the managers; a request that has ended is skipped."""
    scores: dict[str, np.ndarray] = getattr(output, SCORES, None) or {}
    for manager in managers if scores else ():
        for request, latest in scores.items():
            if request in scheduler.requests:
                manager.add_scores(request, latest)


def apply_evictions_v1(runner: Any, output: Any) -> None:
    """Write the null block over evicted ones, in the V1 runner's batch and in its memory of the request."""
    for request, gone in _running_evictions(output):
        state = runner.requests.get(request)
        for group in state.block_ids if state is not None else ():
            for index in gone:
                group[index] = 0
        row = runner.input_batch.req_id_to_index.get(request)
        if row is not None:
            for table in runner.input_batch.block_table.block_tables:
                table.block_table.np[row, gone] = 0


def apply_evictions_v2(runner: Any, output: Any) -> None:
    """Write the null block over evicted ones, in the V2 runner's block tables on the device."""
    for request, gone in _running_evictions(output):
        row = runner.req_states.req_id_to_index.get(request)
        if row is not None:
            for table in runner.block_tables.block_tables:
                for index in gone:
                    table.stage_write(row, index, [0])


def _running_evictions(output: Any) -> list[tuple[str, Sequence[int]]]:
    """Return the notes of requests that a worker has block tables for.

    One that is new in this step, or comes back after a preemption, is sent with its whole table, evicted blocks null.
    """
    evictions: dict[str, list[int]] | None = getattr(output, EVICTIONS, None)
    if not evictions:
        return []
    new = {request.req_id for request in output.scheduled_new_reqs}
    resumed = set(getattr(output.scheduled_cached_reqs, "resumed_req_ids", ()))
    return [(request, gone) for request, gone in evictions.items() if request not in new and request not in resumed]


# The registry fills itself with vLLM's own specs on first use, but only while it is empty (0.26 to 0.32).
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, EvictingSpec)
