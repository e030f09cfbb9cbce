"""The class of a request, from its priority: 1 goes first."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_graft.contracts import Item, Refusal, WaitingRequest
from vllm_graft.plugins.schedulers.limits import count


@dataclass(frozen=True, slots=True)
class Classes:
    """Classes 1 to ``number``. vLLM's priority 0, which clients that say nothing have, is the class ``default``.

    So is anything below 0: vLLM itself lowers the priority by one in later turns of a conversation with tools.
    """

    number: int
    default: int

    @classmethod
    def of_options(cls, item: Item, who: str) -> Classes:
        """From the options ``classes`` and ``default_class``."""
        number = count(item, who, "classes", 1, 1000)
        return cls(number, count(item, who, "default_class", 1, number))

    def of(self, request: WaitingRequest) -> int:
        """The class of a request."""
        return min(request.priority, self.number) if request.priority > 0 else self.default

    def refusal(self, request: WaitingRequest) -> Refusal | None:
        """Why a request's priority cannot be meant, where it cannot."""
        if request.priority <= self.number:
            return None
        return Refusal(f"priority {request.priority} is not one of 1 (first) to {self.number} (last)", status=400)
