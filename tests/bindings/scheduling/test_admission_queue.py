"""The side of an admission queue that vLLM sees: order, time, hand-backs, refusals, and what a failure leads to."""

import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.bindings.scheduling.admission_queue import AdmissionQueueAdapter
from vllm_graft.bindings.scheduling.clock import OLDEST_S, SteadyClock
from vllm_graft.contracts import AdmissionQueue, Load, Refusal, WaitingHeap, WaitingRequest
from vllm_graft.ledger import Ledger
from vllm_graft.plan import PlanItem

ITEM = PlanItem("scheduler", "shortest-first", "m:C", "p", ("engine",), {}, "graft.toml:2")


class ShortestFirst(AdmissionQueue):
    def __init__(self) -> None:
        super().__init__()
        self.heap = WaitingHeap()

    def push(self, request: WaitingRequest) -> None:
        self.heap.add(request.prompt_tokens, request)

    def peek(self) -> WaitingRequest:
        return self.heap.first()

    def pop(self) -> WaitingRequest:
        return self.heap.take()

    def remove(self, request: WaitingRequest) -> None:
        assert self.heap.discard(request)


def request(name: str, tokens: int, arrival: float = 0.0) -> SimpleNamespace:
    """What the queue reads of vLLM's request."""
    return SimpleNamespace(
        request_id=name,
        priority=0,
        arrival_time=arrival,
        num_prompt_tokens=tokens,
        max_tokens=1,
        sampling_params=SimpleNamespace(extra_args={"tenant": "a"}),
        cache_salt="salt",
        lora_request=SimpleNamespace(lora_name="adapter"),
    )


def held(queue: AdmissionQueue) -> tuple[AdmissionQueueAdapter, Ledger]:
    ledger = Ledger()
    ledger.set_item("scheduler", "shortest-first", "applied")
    return AdmissionQueueAdapter(queue, ITEM, ledger), ledger


def filled(queue: AdmissionQueue) -> tuple[AdmissionQueueAdapter, Ledger]:
    made, ledger = held(queue)
    for name, tokens in (("long", 9), ("short", 1), ("middle", 5)):
        made.add_request(request(name, tokens))  # type: ignore[arg-type]
    return made, ledger


def drain(queue: AdmissionQueueAdapter) -> list[str]:
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


def test_requests_handed_back_keep_their_place():
    """The author's queue is given the request that it was given first."""
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
    queue.remove_request(back)
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
    assert "are served in order of arrival" in item.reason


def test_a_queue_that_names_a_stranger_is_put_aside():
    """An answer that cannot be right is a failure like any other."""

    class Stranger(ShortestFirst):
        def peek(self) -> WaitingRequest:
            return WaitingRequest("stranger", 0, 0.0, 1, 1)

    queue, ledger = filled(Stranger())
    assert drain(queue) == ["long", "short", "middle"]
    assert "peek returned 'stranger', which is not waiting" in ledger._items["shortest-first"].reason


def test_a_queue_that_fails_between_peek_and_pop_loses_nothing():
    """The request that was peeked at is popped; the fallback keeps all others."""

    class Silent(ShortestFirst):
        def served(self, request: WaitingRequest, tokens: int) -> None:
            raise RuntimeError("queue is broken")

    queue, ledger = filled(Silent())
    queue.pop_request()
    assert queue.peek_request().request_id == "middle"
    for _ in range(2):  # the first step has none to report yet
        queue.end_step({"short": 1}, ())
    assert ledger._items["shortest-first"].state == "quarantined"
    assert queue.pop_request().request_id == "middle"
    assert drain(queue) == ["long"]


@pytest.mark.parametrize("answer", [None, (1, "short"), 7])
def test_a_queue_that_answers_with_something_else_is_put_aside(answer: object):
    """A forgotten return must not be the order of arrival under the name of the author's queue."""
    broken = ShortestFirst()
    broken.peek = lambda: answer  # type: ignore[assignment, method-assign, return-value]
    queue, ledger = filled(broken)
    assert drain(queue) == ["long", "short", "middle"]
    assert ledger._items["shortest-first"].state == "quarantined"


class Timed(ShortestFirst):
    """Names another request whenever the clock has moved on, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []

    def peek(self) -> WaitingRequest:
        waiting = sorted(self.heap, key=lambda each: each.request_id)
        return waiting[int(self.clock()) % len(waiting)]

    def pop(self) -> WaitingRequest:
        named = self.peek()
        self.heap.discard(named)
        return named

    def put_back(self, request: WaitingRequest) -> None:
        self.told.append(("back", request.request_id))
        self.push(request)

    def served(self, request: WaitingRequest, tokens: int) -> None:
        self.told.append((request.request_id, tokens))

    def ended(self, request: WaitingRequest) -> None:
        self.told.append(("ended", request.request_id))


def test_the_clock_stands_still_from_peek_to_pop(monkeypatch: pytest.MonkeyPatch):
    """The scheduler decides for a while after it has peeked; the queue may be one of the time."""
    wall = [1000.0]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    monkeypatch.setattr(time, "monotonic", lambda: wall[0])
    queue, ledger = filled(Timed())
    for _ in range(3):
        peeked = queue.peek_request()
        wall[0] += 1
        assert queue.pop_request() is peeked
    assert not queue
    assert ledger._items["shortest-first"].state == "applied"


def test_what_is_served_and_what_ended_is_told():
    """Of requests that were here; a request that is preempted is known as it was at first."""
    author = Timed()
    queue, _ = filled(author)
    taken = queue.pop_request()
    name = taken.request_id
    queue.end_step({name: 7, "stranger": 3}, ["stranger"])
    taken.priority = 99
    queue.prepend_request(taken)
    assert next(each for each in author.heap if each.request_id == name).priority == 0
    queue.end_step({}, [name])  # ended, and come again under the same name
    queue.remove_request(taken)
    queue.end_step({}, [name])
    queue.end_step({name: 1}, [name])
    assert author.told == [(name, 7), ("back", name), ("ended", name)]


def test_a_request_as_the_queue_sees_it():
    """With all that tells one client from another."""
    author = ShortestFirst()
    queue, _ = held(author)
    now = time.time()
    queue.add_request(request("a", 3, now))  # type: ignore[arg-type]
    assert author.peek() == WaitingRequest("a", 0, now, 3, 1, {"tenant": "a"}, "salt", "adapter")


def test_a_request_that_is_turned_away_is_never_pushed():
    """It counts as waiting until its client was told, and is never offered."""

    class Choosy(ShortestFirst):
        def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
            return Refusal("too long", 2.0) if request.prompt_tokens > 8 else None

    queue, _ = filled(Choosy())
    assert list(queue.refused) == ["long"]
    assert queue.refused["long"][1] == Refusal("too long", 2.0)
    assert (len(queue), [each.request_id for each in queue]) == (3, ["short", "middle"])
    queue.remove_request(queue.refused["long"][0])
    assert (len(queue), drain(queue)) == (2, ["short", "middle"])


def test_the_reason_of_a_refusal_can_be_sent():
    """It may repeat a client's words; what no encoder takes would end the engine's answers to everybody."""

    class Repeats(ShortestFirst):
        def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
            return Refusal("nothing for \ud800", 2.0)

    queue, _ = filled(Repeats())
    assert {refusal.reason for _, refusal in queue.refused.values()} == {r"nothing for \ud800"}


def test_the_rank_becomes_the_priority_of_an_admitted_request():
    """So that vLLM's choice of whom to preempt follows it; where there is none, the priority stays."""

    class Ranked(ShortestFirst):
        def rank(self, request: WaitingRequest) -> int:
            return -request.prompt_tokens

    author = Ranked()
    queue, _ = filled(author)
    assert queue.ranks
    taken = queue.pop_request()
    assert taken.priority == -1
    queue.add_request(taken)  # a session goes on
    assert author.peek().priority == 0
    plain, _ = filled(ShortestFirst())
    assert not plain.ranks
    assert plain.pop_request().priority == 0


@pytest.mark.parametrize("answer", [None, "1", 1.5, object()])
def test_a_rank_that_is_no_whole_number_puts_the_queue_aside(answer: object):
    """Passed over, it would change nothing, and nobody would know."""

    class Ranked(ShortestFirst):
        def rank(self, request: WaitingRequest) -> int:
            return answer  # type: ignore[return-value]

    queue, ledger = filled(Ranked())
    assert queue.pop_request().priority == 0
    item = ledger._items["shortest-first"]
    assert item.state == "quarantined"
    assert f"TypeError: rank must return a whole number, but returned {type(answer).__name__}" in item.reason


def test_a_rank_of_a_class_of_the_author_s_own_becomes_a_plain_number():
    """vLLM compares ranks outside of every guard: an exception there would end the engine."""

    class Sulking(int):
        def __lt__(self, other: object) -> bool:
            raise RuntimeError("on purpose")

    class Ranked(ShortestFirst):
        def rank(self, request: WaitingRequest) -> int:
            return Sulking(7)

    queue, _ = filled(Ranked())
    assert type(queue.pop_request().priority) is int


class TestSteadyClock:
    @pytest.fixture
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        made = SimpleNamespace(date=5000.0, up=10.0)
        monkeypatch.setattr(time, "time", lambda: made.date)
        monkeypatch.setattr(time, "monotonic", lambda: made.up)
        return made

    def test_it_goes_on_when_the_date_is_set_back(self, machine: SimpleNamespace):
        clock = SteadyClock()
        machine.date, machine.up = 1400.0, 11.0
        assert clock.tick() == 5001.0
        assert clock.from_wall_time(1399.5) == 5000.5, "a stamp of the new date, half a second old"

    def test_it_is_read_as_it_was_moved_last(self, machine: SimpleNamespace):
        clock = SteadyClock()
        machine.up = 99.0
        assert clock() == 5000.0
        clock.tick()
        assert clock() == 5089.0

    def test_a_stamp_is_neither_in_the_future_nor_long_ago(self, machine: SimpleNamespace):
        """A skewed host gains nothing and loses nothing but its skew."""
        clock = SteadyClock()
        assert clock.from_wall_time(5003.0) == 5000.0
        assert clock.from_wall_time(0.0) == 5000.0 - OLDEST_S
        assert clock.from_wall_time(4999.875) == 4999.875

    def test_a_process_that_was_stopped_between_two_readings_keeps_the_order(
        self, machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ):
        """A busy machine stops a process for half a second and more: that is no date which was set."""
        clock = SteadyClock()
        machine.date, machine.up = 5001.0, 11.0
        clock.tick()
        first = clock.from_wall_time(5000.9)
        stops = [2.0]

        def date() -> float:
            pause = stops.pop() if stops else 0.0
            machine.up += pause
            machine.date += pause
            return machine.date

        monkeypatch.setattr(time, "time", date)
        assert first == 5000.9 < clock.from_wall_time(5000.95) == 5000.95

    def test_dates_that_were_set_keep_the_order_whatever_a_reading_takes(self, machine: SimpleNamespace):
        """A stamp that waited longer to be placed is not earlier for it."""
        clock = SteadyClock()
        machine.date, machine.up = 1400.0, 11.0
        clock.tick()
        assert clock.from_wall_time(1399.90) == pytest.approx(5000.90)
        machine.date += 0.3
        assert clock.from_wall_time(1399.95) == pytest.approx(5000.95)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nothing_is_lost_or_doubled(data: st.DataObject):
    """Random arrivals, admissions, hand-backs, aborts and strangers, on a queue that may fail in any call."""
    fails_at = data.draw(st.integers(0, 60), "fails at call")
    calls = 0

    class Failing(ShortestFirst):
        def _count(self) -> None:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise RuntimeError("now")

        def push(self, request: WaitingRequest) -> None:
            self._count()
            super().push(request)

        def peek(self) -> WaitingRequest:
            self._count()
            return super().peek()

        def pop(self) -> WaitingRequest:
            self._count()
            return super().pop()

        def remove(self, request: WaitingRequest) -> None:
            self._count()
            super().remove(request)

    queue, _ = held(Failing())
    waiting: dict[str, SimpleNamespace] = {}
    admitted: dict[str, SimpleNamespace] = {}
    for number in range(data.draw(st.integers(0, 40), "operations")):
        operation = data.draw(st.sampled_from(["add", "add", "pop", "back", "abort", "stranger", "end"]))
        if operation == "add":
            made = request(str(number), data.draw(st.integers(1, 5)))
            waiting[made.request_id] = made
            queue.add_request(made)  # type: ignore[arg-type]
        elif operation == "pop" and waiting:
            peeked = queue.peek_request()
            popped = queue.pop_request()
            assert popped is peeked
            admitted[popped.request_id] = waiting.pop(popped.request_id)
        elif operation == "back" and admitted:
            name = data.draw(st.sampled_from(sorted(admitted)))
            waiting[name] = admitted.pop(name)
            queue.prepend_requests([waiting[name]])  # type: ignore[list-item]
        elif operation == "abort" and waiting:
            name = data.draw(st.sampled_from(sorted(waiting)))
            queue.remove_requests([waiting.pop(name)])  # type: ignore[list-item]
            queue.end_step({}, [name])
        elif operation == "end" and admitted:
            name = data.draw(st.sampled_from(sorted(admitted)))
            del admitted[name]
            queue.end_step({name: 1}, [name])
        elif operation == "stranger":
            queue.remove_requests([*admitted.values(), request("nobody", 1)])  # type: ignore[list-item]
        assert (len(queue), bool(queue)) == (len(waiting), bool(waiting))
        assert {each.request_id for each in queue} == set(waiting)
    while queue:
        peeked = queue.peek_request()
        assert queue.pop_request() is peeked
        assert waiting.pop(peeked.request_id) is peeked
    assert not waiting


def test_a_queue_is_told_how_busy_its_engine_is():
    """When it is asked whether to admit: who waits, who runs, and how many are admitted in a second."""
    told: list[Load] = []

    class Listening(ShortestFirst):
        def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
            told.append(load)
            return None

    ledger = Ledger()
    queue = AdmissionQueueAdapter(Listening(), ITEM, ledger, running=lambda: 7, slots=8)
    queue.add_request(request("a", 1))  # type: ignore[arg-type]
    queue.add_request(request("b", 1))  # type: ignore[arg-type]
    assert told == [Load(0, 7, 0.0), Load(1, 7, 0.0)]


def test_a_queue_may_hold_requests_back_while_others_run():
    """vLLM sees none to admit and still counts them; with nothing running all are offered, or nothing would happen."""
    running = [3]

    class Reserving(ShortestFirst):
        def ready(self) -> bool:
            return self.free_slots > 1

    ledger = Ledger()
    queue = AdmissionQueueAdapter(Reserving(), ITEM, ledger, running=lambda: running[0], slots=4)
    queue.add_request(request("a", 1))  # type: ignore[arg-type]
    assert (bool(queue), len(queue)) == (False, 1)
    running[0] = 2
    assert queue
    running[0] = 0
    queue = AdmissionQueueAdapter(Reserving(), ITEM, ledger, running=lambda: running[0], slots=1)
    queue.add_request(request("a", 1))  # type: ignore[arg-type]
    assert queue


def test_requests_that_wait_for_something_else_are_no_queue():
    """For a grammar, say: taken out and put back in every step. They make nobody else's wait longer."""
    queue, _ = filled(ShortestFirst())
    for _ in range(3):
        tried = [queue.pop_request() for _ in range(2)]
        queue.prepend_requests(tried)
        queue.end_step({}, ())
    assert (len(queue), queue.load().waiting) == (3, 1)
    queue.end_step({}, ())
    assert queue.load().waiting == 3


def test_a_preempted_request_waits_for_its_turn():
    """It was admitted in an earlier step."""
    queue, _ = filled(ShortestFirst())
    taken = queue.pop_request()
    queue.end_step({taken.request_id: 1}, ())
    queue.prepend_request(taken)
    queue.end_step({}, ())
    assert queue.load().waiting == 3


@pytest.mark.parametrize("wrong", [("full", None), ("full", float("nan")), ("full", -1), (None, 1), ("full", 1, 200)])
def test_a_refusal_that_nobody_could_be_told_puts_the_queue_aside(wrong):
    """In the call that makes it, and not where the engine would end the request."""

    class Wrong(ShortestFirst):
        def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
            return Refusal(*wrong)

    queue, ledger = held(Wrong())
    queue.add_request(request("a", 1))  # type: ignore[arg-type]
    assert not queue.refused
    assert drain(queue) == ["a"]
    assert ledger._items["shortest-first"].state == "quarantined"


@pytest.mark.parametrize("answer", [True, False, "full"])
def test_an_answer_to_admit_that_is_no_refusal_puts_the_queue_aside(answer: object):
    """It would be taken for consent, whatever its author meant."""

    class Wrong(ShortestFirst):
        def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
            return answer  # type: ignore[return-value]

    queue, ledger = held(Wrong())
    queue.add_request(request("a", 1))  # type: ignore[arg-type]
    assert drain(queue) == ["a"]
    reason = ledger._items["shortest-first"].reason
    assert f"TypeError: admit must return a Refusal or None, but returned {type(answer).__name__}" in reason


class Fixed(ShortestFirst):
    """Has a property where a number is written."""

    free_slots = property(lambda self: 1)  # type: ignore[assignment]


class Trap:
    """Something whose name ends the process."""

    @property
    def request_id(self) -> str:
        raise SystemExit(1)


class Trapped(ShortestFirst):
    """Names it."""

    def peek(self) -> WaitingRequest:
        return Trap()  # type: ignore[return-value]


class Leaves(ShortestFirst):
    """Ends the process, it thinks."""

    def pop(self) -> WaitingRequest:
        raise SystemExit(1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Fixed, "free_slots cannot be set: AttributeError"),
        (Trapped, "peek returned '', which is not waiting"),
        (Leaves, "SystemExit: 1"),
    ],
)
def test_nothing_a_queue_does_ends_the_engine(kind: type[ShortestFirst], reason: str):
    """The order of arrival takes over, and nothing is lost."""
    queue, ledger = filled(kind())
    assert sorted(drain(queue)) == ["long", "middle", "short"]
    assert reason in ledger._items["shortest-first"].reason
