"""The attention contracts: which part of a request's KV cache stays, and how attention is computed over it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from vllm_graft.contracts.item import Item, OptionValue

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LayerView:
    """One attention layer of the model, as an item is asked about it at the start.

    name:       vLLM's name for it, as ``model.layers.3.self_attn.attn``
    index:      its number in the model, counted from 0
    layers:     how many layers the model has
    window:     the sliding window that the model itself gives it, in tokens; None for full attention
    heads:      query heads in this worker; with tensor parallelism each worker has its share
    kv_heads:   key and value heads in this worker
    head_size:  the length of a head's vectors
    block_size: tokens in a block of the KV cache
    max_tokens: the longest sequence that the server accepts
    """

    name: str
    index: int
    layers: int
    window: int | None
    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Window:
    """The keys that a query attends to: the first tokens of the sequence, and the last ones up to the query itself.

    first: tokens at the start of the sequence, rounded up to whole blocks
    last:  at most this many tokens up to the query; whole steps of tokens leave at once, so a query sees up to one
           step less (a step is the smallest multiple of the block size that is at least 64). ``layer.max_tokens`` for
           full attention that single requests narrow (``request_window``)

    A token's keys and values then depend on its position alone, so that prefix caching, preemption and prompts read in
    parts all give the same tokens.
    """

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """A request's blocks of the KV cache, as a policy is asked about them.

    request_id: vLLM's name for the request
    tokens:     tokens that are computed; those of the step that is being scheduled come on top
    block_size: tokens in a block
    held:       the indices of the blocks that are held, ascending; block i has the tokens from ``i * block_size`` on
    evictable:  those of them that may be evicted: whole, computed, and not used by the step that is being scheduled
    prompt:     tokens of the prompt
    keys:       the request's ``vllm_xargs``
    scores:     the share of attention that held blocks draw, by index, for a policy that wants scores: a running
                average, in which a block that was not scored yet is missing
    """

    request_id: str
    tokens: int
    block_size: int
    held: Sequence[int]
    evictable: Sequence[int]
    prompt: int
    keys: dict[str, object]
    scores: Mapping[int, float] = field(default_factory=dict)


class KVPolicy(Item):
    """Decides which part of a request's KV cache stays; the rest is freed while the request runs.

    Override one of the two methods. ``window`` is for retention by position. It is asked once for each layer, and costs
    nothing while serving::

        class RecentTokens(KVPolicy):
            options = {"tokens": 2048}

            def window(self, layer):
                return Window(first=64, last=self.option("tokens"))

    ``evict`` is for everything else. It is called in engine core whenever a request has filled a block::

        class EveryOther(KVPolicy):
            def evict(self, request):
                return [block for block in request.evictable[1:-8] if block % 2]

    Block numbers may be of NumPy's types. An evicted block is gone for all layers. A policy that raises, or names a
    block that is not evictable, is put aside: requests keep what they hold from then on, and ``vllm-graft status``
    shows it as quarantined.

    With ``wants_scores`` the workers score blocks while requests decode. Every ``score_every`` steps, in the layers
    that ``scores_layer`` chooses, they compare the request's query with the mean of each block's keys: a softmax over
    the blocks, averaged over heads and layers. ``request.scores`` has a running average of these. With tensor
    parallelism the heads of the first worker count.
    """

    wants_scores: ClassVar[bool] = False
    """Whether ``evict`` is given scores. Otherwise none are computed."""
    score_every: int = 16
    """Steps with requests that decode, from one scoring to the next."""
    score_decay: float = 0.8
    """The weight of earlier scores in the running average: 0 for the latest alone, below 1."""

    keys: ClassVar[Sequence[str]] = ()
    """The names in ``vllm_xargs`` by which requests tell the policy something."""

    @classmethod
    def check_request(cls, keys: Mapping[str, object], options: Mapping[str, OptionValue]) -> None:
        """Optional: refuse a request whose keys cannot work, with a ValueError, which becomes a 400.

        Called in the front end, on the class, for requests that carry one of ``keys``; ``options`` holds every declared
        option.
        """

    def scores_layer(self, layer: LayerView) -> bool:
        """Return whether a layer scores blocks; by default two do, in the middle and at three quarters of the model."""
        return layer.index in (layer.layers // 2, layer.layers * 3 // 4)

    def window(self, layer: LayerView) -> Window | None:
        """Return the window of a layer; None leaves the layer as it is."""
        return None

    def request_window(self, keys: Mapping[str, object]) -> int | None:
        """Optional: return the window that a request asks for by its ``vllm_xargs``; None for that of its layers.

        ``Window.last`` for all layers to which ``window`` gave one; a number above it changes nothing. Called in engine
        core, once for each request that carries one of ``keys``. What was computed under one window is never taken from
        the prefix cache for another.
        """
        return None

    def evict(self, request: RequestBlocks) -> Collection[int]:
        """Return the indices of the blocks to free now, out of ``request.evictable``."""
        return ()


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The requests of a step: which tokens are theirs, and where their keys and values are.

    starts:     where each request's tokens begin in ``query``; one entry more than there are requests
    lengths:    each request's tokens in the KV cache, those of this step included
    blocks:     each request's block table: entry i is the block with the tokens from ``i * block_size`` on, where
                ``block_size`` is ``kv_cache.shape[2]``
    max_query:  the most tokens that a request has in this step; 1 in a step that only decodes
    max_length: an upper bound of ``lengths``

    The tensors are on the device. A batch may be padded with requests that have no tokens.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    max_query: int
    max_length: int


class AttentionKernel(Item):
    """Computes attention over the paged KV cache, in every layer and step. Lives in each worker::

        class PlainAttention(AttentionKernel):
            def forward(self, query, key, value, kv_cache, batch):
                ...  # attend to the blocks of each request, return a tensor shaped like query

    ``query`` is ``[tokens, heads, head_size]``; ``key`` and ``value`` have the layer's ``kv_heads``. ``kv_cache`` is
    ``[blocks, kv_heads, block_size, 2 * head_size]``, keys in the first half of the last dimension and values in the
    second; ``store`` has put this step's there. It may be strided: use it through its strides. A token sees itself and
    earlier ones of its request. Prompts, parts of prompts, single tokens and drafts come in one batch.

    The class says what it serves; a model that needs more is refused at the start, by the name of what is missing. Each
    layer's kernel is tried on two small batches then, and one that raises, answers with another shape or with NaN stops
    the start. No other kernel could read what it has stored, so one that raises later ends its engine, with an error
    that names it. Time over the budget is counted, and has no other consequence.
    """

    dtypes: ClassVar[Sequence[str]] = ("float32", "float16", "bfloat16")
    """The types of query, key, value and cache that it serves."""
    head_sizes: ClassVar[Sequence[int]] = ()
    """The head sizes that it serves; empty: any."""
    block_multiple: ClassVar[int] = 16
    """The block size must be a multiple of this."""
    windows: ClassVar[bool] = False
    """Whether it serves layers with a sliding window: a token then sees the last ``layer.window`` tokens, itself
    included. The blocks before are given back, and their entries in the block table are 0."""
    cuda_graphs: ClassVar[bool] = False
    """Whether ``forward`` may be captured in a CUDA graph for steps that only decode: no copy to the host, and no shape
    or launch that depends on ``lengths`` or ``max_length``."""

    layer: LayerView
    """The layer of this instance, set before the first call; there is one instance for each layer."""
    scale: float
    """The factor of the scores before the softmax, set as ``layer`` is."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Return the attention output of the step's tokens, shaped like ``query``."""
        raise NotImplementedError(f"{type(self).__name__} must implement forward(query, key, value, kv_cache, batch)")

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        """Write a step's keys and values into the cache, at the slots that vLLM assigned; -1 is padding.

        Called before ``forward``. Override it if the kernel keeps keys and values in another order.
        """
        head_size, block_size = key.shape[-1], kv_cache.shape[2]
        # Block 0 is vLLM's null block, which is never read: the place for padding.
        slots = slots.clamp(min=0)
        block, offset = slots // block_size, slots % block_size
        kv_cache[block, :, offset, :head_size] = key
        kv_cache[block, :, offset, head_size:] = value
