"""The scheduling contract: a queue that decides which waiting request goes next, and a heap to make one of."""

from __future__ import annotations

import heapq
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_graft.contracts.item import Item

# Below this many stale entries, rebuilding the heap costs more than it saves.
_SLACK: Final = 64


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits to be admitted, as far as a queue needs to know it.

    priority:   smaller goes first, as vLLM's own ``priority`` means it; 0 if the client gave none
    arrival:    when it reached the server, in seconds on the queue's clock; never after the moment it was pushed
    extra:      the request's ``vllm_xargs``, by which a client names its tenant and its wishes
    cache_salt: what keeps its prefix cache apart from others'; empty if it has none
    lora:       the name of its LoRA adapter; empty if it has none
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
    """Why a request is refused, in words for its client.

    retry_after: the seconds after which another try makes sense; 0 if none does
    status:      the HTTP status of the response: 429 for too many requests, 503 for a server that is full, 400 for a
                 request that is invalid
    """

    reason: str
    retry_after: float = 0.0
    status: int = 429

    def __post_init__(self) -> None:
        """Validate the fields here, in the author's call, and not while the client is answered."""
        if not isinstance(self.reason, str):
            raise TypeError(f"the reason of a refusal must be a string, but is {self.reason!r}")
        if not isinstance(self.retry_after, int | float) or not 0 <= self.retry_after < math.inf:
            raise ValueError(f"retry_after must be a number of seconds, but is {self.retry_after!r}")
        if not isinstance(self.status, int) or not 400 <= self.status <= 599:
            raise ValueError(f"the status of a refusal must be from 400 to 599, but is {self.status!r}")


@dataclass(frozen=True, slots=True)
class Load:
    """The load of an engine.

    waiting: requests that wait for their turn, not for a grammar, an adapter's slot or KV blocks of another engine
    running: requests that were admitted and have not ended
    rate:    admissions per second while others waited, over the last seconds of waiting; 0 while none waits or it is
             unknown
    """

    waiting: int = 0
    running: int = 0
    rate: float = 0.0

    @property
    def wait(self) -> float:
        """The seconds that a new request would wait if all went in order; 0 while unknown."""
        return self.waiting / self.rate if self.rate > 0 else 0.0

    @classmethod
    def combine(cls, loads: Sequence[Load]) -> Load:
        """Combine the loads of a server's engines: no wait while one has room, the mean for unknown rates."""
        waiting, running = sum(load.waiting for load in loads), sum(load.running for load in loads)
        known = [load.rate for load in loads if load.rate > 0]
        # vLLM's front end sends a request to the least busy engine, so one without a queue takes it at once.
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
    """The number of further requests that can run; set before each ``ready``, ``peek`` and ``pop``."""

    def check_slots(self, slots: int) -> None:
        """Optional: check the options against the number of requests that the engine runs at a time; ConfigError."""

    def push(self, request: WaitingRequest) -> None:
        """Add a request that arrived."""
        raise NotImplementedError(f"{type(self).__name__} must implement push(request)")

    def peek(self) -> WaitingRequest:
        """Return the request that goes next; it stays in the queue. Only called while the queue is not empty."""
        raise NotImplementedError(f"{type(self).__name__} must implement peek()")

    def pop(self) -> WaitingRequest:
        """Take out the request that ``peek`` named."""
        raise NotImplementedError(f"{type(self).__name__} must implement pop()")

    def remove(self, request: WaitingRequest) -> None:
        """Remove a waiting request whose client gave up."""
        raise NotImplementedError(f"{type(self).__name__} must implement remove(request)")

    def put_back(self, request: WaitingRequest) -> None:
        """Take back a popped request: the scheduler had to preempt it, or could not take it in this step.

        It is the object that was pushed, with its first arrival, so that an order by keys gives it its old place. A
        queue whose order is that of the calls overrides this and puts the request in front.
        """
        self.push(request)

    def served(self, request: WaitingRequest, tokens: int) -> None:
        """Optional: count the tokens, of prompt and output, that a running request got since the last call.

        Each running request is reported once per sixteen steps, and before it is put back or has ended.
        """

    def ended(self, request: WaitingRequest) -> None:
        """Optional: forget a request that has finished or was aborted."""

    def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
        """Optional: return why a request that arrives is refused; None to push it.

        Called first in each API server, before vLLM reads the request, where a refusal is an HTTP response. The queue
        there is empty, and ``prompt_tokens`` is 0. Called again in engine core, where a refused request ends with the
        reason. So decide by the arguments and options alone.
        """
        return None

    def ready(self) -> bool:
        """Optional: return whether a request may take one of the free slots; False holds all back in this step."""
        return True

    def labels(self, request: WaitingRequest) -> Mapping[str, str]:
        """Optional: return the labels by which a request is counted in status and metrics, such as its class."""
        return {}

    def rank(self, request: WaitingRequest) -> int:
        """Optional: return the rank of a request that was just popped.

        When memory runs out, the running request with the greatest rank is preempted, the newest of several. Without
        this method the choice is vLLM's own.
        """
        return request.priority


class WaitingHeap:
    """Requests in the order of their keys; those of one key in the order they were added. All in O(log n).

    A request that is taken out stays in the heap as a stale entry until it comes up, or until more than half of the
    entries are stale: taking out costs O(1), over many calls, wherever the request is.
    """

    __slots__ = ("_entries", "_live", "_number")

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, WaitingRequest]] = []
        self._live: dict[str, int] = {}
        self._number = 0

    def add(self, key: Any, request: WaitingRequest) -> None:
        """Add a request under a key, or give it a new one. Keys must compare with each other."""
        self._number += 1
        self._live[request.request_id] = self._number
        heapq.heappush(self._entries, (key, self._number, request))
        self._tidy()

    def first(self) -> WaitingRequest:
        """Return the request with the smallest key; IndexError if there is none."""
        return self._top()[2]

    def first_key(self) -> Any:
        """Return the smallest key; IndexError if there is none."""
        return self._top()[0]

    def take(self) -> WaitingRequest:
        """Take out the request with the smallest key."""
        request = self._top()[2]
        heapq.heappop(self._entries)
        del self._live[request.request_id]
        return request

    def discard(self, request: WaitingRequest) -> bool:
        """Take out a request; return False if it is not here."""
        if self._live.pop(request.request_id, None) is None:
            return False
        self._tidy()
        return True

    def __contains__(self, request: WaitingRequest) -> bool:
        return request.request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[WaitingRequest]:
        """Return the requests in no particular order."""
        return (request for _, number, request in self._entries if self._live.get(request.request_id) == number)

    def _top(self) -> tuple[Any, int, WaitingRequest]:
        entries, live = self._entries, self._live
        while live.get(entries[0][2].request_id) != entries[0][1]:
            heapq.heappop(entries)
        return entries[0]

    def _tidy(self) -> None:
        if len(self._entries) > 2 * len(self._live) + _SLACK:
            self._entries = [entry for entry in self._entries if self._live.get(entry[2].request_id) == entry[1]]
            heapq.heapify(self._entries)
