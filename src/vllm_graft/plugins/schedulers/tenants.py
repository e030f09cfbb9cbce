"""The tenant of a request, and the order of tenants by the tokens they were served.

Each tenant has a virtual counter: tokens served over its weight. The smallest goes next. A tenant that comes back after
a pause starts at the smallest counter of those that wait, so being away earns no credit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2s
from typing import Any, Final

from vllm_graft.contracts import OptionError, WaitingHeap, WaitingRequest, nearest

MAX_TENANT_CHARS: Final = 128
"""Names are truncated to this length: they are clients' words, and are kept."""

_MOST_BITS: Final = 256
"""Longer integers are not names: Python refuses to convert those of more than 4300 digits to text."""

_KEPT: Final = 1024
# vLLM puts the endpoint before an X-Request-Id, and a random part behind it.
_ENDPOINTS: Final = ("chatcmpl-", "cmpl-", "resp_", "resp-")


def tenant_reader(sources: Sequence[str], key: str, item: str) -> Callable[[WaitingRequest], str]:
    """Return a function that reads a request's tenant from the first source that has one, else the empty name.

    Sources: ``xargs`` (the value of ``key`` among its ``vllm_xargs``, text or a number), ``cache_salt``, ``lora``, and
    ``request_id`` (the part before the first hyphen of an ``X-Request-Id`` that the gateway sets).
    """
    known: Mapping[str, Callable[[WaitingRequest], object]] = {
        "xargs": lambda request: request.extra.get(key),
        "cache_salt": lambda request: request.cache_salt,
        "lora": lambda request: request.lora,
        "request_id": _prefix,
    }
    for source in sources:
        if source not in known:
            what = f"names {source!r}, which a tenant cannot be read from{nearest(source, known)}"
            raise OptionError(what, option="tenant_from", item=item, fix=f"use {list(known)}")
    if not sources:
        what = "names no source of tenants"
        raise OptionError(what, option="tenant_from", item=item, fix=f"name some of {list(known)}")
    readers = [known[source] for source in sources]

    def tenant(request: WaitingRequest) -> str:
        for read in readers:
            name = _name(read(request))
            if name:
                return name
        return ""

    return tenant


def display_name(tenant: str, request: WaitingRequest) -> str:
    """Return the name of a tenant in status and metrics.

    A cache salt is a secret that keeps others from guessing prompts, so it shows as a hash.
    """
    if not tenant or tenant != request.cache_salt[:MAX_TENANT_CHARS]:
        return tenant
    return f"salt-{blake2s(request.cache_salt.encode('utf-8', 'replace'), digest_size=6).hexdigest()}"


def parse_weights(rows: Sequence[str], item: str) -> dict[str, float]:
    """Parse weights written as ``tenant=weight``."""
    weights: dict[str, float] = {}
    for row in rows:
        name, equals, text = row.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not equals or not name or not 1e-6 <= weight <= 1e6:
            what = f"holds {row!r}, which is not a tenant and its weight"
            raise OptionError(what, option="weights", item=item, fix='write "tenant=2", the weight above 0')
        if name in weights:
            what = f"gives the tenant {name!r} two weights"
            raise OptionError(what, option="weights", item=item, fix="remove one of them")
        weights[name] = weight
    return weights


def _name(value: object) -> str:
    """Return a tenant's name as a client wrote it, text or a number; empty for anything else.

    Converting a list nested a thousand times to text would be a RecursionError, with which one client's request would
    have the scheduler put aside.
    """
    if isinstance(value, str):
        return value[:MAX_TENANT_CHARS]
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= _MOST_BITS):
        return str(value)[:MAX_TENANT_CHARS]
    return ""


def _prefix(request: WaitingRequest) -> str:
    name = request.request_id
    for endpoint in _ENDPOINTS:
        name = name.removeprefix(endpoint)
    prefix, hyphen, _ = name.partition("-")
    return prefix if hyphen else ""


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
    that was lowered must be reported by ``reposition``.
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

    def reposition(self, tenant: str) -> None:
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
        # Of equal counters the name decides, so that a run in virtual time repeats.
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
