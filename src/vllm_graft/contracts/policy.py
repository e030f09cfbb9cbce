"""The scheduling contract in one call: which requests start in a step, which go on, and which are preempted."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from vllm_graft.contracts.item import Item


class RequestView(dict[str, object]):
    """A request as a policy sees it: by attribute, or like a dictionary.

    ==================  ==================  ==========================================================================
    attribute           key
    ==================  ==================  ==========================================================================
    ``request_id``      ``request_id``
    ``priority``        ``priority``        smaller goes first; 0, and no key, if the client gave none
    ``arrival``         ``arrival_time``    when it reached the server, in seconds on the policy's clock
    ``prompt_tokens``   ``input_length``
    ``max_tokens``      ``max_tokens``
    ``extra``           ``extra``           the request's ``vllm_xargs``
    ``cache_salt``      ``cache_salt``      what keeps its prefix cache apart from others'; empty if it has none
    ``lora``            ``lora``            the name of its LoRA adapter; empty if it has none
    ``output_tokens``                       tokens of its answer so far
    ``computed_tokens``                     tokens that hold KV blocks; 0 while it waits
    ``preemptions``                         how often it was preempted
    ==================  ==================  ==========================================================================

    The same object in every step, from the request's arrival to its end: a policy may keep it, use it as a key, and
    write keys of its own into it. Its attributes cannot be written. Two views are equal only if they are one.
    """

    __slots__ = (
        "_progress",
        "arrival",
        "cache_salt",
        "extra",
        "lora",
        "max_tokens",
        "priority",
        "prompt_tokens",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        *,
        priority: int = 0,
        arrival: float = 0.0,
        prompt_tokens: int = 0,
        max_tokens: int = 0,
        extra: Mapping[str, object] | None = None,
        cache_salt: str = "",
        lora: str = "",
        progress: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        shared = {
            "request_id": request_id,
            "max_tokens": max_tokens,
            "extra": {} if extra is None else extra,
            "cache_salt": cache_salt,
            "lora": lora,
        }
        self._write(**shared, priority=priority, arrival=arrival, prompt_tokens=prompt_tokens, _progress=progress)
        super().__init__(**shared, arrival_time=arrival, input_length=prompt_tokens)
        # Policies read request.get("priority", default): a key that is always there would defeat the default.
        if priority:
            self["priority"] = priority

    request_id: str
    priority: int
    arrival: float
    prompt_tokens: int
    max_tokens: int
    extra: Mapping[str, object]
    cache_salt: str
    lora: str
    _progress: tuple[int, int, int]

    def _write(self, **attributes: object) -> None:
        for name, value in attributes.items():
            # Past __setattr__ below, which keeps policies from writing what vLLM decides.
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a request cannot be written; keep what is yours under a key: view[{name!r}]")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} of a request cannot be deleted")

    def __setstate__(self, state: tuple[None, Mapping[str, object]]) -> None:
        """Restore a copy's attributes, for the module ``copy``."""
        self._write(**state[1])

    @property
    def output_tokens(self) -> int:
        """Tokens of its answer so far."""
        return self._progress[0]

    @property
    def computed_tokens(self) -> int:
        """Tokens that hold KV blocks; 0 while it waits."""
        return self._progress[1]

    @property
    def preemptions(self) -> int:
        """The number of its preemptions."""
        return self._progress[2]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class KVState(dict[str, float]):
    """The KV cache before a step, by attribute or like a dictionary.

    free_blocks:  blocks that can be allocated, unused ones of the prefix cache included
    total_blocks: all blocks
    block_size:   tokens in a block
    usage:        the share that is in use, from 0 to 1
    """

    __slots__ = ("block_size", "free_blocks", "total_blocks", "usage")

    def __init__(self, free_blocks: int, total_blocks: int, block_size: int) -> None:
        self.free_blocks = free_blocks
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.usage = 1.0 - free_blocks / total_blocks if total_blocks else 0.0
        super().__init__(free_blocks=free_blocks, total_blocks=total_blocks, block_size=block_size, usage=self.usage)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A policy's decision for one step.

    prefill: waiting requests in the order in which they are to start; the others keep waiting
    decode:  running requests that go on: all but those of ``preempt``, and None says the same
    preempt: running requests whose KV blocks are taken, and which wait again
    """

    prefill: Collection[RequestView] = ()
    decode: Collection[RequestView] | None = None
    preempt: Collection[RequestView] = ()


class SchedulingPolicy(Item):
    """Sees everything and decides each step. Lives in engine core::

        class ShortestFirst(SchedulingPolicy):
            def schedule(self, waiting, running, kv_cache):
                return Schedule(prefill=sorted(waiting, key=lambda request: request.prompt_tokens))

    The answer may also be a dictionary with the keys ``prefill_requests``, ``decode_requests`` and
    ``preempt_requests``. Requests that ``prefill`` names are offered to vLLM in that order; how many of them start is
    vLLM's decision, by its limits on requests, tokens and blocks. What is not named is not offered in this step.

    A call costs at least a look at each waiting request, in every step: with thousands waiting, write an
    ``AdmissionQueue`` instead. A policy that raises, gives an answer that cannot be followed, or lets nothing start
    while nothing runs is put aside: requests go on in the order of their arrival, and ``vllm-graft status`` shows it as
    quarantined.
    """

    clock: Callable[[], float] = staticmethod(time.time)
    """The seconds on which arrivals are counted; the binding, or a test, sets it before the first step. Unlike
    ``time.time()`` it does not go back when the machine's date is set."""

    def schedule(
        self, waiting: list[RequestView], running: list[RequestView], kv_cache: KVState
    ) -> Schedule | Mapping[str, Collection[RequestView]]:
        """Return the schedule of this step; ``waiting`` is in the order of arrival."""
        raise NotImplementedError(f"{type(self).__name__} must implement schedule(waiting, running, kv_cache)")


SchedulerBase = SchedulingPolicy
"""The name under which the contract was first described."""
