"""vLLM's scheduler class with a planned queue for its waiting requests, or a planned policy.

Replacing ``self.waiting`` after vLLM's constructor is the one override that fits every release from 0.26 on: the
scheduling loop itself changes in each of them, and is never copied. The base is the class that vLLM has chosen by the
time its configuration is made: a plain ``Scheduler`` stalls the pipeline under asynchronous scheduling,
``AsyncScheduler`` without it schedules tokens that do not exist yet when the pipeline has several stages, and diffusion
models have schedulers of their own.

vLLM has two layouts. From 0.31 on, a request that could not be taken in a step goes back into ``waiting``, and requests
that already hold KV blocks wait in another queue, drained first. Before, both kinds went to ``skipped_waiting``, which
was drained first. There, ``skipped_queue`` keeps those with blocks and passes the others to the planned queue, so that
they do not overtake earlier requests.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.instantiate import instantiate
from vllm_graft.bindings.scheduling.admission_queue import AdmissionQueueAdapter
from vllm_graft.bindings.scheduling.clock import SteadyClock
from vllm_graft.bindings.scheduling.policy import PolicyQueue, PolicyRunner
from vllm_graft.contracts import AdmissionQueue, Item, SchedulingPolicy
from vllm_graft.errors import ConfigError, StartError
from vllm_graft.ledger import current
from vllm_graft.plan import Plan, inherited_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.request import Request

PREFIX: Final = f"{__name__}.over-"
"""The scheduler class in vLLM's configuration is this and the path of its base, dots as hyphens. vLLM imports it in
engine core, where ``__getattr__`` below makes the class."""


def check_arguments(args: EngineArgs, plan: Plan) -> None:
    """Refuse a planned scheduler beside the user's own ``--scheduler-cls``."""
    planned = plan.of("scheduler")
    if planned and args.scheduler_cls is not None:
        raise ConfigError(
            f"two schedulers are configured: {planned[0].name!r} by the plan ({planned[0].origin}) and "
            f"{args.scheduler_cls!r} by --scheduler-cls; an engine has one",
            where="--scheduler-cls",
            fix="remove one of the two",
        )


def set_scheduler_class(config: VllmConfig, plan: Plan) -> None:
    """Put the planned scheduler over the class that vLLM has chosen."""
    settings = config.scheduler_config
    if plan.of("scheduler") and not str(settings.scheduler_cls).startswith(PREFIX):
        # AsyncScheduler or Scheduler, as `async_scheduling` has been settled by now; a string is imported.
        base = settings.get_scheduler_cls()
        # vLLM warns that a scheduler class of its users is not a public interface; from 0.31 on not for its own names.
        settings.scheduler_cls = PREFIX + f"{base.__module__}.{base.__qualname__}".replace(".", "-")


def planned_scheduler(chosen: type) -> type:
    """Derive a scheduler class with the planned queue from one of vLLM's."""
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.request_queue import SchedulingPolicy as Order
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    # Every vLLM scheduler inherits from this one; named here, the audit of this package sees what is overridden.
    base = chosen if issubclass(chosen, Scheduler) else Scheduler

    # vLLM's RequestQueue is abstract, with the same ten methods from 0.26 to 0.32.
    class AdmissionRequestQueue(AdmissionQueueAdapter, RequestQueue):
        """An admission queue that is an instance of vLLM's queue class."""

    class PolicyRequestQueue(PolicyQueue, RequestQueue):
        """A policy's queue that is an instance of vLLM's queue class."""

    class PlannedScheduler(base):  # type: ignore[misc, valid-type]
        """vLLM's scheduler with the planned item; unchanged if a lenient plan's item could not be instantiated."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.planned, self.policy_runner = _planned_queue(self, AdmissionRequestQueue, PolicyRequestQueue)
            if self.planned is None:
                return
            self.waiting = self.planned
            # Up to 0.30. From 0.31 on vLLM has kv_holding_waiting in its place, which holds only requests with blocks
            # and stays as it is.
            if hasattr(self, "skipped_waiting"):
                self.skipped_waiting = skipped_queue(self.planned)
            if self.planned.ranks:
                # With `waiting` replaced, only the choice of the request to preempt still depends on this.
                self.policy = Order.PRIORITY

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self.policy_runner is None:
                return super().schedule(*args, **kwargs)
            self.policy_runner.before_step(self)
            # Wrapped, never copied: vLLM's schedule() has 767 lines in 0.26, 966 in 0.32, and changed in every release
            # between.
            output = super().schedule(*args, **kwargs)
            self.policy_runner.after_step(self, output)
            return output

        def _select_waiting_queue_for_scheduling(self) -> Any:
            # Up to 0.30; under PRIORITY, vLLM's own would compare the priorities of the heads of both queues.
            if self.planned is None:
                return super()._select_waiting_queue_for_scheduling()
            return self.skipped_waiting or self.waiting or None

        def _update_after_schedule(self, scheduler_output: Any) -> None:
            if self.planned is not None:
                # What a step computes is final here, and the model has not run yet.
                self.planned.end_step(scheduler_output.num_scheduled_tokens, scheduler_output.finished_req_ids)
            super()._update_after_schedule(scheduler_output)

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().update_from_output(*args, **kwargs)
            # vLLM has no way to refuse a request in engine core: an aborted one with a reason is the nearest to it.
            for name, (request, refusal) in list(self.planned.refused.items()) if self.planned is not None else ():
                # This also removes it from `planned.refused`, by remove_requests.
                self.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                retry = f"; try again after {refusal.retry_after:.0f} s" if refusal.retry_after > 0 else ""
                last = EngineCoreOutput(
                    request_id=name,
                    new_token_ids=[],
                    finish_reason=FinishReason.ABORT,
                    stop_reason=f"refused: {refusal.reason}{retry}",
                )
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(last)
            if self.planned is not None and not self.running and not self.has_unfinished_requests():
                # An engine in its client's process makes no further step that would report the last requests' end.
                self.planned.end_step({}, self.finished_req_ids)
            return outputs

    PlannedScheduler.__name__ = PlannedScheduler.__qualname__ = f"Planned{base.__name__}"
    return PlannedScheduler


def skipped_queue(planned: AdmissionQueueAdapter | PolicyQueue) -> Any:
    """Make the queue for skipped requests, up to 0.30: those that hold KV blocks stay, the others are planned."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue
    from vllm.v1.request import RequestStatus

    def holds_blocks(request: Request) -> bool:
        return request.num_computed_tokens > 0 or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    class SkippedQueue(FCFSRequestQueue):
        """Requests that hold KV blocks, which must not wait behind one that finds none."""

        def add_request(self, request: Request) -> None:
            if holds_blocks(request):
                super().add_request(request)
            else:
                planned.add_request(request)

        def prepend_request(self, request: Request) -> None:
            if holds_blocks(request):
                super().prepend_request(request)
            else:
                planned.prepend_request(request)

        def prepend_requests(self, requests: Iterable[Request]) -> None:
            for request in list(requests):
                self.prepend_request(request)

    return SkippedQueue()


def _planned_queue(
    scheduler: Any, admission: type[AdmissionQueueAdapter], policy: type[PolicyQueue]
) -> tuple[AdmissionQueueAdapter | PolicyQueue | None, PolicyRunner | None]:
    """Instantiate the planned item; return the queue for vLLM, and for a policy what runs it."""
    plan, ledger = inherited_plan(), current()
    if plan is None or not plan.of("scheduler"):
        raise StartError(
            "the planned scheduler runs in a process without a plan",
            where=PREFIX,
            fix="name a scheduler in graft.toml instead of giving --scheduler-cls",
        )
    item = plan.of("scheduler")[0]
    slots, clock = scheduler.max_num_running_reqs, SteadyClock()

    def fit(made: Item) -> None:
        # Set here too, where a class that does not let it be set is refused by name.
        made.clock = clock  # type: ignore[attr-defined]
        if isinstance(made, AdmissionQueue):
            made.check_slots(slots)

    made: Item | None = instantiate(item, (AdmissionQueue, SchedulingPolicy), plan, ledger, fit)
    if isinstance(made, AdmissionQueue):
        engine = scheduler.vllm_config.parallel_config.data_parallel_index
        queue = admission(made, item, ledger, clock, running=lambda: len(scheduler.running), slots=slots, engine=engine)
        return queue, None
    if isinstance(made, SchedulingPolicy):
        policy_queue = policy(clock)
        return policy_queue, PolicyRunner(made, item, ledger, policy_queue, clock)
    return None, None


def __getattr__(name: str) -> Any:
    if not name.startswith("over-"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # vLLM splits the path at its last dot and calls getattr on the module: hence the hyphens.
    module, _, qualname = name.removeprefix("over-").replace("-", ".").rpartition(".")
    globals()[name] = planned_scheduler(getattr(importlib.import_module(module), qualname))
    return globals()[name]
