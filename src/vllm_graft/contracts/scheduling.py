"""The scheduling contract: a queue that decides which waiting request goes next."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
    """Why a request is turned away, in words for its client.

    retry_after: after how many seconds another try makes sense; 0 where none does
    status:      what an API server answers: 429 for too much of something, 503 for a server that takes nobody,
                 400 for a request that is wrong
    """

    reason: str
    retry_after: float = 0.0
    status: int = 429

    def __post_init__(self) -> None:
        """Refuse what no client could be told, where its author will hear of it."""
        if not isinstance(self.reason, str):
            raise TypeError(f"the reason of a refusal is text, and not {self.reason!r}")
        if not isinstance(self.retry_after, int | float) or not 0 <= self.retry_after < math.inf:
            raise ValueError(f"retry_after is a number of seconds, and not {self.retry_after!r}")
        if not isinstance(self.status, int) or not 400 <= self.status <= 599:
            raise ValueError(f"the status of a refusal is one from 400 to 599, and not {self.status!r}")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an engine is.

    waiting: requests that wait for their turn; not those that wait for a grammar, an adapter's slot or blocks from afar
    running: requests that were admitted and have not ended
    rate:    admissions per second while others waited, over the last seconds of waiting; 0 while nobody waits, and
             while it is not known
    """

    waiting: int = 0
    running: int = 0
    rate: float = 0.0

    @property
    def wait(self) -> float:
        """How long a request that arrives now would wait if all went in order, in seconds; 0 while not known."""
        return self.waiting / self.rate if self.rate > 0 else 0.0

    @classmethod
    def together(cls, loads: Sequence[Load]) -> Load:
        """That of all engines of a server: while one of them has room, nobody waits long; unknown rates are guessed."""
        waiting, running = sum(load.waiting for load in loads), sum(load.running for load in loads)
        known = [load.rate for load in loads if load.rate > 0]
        if not known or any(load.waiting == 0 for load in loads):
            return cls(waiting, running, 0.0)
        return cls(waiting, running, sum(known) / len(known) * len(loads))


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

    free_slots: int = sys.maxsize
    """How many more requests can run; set before each ``ready``, ``peek`` and ``pop``."""

    def limited_to(self, slots: int) -> None:
        """Optional: the engine runs so many requests at once. Raise ConfigError where the options do not fit that."""

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
        """Optional: an admitted request was given so many tokens, of its prompt or of its answer, since the last time.

        Each running request is told of within sixteen steps, and the rest before it is put back or has ended.
        """

    def ended(self, request: WaitingRequest) -> None:
        """Optional: a request that was pushed is finished or gone, and nothing more will be served to it."""

    def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
        """Optional: why a request that arrives must be turned away; None to push it.

        Asked in each API server before the request is read any further, where a refusal is an HTTP answer, of a queue
        that holds nothing and of a request whose prompt is not counted yet (``prompt_tokens`` is 0); and again in
        engine core, where a refused request ends with its reason. So it goes by its arguments and options alone.
        """
        return None

    def ready(self) -> bool:
        """Optional: whether ``peek`` has a request for the slots that are free. False holds all of them back."""
        return True

    def labels(self, request: WaitingRequest) -> Mapping[str, str]:
        """Optional: what a request counts as in status and metrics, such as its class and its tenant."""
        return {}

    def rank(self, request: WaitingRequest) -> int:
        """Optional: the standing of a request that was just popped.

        When memory runs out, the running request with the greatest is preempted, and of several the newest. Where this
        is not overridden, the choice is vLLM's own.
        """
        return request.priority
