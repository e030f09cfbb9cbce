"""vLLM's side of a scheduling policy: its ``RequestQueue``, of which a step sees only what the policy named.

vLLM's loop goes on while the queue is true; what waits counts by its length. So a queue that is false, with requests
in it, keeps them out of a step, and keeps the engine at work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_graft.bindings.clock import SteadyClock
from vllm_graft.contracts import Refusal, RequestView, WaitingHeap

if TYPE_CHECKING:
    from vllm.v1.request import Request


class LiveView(RequestView):
    """A view of one of vLLM's requests; what changes is read from it when it is asked for."""

    __slots__ = ("source",)

    source: Request

    def __init__(self, source: Request, clock: SteadyClock) -> None:
        lora = source.lora_request
        super().__init__(
            source.request_id,
            priority=source.priority,
            arrival=clock.place(source.arrival_time),
            prompt_tokens=source.num_prompt_tokens,
            max_tokens=source.max_tokens,
            extra=dict(getattr(source.sampling_params, "extra_args", None) or {}),
            cache_salt=source.cache_salt or "",
            lora=lora.lora_name if lora is not None else "",
        )
        self._write(source=source)

    @property
    def output_tokens(self) -> int:
        """Tokens of its answer so far."""
        return self.source.num_output_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens that hold KV blocks."""
        return self.source.num_computed_tokens

    @property
    def preemptions(self) -> int:
        """How often it was preempted."""
        return self.source.num_preemptions


class OfferedQueue:
    """Every operation of vLLM's ``RequestQueue``: requests that wait, and those of them that are offered in this step.

    What is handed back in a step is not offered again in it. Once the policy has failed, everything is offered, in the
    order of arrival.
    """

    ranks = False

    def __init__(self, clock: SteadyClock) -> None:
        self.held: dict[str, LiveView] = {}
        self.refused: dict[str, tuple[Request, Refusal]] = {}  # a policy refuses nobody; asked for as of any queue
        self._clock = clock
        self._views: dict[str, LiveView] = {}
        self._offered: deque[LiveView] = deque()
        self._by_arrival: Any = None
        self._in_order, self._newest = True, 0.0

    def waiting(self) -> list[RequestView]:
        """Those that wait, in the order of their arrival."""
        if not self._in_order:
            self.held = {view.request_id: view for view in sorted(self.held.values(), key=_arrival)}
            self._in_order = True
        return list(self.held.values())

    def view(self, request: Request) -> LiveView:
        """The view of a request, the same each time."""
        known = self._views.get(request.request_id)
        if known is None or known.source is not request:
            known = self._views[request.request_id] = LiveView(request, self._clock)
        return known

    def offer(self, views: Iterable[LiveView]) -> None:
        """These, and in this order, are there in the step that begins."""
        self._offered = deque(views)

    def offer_all(self) -> None:
        """From now on every request is there, in the order of arrival."""
        self._by_arrival = WaitingHeap()
        for view in self.waiting():
            self._by_arrival.add(view.arrival, view)

    def add_request(self, request: Request) -> None:
        """A request arrived, or a session goes on with another prompt."""
        self._clock.move()
        self._views.pop(request.request_id, None)
        self._hold(self.view(request))

    def peek_request(self) -> Request:
        """The request that is offered next."""
        return self._next().source

    def pop_request(self) -> Request:
        """Take it out."""
        view = self._next()
        self._withdraw(view)
        del self.held[view.request_id]
        return view.source

    def prepend_request(self, request: Request) -> None:
        """The scheduler hands a request back: it was preempted, or could not be taken."""
        self._hold(self.view(request))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """The scheduler hands several back."""
        for request in list(requests):
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        """A request is gone."""
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Several are gone; some may never have been here."""
        for request in requests:
            view = self.held.pop(request.request_id, None)
            if view is not None:
                self._withdraw(view)

    def stepped(self, tokens: Mapping[str, int], ended: Iterable[str]) -> None:
        """A step was scheduled; these requests have ended since the last one."""
        for name in ended:
            if name not in self.held:
                self._views.pop(name, None)

    def __bool__(self) -> bool:
        return bool(self._offered if self._by_arrival is None else self._by_arrival)

    def __len__(self) -> int:
        return len(self.held)

    def __iter__(self) -> Iterator[Request]:
        return (view.source for view in self.held.values())

    def _hold(self, view: LiveView) -> None:
        self.held[view.request_id] = view
        if self._by_arrival is not None:
            self._by_arrival.add(view.arrival, view)
        if view.arrival < self._newest:
            self._in_order = False
        else:
            self._newest = view.arrival

    def _next(self) -> LiveView:
        return self._offered[0] if self._by_arrival is None else self._by_arrival.first()

    def _withdraw(self, view: LiveView) -> None:
        if self._by_arrival is not None:
            self._by_arrival.discard(view)
        elif self._offered and self._offered[0] is view:
            self._offered.popleft()
        elif view in self._offered:
            self._offered.remove(view)


def _arrival(view: RequestView) -> float:
    return view.arrival
