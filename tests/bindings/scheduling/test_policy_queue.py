"""The queue that vLLM sees of a policy: only what is offered is there, everything that waits counts."""

import time
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.bindings.scheduling.clock import SteadyClock
from vllm_graft.bindings.scheduling.policy import PolicyQueue


def request(name: str, age: float = 0.0, priority: int = 0) -> SimpleNamespace:
    """What the queue reads of vLLM's request."""
    return SimpleNamespace(
        request_id=name,
        priority=priority,
        arrival_time=time.time() - age,
        num_prompt_tokens=7,
        max_tokens=9,
        sampling_params=SimpleNamespace(extra_args={"tenant": "a"}),
        cache_salt="salt",
        lora_request=SimpleNamespace(lora_name="adapter"),
        num_output_tokens=0,
        num_computed_tokens=0,
        num_preemptions=0,
    )


def filled(*ages: float) -> tuple[PolicyQueue, list[SimpleNamespace]]:
    queue = PolicyQueue(SteadyClock())
    requests = [request(str(number), age) for number, age in enumerate(ages)]
    for each in requests:
        queue.add_request(each)  # type: ignore[arg-type]
    return queue, requests


def drain(queue: PolicyQueue) -> str:
    order = ""
    while queue:
        peeked = queue.peek_request()
        assert queue.pop_request() is peeked
        order += peeked.request_id
    return order


def order(queue: PolicyQueue) -> str:
    return "".join(view.request_id for view in queue.waiting())


def test_what_is_not_offered_is_not_there_and_counts():
    """vLLM's loop looks at the truth of the queue, its liveness at the length."""
    queue, requests = filled(3, 2, 1)
    assert (bool(queue), len(queue), list(queue)) == (False, 3, requests)
    queue.offer([queue.view(requests[2]), queue.view(requests[0])])  # type: ignore[arg-type]
    assert drain(queue) == "20"
    assert (bool(queue), len(queue)) == (False, 1)


def test_what_is_handed_back_is_not_offered_again_in_the_step():
    """In either of vLLM's ways; it waits in the order of its arrival."""
    queue, requests = filled(4, 3, 2, 1)
    queue.offer(queue.view(each) for each in reversed(requests))  # type: ignore[arg-type]
    first, second, third = queue.pop_request(), queue.pop_request(), queue.pop_request()
    queue.prepend_requests([third, second])
    queue.prepend_request(first)
    assert drain(queue) == "0"
    assert order(queue) == "123"


def test_a_request_that_is_gone_is_gone():
    """Offered or not, and strangers are no error."""
    queue, requests = filled(3, 2, 1)
    queue.offer(queue.view(each) for each in requests)  # type: ignore[arg-type]
    queue.remove_requests([requests[1], request("stranger")])  # type: ignore[list-item]
    queue.remove_request(requests[0])  # type: ignore[arg-type]
    assert (drain(queue), len(queue)) == ("2", 0)


def test_a_view_is_the_same_until_its_request_ends():
    """With what tells one client from another, and what changes read when it is asked for."""
    queue, (first,) = filled(1)
    view = queue.waiting()[0]
    queue.offer([queue.view(first)])  # type: ignore[arg-type]
    queue.pop_request()
    first.num_output_tokens, first.num_computed_tokens, first.num_preemptions = 5, 12, 1
    assert (view.output_tokens, view.computed_tokens, view.preemptions) == (5, 12, 1)
    assert queue.view(first) is view  # type: ignore[arg-type]
    assert (view.extra, view.cache_salt, view.lora) == ({"tenant": "a"}, "salt", "adapter")
    assert view["input_length"] == view.prompt_tokens == 7
    assert abs(view["arrival_time"] - (time.time() - 1)) < 0.5  # type: ignore[operator]
    queue.end_step({}, ["0"])
    assert queue.view(first) is not view  # type: ignore[arg-type]


def test_a_priority_of_zero_is_one_that_was_not_given():
    """As a key it is missing, so that a default of the author's counts."""
    queue = PolicyQueue(SteadyClock())
    queue.add_request(request("a"))  # type: ignore[arg-type]
    queue.add_request(request("b", priority=2))  # type: ignore[arg-type]
    plain, second = queue.waiting()
    assert (plain.get("priority", 3), plain.priority) == (3, 0)
    assert (second.get("priority", 3), second.priority) == (2, 2)


def test_once_everything_is_offered_it_goes_by_arrival():
    """What came before, what comes after, and what is handed back."""
    queue, requests = filled(1, 9, 5)
    queue.offer([queue.view(requests[0])])  # type: ignore[arg-type]
    queue.offer_all()
    queue.add_request(request("late", 3))  # type: ignore[arg-type]
    first = queue.pop_request()
    assert first is requests[1]
    queue.prepend_request(first)
    queue.offer(())  # steps go on
    assert drain(queue) == "12late0"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nothing_is_lost_or_doubled(data: st.DataObject):
    """Random arrivals, steps that offer some and take some of them, hand-backs and aborts; the policy may fail."""
    queue = PolicyQueue(SteadyClock())
    waiting: dict[str, SimpleNamespace] = {}
    taken: dict[str, SimpleNamespace] = {}
    for number in range(data.draw(st.integers(0, 40), "operations")):
        operation = data.draw(st.sampled_from(["add", "add", "step", "back", "abort", "end", "fail"]))
        if operation == "add":
            made = request(str(number), data.draw(st.integers(0, 9)))
            waiting[made.request_id] = made
            queue.add_request(made)  # type: ignore[arg-type]
        elif operation == "step":
            offered = data.draw(st.permutations(sorted(waiting)))[: data.draw(st.integers(0, 5))]
            queue.offer(queue.view(waiting[name]) for name in offered)  # type: ignore[arg-type]
            for _ in range(data.draw(st.integers(0, 5))):
                if not queue:
                    break
                popped = queue.pop_request()
                taken[popped.request_id] = waiting.pop(popped.request_id)
                if data.draw(st.booleans()):  # could not be taken
                    waiting[popped.request_id] = taken.pop(popped.request_id)
                    queue.prepend_requests([popped])
            queue.offer(())
        elif operation == "back" and taken:
            name = data.draw(st.sampled_from(sorted(taken)))
            waiting[name] = taken.pop(name)
            queue.prepend_request(waiting[name])  # type: ignore[arg-type]
        elif operation == "abort" and waiting:
            name = data.draw(st.sampled_from(sorted(waiting)))
            queue.remove_requests([waiting.pop(name), *taken.values()])  # type: ignore[list-item]
            queue.end_step({}, [name])
        elif operation == "end" and taken:
            queue.end_step({}, [taken.popitem()[0]])
        elif operation == "fail" and number % 3 == 0:
            queue.offer_all()
        assert len(queue) == len(waiting)
        assert {each.request_id for each in queue} == set(waiting)
        views = queue.waiting()
        assert [view.arrival for view in views] == sorted(view.arrival for view in views)
        assert len(queue._views) == len(waiting) + len(taken)
    queue.offer_all()
    assert sorted(drain_names(queue)) == sorted(waiting)


def drain_names(queue: PolicyQueue) -> list[str]:
    found = []
    while queue:
        found.append(queue.pop_request().request_id)
    return found


def test_a_pooling_request_shows_its_vllm_xargs():
    """It has no sampling parameters; a tenant that was stamped on it counts all the same."""
    queue = PolicyQueue(SteadyClock())
    pooling = request("a")
    pooling.sampling_params, pooling.pooling_params = None, SimpleNamespace(extra_kwargs={"tenant": "acme"})
    queue.add_request(pooling)  # type: ignore[arg-type]
    assert queue.waiting()[0].extra == {"tenant": "acme"}
