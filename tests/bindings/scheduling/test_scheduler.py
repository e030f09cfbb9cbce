"""A planned admission queue in vLLM's own scheduler: order, failures, refusals, and the user's own scheduler."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from vllm_graft.bindings import instantiate
from vllm_graft.bindings.scheduling import scheduler as module
from vllm_graft.bindings.scheduling.admission_queue import AdmissionQueueAdapter
from vllm_graft.bindings.scheduling.policy import PolicyQueue
from vllm_graft.bindings.scheduling.scheduler import PREFIX, check_arguments, set_scheduler_class
from vllm_graft.contracts import AdmissionQueue
from vllm_graft.errors import ConfigError, StartError
from vllm_graft.ledger import Ledger
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.testing import Session

ITEM = PlanItem("scheduler", "shortest-first", "m:C", "p", ("engine",), {}, "graft.toml:2")

SOURCE = """
import heapq
from vllm_graft.contracts import AdmissionQueue

class ShortestFirst(AdmissionQueue):
    def __init__(self, options=None):
        super().__init__(options)
        self.heap, self.gone = [], set()
    def push(self, request):
        heapq.heappush(self.heap, (request.prompt_tokens, request.arrival, request.request_id, request))
    def peek(self):
        while self.heap[0][2] in self.gone:
            self.gone.discard(heapq.heappop(self.heap)[2])
        return self.heap[0][3]
    def pop(self):
        request = self.peek()
        heapq.heappop(self.heap)
        return request
    def remove(self, request):
        self.gone.add(request.request_id)

class Fails(ShortestFirst):
    def pop(self):
        raise RuntimeError("queue is broken")

class Choosy(ShortestFirst):
    def admit(self, request, load):
        from vllm_graft.contracts import Refusal
        return Refusal("the prompt is too long", 3) if request.prompt_tokens > 80 else None

class Closed(Choosy):
    def admit(self, request, load):
        from vllm_graft.contracts import Refusal
        return Refusal("closed")
"""


def test_the_users_own_scheduler_beside_a_planned_one_is_refused_naming_both():
    """An engine has one scheduler; neither may win in silence."""
    plan = Plan((ITEM,))
    free = SimpleNamespace(scheduler_cls=None)
    check_arguments(free, plan)  # type: ignore[arg-type]
    check_arguments(free, Plan())  # type: ignore[arg-type]
    taken = SimpleNamespace(scheduler_cls="my.Scheduler")
    with pytest.raises(ConfigError, match=r"'shortest-first' by the plan \(graft.toml:2\) and 'my.Scheduler' by --sch"):
        check_arguments(taken, plan)  # type: ignore[arg-type]
    check_arguments(taken, Plan())  # type: ignore[arg-type]


class Timeless(AdmissionQueue):
    """A queue with a clock of its own, which cannot be set."""

    @property
    def clock(self) -> float:  # type: ignore[override]
        return 0.0


def test_a_queue_that_does_not_take_the_clock_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    """The last line of the start names the item, not an attribute."""
    plan = Plan((replace(ITEM, target="tests:Timeless"),))
    monkeypatch.setattr(module, "inherited_plan", lambda: plan)
    monkeypatch.setattr(module, "current", Ledger)
    monkeypatch.setattr(instantiate, "load", lambda *_: Timeless)
    with pytest.raises(StartError, match=r"scheduler 'shortest-first' \(from graft.toml:2\) cannot be made: Attribute"):
        module._planned_queue(SimpleNamespace(max_num_running_reqs=4), AdmissionQueueAdapter, PolicyQueue)


def test_the_base_is_the_class_that_vllm_has_chosen():
    """Whatever it is; and it is chosen once."""

    class Settings(SimpleNamespace):
        def get_scheduler_cls(self) -> type:
            return Plan

    config = SimpleNamespace(scheduler_config=Settings(scheduler_cls=None))
    set_scheduler_class(config, Plan())  # type: ignore[arg-type]
    assert config.scheduler_config.scheduler_cls is None
    for _ in range(2):
        set_scheduler_class(config, Plan((ITEM,)))  # type: ignore[arg-type]
        assert config.scheduler_config.scheduler_cls == PREFIX + "vllm_graft-plan-plan-Plan"


def test_up_to_0_30_only_those_that_hold_blocks_wait_apart():
    """A request that was skipped goes back to its place in the planned queue; one that holds KV blocks goes first."""
    pytest.importorskip("vllm")
    from vllm.v1.request import RequestStatus

    from vllm_graft.bindings.scheduling.scheduler import skipped_queue

    def request(name: str, status: object, computed: int = 0) -> SimpleNamespace:
        return SimpleNamespace(request_id=name, status=status, num_computed_tokens=computed)

    calls: list[tuple[str, str]] = []
    planned = SimpleNamespace(
        add_request=lambda request: calls.append(("add", request.request_id)),
        prepend_request=lambda request: calls.append(("back", request.request_id)),
    )
    queue = skipped_queue(planned)  # type: ignore[arg-type]
    queue.add_request(request("grammar", RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR))
    queue.add_request(request("session", RequestStatus.WAITING_FOR_STREAMING_REQ, 12))
    assert not calls[1:]
    # As the scheduler gives them: the last one was the first that it skipped.
    remote, plain = request("remote", RequestStatus.WAITING_FOR_REMOTE_KVS), request("plain", RequestStatus.WAITING)
    queue.prepend_requests([plain, remote])
    assert calls == [("add", "grammar"), ("back", "plain")]
    assert [each.request_id for each in queue] == ["remote", "session"]
    assert len(queue) == 2


SCRIPT = """
import json
import threading
from vllm import LLM, SamplingParams
from vllm_graft.ledger import runs
llm = LLM(MODEL, max_model_len=256, max_num_seqs=1, disable_log_stats=False)
prompts = ["a" * 90, "b" * 5, "c" * 40, "d" * 20]
done = []
for number, prompt in enumerate(prompts):
    llm.llm_engine.add_request(str(number), prompt, SamplingParams(max_tokens=3))
while llm.llm_engine.has_unfinished_requests():
    for output in llm.llm_engine.step():
        if output.finished:
            done.append(output.request_id[0])
            if not output.outputs[0].token_ids:
                print("REFUSED", output.outputs[0].finish_reason, output.outputs[0].stop_reason)
print("ORDER", "".join(done))
core = llm.llm_engine.engine_core.engine_core.scheduler
pool = core.kv_cache_manager.block_pool
free = pool.get_num_free_blocks() + 1 == pool.num_gpu_blocks
print("CORE", type(core).__name__, len(core.requests), len(core.waiting._popped), free)
for thread in threading.enumerate():
    if thread.name == "graft-ledger":  # a failure is written off the step path
        thread.join()
rows = [row for view in runs() for row in view.rows() if "engine" in row["roles"]]
print("ITEM", json.dumps(rows[0]["items"][0]))
"""


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "order", "state"),
    [
        ("ShortestFirst", "1320", "applied"),
        ("Fails", "1023", "quarantined"),
        ("Choosy", "0132", "applied"),
        ("Closed", "0123", "applied"),
    ],
)
def test_a_planned_queue_orders_the_real_engine(graft: Session, name: str, order: str, state: str):
    """One request at a time: the rest wait in the author's queue, or in their order once it has failed."""
    graft.simulate()
    graft.package("queues", {"vllm_graft.plugins": {"shortest-first": f"queues:{name}"}}, {"queues": SOURCE})
    graft.plan('[defaults]\nscheduler = "shortest-first"\n')
    # In the engine's own process nothing is scheduled before every request has arrived.
    graft.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = graft.script(SCRIPT)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = dict(
        line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("ORDER", "ITEM", "CORE", "REFUSED"))
    )
    assert shown["ORDER"] == order
    # What ended last is told though nobody asks for another step.
    assert shown["CORE"] in ("PlannedAsyncScheduler 0 0 True", "PlannedScheduler 0 0 True")
    if name == "Closed":
        assert shown["REFUSED"] == "abort refused: closed"
    if name == "Choosy":
        assert shown["REFUSED"] == "abort refused: the prompt is too long; try again after 3 s"
    assert f'"state": "{state}"' in shown["ITEM"]
