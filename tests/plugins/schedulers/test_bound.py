"""The bound of ``priority-fairness`` through the binding: whatever is done to the machine's date, and under aborts and
preemptions, no request is lost, none is doubled, and none waits longer than docs/reference/schedulers.md says."""

import time
from types import SimpleNamespace
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.bindings.scheduling.admission_queue import AdmissionQueueAdapter
from vllm_graft.ledger import Ledger
from vllm_graft.plan import PlanItem
from vllm_graft.plugins.schedulers.priority_fairness import PriorityFairness
from vllm_graft.plugins.schedulers.urgent_lane import AHEAD

ITEM = PlanItem("scheduler", "priority-fairness", "m:C", "p", ("engine",), {}, "graft.toml:2")
WAIT, AFTER, SHARE = 20.0, 0.5, 0.9


def request(name: int, priority: int, arrival: float) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=str(name),
        priority=priority,
        arrival_time=arrival,
        num_prompt_tokens=8,
        max_tokens=8,
        sampling_params=None,
        cache_salt=None,
        lora_request=None,
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_bound_survives_a_machine_whose_date_is_set(data: st.DataObject):
    """Seconds of one admission each; the date jumps by hours; waits are counted on the machine's uptime."""
    machine = SimpleNamespace(date=1_000_000.0, up=50.0)
    with (
        mock.patch.object(time, "time", side_effect=lambda: machine.date),
        mock.patch.object(time, "monotonic", side_effect=lambda: machine.up),
    ):
        ledger = Ledger()
        ledger.set_item("scheduler", ITEM.name, "applied")
        queue = AdmissionQueueAdapter(PriorityFairness({"max_wait_sec": WAIT}), ITEM, ledger)
        waiting: dict[str, tuple[SimpleNamespace, float, int, int]] = {}
        running: list[SimpleNamespace] = []
        number = preempted = 0
        for second in range(data.draw(st.integers(1, 60)) + 200):
            quiet = second >= 60
            for _ in range(0 if quiet else data.draw(st.sampled_from([0, 0, 1, 2, 4]))):
                number += 1
                made = request(number, data.draw(st.integers(0, 5)), machine.date)
                waiting[made.request_id] = (made, machine.up, len(waiting), preempted)
                queue.add_request(made)  # type: ignore[arg-type]
            event = "" if quiet else data.draw(st.sampled_from(["", "", "abort", "preempt", "back", "forward"]))
            if event == "abort" and waiting:
                gone = waiting.pop(data.draw(st.sampled_from(sorted(waiting))))[0]
                queue.remove_requests([gone])  # type: ignore[list-item]
            elif event == "preempt" and running:
                back = running.pop(data.draw(st.integers(0, len(running) - 1)))
                preempted += 1
                waiting[back.request_id] = (back, machine.up, len(waiting), preempted)
                queue.prepend_request(back)  # type: ignore[arg-type]
            elif event in ("back", "forward"):
                machine.date += {"back": -1, "forward": 1}[event] * data.draw(st.sampled_from([5.0, 3600.0]))
            assert len(queue) == len(waiting)
            if waiting:
                peeked = queue.peek_request()
                assert queue.pop_request() is peeked
                made, since, before, returned = waiting.pop(peeked.request_id)
                assert made is peeked
                ahead = before + 1 + preempted - returned
                assert machine.up - since <= AFTER * WAIT + 2 * (ahead / SHARE + 1) + AHEAD + 1
                running.append(made)
            machine.up += 1.0
            machine.date += 1.0
        assert not waiting
        assert ledger._items[ITEM.name].state == "applied"
