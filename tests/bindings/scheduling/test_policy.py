"""A policy around vLLM's step: when it is asked, how it preempts, and what a failure leads to. The scheduler is a
stand-in here; the real one is in ``test_policy_engine.py``."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.bindings.scheduling.clock import SteadyClock
from vllm_graft.bindings.scheduling.policy import STALLED_STEPS, PolicyQueue, PolicyRunner
from vllm_graft.contracts import KVState, RequestView, Schedule, SchedulerBase, SchedulingPolicy
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.guard import OVERRUNS_IN_A_ROW
from vllm_graft.plan import PlanItem

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "schedulers.md"
ITEM = PlanItem("scheduler", "runner", "m:C", "p", ("engine",), {}, "graft.toml:2")
EMPTY = SimpleNamespace(total_num_scheduled_tokens=0)


def request(name: str, **facts: object) -> SimpleNamespace:
    """What the queue and the runner read of vLLM's request, in a release before 0.27.1."""
    known = {
        "priority": 0,
        "arrival_time": 0.0,
        "num_prompt_tokens": 1,
        "max_tokens": 1,
        "sampling_params": None,
        "cache_salt": None,
        "lora_request": None,
        "num_in_flight_tokens": 0,
    }
    return SimpleNamespace(request_id=name, **{**known, **facts})


class Scheduler(SimpleNamespace):
    """What a runner touches of vLLM's; it preempts as vLLM does."""

    def __init__(self, queue: PolicyQueue, running: str) -> None:
        pool = SimpleNamespace(get_num_free_blocks=lambda: 30, num_gpu_blocks=121)
        super().__init__(
            waiting=queue,
            running=[request(name) for name in running],
            pause_state=SimpleNamespace(name="UNPAUSED"),
            kv_cache_manager=SimpleNamespace(block_pool=pool),
            block_size=16,
            num_waiting_for_streaming_input=0,
            elsewhere=0,
            preempted=[],
        )

    def _preempt_request(self, request: Any, timestamp: float, **told: object) -> None:
        assert request not in self.running
        self.preempted.append((request.request_id, told))
        self.waiting.prepend_request(request)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting) + self.elsewhere


Answer = Callable[[list[RequestView], list[RequestView], KVState], object]


def engine(answer: Answer, waiting: str = "ab", running: str = "xy") -> tuple[PolicyRunner, Scheduler, Ledger]:
    class Policy(SchedulingPolicy):
        schedule = staticmethod(answer)  # type: ignore[assignment]

    ledger = Ledger()
    ledger.set_item("scheduler", "runner", "applied")
    clock = SteadyClock()
    queue = PolicyQueue(clock)
    for name in waiting:
        queue.add_request(request(name))  # type: ignore[arg-type]
    return PolicyRunner(Policy(), ITEM, ledger, queue, clock), Scheduler(queue, running), ledger


def offered(queue: PolicyQueue) -> str:
    found = ""
    while queue:
        found += queue.pop_request().request_id
    return found


def test_a_step_is_what_the_policy_says():
    """It sees all requests and the blocks; what it preempts waits, and is not offered in the same step."""
    seen: list[object] = []

    def decide(waiting: list[RequestView], running: list[RequestView], kv: KVState) -> Schedule:
        seen.extend([[each.request_id for each in waiting], [each.request_id for each in running], dict(kv), kv.usage])
        return Schedule(waiting[::-1], preempt=[running[0]])

    runner, scheduler, _ = engine(decide)
    runner.before_step(scheduler)
    state = {"free_blocks": 30, "total_blocks": 120, "block_size": 16, "usage": 0.75}
    assert seen == [["a", "b"], ["x", "y"], state, 0.75]
    assert scheduler.preempted == [("x", {})]
    assert [each.request_id for each in scheduler.running] == ["y"]
    assert len(scheduler.waiting) == 3
    assert offered(scheduler.waiting) == "ba"
    runner.after_step(scheduler, EMPTY)  # type: ignore[arg-type]
    assert {each.request_id for each in scheduler.waiting} == {"x"}
    assert not scheduler.waiting


@pytest.mark.parametrize("delivers", [True, False])
def test_where_vllm_tells_what_to_drop_it_is_told_as_vllm_does(delivers: bool):
    """Since 0.27.1: output on its way is dropped where a connector has to deliver the KV of the request, else kept."""
    runner, scheduler, _ = engine(lambda waiting, running, kv: Schedule(preempt=running))
    scheduler.requires_kv_delivery = delivers
    runner.before_step(scheduler)
    assert scheduler.preempted == [(name, {"drop_stale_output": delivers}) for name in "xy"]


def test_what_has_output_on_its_way_is_not_resumed_where_vllm_would():
    """Before 0.27.1; from then on vLLM looks itself."""
    runner, scheduler, _ = engine(lambda waiting, running, kv: Schedule(waiting), waiting="abc")
    first, second, _ = scheduler.waiting
    first.num_in_flight_tokens = second.num_in_flight_tokens = 1
    second.num_stale_output_tokens = 1
    runner.before_step(scheduler)
    assert offered(scheduler.waiting) == "bc"


def test_a_policy_is_not_asked_while_the_engine_is_paused_or_empty():
    """What it preempted then would stay out for as long as the pause."""
    runner, scheduler, _ = engine(lambda waiting, running, kv: pytest.fail("asked"))
    scheduler.pause_state.name = "PAUSED_NEW"
    runner.before_step(scheduler)
    idle, nothing, _ = engine(lambda waiting, running, kv: pytest.fail("asked"), "", "")
    idle.before_step(nothing)
    assert not runner.failed
    assert not scheduler.waiting


def spoil(waiting: list[RequestView], running: list[RequestView], kv: KVState) -> Schedule:
    left = Schedule([], decode=running[1:])
    waiting.clear()
    del running[0]
    return left


class Stranger(RequestView):
    """A view of the author's own, which says that it equals anything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = RequestView.__hash__


class Trap(RequestView):
    """One whose name ends the process."""

    __slots__ = ()

    @property
    def request_id(self) -> str:  # type: ignore[override]
        raise SystemExit(1)

    def _write(self, **attributes: object) -> None:
        """Nothing is kept."""


def rename(waiting: list[RequestView], running: list[RequestView], kv: KVState) -> Schedule:
    waiting[0].request_id = "c"
    return Schedule(waiting)


def age(waiting: list[RequestView], running: list[RequestView], kv: KVState) -> Schedule:
    waiting[0].arrival = "yesterday"  # type: ignore[assignment]
    return Schedule(waiting)


def strip(waiting: list[RequestView], running: list[RequestView], kv: KVState) -> Schedule:
    del waiting[0].source  # type: ignore[attr-defined]
    return Schedule(waiting)


def leave(waiting: list[RequestView], running: list[RequestView], kv: KVState) -> Schedule:
    raise KeyboardInterrupt


def fail(waiting: list[RequestView], running: list[RequestView], kv: KVState) -> Schedule:
    raise RuntimeError("no idea")


INVALID = (
    "schedule() returned an invalid schedule: it must be a Schedule or a dictionary with "
    "['prefill_requests', 'decode_requests', 'preempt_requests'], but is NoneType"
)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (fail, "RuntimeError: no idea"),
        (lambda waiting, running, kv: None, INVALID),
        (spoil, "'x' is running, but is in neither decode nor preempt"),
        (rename, "AttributeError: request_id of a request cannot be written"),
        (age, "AttributeError: arrival of a request cannot be written"),
        (strip, "AttributeError: source of a request cannot be deleted"),
        (leave, "KeyboardInterrupt"),
        (
            lambda waiting, running, kv: Schedule([Stranger("a")]),
            "'a', which is not one of the requests that it was given",
        ),
        (lambda waiting, running, kv: Schedule([Trap("a")]), "invalid schedule: SystemExit: 1"),
        (lambda waiting, running, kv: Schedule([RequestView([])]), "invalid schedule: TypeError: unhashable"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_that_fails_is_put_aside_and_nothing_is_lost(answer: Answer, reason: str):
    """In the step in which it fails, and from then on, requests go in the order of their arrival."""
    runner, scheduler, ledger = engine(answer)
    for _ in range(2):
        runner.before_step(scheduler)
        assert offered(scheduler.waiting) == "ab"
        for name in "ab":
            scheduler.waiting.add_request(request(name))
        runner.after_step(scheduler, EMPTY)  # type: ignore[arg-type]
    assert scheduler.preempted == []
    item = ledger._items["runner"]
    assert item.state == "quarantined"
    assert reason in item.reason
    assert "are served in order of arrival" in item.reason


def test_a_view_can_be_copied_and_has_room_for_keys():
    """What a policy may do with it."""
    view = RequestView("a", priority=3, extra={"tenant": "acme"})
    view["mine"] = 5
    twin = copy.copy(view)
    assert (twin.request_id, twin.priority, twin["mine"], twin.extra) == ("a", 3, 5, {"tenant": "acme"})


def test_a_policy_that_is_slow_again_and_again_is_put_aside(monkeypatch: pytest.MonkeyPatch):
    """The budget of the point is a millisecond."""
    now = [0]
    monkeypatch.setattr("time.perf_counter_ns", lambda: now[0])

    def slow(waiting: list[RequestView], running: list[RequestView], kv: KVState) -> Schedule:
        now[0] += 2_000_000
        return Schedule(preempt=running)

    runner, scheduler, ledger = engine(slow)
    for _ in range(OVERRUNS_IN_A_ROW):
        runner.before_step(scheduler)
    assert "over the budget of 1000 us" in ledger._items["runner"].reason
    assert offered(scheduler.waiting) == "abxy"


def test_a_policy_that_starts_nothing_while_nothing_runs_is_put_aside():
    """After many steps in a row; not while requests run, start, or wait where vLLM starts them by itself."""
    runner, scheduler, ledger = engine(lambda waiting, running, kv: Schedule(), "ab", "")

    def steps(number: int, output: object = EMPTY) -> None:
        for _ in range(number):
            runner.before_step(scheduler)
            runner.after_step(scheduler, output)  # type: ignore[arg-type]

    steps(STALLED_STEPS - 1)
    steps(1, SimpleNamespace(total_num_scheduled_tokens=5))
    steps(STALLED_STEPS - 1)
    scheduler.elsewhere = 1
    steps(STALLED_STEPS)
    scheduler.running = [request("x")]
    steps(STALLED_STEPS)
    scheduler.running, scheduler.num_waiting_for_streaming_input = [], 1
    steps(STALLED_STEPS - 1)
    assert not runner.failed
    steps(1)
    assert "lets none of 2 requests start while nothing runs" in ledger._items["runner"].reason
    assert offered(scheduler.waiting) == "ab"


def test_a_policy_must_decide():
    """And the name of the guide is the same contract."""
    assert SchedulerBase is SchedulingPolicy
    with pytest.raises(NotImplementedError, match="SchedulingPolicy must implement schedule"):
        SchedulingPolicy().schedule([], [], KVState(0, 0, 16))


def test_the_policy_of_the_page_does_what_it_says():
    """The earliest deadline first; one that is close preempts where blocks are short, and only there."""
    (text,) = re.findall(r"^```python\n(# deadline\.py\n.+?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    scope: dict[str, Any] = {}
    exec(text, scope)
    policy = scope["DeadlineFirst"]({})
    policy.clock = lambda: 100.0
    late, soon = RequestView("late", arrival=90.0), RequestView("soon", arrival=99.0, extra={"deadline_s": 1.2})
    first, last = RequestView("first", arrival=10.0), RequestView("last", arrival=20.0)
    decided = policy.schedule([late, soon], [first, last], KVState(5, 100, 16))
    assert decided == Schedule([soon, late], preempt=[last])
    assert policy.schedule([late, soon], [first, last], KVState(50, 100, 16)) == Schedule([soon, late])
    assert policy.schedule([late], [first, last], KVState(5, 100, 16)) == Schedule([late])
