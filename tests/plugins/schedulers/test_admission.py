"""Graded admission control, and slots that are kept for the first classes."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_graft.contracts import Load, WaitingRequest
from vllm_graft.errors import ConfigError
from vllm_graft.plugins.schedulers.priority_fairness import PriorityFairness


def request(priority: int, name: str = "a", arrival: float = 0.0) -> WaitingRequest:
    return WaitingRequest(name, priority, arrival, 10, 10)


def test_the_longer_the_wait_the_more_classes_are_turned_away():
    """With the defaults class 5 above 18 s, 4 above 20.4 s, 3 above 22.8 s, and 1 and 2 never."""
    queue = PriorityFairness({"admission": True})

    def away(wait: int) -> list[int]:
        return [number for number in range(1, 6) if queue.admit(request(number), Load(wait, 0, 1.0))]

    assert [away(wait) for wait in (0, 18, 19, 21, 23, 10_000)] == [[], [], [5], [4, 5], [3, 4, 5], [3, 4, 5]]


def test_a_refusal_says_why_and_when_to_come_back():
    """After as many seconds as the queue is too long."""
    refusal = PriorityFairness({"admission": True}).admit(request(5), Load(500, 128, 20.0))
    assert refusal is not None
    assert (refusal.status, refusal.retry_after) == (429, 7)
    assert refusal.reason == "requests wait about 25 s, and class 5 is let in up to 18 s"


def test_a_server_that_takes_nobody_says_that():
    """Where all classes may be turned away, and all are: 503."""
    queue = PriorityFairness({"admission": True, "shed_classes": 5})
    load = Load(1000, 128, 10.0)
    found = [queue.admit(request(number), load) for number in (1, 5)]
    assert [refusal and refusal.status for refusal in found] == [503, 503]
    some = queue.admit(request(5), Load(200, 128, 10.0))
    assert some is not None
    assert some.status == 429


def test_nobody_is_turned_away_while_the_pace_is_not_known():
    """A queue of a moment says nothing of how long it will take."""
    queue = PriorityFairness({"admission": True, "shed_classes": 5})
    assert queue.admit(request(5), Load(100_000, 128, 0.0)) is None


def test_without_admission_nobody_is_turned_away():
    """It must be asked for."""
    assert PriorityFairness().admit(request(5), Load(100_000, 128, 1.0)) is None


@example(1, 1, 1.9999999999999998, 0.0, 124, 1.0)
@given(
    st.integers(1, 8), st.integers(1, 12), st.floats(0.01, 2), st.floats(0, 1), st.integers(0, 500), st.floats(0.1, 50)
)
def test_no_class_is_turned_away_before_one_below_it(classes, shed, after, step, waiting, rate):
    """Whatever the options are; and a request that comes back when told finds room, if nobody came meanwhile."""
    options = {"classes": classes, "default_class": 1, "admission": True}
    queue = PriorityFairness({**options, "shed_classes": shed, "shed_after": after, "shed_step": step})
    found = [queue.admit(request(number), Load(waiting, 0, rate)) for number in range(1, classes + 1)]
    first = next((index for index, refusal in enumerate(found) if refusal is not None), classes)
    assert all(refusal is not None for refusal in found[first:])
    for number, refusal in enumerate(found[first:], first + 1):
        assert refusal is not None
        assert refusal.retry_after > 0
        left = max(0, math.floor(waiting - refusal.retry_after * rate))
        assert queue.admit(request(number), Load(left, 0, rate)) is None


@pytest.mark.parametrize(
    ("option", "value"),
    [("shed_after", 0.0), ("shed_step", -0.1), ("shed_classes", 0), ("reserved_slots", -1), ("reserved_classes", 6)],
)
def test_absurd_options_are_refused_by_name(option: str, value: float):
    """Also where admission control is off: a mistake should not wait for the day it is turned on."""
    with pytest.raises(ConfigError, match=f"option {option} of priority-fairness: must be"):
        PriorityFairness({option: value})


def test_reserved_slots_are_for_the_first_classes():
    """The last free slots wait for them, and all others wait on."""
    queue = PriorityFairness({"reserved_slots": 2, "reserved_classes": 2})
    queue.clock = lambda: 100.0
    queue.push(request(3, "old", 0.0))
    queue.free_slots = 3
    assert queue.ready()
    assert queue.peek().request_id == "old"
    queue.free_slots = 2
    assert not queue.ready()
    queue.push(request(2, "second", 90.0))
    queue.push(request(1, "first", 99.0))
    assert queue.ready()
    assert [queue.pop().request_id for _ in range(2)] == ["first", "second"]
    assert not queue.ready()
    queue.free_slots = 3
    assert queue.ready()
    assert queue.pop().request_id == "old"


def test_an_engine_must_have_a_slot_for_all():
    """Said with the number of slots that there are."""
    queue = PriorityFairness({"reserved_slots": 8})
    queue.check_slots(9)
    with pytest.raises(ConfigError, match="option reserved_slots of priority-fairness: must be below the 8 requests"):
        queue.check_slots(8)


def test_a_server_with_room_in_one_engine_turns_nobody_away():
    """Requests go to the engine that has room; a rate that is not known yet is that of the others."""
    busy = Load(100, 8, 2.0)
    assert Load.combine([busy, Load(0, 3, 0.0)]).wait == 0.0
    assert Load.combine([busy, Load(100, 8, 0.0)]) == Load(200, 16, 4.0)
    assert Load.combine([busy, busy]).wait == busy.wait
    assert Load.combine([]) == Load()
