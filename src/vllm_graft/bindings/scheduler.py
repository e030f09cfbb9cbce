"""The scheduler point: vLLM's own scheduler with a planned queue for the waiting requests.

Replacing ``self.waiting`` after vLLM's constructor is the one override that fits every release from 0.26 on: the
scheduling loop itself changes in each of them and is never copied. The base is the class vLLM itself would take: a
plain ``Scheduler`` stalls the pipeline under asynchronous scheduling, and ``AsyncScheduler`` without it schedules
tokens that are not there yet when the pipeline has several stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.making import make
from vllm_graft.contracts import AdmissionQueue, WaitingRequest
from vllm_graft.errors import ConfigError, StartError
from vllm_graft.ledger import Guard, Ledger, current
from vllm_graft.plan import Plan, PlanItem, carried
from vllm_graft.points import point

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.request import Request

QUALNAME: Final = f"{__name__}.PlannedScheduler"
"""What vLLM is given as its scheduler class; it resolves the name in engine core."""

ASYNC_QUALNAME: Final = f"{__name__}.PlannedAsyncScheduler"
"""The same where scheduling is asynchronous, which is known only once the engine's configuration is made."""


def arguments(args: EngineArgs, plan: Plan) -> dict[str, Any]:
    """The engine arguments that a planned scheduler needs; the user's own scheduler class beside it is refused."""
    planned = plan.of("scheduler")
    if not planned:
        return {}
    if args.scheduler_cls not in (None, QUALNAME):
        raise ConfigError(
            f"two schedulers are asked for: {planned[0].name!r} by the plan ({planned[0].origin}) and "
            f"{args.scheduler_cls!r} by --scheduler-cls; an engine has one",
            where="--scheduler-cls",
            fix="take one of the two out",
        )
    return {"scheduler_cls": QUALNAME}


def settle(config: VllmConfig, plan: Plan) -> None:
    """Choose the base once vLLM has decided whether it schedules asynchronously."""
    if plan.of("scheduler") and config.scheduler_config.async_scheduling:
        config.scheduler_config.scheduler_cls = ASYNC_QUALNAME


class HeldQueue:
    """vLLM's side of an admission queue: every operation of its ``RequestQueue``, on the author's four methods.

    Requests that the scheduler hands back go first, in the order it wants. Everything the author's queue holds is
    held here too, in the order of arrival: once that queue has failed, this order takes over and nothing is lost.
    """

    def __init__(self, queue: AdmissionQueue, item: PlanItem, ledger: Ledger) -> None:
        self._held: dict[str, tuple[Request, WaitingRequest]] = {}
        self._returned: deque[Request] = deque()
        self._failed = ""
        self._item = item
        self._ledger = ledger
        self._push = self._guarded("push", queue.push)
        self._peek = self._guarded("peek", queue.peek)
        self._pop = self._guarded("pop", queue.pop)
        self._remove = self._guarded("remove", queue.remove)

    def add_request(self, request: Request) -> None:
        """A request arrived."""
        waiting = _waiting(request)
        self._held[request.request_id] = (request, waiting)
        self._push(waiting)

    def peek_request(self) -> Request:
        """The request that goes next."""
        return self._returned[0] if self._returned else self._next()

    def pop_request(self) -> Request:
        """Take out the request that goes next."""
        if self._returned:
            return self._returned.popleft()
        request = self._next()
        popped = _name(self._pop())
        if popped != request.request_id and not self._failed:
            self._fail(f"pop gave {popped!r} after peek had named {request.request_id!r}")
        del self._held[request.request_id]
        return request

    def prepend_request(self, request: Request) -> None:
        """The scheduler hands a request back."""
        self._returned.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """The scheduler hands several back; as in vLLM's own queue, the last one given goes first."""
        self._returned.extendleft(requests)

    def remove_request(self, request: Request) -> None:
        """A request is gone."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Several are gone; some may never have been here."""
        gone = {request.request_id for request in requests}
        for request_id in gone:
            held = self._held.pop(request_id, None)
            if held is not None:
                self._remove(held[1])
        self._returned = deque(request for request in self._returned if request.request_id not in gone)

    def __bool__(self) -> bool:
        return bool(self._returned or self._held)

    def __len__(self) -> int:
        return len(self._returned) + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from (request for request, _ in self._held.values())

    def _next(self) -> Request:
        named = _name(self._peek())
        if named in self._held:
            return self._held[named][0]
        if not self._failed:
            self._fail(f"peek named {named!r}, which is not waiting")
        return next(iter(self._held.values()))[0]

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        meter = self._ledger.hook(self._item.name, name, point("scheduler").budget_us)
        guard = Guard(call, _nothing, meter, self._fail)

        def operation(*args: WaitingRequest) -> Any:
            return None if self._failed else guard(*args)

        return operation

    def _fail(self, reason: str) -> None:
        self._failed = reason
        self._ledger.put_aside(self._item.name, f"{reason}; waiting requests go in the order of their arrival")


def _name(answer: object) -> str:
    """The request an answer names; empty where it is no request at all."""
    named = getattr(answer, "request_id", "")
    return named if isinstance(named, str) else ""


def _nothing(*args: object) -> None:
    """What a queue that has failed answers: the order of arrival decides."""


def _waiting(request: Request) -> WaitingRequest:
    params = request.sampling_params
    return WaitingRequest(
        request_id=request.request_id,
        priority=request.priority,
        arrival=request.arrival_time,
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        extra=dict(getattr(params, "extra_args", None) or {}),
    )


def _make(name: str) -> type:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler

    base = AsyncScheduler if name == "PlannedAsyncScheduler" else Scheduler

    class PlannedQueue(HeldQueue, RequestQueue):
        """What vLLM's scheduler sees."""

    class Planned(base):  # type: ignore[misc, valid-type]
        """vLLM's scheduler with the planned queue, or with its own where a lenient plan's queue could not be made."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            queue = _planned_queue(PlannedQueue)
            if queue is not None:
                self.waiting: HeldQueue = queue

    Planned.__name__ = Planned.__qualname__ = name
    return Planned


def _planned_queue(kind: type[HeldQueue]) -> HeldQueue | None:
    plan, ledger = carried(), current()
    if plan is None or not plan.of("scheduler"):
        raise StartError(
            "the planned scheduler runs in a process without a plan",
            where=QUALNAME,
            fix="name a scheduler in graft.toml instead of giving --scheduler-cls",
        )
    item = plan.of("scheduler")[0]
    queue = make(item, AdmissionQueue, plan, ledger)
    return kind(queue, item, ledger) if queue is not None else None


def __getattr__(name: str) -> Any:
    if name not in ("PlannedScheduler", "PlannedAsyncScheduler"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _make(name)
    return globals()[name]
