"""What running requests were given: counted once for all, and told to the author's queue in turns."""

import random
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.bindings.scheduling.admission_queue import AdmissionQueueAdapter
from vllm_graft.bindings.scheduling.statistics import REPORT_STEPS, TokenCounts
from vllm_graft.contracts import AdmissionQueue, WaitingHeap, WaitingRequest
from vllm_graft.ledger import Ledger
from vllm_graft.plan import PlanItem

ITEM = PlanItem("scheduler", "noting", "m:C", "p", ("engine",), {}, "graft.toml:2")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_request_has_what_it_was_given(data):
    """Against adding up for each, whoever begins, ends or is left out of a step."""
    counted, expected = TokenCounts(), {}
    for _ in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from("abcdef"))
        what = data.draw(st.sampled_from(("begin", "end", "step", "step", "step")))
        if what == "begin":
            counted.start(name)
            expected[name] = 0
        elif what == "end":
            counted.stop(name)
            expected.pop(name, None)
        else:
            tokens = data.draw(st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 3)))
            counted.add_step(tokens)
            for each in tokens.keys() & expected.keys():
                expected[each] += tokens[each]
        assert {each: counted.total(each) for each in "abcdefg"} == {each: expected.get(each, 0) for each in "abcdefg"}


def test_everybody_s_turn_comes():
    """Within so many steps, few at a time; who has ended has no turn."""
    counted = TokenCounts()
    names = [str(number) for number in range(128)]
    for name in names:
        counted.start(name)
    seen = [counted.next_batch() for _ in range(REPORT_STEPS + 1)]
    assert {name for each in seen for name in each} == set(names)
    assert max(len(each) for each in seen) <= 128 // REPORT_STEPS + 1
    for name in names[1:]:
        counted.stop(name)
    assert {name for _ in range(2 * REPORT_STEPS) for name in counted.next_batch()} == {"0"}


class Noting(AdmissionQueue):
    """Keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = WaitingHeap()
        self.told: dict[str, int] = {}
        self.when_ended: dict[str, int] = {}
        self.when_back: dict[str, int] = {}

    def push(self, request: WaitingRequest) -> None:
        self.heap.add(request.arrival, request)

    def peek(self) -> WaitingRequest:
        return self.heap.first()

    def pop(self) -> WaitingRequest:
        return self.heap.take()

    def remove(self, request: WaitingRequest) -> None:
        self.heap.discard(request)

    def put_back(self, request: WaitingRequest) -> None:
        self.when_back[request.request_id] = self.told.get(request.request_id, 0)
        self.push(request)

    def served(self, request: WaitingRequest, tokens: int) -> None:
        self.told[request.request_id] = self.told.get(request.request_id, 0) + tokens

    def ended(self, request: WaitingRequest) -> None:
        self.when_ended[request.request_id] = self.told.get(request.request_id, 0)


def vllm_request(name: str) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        priority=0,
        arrival_time=0.0,
        num_prompt_tokens=5,
        max_tokens=9,
        sampling_params=None,
        cache_salt=None,
        lora_request=None,
    )


def test_a_queue_hears_of_every_token():
    """Of all of them before a request is put back and before it has ended; of running ones within some steps."""
    draw, author, ledger = random.Random(3), Noting(), Ledger()
    ledger.set_item("scheduler", "noting", "applied")
    queue = AdmissionQueueAdapter(author, ITEM, ledger)
    waiting = [vllm_request(str(number)) for number in range(60)]
    for request in waiting:
        queue.add_request(request)  # type: ignore[arg-type]
    running: dict[str, SimpleNamespace] = {}
    total: dict[str, int] = {}
    ended: list[str] = []
    for _ in range(200):
        while queue and len(running) < 20:
            request = queue.pop_request()
            running[request.request_id] = request  # type: ignore[assignment]
        if draw.random() < 0.2 and running:
            name = draw.choice(sorted(running))
            queue.prepend_request(running.pop(name))  # type: ignore[arg-type]
            assert author.when_back[name] == total.get(name, 0)
        tokens = {name: draw.choice((1, 1, 1, 4)) for name in running if draw.random() < 0.9}
        for name, number in tokens.items():
            total[name] = total.get(name, 0) + number
        queue.end_step(tokens, ended)
        for name in ended:
            assert author.when_ended[name] == total.get(name, 0)
        ended = [name for name in sorted(running) if draw.random() < 0.02]
        for name in ended:
            del running[name]
    for _ in range(2 * REPORT_STEPS):
        queue.end_step({}, ended)
        ended = []
    assert len(author.when_ended) > 20
    assert author.told == {name: number for name, number in total.items() if number}
