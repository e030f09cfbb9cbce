"""``priority-fairness`` against a slow and obvious reference: the order, the urgent lane's share, and the bound."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.contracts import Load, WaitingRequest
from vllm_graft.contracts.item import OptionValue
from vllm_graft.errors import ConfigError
from vllm_graft.plugins.schedulers.priority_fairness import PriorityFairness
from vllm_graft.plugins.schedulers.urgent_lane import AHEAD


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(options: Mapping[str, OptionValue] | None = None) -> tuple[PriorityFairness, Clock]:
    queue, clock = PriorityFairness(options), Clock()
    queue.clock = clock
    return queue, clock


def request(name: object, priority: int, arrival: float) -> WaitingRequest:
    return WaitingRequest(str(name), priority, arrival, 10, 10)


class Reference:
    """The mathematics, word for word, over a plain list: every question looks at every request."""

    def __init__(self, wait: float, weight: float, aging: float, after: float, share: float) -> None:
        self.wait, self.weight, self.aging, self.after, self.share = wait, weight, aging, after, share
        self.waiting: list[tuple[int, WaitingRequest]] = []
        self.debt, self.ahead = 0.0, 0
        self.moved: dict[str, tuple[float, int]] = {}
        self.number = 0

    def push(self, each: WaitingRequest) -> None:
        self.number += 1
        self.waiting.append((self.number, each))

    def score(self, each: WaitingRequest, now: float) -> float:
        kind = each.priority if 0 < each.priority <= 5 else 3 if each.priority <= 0 else 5
        return self.weight * (6 - kind) / 5 + self.aging * (now - each.arrival) / self.wait

    def choose(self, now: float) -> tuple[WaitingRequest, str]:
        _, oldest = min(self.waiting, key=lambda row: (row[1].arrival, row[0]))
        best = max(self.score(each, now) for _, each in self.waiting)
        near = [row for row in self.waiting if math.isclose(self.score(row[1], now), best, abs_tol=1e-9)]
        first = min(near)[1]
        tops = [row for row in self.waiting if row[1].priority == 1]
        if self.urgent(now) and tops and self.ahead < AHEAD:
            return min(tops, key=lambda row: (row[1].arrival, row[0]))[1], "first"
        if self.urgent(now) and self.debt < 1:
            return oldest, "urgent"
        return first, "class"

    def urgent(self, now: float) -> bool:
        return any(now >= each.arrival + self.after * self.wait for _, each in self.waiting)

    def pop(self, now: float) -> WaitingRequest:
        chosen, way = self.choose(now)
        before = self.debt, self.ahead
        self.ahead = self.ahead + 1 if way == "first" else max(0, self.ahead - 1)
        if way == "urgent":
            self.debt += (1 - self.share) / self.share
        elif way == "class" and self.urgent(now):
            self.debt -= 1
        elif way == "class" and self.debt > 0:
            self.debt = max(0.0, self.debt - 1)
        self.moved[chosen.request_id] = self.debt - before[0], self.ahead - before[1]
        self.waiting = [row for row in self.waiting if row[1] is not chosen]
        return chosen

    def put_back(self, each: WaitingRequest) -> None:
        debt, ahead = self.moved[each.request_id]
        self.debt -= debt
        self.ahead = max(0, self.ahead - ahead)
        self.push(each)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_it_agrees_with_the_reference(data: st.DataObject):
    """Under arrivals, admissions, hand-backs, aborts and a clock that moves as it likes, forward."""
    after, share = data.draw(st.sampled_from([0.0, 0.5, 0.8])), data.draw(st.sampled_from([0.25, 0.5, 1.0]))
    queue, clock = made({"urgent_after": after, "urgent_share": share})
    reference = Reference(30.0, 0.7, 0.3, after, share)
    admitted: list[WaitingRequest] = []
    for number in range(data.draw(st.integers(0, 60))):
        clock.now += data.draw(st.sampled_from([0, 0, 1, 3, 7, 20]))
        operation = data.draw(st.sampled_from(["push", "push", "push", "pop", "pop", "back", "remove"]))
        if operation == "push":
            each = request(number, data.draw(st.integers(-1, 6)), clock.now - data.draw(st.sampled_from([0, 0, 2, 5])))
            queue.push(each)
            reference.push(each)
        elif operation == "pop" and reference.waiting:
            assert queue.peek() is reference.choose(clock.now)[0]
            assert queue.peek() is queue.peek()
            popped = queue.pop()
            assert popped is reference.pop(clock.now)
            admitted.append(popped)
        elif operation == "back" and admitted:
            each = admitted.pop(data.draw(st.integers(0, len(admitted) - 1)))
            queue.put_back(each)
            reference.put_back(each)
        elif operation == "remove" and reference.waiting:
            _, each = reference.waiting.pop(data.draw(st.integers(0, len(reference.waiting) - 1)))
            queue.remove(each)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=120),
    back=st.sets(st.integers(0, 100)),
    after=st.sampled_from([0.2, 0.5, 0.8]),
    share=st.sampled_from([0.25, 0.5, 1.0]),
)
def test_the_bound_is_kept(arrivals: list[tuple[int, int]], back: set[int], after: float, share: float):
    """One admission per second, requests of one size: nobody waits longer than docs/reference/schedulers.md says.

    wait <= urgent_after * max_wait_sec + 2 * (waiting when it came + those handed back since) / urgent_share + a few
    """
    wait = 30.0
    queue, clock = made({"max_wait_sec": wait, "urgent_after": after, "urgent_share": share})
    start = clock.now
    coming = sorted((start + at, number, kind) for number, (at, kind) in enumerate(arrivals))
    waiting: dict[str, tuple[float, int, int]] = {}
    returned = admissions = 0
    while coming or waiting:
        while coming and coming[0][0] <= clock.now:
            at, number, kind = coming.pop(0)
            each = request(number, kind, at)
            waiting[each.request_id] = (at, len(waiting), returned)
            queue.push(each)
        if waiting:
            popped = queue.pop()
            at, before, returned_before = waiting.pop(popped.request_id)
            allowed = after * wait + 2 * ((before + returned - returned_before + 1) / share + 1) + AHEAD + 1
            assert clock.now - at <= allowed
            if admissions in back:
                returned += 1
                waiting[popped.request_id] = (clock.now, len(waiting), returned)
                queue.put_back(popped)
            admissions += 1
        clock.now += 1.0


def test_a_preempted_request_keeps_its_place():
    """It waits again as long as it had waited, and not from now on."""
    queue, clock = made()
    first, second = request("first", 3, clock.now), request("second", 3, clock.now + 1)
    queue.push(first)
    queue.push(second)
    assert queue.pop() is first
    clock.now += 5
    queue.put_back(first)
    assert queue.pop() is first


def test_classes_go_before_each_other_until_the_wait_is_worth_more():
    """With the weights as they are a class is worth 14 s."""
    queue, clock = made({"urgent_after": 1.0})
    queue.push(request("old", 2, clock.now))
    queue.push(request("new", 1, clock.now + 13))
    assert queue.peek().request_id == "new"
    queue.push(request("older", 2, clock.now - 2))
    assert queue.peek().request_id == "older"


def test_the_urgent_have_their_share_and_no_more():
    """Half of the admissions, while both kinds wait."""
    queue, clock = made({"urgent_share": 0.5})
    for number in range(20):
        queue.push(request(f"old{number}", 5, clock.now - 20))
        queue.push(request(f"new{number}", 2, clock.now))
    order = [queue.pop().request_id[:3] for _ in range(20)]
    assert order == ["old", "new"] * 10


def test_the_first_class_need_not_wait_for_its_turn():
    """It goes before urgent requests; a flood of it has every second admission, and a few more at once."""
    queue, clock = made({"urgent_share": 0.5})
    for number in range(20):
        queue.push(request(f"old{number}", 5, clock.now - 20))
        queue.push(request(f"mid{number}", 2, clock.now))
    assert [queue.pop().request_id[:3] for _ in range(3)] == ["old", "mid", "old"]
    queue.push(request("top0", 1, clock.now))
    queue.push(request("top1", 1, clock.now))
    assert [queue.pop().request_id[:3] for _ in range(6)] == ["top", "top", "mid", "old", "mid", "old"]
    for number in range(40):
        queue.push(request(f"top{number}", 1, clock.now))
    order = [queue.pop().request_id[:3] for _ in range(AHEAD + 20)]
    assert order[:AHEAD] == ["top"] * AHEAD
    assert order.count("top") >= AHEAD + 10
    assert order.count("old") == 5


def test_a_blocked_request_does_not_use_up_the_share_of_the_urgent():
    """One that waits for its grammar is taken out and put back in every step, and others are admitted meanwhile."""
    queue, clock = made({"urgent_share": 0.5})
    blocked = request("blocked", 5, clock.now - 25)
    queue.push(blocked)
    for number in range(20):
        queue.push(request(f"old{number}", 5, clock.now - 20))
        queue.push(request(f"new{number}", 2, clock.now))
    order = []
    for _ in range(20):  # steps with one admission each
        skipped = []
        while (popped := queue.pop()) is blocked:
            skipped.append(popped)
        order.append(popped.request_id[:3])
        for each in skipped:
            queue.put_back(each)
    assert (order.count("old"), order.count("new")) == (10, 10)
    queue.remove(blocked)
    queue.ended(blocked)


def test_what_is_over_is_forgotten():
    """Nothing is kept of requests that have ended."""
    queue, clock = made()
    for number in range(100):
        queue.push(request(number, number % 5, clock.now - number))
        queue.ended(queue.pop())
    assert not queue._urgent._moved


def test_who_came_through_the_urgent_lane_is_not_preempted_first():
    """Else it would lose again what it waited for."""
    queue, clock = made()
    queue.push(request("aged", 5, clock.now - 20))
    queue.push(request("plain", 5, clock.now))
    assert queue.rank(queue.pop()) == 0
    assert queue.rank(queue.pop()) == 5


@pytest.mark.parametrize(("priority", "refused"), [(-1, False), (0, False), (1, False), (5, False), (6, True)])
def test_a_priority_beyond_the_last_class_is_refused(priority: int, refused: bool):
    """Clients that say nothing have priority 0."""
    queue, clock = made()
    refusal = queue.admit(request("a", priority, clock.now), Load())
    assert (refusal is not None) == refused
    if refusal is not None:
        assert refusal.reason == "priority 6 is not one of 1 (first) to 5 (last)"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_wait_sec", 0),
        ("max_wait_sec", -5.0),
        ("max_wait_sec", math.nan),
        ("max_wait_sec", math.inf),
        ("priority_weight", -0.1),
        ("fairness_weight", 0.0),
        ("classes", 0),
        ("default_class", 6),
        ("urgent_after", 1.5),
        ("urgent_share", 0.0),
    ],
)
def test_absurd_options_are_refused_by_name(option: str, value: float):
    """With the option, its limits, and what was given."""
    with pytest.raises(ConfigError, match=f"option {option} of priority-fairness: must be") as caught:
        PriorityFairness({option: value})
    assert repr(value).rstrip("0").rstrip(".") in str(caught.value)


class Counted(float):
    """A number that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float.__lt__(self, other)

    def __add__(self, other: float) -> "Counted":
        return Counted(float(self) + other)

    __radd__ = __add__


@pytest.mark.parametrize("waiting", [1000, 50_000])
def test_an_operation_costs_the_logarithm(waiting: int):
    """Counted in comparisons: with fifty times as many requests a few more, for every operation."""
    queue, clock = made()
    requests = [request(number, number % 5 + 1, Counted(clock.now + number * 7919 % 1000)) for number in range(waiting)]
    for each in requests:
        queue.push(each)
    Counted.compared = 0
    rounds = 200
    for number in range(rounds):
        queue.peek()
        popped = queue.pop()
        queue.put_back(popped)
        queue.remove(requests[-1 - number])
        queue.push(requests[-1 - number])
    assert Counted.compared / rounds <= 20 * math.log2(waiting)
