"""The order of arrival: what takes over from a queue that has failed."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_graft.contracts import AdmissionQueue, WaitingHeap, WaitingRequest


class ByArrival(AdmissionQueue):
    """The order of arrival: what takes over from a queue that has failed."""

    def __init__(self, requests: Iterable[WaitingRequest]) -> None:
        super().__init__()
        self._heap = WaitingHeap()
        for request in requests:
            self.push(request)

    def push(self, request: WaitingRequest) -> None:
        """By arrival; of one moment in the order given."""
        self._heap.add(request.arrival, request)

    def peek(self) -> WaitingRequest:
        """The first to have arrived."""
        return self._heap.first()

    def pop(self) -> WaitingRequest:
        """Take it out."""
        return self._heap.take()

    def remove(self, request: WaitingRequest) -> None:
        """Gone."""
        self._heap.discard(request)
