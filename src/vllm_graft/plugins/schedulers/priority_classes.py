"""The class of a request, from its priority: 1 goes first."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_graft.contracts import Item, Refusal, WaitingRequest
from vllm_graft.plugins.schedulers.options import integer


@dataclass(frozen=True, slots=True)
class PriorityClasses:
    """Classes 1 to ``number``; ``default`` is the class of vLLM's priority 0, that of clients that name none.

    Negative priorities are of that class too: vLLM itself lowers the priority by one in later turns of a conversation
    with tools.
    """

    number: int
    default: int

    @classmethod
    def of_options(cls, item: Item, who: str) -> PriorityClasses:
        """Read the options ``classes`` and ``default_class``."""
        number = integer(item, who, "classes", 1, 1000)
        return cls(number, integer(item, who, "default_class", 1, number))

    def of(self, request: WaitingRequest) -> int:
        """Return the class of a request."""
        return min(request.priority, self.number) if request.priority > 0 else self.default

    def refusal(self, request: WaitingRequest) -> Refusal | None:
        """Refuse a priority beyond the last class: it is a mistake of the client's."""
        if request.priority <= self.number:
            return None
        return Refusal(f"priority {request.priority} is not one of 1 (first) to {self.number} (last)", status=400)
