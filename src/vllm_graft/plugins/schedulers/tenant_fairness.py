"""``tenant-fairness``: each tenant its share of the tokens, however many requests it sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from vllm_graft.contracts import AdmissionQueue, Load, OptionValue, Refusal, WaitingRequest
from vllm_graft.plugins.schedulers.options import number
from vllm_graft.plugins.schedulers.priority_classes import PriorityClasses
from vllm_graft.plugins.schedulers.tenants import TenantCounters, TenantHeap, display_name, parse_weights, tenant_reader
from vllm_graft.plugins.schedulers.urgent_lane import UrgentLane

_NAME: Final = "tenant-fairness"


@dataclass(slots=True)
class Account:
    """The account of an admitted request: its tenant, and the tokens of its prompt that were charged in advance."""

    tenant: str
    weight: float
    advance: int


class TenantFairness(AdmissionQueue):
    """The tenant that was served least for its weight goes next, with its first request by class and arrival.

    A prompt is charged when its request is admitted, so that many admissions in one step are shared too; what the
    prefix cache had, or was never computed, is refunded. With ``classes_first``, tenants share only within the first
    class that waits. With ``max_wait_sec`` above 0 there is an urgent lane over all tenants, as in
    ``priority-fairness``.
    """

    options: ClassVar[Mapping[str, OptionValue]] = {
        "tenant_from": ["xargs", "cache_salt", "lora"],
        "tenant_key": "tenant",
        "weights": [],
        "known_only": False,
        "classes": 5,
        "default_class": 3,
        "classes_first": False,
        "max_wait_sec": 0.0,
        "urgent_after": 0.5,
        "urgent_share": 0.5,
    }

    def __init__(self, options: Mapping[str, OptionValue] | None = None) -> None:
        super().__init__(options)
        self._classes = PriorityClasses.of_options(self, _NAME)
        self._tenant = tenant_reader(_names(self, "tenant_from"), str(self.option("tenant_key")), _NAME)
        self._weights = parse_weights(_names(self, "weights"), _NAME)
        self._known_only = bool(self.option("known_only"))
        self._classes_first = bool(self.option("classes_first"))
        wait = number(self, _NAME, "max_wait_sec", 0.0, 86_400.0)
        after = number(self, _NAME, "urgent_after", 0.0, 1.0)
        share = number(self, _NAME, "urgent_share", 0.01, 1.0)
        self._urgent = UrgentLane(after * wait, share) if wait else None
        self._counters = TenantCounters(self._weights)
        self._groups: dict[int, TenantHeap] = {}
        self._waiting: dict[str, int] = {}
        self._accounts: dict[str, Account] = {}

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse what the constructor refuses."""
        cls(options)

    def labels(self, request: WaitingRequest) -> Mapping[str, str]:
        """Label a request by its class and tenant."""
        return {"class": str(self._classes.of(request)), "tenant": display_name(self._tenant(request), request)}

    def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
        """Refuse a priority beyond the last class, and with ``known_only`` a tenant without a weight."""
        if self._known_only and self._tenant(request) not in self._weights:
            return Refusal(f"the tenant {self._tenant(request)!r} is not known here", status=403)
        return self._classes.refusal(request)

    def push(self, request: WaitingRequest) -> None:
        """Add a request to its tenant's; one that is pushed while it runs is the next turn of a session."""
        self._refund(request)
        tenant, group = self._tenant(request), self._group(request)
        heap = self._groups.get(group)
        if heap is None:
            heap = self._groups[group] = TenantHeap(self._counters)
        before = self._waiting.get(tenant, 0)
        self._waiting[tenant] = before + 1
        if not before:
            self._counters.lift(tenant, heap.lowest())
            self._counters.forget(self._waiting)
        heap.add(tenant, (self._classes.of(request), request.arrival), request)
        if self._urgent is not None:
            self._urgent.add(request)

    def peek(self) -> WaitingRequest:
        """Return the oldest if it is the urgent lane's turn, else the first of the tenant that was served least."""
        return self._due() or self._groups[min(self._groups)].first()

    def pop(self) -> WaitingRequest:
        """Take the next request out, and charge its prompt in advance."""
        due = self._due()
        request = due or self._groups[min(self._groups)].first()
        self._take(request)
        if self._urgent is not None:
            self._urgent.record_admission(request, "class" if due is None else "urgent", self.clock())
        tenant = self._tenant(request)
        # vLLM may admit dozens of requests in one step, before any of their tokens is reported.
        self._counters.charge(tenant, request.prompt_tokens)
        self._accounts[request.request_id] = Account(tenant, self._weights.get(tenant, 1.0), request.prompt_tokens)
        return request

    def put_back(self, request: WaitingRequest) -> None:
        """Put a request back, and refund what was charged and not served."""
        self._refund(request)
        if self._urgent is not None:
            self._urgent.undo_admission(request)
        self.push(request)

    def remove(self, request: WaitingRequest) -> None:
        """Remove a request."""
        self._take(request)
        if self._urgent is not None:
            self._urgent.discard(request)

    def served(self, request: WaitingRequest, tokens: int) -> None:
        """Charge served tokens: against the advance first, then to the tenant."""
        account = self._accounts.get(request.request_id)
        if account is None:
            return
        if account.advance:
            used = min(account.advance, tokens)
            account.advance -= used
            tokens -= used
        # As TenantCounters.charge, without the call: up to a sixteenth of the running requests come here in every step.
        served = self._counters.served
        try:
            served[account.tenant] += tokens / account.weight
        except KeyError:
            served[account.tenant] = tokens / account.weight

    def ended(self, request: WaitingRequest) -> None:
        """Refund what was charged and not served."""
        self._refund(request)
        if self._urgent is not None:
            self._urgent.forget(request)

    def _due(self) -> WaitingRequest | None:
        return self._urgent.due() if self._urgent is not None and self._urgent.any(self.clock()) else None

    def _group(self, request: WaitingRequest) -> int:
        return self._classes.of(request) if self._classes_first else 0

    def _take(self, request: WaitingRequest) -> None:
        tenant, group = self._tenant(request), self._group(request)
        heap = self._groups[group]
        heap.discard(tenant, request)
        if not heap:
            del self._groups[group]
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._counters.floor = max(self._counters.floor, self._counters.served[tenant])

    def _refund(self, request: WaitingRequest) -> None:
        account = self._accounts.pop(request.request_id, None)
        if account is not None and account.advance:
            self._counters.charge(account.tenant, -account.advance)
            for heap in self._groups.values():
                heap.reposition(account.tenant)


def _names(queue: TenantFairness, option: str) -> list[str]:
    value = queue.option(option)
    return [str(each) for each in value] if isinstance(value, list) else []
