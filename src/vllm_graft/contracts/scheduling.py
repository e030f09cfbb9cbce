"""The scheduling contract: a queue that decides which waiting request goes next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_graft.contracts.item import Item


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits to be admitted, as far as a queue needs to know it.

    priority:   smaller goes first, as vLLM's own ``priority`` means it; 0 where the client gave none
    arrival:    when it reached the server, in seconds on the queue's clock; never after the moment it was pushed
    extra:      the request's ``vllm_xargs``, where a client says who it is and what it wants
    cache_salt: what keeps its prefix cache apart from others'; empty where it has none
    lora:       the name of its LoRA adapter; empty where it has none
    """

    request_id: str
    priority: int
    arrival: float
    prompt_tokens: int
    max_tokens: int
    extra: Mapping[str, object] = field(default_factory=dict)
    cache_salt: str = ""
    lora: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is turned away, in words for its client, and after how many seconds another try makes sense."""

    reason: str
    retry_after: float = 0.0


class AdmissionQueue(Item):
    """Holds the waiting requests and says which goes next. Lives in engine core.

    Implement push, peek, pop and remove, each in O(log n): one iteration of the engine may cost a millisecond, with
    ten thousand waiting as with ten. ``WaitingHeap`` does most of it::

        class ShortestFirst(AdmissionQueue):
            def __init__(self, options=None):
                super().__init__(options)
                self.heap = WaitingHeap()

            def push(self, request):
                self.heap.add((request.prompt_tokens, request.arrival), request)

            def peek(self):
                return self.heap.first()

            def pop(self):
                return self.heap.take()

            def remove(self, request):
                self.heap.discard(request)

    The time is ``self.clock()``, never ``time.time()``: it does not go back, and it stands still from a peek to the pop
    that follows, so that a queue whose order depends on the time still pops the request it named.

    A queue that raises, or that names a request it was not given, is put aside: requests go on in the order of their
    arrival, and ``vllm-graft status`` shows it as quarantined.
    """

    clock: Callable[[], float] = staticmethod(time.time)
    """The seconds on which arrivals are counted; the binding, or a test, sets it before the first request."""

    def push(self, request: WaitingRequest) -> None:
        """A request arrived."""
        raise NotImplementedError(f"{type(self).__name__} must implement push(request)")

    def peek(self) -> WaitingRequest:
        """The request that goes next; it stays in the queue. Only called while the queue is not empty."""
        raise NotImplementedError(f"{type(self).__name__} must implement peek()")

    def pop(self) -> WaitingRequest:
        """Take out the request that ``peek`` named."""
        raise NotImplementedError(f"{type(self).__name__} must implement pop()")

    def remove(self, request: WaitingRequest) -> None:
        """A waiting request is gone: its client gave up."""
        raise NotImplementedError(f"{type(self).__name__} must implement remove(request)")

    def put_back(self, request: WaitingRequest) -> None:
        """A popped request waits again: the scheduler had to preempt it, or could not take it in this step.

        It is the object that was pushed, with its first arrival, so that an order by keys gives it its old place. A
        queue whose order is that of the calls overrides this and puts the request in front.
        """
        self.push(request)

    def served(self, request: WaitingRequest, tokens: int) -> None:
        """Optional: an admitted request was given so many tokens in a step, of its prompt or of its answer."""

    def ended(self, request: WaitingRequest) -> None:
        """Optional: a request that was pushed is finished or gone, and nothing more will be served to it."""

    def admit(self, request: WaitingRequest) -> Refusal | None:
        """Optional: why a request that arrives must be turned away; None to push it."""
        return None

    def rank(self, request: WaitingRequest) -> int:
        """Optional: the standing of a request that was just popped.

        When memory runs out, the running request with the greatest is preempted, and of several the newest. Where this
        is not overridden, the choice is vLLM's own.
        """
        return request.priority
