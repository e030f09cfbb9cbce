"""A scheduling policy in vLLM's scheduler: called before each step, and carried out with vLLM's own means.

vLLM's loop takes waiting requests while its queue is true, and counts them by its length. So a ``PolicyQueue`` that is
false, with requests in it, keeps out of a step what the policy did not name, and keeps engine core stepping.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vllm_graft.bindings.instantiate import guard_method
from vllm_graft.bindings.scheduling.clock import SteadyClock
from vllm_graft.bindings.scheduling.request_fields import request_fields
from vllm_graft.contracts import KVState, Refusal, RequestView, Schedule, SchedulingPolicy, WaitingHeap
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import PlanItem

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

STALLED_STEPS: Final = 1000
"""The most steps in a row that a policy may start nothing while nothing runs, say to gather a batch. At least a
second: engine core sleeps for a millisecond after an empty step."""

KEYS: Final = ("prefill_requests", "decode_requests", "preempt_requests")
"""The keys of a schedule that is a dictionary, in the order of the fields of ``Schedule``."""


class PolicyRunner:
    """Calls a policy, preempts the requests that it names, and offers vLLM those that it wants to start.

    The policy is called before vLLM's own ``schedule``, so that preempted requests have freed their blocks by then, and
    vLLM's loop, which changes in every release, stays as it is.
    """

    def __init__(
        self, policy: SchedulingPolicy, item: PlanItem, ledger: Ledger, queue: PolicyQueue, clock: SteadyClock
    ) -> None:
        policy.clock = clock
        self.failed = ""
        self._item, self._ledger, self._queue, self._clock = item, ledger, queue, clock
        self._schedule = guard_method(item, "schedule", policy.schedule, ledger, on_aside=self._fail)
        self._started_nothing = False
        self._stalled = 0

    def before_step(self, scheduler: Any) -> None:
        """Call the policy, and apply its schedule."""
        self._started_nothing = False
        # A paused vLLM starts nothing: what was preempted now would stay out until the engine is resumed.
        if self.failed or scheduler.pause_state.name != "UNPAUSED":
            return
        self._clock.tick()
        waiting = self._queue.waiting()
        running = {request.request_id: self._queue.view(request) for request in scheduler.running}
        if not waiting and not running:
            return
        pool = scheduler.kv_cache_manager.block_pool
        # One block is never allocated: unused entries of block tables point to it.
        kv_cache = KVState(pool.get_num_free_blocks(), pool.num_gpu_blocks - 1, scheduler.block_size)
        answer = self._schedule(waiting, list(running.values()), kv_cache)
        if self._schedule.aside:
            return
        try:
            starting, stopping = validate_schedule(answer, self._queue.requests, running)
        except BaseException as error:  # a request that the author made may have anything as its id
            if raised_by_signal(error):
                raise
            why = str(error) if isinstance(error, ValueError) else reason_of(error)
            self._fail(f"schedule() returned an invalid schedule: {why}")
            return
        self._started_nothing = not starting
        _preempt(scheduler, {view.request_id for view in stopping})
        # A preempted request with output in flight must wait for it: resumed now, it would compute again what is about
        # to be delivered. Since 0.27.1 vLLM skips such a request itself.
        self._queue.offer(
            view
            for view in starting
            if hasattr(view.source, "num_stale_output_tokens") or view.source.num_in_flight_tokens <= 0
        )

    def after_step(self, scheduler: Any, output: SchedulerOutput) -> None:
        """Withdraw the offer, and give up on a policy that has started nothing for ``STALLED_STEPS``."""
        self._queue.offer(())
        number = len(self._queue)
        if not self._started_nothing or scheduler.running or output.total_num_scheduled_tokens or not number:
            self._stalled = 0
            return
        # Requests that hold blocks wait in a queue of vLLM's own and start without the policy, except streaming
        # sessions, which wait for their clients.
        elsewhere = scheduler.get_request_counts()[1] - number
        self._stalled = self._stalled + 1 if elsewhere <= scheduler.num_waiting_for_streaming_input else 0
        if self._stalled >= STALLED_STEPS:
            self._fail(f"it lets none of {number} requests start while nothing runs, for {self._stalled} steps")

    def _fail(self, reason: str) -> None:
        if self.failed:
            return
        self.failed = reason
        self._queue.offer_all()
        self._ledger.put_aside(self._item.name, f"{reason}; waiting requests are served in order of arrival")


class LiveRequestView(RequestView):
    """A view of one of vLLM's requests that reads what changes from it on access."""

    __slots__ = ("source",)

    source: Request

    def __init__(self, source: Request, clock: SteadyClock) -> None:
        super().__init__(**request_fields(source, clock))
        self._write(source=source)

    @property
    def output_tokens(self) -> int:
        """Tokens of its output so far."""
        return self.source.num_output_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens that hold KV blocks."""
        return self.source.num_computed_tokens

    @property
    def preemptions(self) -> int:
        """The number of its preemptions."""
        return self.source.num_preemptions


class PolicyQueue:
    """Every operation of vLLM's ``RequestQueue``: the waiting requests, and those of them offered in this step.

    A request that is put back in a step is not offered again in it. Once the policy has failed, all are offered, first
    come, first served.
    """

    # A policy names the requests to preempt; vLLM's own choice, for want of blocks, stays the newest one.
    ranks = False

    def __init__(self, clock: SteadyClock) -> None:
        self.requests: dict[str, LiveRequestView] = {}
        self.refused: dict[str, tuple[Request, Refusal]] = {}  # always empty; the scheduler reads it from any queue
        self._clock = clock
        self._views: dict[str, LiveRequestView] = {}
        self._offered: deque[LiveRequestView] = deque()
        self._fallback: Any = None
        self._sorted, self._newest = True, 0.0

    def waiting(self) -> list[RequestView]:
        """Return the waiting requests in the order of their arrival."""
        if not self._sorted:
            views = sorted(self.requests.values(), key=attrgetter("arrival"))
            self.requests = {view.request_id: view for view in views}
            self._sorted = True
        return list(self.requests.values())

    def view(self, request: Request) -> LiveRequestView:
        """Return the view of a request, the same object each time."""
        known = self._views.get(request.request_id)
        if known is None or known.source is not request:
            known = self._views[request.request_id] = LiveRequestView(request, self._clock)
        return known

    def offer(self, views: Iterable[LiveRequestView]) -> None:
        """Offer these requests, in this order, in the step that begins."""
        self._offered = deque(views)

    def offer_all(self) -> None:
        """Offer every request from now on, in the order of arrival."""
        self._fallback = WaitingHeap()
        for view in self.waiting():
            self._fallback.add(view.arrival, view)

    def add_request(self, request: Request) -> None:
        """Queue a request that arrived, or the next turn of a streaming session."""
        self._clock.tick()
        # A session's next turn has another prompt, so its view is made anew.
        self._views.pop(request.request_id, None)
        self._enqueue(self.view(request))

    def peek_request(self) -> Request:
        """Return the request that is offered next."""
        return self._next().source

    def pop_request(self) -> Request:
        """Take out the request that is offered next."""
        view = self._next()
        self._withdraw(view)
        del self.requests[view.request_id]
        return view.source

    def prepend_request(self, request: Request) -> None:
        """Put back a request that vLLM preempted or could not take."""
        self._enqueue(self.view(request))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put back several."""
        for request in list(requests):
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        """Remove a request."""
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove several requests, some of which may not be here."""
        for request in requests:
            view = self.requests.pop(request.request_id, None)
            if view is not None:
                self._withdraw(view)

    def end_step(self, tokens: Mapping[str, int], ended: Iterable[str]) -> None:
        """Forget the views of requests that have ended."""
        for name in ended:
            # An id in use again is that of a new request, which waits.
            if name not in self.requests:
                self._views.pop(name, None)

    def __bool__(self) -> bool:
        return bool(self._offered if self._fallback is None else self._fallback)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return (view.source for view in self.requests.values())

    def _enqueue(self, view: LiveRequestView) -> None:
        self.requests[view.request_id] = view
        if self._fallback is not None:
            self._fallback.add(view.arrival, view)
        if view.arrival < self._newest:
            self._sorted = False
        else:
            self._newest = view.arrival

    def _next(self) -> LiveRequestView:
        return self._offered[0] if self._fallback is None else self._fallback.first()

    def _withdraw(self, view: LiveRequestView) -> None:
        if self._fallback is not None:
            self._fallback.discard(view)
        elif self._offered and self._offered[0] is view:
            self._offered.popleft()
        elif view in self._offered:
            self._offered.remove(view)


_V = TypeVar("_V", bound=RequestView)
_NAME: Final[Callable[[RequestView], str]] = attrgetter("request_id")


def validate_schedule(
    answer: object, waiting: Mapping[str, _V], running: Mapping[str, _V]
) -> tuple[list[_V], list[_V]]:
    """Validate a policy's schedule: each request known, listed once.

    Return the requests to start, in order, and those to preempt; raise ValueError with the reason if that cannot be
    done. No code of the policy runs here: only built-in collections of views are accepted.
    """
    if isinstance(answer, Schedule):
        prefill, decode, preempt = answer.prefill, answer.decode, answer.preempt
    elif not isinstance(answer, dict):
        raise ValueError(f"it must be a Schedule or a dictionary with {list(KEYS)}, but is {type(answer).__name__}")
    elif set(answer) != set(KEYS):
        raise ValueError(f"its keys must be {list(KEYS)}, but are {[str(key) for key in answer]}")
    elif answer[KEYS[1]] is None:
        raise ValueError(f"{KEYS[1]} is None")
    else:
        prefill, decode, preempt = (answer[key] for key in KEYS)
    starting = _views("prefill", prefill, waiting, running, "is running")
    stopping = _views("preempt", preempt, running, waiting, "is waiting, so it has nothing to give back")
    if decode is not None:
        going = set(map(_NAME, _views("decode", decode, running, waiting, "is waiting")))
        gone = set(map(_NAME, stopping))
        if both := going & gone:
            raise ValueError(f"{next(iter(both))!r} is in decode and in preempt")
        if len(going) + len(gone) < len(running):
            left = next(name for name in running if name not in going and name not in gone)
            raise ValueError(f"{left!r} is running, but is in neither decode nor preempt")
    return starting, stopping


def _views(part: str, listed: object, known: Mapping[str, _V], others: Mapping[str, _V], elsewhere: str) -> list[_V]:
    """Return the requests of one list; compared as a whole, because a step may name thousands."""
    if not isinstance(listed, list | tuple | set | frozenset | deque):
        raise ValueError(f"{part} must be a list of requests, but is {type(listed).__name__}")
    views = list(listed)
    strange = next((kind for kind in set(map(type, views)) if not issubclass(kind, RequestView)), None)
    if strange is not None:
        raise ValueError(f"{part} holds {strange.__name__}, which is not one of the requests that it was given")
    names = list(map(_NAME, views))
    if len(set(names)) < len(names):
        double = next(name for name, number in Counter(names).items() if number > 1)
        raise ValueError(f"{part} names {double!r} twice")
    mine = [*map(known.get, names)]
    # By identity: a class of the policy's own may compare equal to anything.
    if not all(map(is_, mine, views)):
        at = next(number for number, view in enumerate(views) if mine[number] is not view)
        fault = elsewhere if others.get(names[at]) is views[at] else "is not one of the requests that it was given"
        raise ValueError(f"{part} names {names[at]!r}, which {fault}")
    return views


def _preempt(scheduler: Any, names: set[str]) -> None:
    """Preempt running requests as vLLM does when blocks run out."""
    if not names:
        return
    # As vLLM does itself: a victim has left `running` by the time _preempt_request frees its blocks.
    victims = [request for request in scheduler.running if request.request_id in names]
    scheduler.running = [request for request in scheduler.running if request.request_id not in names]
    options = {}
    # Since 0.27.1 vLLM delivers output that is still in flight, unless a connector has to deliver the request's KV.
    if hasattr(scheduler, "requires_kv_delivery"):
        options["drop_stale_output"] = scheduler.requires_kv_delivery
    now = time.monotonic()
    for request in victims:
        # Frees the blocks, resets the computed tokens and puts the request back into `waiting` by prepend_request.
        scheduler._preempt_request(request, now, **options)
