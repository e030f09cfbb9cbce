"""vLLM's side of an admission queue: its ``RequestQueue`` on the author's methods, and a net under them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.arrival import ByArrival
from vllm_graft.bindings.clock import Pace, SteadyClock
from vllm_graft.bindings.tally import ALL, Kinds, Tally, kinds_of
from vllm_graft.contracts import AdmissionQueue, Load, Refusal, WaitingRequest
from vllm_graft.ledger import Guard, Ledger
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import PlanItem
from vllm_graft.points import point

if TYPE_CHECKING:
    from vllm.v1.request import Request


class HeldQueue:
    """Every operation of vLLM's ``RequestQueue``, on the author's methods.

    Every request that the author's queue holds is held here too: once that queue has failed, the order of arrival takes
    over and nothing is lost. Removing costs the same wherever a request is, and strangers are no error.

    ``running`` says how many requests run, of at most ``slots``; ``engine`` is the number of this engine.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        item: PlanItem,
        ledger: Ledger,
        clock: SteadyClock | None = None,
        running: Callable[[], int] = int,
        slots: int = sys.maxsize,
        engine: int = 0,
    ) -> None:
        self.refused: dict[str, tuple[Request, Refusal]] = {}
        self._clock = clock or SteadyClock()
        self._pace = Pace()
        self._tally = Tally(ledger.board(item.name, engine))
        self._admitted = 0
        self._tried: set[str] = set()
        self._blocked, self._blocked_now = 0, 0
        self._running, self._slots = running, slots
        self._queue = queue
        self._held: dict[str, tuple[Request, WaitingRequest]] = {}
        self._taken: dict[str, WaitingRequest] = {}  # until they end; apart, for there are few and each step asks
        self._told: dict[str, int] = {}
        self._pinned = ""
        self._failed = ""
        self._item = item
        self._ledger = ledger
        self._instead: AdmissionQueue = queue
        queue.clock = self._clock
        own = {name for name in _OPTIONAL if getattr(type(queue), name) is not getattr(AdmissionQueue, name)}
        self.ranks = "rank" in own
        self._admits, self._counts, self._ends = "admit" in own, "served" in own, "ended" in own
        self._holds_back = "ready" in own
        self._served = queue.served
        self._calls = {name: self._guarded(name, getattr(queue, name)) for name in (*_REQUIRED, *own - _WRAPPED)}
        self._calls.setdefault("put_back", self._calls["push"])
        if self._counts:
            self._calls["served"] = self._guarded("served", self._serve)
        self._labels = "labels" in own
        if self._admits:
            self._calls["admit"] = self._guarded("admit", lambda *args: _refusal(queue.admit(*args)))
        if self.ranks:
            self._calls["rank"] = self._guarded("rank", lambda request: _rank(queue.rank(request)))
        if self._labels:
            self._calls["labels"] = self._guarded("labels", lambda request: kinds_of(queue.labels(request)))

    def add_request(self, request: Request) -> None:
        """A request arrived, or a session goes on."""
        name = request.request_id
        self._clock.move()
        self._tell_rest(name)
        waiting, before = _waiting(request, self._clock), self._taken.pop(name, None)
        if before is not None:
            waiting = replace(waiting, priority=before.priority)  # the request's own may have become its rank
        elif self._admits:
            refusal = self._ask("admit", waiting, self.load())
            if refusal is not None:
                self._tally.refused(self._kinds(waiting))
                self.refused[name] = (request, refusal)
                return
        self._hold(request, "push", waiting)

    def load(self) -> Load:
        """How busy this engine is."""
        return Load(max(0, len(self._held) - self._blocked), self._running(), self._pace.rate)

    def peek_request(self) -> Request:
        """The request that goes next, as of now."""
        self._clock.move()
        self._tell_free_slots(self._running())
        return self._held[self._next()][0]

    def pop_request(self) -> Request:
        """Take out the request that goes next: the one that was peeked at, though time has passed since."""
        name = self._pinned or self._next()
        popped = _name(self._ask("pop"))
        if popped != name:
            self._fail(f"pop gave {popped!r} after peek had named {name!r}")
            self._instead.remove(self._held[name][1])
        self._pinned = ""
        request, waiting = self._held.pop(name)
        self._taken[name] = waiting
        self._admitted += 1
        self._tried.add(name)
        self._tally.taken(name)
        if self.ranks and not self._failed:
            rank = self._ask("rank", waiting)
            request.priority = rank if isinstance(rank, int) else request.priority
        return request

    def prepend_request(self, request: Request) -> None:
        """The scheduler hands a request back."""
        self._clock.move()
        self._tell_rest(request.request_id)
        waiting = self._taken.pop(request.request_id, None) or _waiting(request, self._clock)
        if request.request_id in self._tried:  # of this very step: it waits for something else than its turn
            self._admitted -= 1
            self._blocked_now += 1
        self._hold(request, "put_back", waiting)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """The scheduler hands several back; as in vLLM's own queue, the last one given was the first to be taken."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        """A request is gone."""
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Several are gone; some may never have been here."""
        self._clock.move()
        for request in requests:
            name = request.request_id
            self.refused.pop(name, None)
            held = self._held.pop(name, None)
            if held is not None:
                self._pinned = ""
                self._taken[name] = held[1]
                self._tally.removed(name)
                self._ask("remove", held[1])

    def stepped(self, tokens: Mapping[str, int], ended: Iterable[str]) -> None:
        """A step was scheduled with so many tokens for each request; others have ended since the last one."""
        for name in ended:
            self._tell_rest(name)
            self._tally.ended(name)
            waiting = self._taken.pop(name, None)
            if waiting is not None and self._ends and not self._failed:
                self._ask("ended", waiting)
        self._blocked, self._blocked_now = self._blocked_now, 0
        self._pace.stepped(self._clock.move(), self._admitted, len(self._held) - self._blocked)
        self._admitted = 0
        self._tried.clear()
        self._tally.stepped(self._clock.now, tokens, self.load())
        if self._counts and not self._failed:
            self._ask("served", self._tally.given.next_ones())

    def __bool__(self) -> bool:
        return bool(self._held) and not (self._holds_back and self._held_back())

    def _held_back(self) -> bool:
        running = self._running()
        if self._failed or not running:
            return False  # with nothing running, nothing would ever change
        self._tell_free_slots(running)
        return not self._failed and self._ask("ready") is False

    def _tell_free_slots(self, running: int) -> None:
        """A class of the author's may have a property of that name, or refuse attributes."""
        if self._failed:
            return
        try:
            self._queue.free_slots = self._slots - running
        except BaseException as error:
            if raised_by_signal(error):
                raise
            self._fail(f"free_slots cannot be set: {reason_of(error)}")

    def __len__(self) -> int:
        # Those refused count until their clients were told, or the engine would see no reason for another step.
        return len(self._held) + len(self.refused)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._held.values())

    def _hold(self, request: Request, operation: str, waiting: WaitingRequest) -> None:
        if not self._tally.again(request.request_id):
            self._tally.arrived(waiting, self._kinds(waiting))
        self._held[request.request_id] = (request, waiting)
        self._pinned = ""
        self._ask(operation, waiting)

    def _kinds(self, waiting: WaitingRequest) -> Kinds:
        """What a request counts as; asked once for each, and before it is held."""
        return (self._ask("labels", waiting) or ALL) if self._labels and not self._failed else ALL

    def _next(self) -> str:
        named = _name(self._ask("peek"))
        if named not in self._held:
            self._fail(f"peek named {named!r}, which is not waiting")
            named = self._instead.peek().request_id
        self._pinned = named
        return named

    def _ask(self, operation: str, *args: Any) -> Any:
        """The author's answer, or that of the queue that has taken over."""
        if self._failed:
            return getattr(self._instead, operation)(*args)
        answer = self._calls[operation](*args)
        return self._recovered(operation) if self._failed else answer

    def _recovered(self, operation: str) -> WaitingRequest | None:
        """The answer to the call in which the author's queue failed; what was held has been handed over by then."""
        if operation == "peek":
            return self._instead.peek()
        if operation == "pop":
            waiting = self._held[self._pinned][1]
            self._instead.remove(waiting)
            return waiting
        return None

    def _tell_rest(self, name: str) -> None:
        """A request runs no more: what it was given and the author has not heard of."""
        if self._counts and not self._failed:
            if self._tally.given.total(name) != self._told.get(name, 0):
                self._ask("served", (name,))
            self._told.pop(name, None)

    def _serve(self, names: Iterable[str]) -> None:
        """Tell the author what these were given since the last time."""
        taken, told, total = self._taken, self._told, self._tally.given.total
        for name in names:
            waiting, now, before = taken.get(name), total(name), told.get(name, 0)
            if waiting is not None and now != before:
                told[name] = now
                self._served(waiting, now - before)

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        meter = self._ledger.hook(self._item.name, name, point("scheduler").budget_us)
        return Guard(call, _nothing, meter, self._fail)

    def _fail(self, reason: str) -> None:
        if self._failed:
            return
        self._failed = reason
        self._instead = ByArrival(waiting for _, waiting in self._held.values())
        self._ledger.put_aside(self._item.name, f"{reason}; waiting requests go in the order of their arrival")


_REQUIRED: Final = ("push", "peek", "pop", "remove")
_OPTIONAL: Final = ("put_back", "served", "ended", "admit", "rank", "ready", "labels")
_WRAPPED: Final = {"served", "labels", "admit", "rank"}


def _name(answer: object) -> str:
    """The request an answer names; empty where it is no request at all."""
    try:
        named = getattr(answer, "request_id", "")
    except BaseException as error:
        if raised_by_signal(error):
            raise
        return ""
    return named if type(named) is str else ""


def _refusal(answer: object) -> Refusal | None:
    """What ``admit`` answered, read while a failure is still its own; anything else would be taken for consent."""
    if answer is None:
        return None
    if not isinstance(answer, Refusal):
        raise TypeError(f"admit must return a Refusal or None, and returned {type(answer).__name__}")
    return Refusal(answer.reason, answer.retry_after, answer.status)


def _rank(answer: object) -> int:
    """What ``rank`` answered, read while a failure is still its own; passed over, nobody would hear of it."""
    if not isinstance(answer, int):
        raise TypeError(f"rank must return a whole number, and returned {type(answer).__name__}")
    return answer


def _nothing(*args: object) -> None:
    """What a queue that has failed answers: the order of arrival decides."""


def _extra(request: Request) -> dict[str, object]:
    given = getattr(request.sampling_params, "extra_args", None)
    pooling = getattr(getattr(request, "pooling_params", None), "extra_kwargs", None)
    return dict(given or pooling or {})


def _waiting(request: Request, clock: SteadyClock) -> WaitingRequest:
    lora = request.lora_request
    return WaitingRequest(
        request_id=request.request_id,
        priority=request.priority,
        arrival=clock.place(request.arrival_time),
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        extra=_extra(request),
        cache_salt=request.cache_salt or "",
        lora=lora.lora_name if lora is not None else "",
    )
