"""A heap of waiting requests from which any can be taken out at once: what most admission queues are made of."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Final

from vllm_graft.contracts.scheduling import WaitingRequest

# Below this many stale entries, rebuilding the heap costs more than it saves.
_SLACK: Final = 64


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
        """Return the request with the smallest key; IndexError where there is none."""
        return self._top()[2]

    def first_key(self) -> Any:
        """Return the smallest key; IndexError where there is none."""
        return self._top()[0]

    def take(self) -> WaitingRequest:
        """Take out the request with the smallest key."""
        request = self._top()[2]
        heapq.heappop(self._entries)
        del self._live[request.request_id]
        return request

    def discard(self, request: WaitingRequest) -> bool:
        """Take out a request; return False where it is not here."""
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
