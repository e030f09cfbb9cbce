"""The urgent lane: requests that have waited too long, the oldest first, with a share of the admissions."""

from __future__ import annotations

from typing import Final, Literal

from vllm_graft.contracts import WaitingHeap, WaitingRequest

AdmissionWay = Literal["urgent", "first", "class", "reserved"]
"""The way a request is admitted: as an urgent one, as one of the first class before urgent ones, by class and age, or
into a reserved slot."""

AHEAD: Final = 8
"""The most admissions that the first class may be ahead of all others while requests are urgent."""


class UrgentLane:
    """Requests become urgent after ``after`` seconds, and share the admissions with all others from then on.

    The first class goes before all, as long as it has no more than every second admission, and ``AHEAD`` more at once.
    Of the rest, at least ``share`` goes to urgent requests: an urgent admission owes ``(1 - share) / share`` ordinary
    ones, and the next urgent one comes when that debt is paid. So m urgent requests are admitted within ``m / share +
    1`` admissions outside the first class, and in any case within ``2 * (m / share + 1) + AHEAD``.

    An admission that is undone does not count: in every step, vLLM pops requests that wait for a grammar and puts them
    back.
    """

    def __init__(self, after: float, share: float) -> None:
        self._after = after
        self._price = (1.0 - share) / share
        self._debt = 0.0
        self._ahead = 0
        self._moved: dict[str, tuple[float, int]] = {}
        self._by_age = WaitingHeap()

    def add(self, request: WaitingRequest) -> None:
        """Add a waiting request."""
        self._by_age.add(request.arrival, request)

    def discard(self, request: WaitingRequest) -> None:
        """Remove a request that no longer waits."""
        self._by_age.discard(request)

    def any(self, now: float) -> bool:
        """Return whether some request is urgent."""
        return bool(self._by_age) and self._by_age.first_key() + self._after <= now

    def first_class_goes(self) -> bool:
        """Return whether the first class may go before urgent requests."""
        return self._ahead < AHEAD

    def due(self) -> WaitingRequest | None:
        """Return the oldest request if it is the turn of urgent ones; only called while there are some."""
        return self._by_age.first() if self._debt < 1.0 else None

    def record_admission(self, request: WaitingRequest, way: AdmissionWay, now: float) -> None:
        """Account for a request that is admitted."""
        debt, ahead, some = self._debt, self._ahead, self.any(now)
        if way != "reserved":
            self._ahead = ahead + 1 if way == "first" else max(0, ahead - 1)
        if way == "urgent":
            self._debt += self._price
        elif way == "class":
            self._debt = debt - 1.0 if some else max(min(debt, 0.0), debt - 1.0)
        self.discard(request)
        if (self._debt, self._ahead) != (debt, ahead):
            self._moved[request.request_id] = (self._debt - debt, self._ahead - ahead)

    def undo_admission(self, request: WaitingRequest) -> None:
        """Undo the admission of a request that waits again."""
        debt, ahead = self._moved.pop(request.request_id, (0.0, 0))
        self._debt -= debt
        self._ahead = max(0, self._ahead - ahead)

    def forget(self, request: WaitingRequest) -> None:
        """Forget a request that has ended."""
        self._moved.pop(request.request_id, None)
