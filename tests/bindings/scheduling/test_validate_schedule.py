"""What a policy may answer: each request in its place, and in one only; all else is refused with the reason."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_graft.bindings.scheduling.policy import KEYS, validate_schedule
from vllm_graft.contracts import RequestView, Schedule

WAITING = {name: RequestView(name) for name in "abc"}
RUNNING = {name: RequestView(name) for name in "xyz"}
A, B, C = WAITING.values()
X, Y, Z = RUNNING.values()


def names(views: list[RequestView]) -> str:
    return "".join(view.request_id for view in views)


def test_a_schedule_says_what_starts_and_what_is_preempted():
    """Those to start in the order given; without a word on the others, they go on."""
    starting, stopping = validate_schedule(Schedule([C, A], preempt={Y}), WAITING, RUNNING)
    assert (names(starting), names(stopping)) == ("ca", "y")
    assert validate_schedule(Schedule(), WAITING, RUNNING) == ([], [])


def test_a_dictionary_with_the_keys_of_the_guide_says_the_same():
    """Sequences of any kind."""
    answer = {"prefill_requests": (B,), "decode_requests": [Z, X], "preempt_requests": [Y]}
    starting, stopping = validate_schedule(answer, WAITING, RUNNING)
    assert (names(starting), names(stopping)) == ("b", "y")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, f"it must be a Schedule or a dictionary with {list(KEYS)}, but is NoneType"),
        ([A], f"it must be a Schedule or a dictionary with {list(KEYS)}, but is list"),
        ({"prefill_requests": [], "decode_requests": []}, "its keys must be"),
        ({**dict.fromkeys(KEYS, ()), "swap": ()}, "its keys must be"),
        (dict.fromkeys(KEYS, None), "decode_requests is None"),
        (Schedule(A), "prefill must be a list of requests, but is RequestView"),
        (Schedule("a"), "prefill must be a list of requests, but is str"),
        (Schedule(view for view in [A]), "prefill must be a list of requests, but is generator"),
        (Schedule(["a"]), "prefill holds str"),
        (Schedule([dict(A)]), "prefill holds dict"),
        (Schedule([RequestView("a")]), "prefill names 'a', which is not one of the requests that it was given"),
        (Schedule([X]), "prefill names 'x', which is running"),
        (Schedule([A, A]), "prefill names 'a' twice"),
        (Schedule(preempt=[A]), "preempt names 'a', which is waiting"),
        (Schedule(preempt=[X, X]), "preempt names 'x' twice"),
        (Schedule(decode=[X, Y]), "'z' is running, but is in neither decode nor preempt"),
        (Schedule(decode=[X, Y, Z], preempt=[Z]), "'z' is in decode and in preempt"),
        (Schedule(decode=[X, Y, Z, A]), "decode names 'a', which is waiting"),
        (Schedule(decode=[X, Y, Z, Z]), "decode names 'z' twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "answer",
)
def test_what_cannot_be_done_is_refused(answer: object, reason: str):
    """With the request and the list it stands in."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        validate_schedule(answer, WAITING, RUNNING)


@st.composite
def lists(draw: Callable[..., object]) -> tuple[list[RequestView], list[RequestView], list[RequestView]]:
    views = st.lists(st.sampled_from([*WAITING.values(), *RUNNING.values(), RequestView("s")]), max_size=7)
    return draw(views), draw(views), draw(views)  # type: ignore[return-value]


@given(lists())
def test_an_answer_is_followed_exactly_if_it_divides_the_requests(
    answered: tuple[list[RequestView], list[RequestView], list[RequestView]],
):
    """Prefill from those that wait; decode and preempt together those that run; nothing twice."""
    prefill, decode, preempt = answered
    waits, runs = set(WAITING.values()), set(RUNNING.values())
    possible = (
        set(prefill) <= waits
        and len(set(prefill)) == len(prefill)
        and set(decode) | set(preempt) == runs
        and len(decode) + len(preempt) == len(runs)
    )
    answer = dict(zip(KEYS, answered, strict=True))
    if possible:
        assert validate_schedule(answer, WAITING, RUNNING) == (prefill, preempt)
    else:
        with pytest.raises(ValueError, match=r"prefill|decode|preempt"):
            validate_schedule(answer, WAITING, RUNNING)


@given(st.permutations([*WAITING.values()]), st.sets(st.sampled_from([*RUNNING.values()])), st.data())
def test_every_division_of_the_requests_is_followed(
    order: list[RequestView], stopped: set[RequestView], data: st.DataObject
):
    """Whichever waiting ones in whichever order, whichever running ones."""
    some = order[: data.draw(st.integers(0, len(order)))]
    going = [view for view in RUNNING.values() if view not in stopped]
    for decode in (going, None):
        starting, stopping = validate_schedule(Schedule(some, decode, stopped), WAITING, RUNNING)
        assert starting == some
        assert set(stopping) == stopped
