"""A planned admission queue in vLLM's own scheduler: order, hand-backs, failures, and the user's own scheduler."""

import heapq
from types import SimpleNamespace

import pytest

from vllm_graft.bindings.scheduler import QUALNAME, HeldQueue, arguments
from vllm_graft.contracts import AdmissionQueue, WaitingRequest
from vllm_graft.errors import ConfigError
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
"""


class ShortestFirst(AdmissionQueue):
    def __init__(self) -> None:
        super().__init__()
        self.heap: list[tuple[int, str, WaitingRequest]] = []
        self.removed: list[str] = []

    def push(self, request: WaitingRequest) -> None:
        heapq.heappush(self.heap, (request.prompt_tokens, request.request_id, request))

    def peek(self) -> WaitingRequest:
        return self.heap[0][2]

    def pop(self) -> WaitingRequest:
        return heapq.heappop(self.heap)[2]

    def remove(self, request: WaitingRequest) -> None:
        self.heap = [row for row in self.heap if row[1] != request.request_id]
        heapq.heapify(self.heap)


def request(name: str, tokens: int) -> SimpleNamespace:
    """What the queue reads of vLLM's request."""
    return SimpleNamespace(
        request_id=name, priority=0, arrival_time=0.0, num_prompt_tokens=tokens, max_tokens=1, sampling_params=None
    )


def held(queue: AdmissionQueue) -> tuple[HeldQueue, Ledger]:
    ledger = Ledger()
    ledger.set_item("scheduler", "shortest-first", "applied")
    return HeldQueue(queue, ITEM, ledger), ledger


def filled(queue: AdmissionQueue) -> tuple[HeldQueue, Ledger]:
    made, ledger = held(queue)
    for name, tokens in (("long", 9), ("short", 1), ("middle", 5)):
        made.add_request(request(name, tokens))  # type: ignore[arg-type]
    return made, ledger


def drain(queue: HeldQueue) -> list[str]:
    order = []
    while queue:
        assert queue.peek_request() is queue.peek_request()
        order.append(queue.peek_request().request_id)
        assert queue.pop_request().request_id == order[-1]
    return order


def test_the_authors_queue_decides():
    """Peek and pop agree, whatever order requests came in."""
    queue, _ = filled(ShortestFirst())
    assert len(queue) == 3
    assert {waiting.request_id for waiting in queue} == {"long", "short", "middle"}
    assert drain(queue) == ["short", "middle", "long"]
    assert not queue


def test_requests_handed_back_go_first():
    """Preempted or skipped requests are not the author's business; the last one prepended goes first."""
    queue, _ = filled(ShortestFirst())
    first, second = queue.pop_request(), queue.pop_request()
    queue.prepend_requests([second, first])
    assert drain(queue) == ["short", "middle", "long"]


def test_a_removed_request_is_gone_from_both_sides():
    """Also one that was handed back, and one that was never here."""
    queue, _ = filled(ShortestFirst())
    back = queue.pop_request()
    queue.prepend_request(back)
    queue.remove_requests([back, request("stranger", 1)])  # type: ignore[list-item]
    queue.remove_request(next(waiting for waiting in queue if waiting.request_id == "long"))
    assert drain(queue) == ["middle"]


class Broken(ShortestFirst):
    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, self._raise)

    def _raise(self, *args: object) -> None:
        raise RuntimeError("queue is broken")


@pytest.mark.parametrize("method", ["push", "peek", "pop", "remove"])
def test_a_queue_that_raises_is_put_aside_and_nothing_is_lost(method: str):
    """The order of arrival takes over."""
    queue, ledger = filled(Broken(method))
    if method == "remove":
        queue.remove_request(request("short", 1))  # type: ignore[arg-type]
        assert drain(queue) == ["long", "middle"]
    else:
        first = ["short"] if method == "pop" else []
        assert drain(queue) == first + [name for name in ("long", "short", "middle") if name not in first]
    item = ledger._items["shortest-first"]
    assert item.state == "quarantined"
    assert "RuntimeError: queue is broken" in item.reason
    assert "go in the order of their arrival" in item.reason


def test_a_queue_that_names_a_stranger_is_put_aside():
    """An answer that cannot be right is a failure like any other."""

    class Stranger(ShortestFirst):
        def peek(self) -> WaitingRequest:
            return WaitingRequest("stranger", 0, 0.0, 1, 1)

    queue, ledger = filled(Stranger())
    assert drain(queue) == ["long", "short", "middle"]
    assert "peek named 'stranger', which is not waiting" in ledger._items["shortest-first"].reason


@pytest.mark.parametrize("answer", [None, (1, "short"), 7])
def test_a_queue_that_answers_with_something_else_is_put_aside(answer: object):
    """A forgotten return must not be the order of arrival under the name of the author's queue."""
    broken = ShortestFirst()
    broken.peek = lambda: answer  # type: ignore[assignment, method-assign, return-value]
    queue, ledger = filled(broken)
    assert drain(queue) == ["long", "short", "middle"]
    assert ledger._items["shortest-first"].state == "quarantined"


def test_the_users_own_scheduler_beside_a_planned_one_is_refused_naming_both():
    """An engine has one scheduler; neither may win in silence."""
    plan = Plan((ITEM,))
    free = SimpleNamespace(scheduler_cls=None)
    assert arguments(free, plan) == {"scheduler_cls": QUALNAME}  # type: ignore[arg-type]
    assert arguments(free, Plan()) == {}  # type: ignore[arg-type]
    taken = SimpleNamespace(scheduler_cls="my.Scheduler")
    with pytest.raises(ConfigError, match=r"'shortest-first' by the plan \(graft.toml:2\) and 'my.Scheduler' by --sch"):
        arguments(taken, plan)  # type: ignore[arg-type]
    assert arguments(taken, Plan()) == {}  # type: ignore[arg-type]


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
    done += [output.request_id for output in llm.llm_engine.step() if output.finished]
print("ORDER", "".join(done))
for thread in threading.enumerate():
    if thread.name == "graft-ledger":  # a failure is written off the step path
        thread.join()
rows = [row for view in runs() for row in view.rows() if "engine" in row["roles"]]
print("ITEM", json.dumps(rows[0]["items"][0]))
"""


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "order", "state"), [("ShortestFirst", "1320", "applied"), ("Fails", "1023", "quarantined")]
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
    shown = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("ORDER", "ITEM")))
    assert shown["ORDER"] == order
    assert f'"state": "{state}"' in shown["ITEM"]
