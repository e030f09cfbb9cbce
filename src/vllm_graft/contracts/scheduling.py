"""The scheduling contract: a queue that decides which waiting request goes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_graft.contracts.item import Item


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits to be admitted, as far as a queue needs to know it.

    priority: smaller goes first, as vLLM's own ``priority`` means it
    arrival:  seconds since the epoch, on the front end's clock
    extra:    the request's ``vllm_xargs``, where a client says who it is and what it wants
    """

    request_id: str
    priority: int
    arrival: float
    prompt_tokens: int
    max_tokens: int
    extra: Mapping[str, object] = field(default_factory=dict)


class AdmissionQueue(Item):
    """Holds the waiting requests and says which goes next. Lives in engine core.

    Implement the four methods below, each in O(log n): one iteration of the engine may cost a millisecond, with ten
    thousand waiting as with ten. A request that the scheduler hands back (preempted, or skipped in this step) is
    kept by the binding and goes first; the queue is not asked again. ::

        class ShortestFirst(AdmissionQueue):
            def __init__(self, options=None):
                super().__init__(options)
                self.heap, self.gone = [], set()

            def push(self, request):
                heapq.heappush(self.heap, (request.prompt_tokens, request.arrival, request.request_id, request))

            def peek(self):
                while self.heap[0][2] in self.gone:
                    self.gone.discard(heapq.heappop(self.heap)[2])
                return self.heap[0][3]

            def pop(self):
                request = self.peek()
                heapq.heappop(self.heap)
                return request

            def remove(self, request):
                self.gone.add(request.request_id)

    A queue that raises, or that names a request it was not given, is put aside: requests go on in the order of their
    arrival, and ``vllm-graft status`` shows it as quarantined.
    """

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
