"""The scheduler point: vLLM's own scheduler with a planned queue for the waiting requests, or a planned policy.

Replacing ``self.waiting`` after vLLM's constructor is the one override that fits every release from 0.26 on: the
scheduling loop itself changes in each of them and is never copied. The base is the class vLLM itself has chosen by the
time its configuration is made: a plain ``Scheduler`` stalls the pipeline under asynchronous scheduling,
``AsyncScheduler`` without it schedules tokens that are not there yet when the pipeline has several stages, and
diffusion models have schedulers of their own.

Two layouts. From 0.31 on a request that could not be taken in a step goes back into ``waiting``, and requests that
already hold KV blocks wait in a queue of vLLM's own that is drained first. Before, both kinds went to
``skipped_waiting``, which was drained first; there, ``skipped_queue`` keeps the holders and hands the others to the
planned queue, so that they do not overtake those who came before them.

A ``SchedulingPolicy`` has a queue too, ours, which shows vLLM only what the policy wants to start; the policy itself is
asked around vLLM's ``schedule``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.bindings.clock import SteadyClock
from vllm_graft.bindings.making import make
from vllm_graft.bindings.offered import OfferedQueue
from vllm_graft.bindings.policy import Decider
from vllm_graft.bindings.waiting import HeldQueue
from vllm_graft.contracts import AdmissionQueue, Item, SchedulingPolicy
from vllm_graft.errors import ConfigError, StartError
from vllm_graft.ledger import current
from vllm_graft.plan import Plan, carried

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.request import Request

PREFIX: Final = f"{__name__}.over-"
"""What vLLM is given as its scheduler class begins so, and goes on with the name of the base; it is resolved in engine
core, by ``__getattr__`` below."""


def arguments(args: EngineArgs, plan: Plan) -> dict[str, Any]:
    """No engine arguments; the user's own scheduler class beside a planned one is refused."""
    planned = plan.of("scheduler")
    if planned and args.scheduler_cls is not None:
        raise ConfigError(
            f"two schedulers are asked for: {planned[0].name!r} by the plan ({planned[0].origin}) and "
            f"{args.scheduler_cls!r} by --scheduler-cls; an engine has one",
            where="--scheduler-cls",
            fix="take one of the two out",
        )
    return {}


def settle(config: VllmConfig, plan: Plan) -> None:
    """Put ours over the class that vLLM has chosen."""
    settings = config.scheduler_config
    if plan.of("scheduler") and not str(settings.scheduler_cls).startswith(PREFIX):
        base = settings.get_scheduler_cls()
        settings.scheduler_cls = PREFIX + f"{base.__module__}.{base.__qualname__}".replace(".", "-")


def over(chosen: type) -> type:
    """A scheduler class of vLLM's with the planned queue."""
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.request_queue import SchedulingPolicy as Order
    from vllm.v1.core.sched.scheduler import Scheduler

    # All that vLLM has inherit from this one; named here, the audit of this package sees what is overridden.
    base = chosen if issubclass(chosen, Scheduler) else Scheduler

    class PlannedQueue(HeldQueue, RequestQueue):
        """What vLLM's scheduler sees of an admission queue."""

    class PolicyQueue(OfferedQueue, RequestQueue):
        """What vLLM's scheduler sees of a policy."""

    class Planned(base):  # type: ignore[misc, valid-type]
        """vLLM's scheduler with what is planned, or as it is where a lenient plan's item could not be made."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.planned, self.decider = _planned(self, PlannedQueue, PolicyQueue)
            if self.planned is None:
                return
            self.waiting = self.planned
            if hasattr(self, "skipped_waiting"):
                self.skipped_waiting = skipped_queue(self.planned)
            if self.planned.ranks:
                self.policy = Order.PRIORITY  # from here on only the choice of whom to preempt asks for it

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self.decider is None:
                return super().schedule(*args, **kwargs)
            self.decider.before(self)
            output = super().schedule(*args, **kwargs)
            self.decider.after(self, output)
            return output

        def _select_waiting_queue_for_scheduling(self) -> Any:
            if self.planned is None:
                return super()._select_waiting_queue_for_scheduling()
            return self.skipped_waiting or self.waiting or None

        def _update_after_schedule(self, scheduler_output: Any) -> None:
            if self.planned is not None:
                self.planned.stepped(scheduler_output.num_scheduled_tokens, scheduler_output.finished_req_ids)
            super()._update_after_schedule(scheduler_output)

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().update_from_output(*args, **kwargs)
            if self.planned is not None and self.planned.refused:
                _tell_refused(self, self.planned, outputs)
            if self.planned is not None and not self.running and not self.has_unfinished_requests():
                # An engine in its client's process makes no further step, which would tell the end of the last ones.
                self.planned.stepped({}, self.finished_req_ids)
            return outputs

    Planned.__name__ = Planned.__qualname__ = f"Planned{base.__name__}"
    return Planned


def skipped_queue(planned: HeldQueue | OfferedQueue) -> Any:
    """The queue for requests that were skipped, up to 0.30: those that hold KV blocks stay, the others are planned."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue
    from vllm.v1.request import RequestStatus

    def holds(request: Request) -> bool:
        return request.num_computed_tokens > 0 or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    class SkippedQueue(FCFSRequestQueue):
        """Requests that hold KV blocks, and must not wait behind one that finds none."""

        def add_request(self, request: Request) -> None:
            if holds(request):
                super().add_request(request)
            else:
                planned.add_request(request)

        def prepend_request(self, request: Request) -> None:
            if holds(request):
                super().prepend_request(request)
            else:
                planned.prepend_request(request)

        def prepend_requests(self, requests: Iterable[Request]) -> None:
            for request in list(requests):
                self.prepend_request(request)

    return SkippedQueue()


def _tell_refused(scheduler: Any, planned: HeldQueue | OfferedQueue, outputs: dict[int, Any]) -> None:
    """End the requests that the queue turned away, each with the reason as its last output."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    for name, (request, refusal) in list(planned.refused.items()):
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        told = EngineCoreOutput(
            request_id=name, new_token_ids=[], finish_reason=FinishReason.ABORT, stop_reason=_words(refusal)
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(told)


def _words(refusal: Any) -> str:
    after = f"; try again after {refusal.retry_after:.0f} s" if refusal.retry_after > 0 else ""
    return f"refused: {refusal.reason}{after}"


def _planned(
    scheduler: Any, held: type[HeldQueue], offered: type[OfferedQueue]
) -> tuple[HeldQueue | OfferedQueue | None, Decider | None]:
    """The queue that vLLM is given, and with a policy who asks it each step."""
    plan, ledger = carried(), current()
    if plan is None or not plan.of("scheduler"):
        raise StartError(
            "the planned scheduler runs in a process without a plan",
            where=PREFIX,
            fix="name a scheduler in graft.toml instead of giving --scheduler-cls",
        )
    item = plan.of("scheduler")[0]
    slots = scheduler.max_num_running_reqs

    def fit(made: Item) -> None:
        if isinstance(made, AdmissionQueue):
            made.limited_to(slots)

    made: Item | None = make(item, (AdmissionQueue, SchedulingPolicy), plan, ledger, fit)
    if isinstance(made, AdmissionQueue):
        engine = scheduler.vllm_config.parallel_config.data_parallel_index
        return held(made, item, ledger, running=lambda: len(scheduler.running), slots=slots, engine=engine), None
    if isinstance(made, SchedulingPolicy):
        queue = offered(clock := SteadyClock())
        return queue, Decider(made, item, ledger, queue, clock)
    return None, None


def __getattr__(name: str) -> Any:
    if not name.startswith("over-"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, qualname = name.removeprefix("over-").replace("-", ".").rpartition(".")
    globals()[name] = over(getattr(importlib.import_module(module), qualname))
    return globals()[name]
