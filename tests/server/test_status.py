"""The status page for browsers: what the table of the command shows, it shows too."""

import time

from vllm_graft.ledger import QueueSnapshot
from vllm_graft.ledger.comparison import findings_of
from vllm_graft.ledger.counters import MeterReading
from vllm_graft.ledger.queue_statistics import LabelStatistics
from vllm_graft.ledger.reading import ProcessView
from vllm_graft.ledger.record import ItemState, Record
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.server.status import status_page

PLAN = Plan((PlanItem("scheduler", "fair", "m:Q", "p", ("engine",)),), model="m")


def document(state: str = "applied", reason: str = "", life: str = "running") -> dict[str, object]:
    """A server with one engine core that has a scheduler."""
    record = Record.of_this_process("run", PLAN.hash, "m", ["engine"], "0.32.0", "V1")
    record.items = [ItemState("scheduler", "fair", state, reason)]  # type: ignore[arg-type]
    hook = MeterReading(7, 1, 2, 10.0, 10.0, 900.0, 950.0, 1000.0)
    view = ProcessView(record, life, {"fair": {"pop": hook}})  # type: ignore[arg-type]
    rows = [view.as_dict()]
    return {
        "model": "m",
        "plan": {"hash": PLAN.hash},
        "processes": rows,
        "queues": QueueSnapshot(1, 0, "fair", time.time(), (LabelStatistics("tenant", "acme"),)).as_dicts(),
        "findings": [finding.as_dict() for finding in findings_of(rows, PLAN)],
    }


def test_life_and_cost_are_shown():
    """Of each hook, against its budget."""
    page = status_page(document())
    assert "<span class=good>running</span>" in page
    assert "<code>pop</code> p99 900 of 1000 us, 2 over, 1 failed" in page
    assert "Every process has what its plan names." in page


def test_the_level_of_a_finding_is_shown():
    """A warning does not look like an error."""
    warned = status_page(document("quarantined", "ValueError: boom"))
    assert '<li class="worrying"><code>S005</code> warning: scheduler fair: is quarantined' in warned
    assert "<span class=worrying>quarantined</span><br><span class=soft>ValueError: boom</span>" in warned
    died = status_page(document(life="died"))
    assert '<li class="bad"><code>S006</code> error: ' in died
    assert "<span class=bad>died</span>" in died


def test_the_worst_finding_comes_first():
    """As in the command's output: the reader of a long page may not reach the last one."""
    warned, died = (document("quarantined"), document(life="died"))
    page = status_page(died | {"findings": [*warned["findings"], *died["findings"]]})  # type: ignore[misc]
    assert 0 < page.index("<code>S006</code> error") < page.index("<code>S005</code> warning")


def test_the_last_error_of_a_process_is_shown():
    """It may be all that is known of a stat logger that the guard has put aside."""
    found = document()
    assert "last error" not in status_page(found)
    found["processes"][0] |= {"name": "vllm", "pid": 7, "last_error": "guard: <b>boom</b>\x1b"}  # type: ignore[index]
    assert "last error in vllm (pid 7): guard: &lt;b&gt;boom&lt;/b&gt;\\x1b" in status_page(found)


def test_only_texts_that_may_be_long_are_broken_anywhere():
    """The page fits its window, and numbers stay in one piece."""
    page = status_page(document("refused", "x" * 500))
    assert "td.long, li, p { overflow-wrap: anywhere }" in page
    assert f"<td class=long><span class=bad>refused</span><br><span class=soft>{'x' * 500}</span>" in page


def test_nothing_of_others_is_markup():
    """Reasons are plugins' words."""
    page = status_page(document("quarantined", "<script>\x1b\ud800"))
    assert "<script" not in page
    assert "&lt;script&gt;\\x1b\\ud800" in page
    page.encode()
