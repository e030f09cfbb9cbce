"""The urgent lane: requests that have waited for a while, the oldest first, with a share of the admissions."""

from __future__ import annotations

from typing import Final, Literal

from vllm_graft.contracts import WaitingHeap, WaitingRequest

Way = Literal["urgent", "first", "class", "reserved"]
"""How a request is admitted: as an urgent one, as one of the first class before urgent ones, by class and age, or into
a slot that is not for all."""

AHEAD: Final = 8
"""How many admissions more than all others the first class may have while some are urgent."""


class UrgentLane:
    """Requests become urgent ``after`` seconds; from then on they share the admissions with all others.

    The first class goes before all, as long as it has no more than every second admission, and ``AHEAD`` more at once.
    Of what it leaves, at least ``share`` goes to urgent requests: an urgent admission takes on ``(1 - share) / share``
    ordinary ones, and the next urgent one comes when they are paid. So m urgent requests are through after at most
    ``m / share + 1`` admissions of others than the first class, and in any case ``2 * (m / share + 1) + AHEAD``.

    An admission that is taken back counts for nothing: vLLM takes out requests that wait for a grammar, and puts them
    back, in every step.
    """

    def __init__(self, after: float, share: float) -> None:
        self._after = after
        self._price = (1.0 - share) / share
        self._debt = 0.0
        self._ahead = 0
        self._moved: dict[str, tuple[float, int]] = {}
        self._by_age = WaitingHeap()

    def add(self, request: WaitingRequest) -> None:
        """A request waits."""
        self._by_age.add(request.arrival, request)

    def discard(self, request: WaitingRequest) -> None:
        """It waits no longer."""
        self._by_age.discard(request)

    def any(self, now: float) -> bool:
        """Whether some request is urgent."""
        return bool(self._by_age) and self._by_age.first_key() + self._after <= now

    def first_class_goes(self) -> bool:
        """Whether the first class may go before urgent requests."""
        return self._ahead < AHEAD

    def due(self) -> WaitingRequest | None:
        """The oldest request, where the urgent ones' turn has come. Asked only where there are some."""
        return self._by_age.first() if self._debt < 1.0 else None

    def admitted(self, request: WaitingRequest, way: Way, now: float) -> None:
        """A request is taken out."""
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

    def returned(self, request: WaitingRequest) -> None:
        """It was taken out, and waits again."""
        debt, ahead = self._moved.pop(request.request_id, (0.0, 0))
        self._debt -= debt
        self._ahead = max(0, self._ahead - ahead)

    def ended(self, request: WaitingRequest) -> None:
        """It will not come back."""
        self._moved.pop(request.request_id, None)
