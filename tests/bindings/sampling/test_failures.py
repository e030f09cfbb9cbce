"""A request whose sampler raised ends with an error: in the step it has an answer in, not before and not never."""

from types import SimpleNamespace

import pytest

from vllm_graft.bindings.sampling import failures

pytest.importorskip("vllm")


class Scheduler:
    """What is asked of vLLM's scheduler."""

    def __init__(self, *names: str) -> None:
        self.requests = dict.fromkeys(names)
        self.finished: list[str] = []

    def finish_requests(self, name: str, status: object) -> None:
        self.finished.append(name)
        del self.requests[name]


def answers(*names: str) -> dict[int, SimpleNamespace]:
    outputs = [SimpleNamespace(request_id=name, finish_reason=None, stop_reason=None) for name in names]
    return {0: SimpleNamespace(outputs=outputs)}


def test_a_request_ends_in_the_step_it_is_named():
    """With the state that vLLM has for errors, and the reason."""
    scheduler, found = Scheduler("a", "b"), answers("a", "b")
    assert failures.finish(scheduler, SimpleNamespace(graft_failed={"a": "why"}), found) is found
    ended, other = found[0].outputs
    assert (str(ended.finish_reason), ended.stop_reason, other.finish_reason) == ("error", "why", None)
    assert scheduler.finished == ["a"]


def test_one_whose_prompt_is_still_being_read_ends_with_its_first_answer():
    """It has no answer in the step it failed in, and must not go on without its sampler."""
    scheduler = Scheduler("a", "b", "gone")
    failures.finish(scheduler, SimpleNamespace(graft_failed={"a": "why", "gone": "why"}), answers("b"))
    assert not scheduler.finished
    del scheduler.requests["gone"]
    failures.finish(scheduler, SimpleNamespace(), answers("b"))
    failures.finish(scheduler, SimpleNamespace(), late := answers("a"))
    assert str(late[0].outputs[0].finish_reason) == "error"
    assert scheduler.finished == ["a"]
    assert not scheduler.graft_failed
