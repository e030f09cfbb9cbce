"""Tenants in the order of what they were served, each by its weight; inside a tenant requests have their own order.

A virtual counter per tenant: tokens served over its weight. The tenant with the smallest goes next. One that comes back
after a pause begins where the least served of those that wait is, so that nobody saves up a claim by being away.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, Final

from vllm_graft.contracts import WaitingHeap, WaitingRequest

_KEPT: Final = 1024


class Counters:
    """What each tenant was served, over its weight."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.served: dict[str, float] = {}
        self.floor = 0.0
        self._weights = weights

    def charge(self, tenant: str, tokens: float) -> None:
        """So many tokens were served to a tenant; a negative number gives some back."""
        if tenant in self._weights:
            tokens /= self._weights[tenant]
        served = self.served
        served[tenant] = served.get(tenant, 0.0) + tokens

    def lift(self, tenant: str, lowest: float | None) -> None:
        """A tenant that had nothing waiting has again; ``lowest`` is the counter of the least served who wait."""
        self.floor = max(self.floor, lowest) if lowest is not None else self.floor
        floor = self.floor if lowest is None else lowest
        self.served[tenant] = max(self.served.get(tenant, 0.0), floor)

    def forget(self, waiting: Mapping[str, int]) -> None:
        """Now and then drop half of the tenants that have nothing waiting, the least served: names are clients' words.

        Coming back they begin where the others are, which is where most of them would be lifted to anyway.
        """
        if len(self.served) <= 2 * len(waiting) + _KEPT:
            return
        idle = sorted((at, name) for name, at in self.served.items() if name not in waiting)
        for at, name in idle[: len(idle) // 2 + 1]:
            del self.served[name]
            self.floor = max(self.floor, at)


class TenantHeap:
    """Waiting requests by tenant, and the tenants by their counters. All in O(log n).

    Counters grow while their tenants wait here: an entry whose counter has grown is put right when it comes up. One
    that was lowered must be told.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._requests: dict[str, WaitingHeap] = {}
        self._order: list[tuple[float, str]] = []
        self._entered: dict[str, float] = {}

    def add(self, tenant: str, key: Any, request: WaitingRequest) -> None:
        """Add a tenant's request under a key; the tenant has a counter by now."""
        if tenant not in self._requests:
            self._requests[tenant] = WaitingHeap()
            self._enter(tenant)
        self._requests[tenant].add(key, request)

    def discard(self, tenant: str, request: WaitingRequest) -> None:
        """Take out a request."""
        heap = self._requests.get(tenant)
        if heap is not None and heap.discard(request) and not heap:
            del self._requests[tenant], self._entered[tenant]

    def lowered(self, tenant: str) -> None:
        """A tenant's counter has become smaller."""
        if tenant in self._requests:
            self._enter(tenant)

    def first(self) -> WaitingRequest:
        """The first request of the tenant that was served least."""
        return self._requests[self._least()[1]].first()

    def lowest(self) -> float | None:
        """The counter of the tenant that was served least; None where nobody waits."""
        return self._least()[0] if self._requests else None

    def __len__(self) -> int:
        """How many tenants wait."""
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
