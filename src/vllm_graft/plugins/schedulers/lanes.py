"""The urgent lane: requests that have waited for a while, the oldest first, with a share of the admissions."""

from __future__ import annotations

from typing import Final

from vllm_graft.contracts import WaitingHeap, WaitingRequest

BORROWED: Final = 4
"""How many admissions the first class may take before their turn."""


class UrgentLane:
    """Requests become urgent ``after`` seconds; while some are, at least ``share`` of the admissions are theirs.

    The share is kept by a debt: an urgent admission takes on ``(1 - share) / share`` ordinary ones, and the next urgent
    one comes when they are paid. The first class need not wait for its turn: it goes before the urgent ones, up to
    ``BORROWED`` admissions ahead of what ordinary requests may have. So m urgent requests are through after at most
    ``(m + 1) / share + BORROWED`` admissions, and ordinary ones keep the rest however many are urgent.

    An admission that is taken back counts for nothing: vLLM takes out requests that wait for a grammar, and puts them
    back, in every step.
    """

    def __init__(self, after: float, share: float) -> None:
        self._after = after
        self._price = (1.0 - share) / share
        self._debt = 0.0
        self._moved: dict[str, float] = {}
        self._by_age = WaitingHeap()

    def add(self, request: WaitingRequest) -> None:
        """A request waits."""
        self._by_age.add(request.arrival, request)

    def discard(self, request: WaitingRequest) -> None:
        """It waits no longer."""
        self._by_age.discard(request)

    def due(self, now: float, *, first_class: bool = False) -> WaitingRequest | None:
        """The oldest request, where it is urgent and the lane's turn has come; ``first_class`` waits beside it."""
        if self._debt >= 1.0 or not self.any(now) or (first_class and self._may_borrow()):
            return None
        return self._by_age.first()

    def admitted(self, request: WaitingRequest, now: float, *, urgent: bool) -> None:
        """A request is taken out, through this lane or not."""
        before = self._debt
        if urgent:
            self._debt += self._price
        elif self.any(now):
            self._debt -= 1.0
        elif self._debt > 0.0:
            self._debt = max(0.0, self._debt - 1.0)
        self.discard(request)
        if self._debt != before:
            self._moved[request.request_id] = self._debt - before

    def any(self, now: float) -> bool:
        """Whether some request is urgent."""
        return bool(self._by_age) and self._by_age.first_key() + self._after <= now

    def _may_borrow(self) -> bool:
        return self._price > 0.0 and self._debt > -BORROWED

    def returned(self, request: WaitingRequest) -> None:
        """It was taken out, and waits again."""
        self._debt -= self._moved.pop(request.request_id, 0.0)

    def ended(self, request: WaitingRequest) -> None:
        """It will not come back."""
        self._moved.pop(request.request_id, None)
