"""A scheduling policy in vLLM's scheduler: asked before each step, and its answer carried out with vLLM's own means."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.answers import read_answer
from vllm_graft.bindings.clock import SteadyClock
from vllm_graft.bindings.offered import OfferedQueue
from vllm_graft.contracts import KVState, SchedulingPolicy
from vllm_graft.ledger import Guard, Ledger
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import PlanItem
from vllm_graft.points import point

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

STALLED_STEPS: Final = 1000
"""For so many steps a policy may let nothing start while nothing runs, to gather a batch for instance. It is at least a
second: engine core sleeps for a millisecond after a step that was empty."""


class Decider:
    """Asks a policy, preempts whom it names, and offers vLLM what it wants to start.

    The policy is asked before vLLM's own ``schedule`` runs, so that what it preempts has left its blocks by then, and
    vLLM's loop, which changes in every release, stays as it is.
    """

    def __init__(
        self, policy: SchedulingPolicy, item: PlanItem, ledger: Ledger, queue: OfferedQueue, clock: SteadyClock
    ) -> None:
        policy.clock = clock
        self.failed = ""
        self._item, self._ledger, self._queue, self._clock = item, ledger, queue, clock
        meter = ledger.hook(item.name, "schedule", point("scheduler").budget_us)
        self._ask = Guard(policy.schedule, _nothing, meter, self._fail)
        self._holds_back = False
        self._stalled = 0

    def before(self, scheduler: Any) -> None:
        """A step begins."""
        self._holds_back = False
        # Paused, vLLM starts nothing; what it preempted now would stay out until somebody resumes the engine.
        if self.failed or scheduler.pause_state.name != "UNPAUSED":
            return
        self._clock.move()
        waiting = self._queue.waiting()
        running = {request.request_id: self._queue.view(request) for request in scheduler.running}
        if not waiting and not running:
            return
        answer = self._ask(waiting, list(running.values()), _kv_state(scheduler))
        if self._ask.aside:
            return
        try:
            starting, stopping = read_answer(answer, self._queue.held, running)
        except BaseException as error:  # a request of the author's own making may have anything for a name
            if raised_by_signal(error):
                raise
            why = str(error) if isinstance(error, ValueError) else reason_of(error)
            self._fail(f"the answer of schedule cannot be followed: {why}")
            return
        self._holds_back = not starting
        _preempt(scheduler, {view.request_id for view in stopping})
        self._queue.offer(view for view in starting if not _in_flight(view.source))

    def after(self, scheduler: Any, output: SchedulerOutput) -> None:
        """The step is made."""
        self._queue.offer(())
        self._stalled = self._stalled + 1 if self._holds_back and self._stalls(scheduler, output) else 0
        if self._stalled >= STALLED_STEPS:
            number = len(self._queue)
            self._fail(f"it lets none of {number} requests start while nothing runs, for {self._stalled} steps")

    def _stalls(self, scheduler: Any, output: SchedulerOutput) -> bool:
        if scheduler.running or output.total_num_scheduled_tokens or not len(self._queue):
            return False
        # What holds blocks waits in a queue of vLLM's own, and starts without being asked for; but for sessions, which
        # wait for their clients.
        elsewhere = scheduler.get_request_counts()[1] - len(self._queue)
        return elsewhere <= scheduler.num_waiting_for_streaming_input

    def _fail(self, reason: str) -> None:
        if self.failed:
            return
        self.failed = reason
        self._queue.offer_all()
        self._ledger.put_aside(self._item.name, f"{reason}; waiting requests go in the order of their arrival")


def _preempt(scheduler: Any, names: set[str]) -> None:
    """Take requests out of the running ones as vLLM does when blocks run out.

    Output that is still on its way is delivered, as there; only where a connector has to deliver its KV is it dropped.
    Before 0.27.1 vLLM knows no difference, and does not ask.
    """
    if not names:
        return
    victims = [request for request in scheduler.running if request.request_id in names]
    scheduler.running = [request for request in scheduler.running if request.request_id not in names]
    told = {}
    if hasattr(scheduler, "requires_kv_delivery"):
        told["drop_stale_output"] = scheduler.requires_kv_delivery
    now = time.monotonic()
    for request in victims:
        scheduler._preempt_request(request, now, **told)


def _in_flight(request: Request) -> bool:
    """Whether output of a preempted request is still on its way, in a release whose own loop does not look.

    Resumed now, it would compute again what is about to be delivered. From 0.27.1 on vLLM passes over such a request
    itself.
    """
    return request.num_in_flight_tokens > 0 and not hasattr(request, "num_stale_output_tokens")


def _kv_state(scheduler: Any) -> KVState:
    pool = scheduler.kv_cache_manager.block_pool
    # One block is never given out: unused entries of block tables point at it.
    return KVState(pool.get_num_free_blocks(), pool.num_gpu_blocks - 1, scheduler.block_size)


def _nothing(*args: object) -> None:
    """What a policy that has failed answers: the order of arrival decides."""
