"""Tenants in the order of the tokens they were served, by weight; requests of a tenant have an order of their own.

Each tenant has a virtual counter: tokens served over its weight. The smallest goes next. A tenant that comes back after
a pause starts at the smallest counter of those that wait, so being away earns no credit.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, Final

from vllm_graft.contracts import WaitingHeap, WaitingRequest

_KEPT: Final = 1024


class TenantCounters:
    """The tokens that each tenant was served, over its weight."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.served: dict[str, float] = {}
        self.floor = 0.0
        self._weights = weights

    def charge(self, tenant: str, tokens: float) -> None:
        """Charge tokens to a tenant; a negative number is a refund."""
        if tenant in self._weights:
            tokens /= self._weights[tenant]
        served = self.served
        served[tenant] = served.get(tenant, 0.0) + tokens

    def lift(self, tenant: str, lowest: float | None) -> None:
        """Raise the counter of a tenant that waits again to ``lowest``, the smallest of those that wait."""
        self.floor = max(self.floor, lowest) if lowest is not None else self.floor
        floor = self.floor if lowest is None else lowest
        self.served[tenant] = max(self.served.get(tenant, 0.0), floor)

    def forget(self, waiting: Mapping[str, int]) -> None:
        """Drop half of the tenants without waiting requests, the least served, once there are too many of them.

        Names are clients' words, and endless. A dropped tenant starts at the others' counters when it comes back, to
        which most would be lifted anyway.
        """
        if len(self.served) <= 2 * len(waiting) + _KEPT:
            return
        idle = sorted((at, name) for name, at in self.served.items() if name not in waiting)
        for at, name in idle[: len(idle) // 2 + 1]:
            del self.served[name]
            self.floor = max(self.floor, at)


class TenantHeap:
    """Waiting requests by tenant, and the tenants by their counters. All in O(log n).

    Counters grow while their tenants wait: an entry whose counter has grown is corrected when it comes up. A counter
    that was lowered must be reported by ``lowered``.
    """

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        self._requests: dict[str, WaitingHeap] = {}
        self._order: list[tuple[float, str]] = []
        self._entered: dict[str, float] = {}

    def add(self, tenant: str, key: Any, request: WaitingRequest) -> None:
        """Add a request of a tenant, which has a counter by now, under a key."""
        if tenant not in self._requests:
            self._requests[tenant] = WaitingHeap()
            self._enter(tenant)
        self._requests[tenant].add(key, request)

    def discard(self, tenant: str, request: WaitingRequest) -> None:
        """Remove a request."""
        heap = self._requests.get(tenant)
        if heap is not None and heap.discard(request) and not heap:
            del self._requests[tenant], self._entered[tenant]

    def lowered(self, tenant: str) -> None:
        """Correct the place of a tenant whose counter was lowered."""
        if tenant in self._requests:
            self._enter(tenant)

    def first(self) -> WaitingRequest:
        """Return the first request of the tenant that was served least."""
        return self._requests[self._least()[1]].first()

    def lowest(self) -> float | None:
        """Return the smallest counter; None if no tenant waits."""
        return self._least()[0] if self._requests else None

    def __len__(self) -> int:
        """Return the number of tenants that wait."""
        return len(self._requests)

    def _enter(self, tenant: str) -> None:
        counter = self._counters.served[tenant]
        self._entered[tenant] = counter
        heapq.heappush(self._order, (counter, tenant))
        if len(self._order) > 2 * len(self._entered) + 64:
            self._order = [(at, name) for name, at in self._entered.items()]
            heapq.heapify(self._order)

    def _least(self) -> tuple[float, str]:
        order, entered, served = self._order, self._entered, self._counters.served
        while True:
            at, tenant = order[0]
            if entered.get(tenant) != at:
                heapq.heappop(order)
            elif served[tenant] != at:
                heapq.heappop(order)
                self._enter(tenant)
                order = self._order
            else:
                return at, tenant
