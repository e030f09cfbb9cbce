"""The figures of queues and items as Prometheus reads them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_graft.cli.status import render_queues
from vllm_graft.ledger import LabelStatistics, Ledger, QueueSnapshot, StatisticsWriter
from vllm_graft.ledger.record import Record
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.server.metrics import Exposition
from vllm_graft.server.status import status_page

parser = pytest.importorskip("prometheus_client.parser")

PLAN = Plan(
    (
        PlanItem("stats", "sink", "m:D", "p", ("frontend",)),
        PlanItem("scheduler", "fair", "m:Q", "p", ("engine",)),
    ),
    model="m",
)


@pytest.fixture(autouse=True)
def _no_writer_here() -> Iterator[None]:
    before, StatisticsWriter.here = StatisticsWriter.here, None
    yield
    StatisticsWriter.here = before


def acme(value: str = "acme") -> LabelStatistics:
    row = LabelStatistics("tenant", value, waiting=3, running=2, refused=1, tokens=70, recent=70)
    for seconds in (0.05, 0.5, 130.0):
        row.add_wait(seconds)
    return row


def opened(home: Path) -> Ledger:
    """The ledger of a front end whose run has a queue and a sink."""
    ledger = Ledger()
    ledger.begin_run("run", PLAN)
    ledger.set_item("stats", "sink", "applied")
    ledger.open(Record.of_this_process("run", PLAN.hash, "m", ["frontend"], "0.32.0", "V1"))
    ledger.set_ready()
    assert ledger.home is not None
    return ledger


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A run on disk."""
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path))
    return opened(tmp_path)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, as Prometheus would read it."""
    families = parser.text_string_to_metric_families(text)
    found = [
        (sample.name, frozenset(sample.labels.items()), sample.value) for each in families for sample in each.samples
    ]
    assert len({(name, labels) for name, labels, _ in found}) == len(found), "a sample shows twice"
    return {(name, labels): value for name, labels, value in found}


def value(text: str, name: str, **labels: str) -> float | None:
    return samples(text).get((name, frozenset(labels.items())))


def test_two_engines_show_beside_each_other(ledger: Ledger):
    """Under the number that vLLM gives them, whichever process asks."""
    assert ledger.home is not None
    for engine in (0, 1):
        writer = StatisticsWriter("fair", ledger.home / f"{engine}.queue", engine)
        writer.publish(0, 0, 0.0)
        writer.write(0, acme())
    text = Exposition(PLAN, lambda: ledger).text()
    for engine in "01":
        labels = {"engine": engine, "by": "tenant", "value": "acme"}
        names = ("waiting", "running", "admitted_total", "refused_total", "tokens_total", "token_share")
        assert [value(text, f"vllm_graft_queue_{name}", **labels) for name in names] == [3, 2, 3, 1, 70, 1.0]
        waits = "vllm_graft_queue_wait_seconds"
        edges = ("0.1", "0.5", "1.0", "120.0", "+Inf")
        assert [value(text, f"{waits}_bucket", **labels, le=edge) for edge in edges] == [1, 2, 2, 2, 3]
        assert value(text, f"{waits}_count", **labels) == 3
        assert value(text, f"{waits}_sum", **labels) == 130.55


def test_a_row_that_changes_is_written_anew(ledger: Ledger):
    """Lines are kept between two scrapes, and only those of rows that stayed."""
    assert ledger.home is not None
    writer = StatisticsWriter("fair", ledger.home / "1.queue")
    writer.write(0, acme())
    writer.write(1, acme("zeta"))
    exposition = Exposition(PLAN, lambda: ledger)
    exposition.text()
    changed = acme("zeta")
    changed.waiting = 9
    writer.write(1, changed)
    text = exposition.text()
    waiting = "vllm_graft_queue_waiting"
    assert [value(text, waiting, engine="0", by="tenant", value=name) for name in ("acme", "zeta")] == [3, 9]
    writer.write(0, None)
    assert value(exposition.text(), waiting, engine="0", by="tenant", value="acme") is None


def test_items_show_their_state_and_cost_by_role(ledger: Ledger):
    """A quarantine can be alerted on, and a plugin's cost compared with its budget."""
    meter = ledger.hook("sink", "finished", 50.0)
    meter.count(40_000)
    meter.count(90_000)
    exposition = Exposition(PLAN, lambda: ledger)
    hook = {"point": "stats", "item": "sink", "role": "frontend", "hook": "finished"}
    item = {"point": "stats", "item": "sink", "role": "frontend"}
    text = exposition.text()
    assert value(text, "vllm_graft_item_processes", **item, state="applied") == 1
    assert value(text, "vllm_graft_processes", role="frontend", life="running") == 1
    assert value(text, "vllm_graft_item_calls_total", **hook) == 2
    assert value(text, "vllm_graft_item_overruns_total", **hook) == 1
    assert value(text, "vllm_graft_item_errors_total", **hook) == 0
    assert value(text, "vllm_graft_item_seconds_total", **hook) == pytest.approx(130e-6)
    assert value(text, "vllm_graft_item_p99_seconds", **hook) == pytest.approx(90e-6)
    assert value(text, "vllm_graft_item_budget_seconds", **hook) == pytest.approx(50e-6)
    ledger.put_aside("sink", "ValueError: boom")
    ledger.save()
    text = exposition.text()
    assert value(text, "vllm_graft_item_processes", **item, state="quarantined") == 1
    assert value(text, "vllm_graft_item_processes", **item, state="applied") is None
    assert value(text, "vllm_graft_findings", code="S005", level="warning") == 1
    assert ledger.home is not None
    (ledger.home / "4194999.json").write_text("null")
    assert value(exposition.text(), "vllm_graft_findings", code="S018", level="error") == 1


def test_a_record_in_memory_shows_too(monkeypatch: pytest.MonkeyPatch):
    """Where no folder can be written, of this process alone."""
    ledger = Ledger()
    ledger.set_item("stats", "sink", "applied")
    ledger.record = Record.of_this_process("run", PLAN.hash, "m", ["frontend"], "0.32.0", "V1")
    ledger.record.items = list(ledger._items.values())
    text = Exposition(PLAN, lambda: ledger).text()
    assert value(text, "vllm_graft_item_processes", point="stats", item="sink", role="frontend", state="applied") == 1


def test_a_folder_that_is_gone_leaves_this_process(ledger: Ledger):
    """It has its figures in memory; that the others' records are gone is a finding."""
    exposition = Exposition(PLAN, lambda: ledger)
    assert ledger.home is not None
    shutil.rmtree(ledger.home)
    text = exposition.text()
    assert value(text, "vllm_graft_processes", role="frontend", life="running") == 1
    assert value(text, "vllm_graft_findings", code="S018", level="error") == 1
    ledger.retry()
    text = exposition.text()
    assert value(text, "vllm_graft_processes", role="frontend", life="running") == 1
    assert value(text, "vllm_graft_findings", code="S018", level="error") is None


def test_a_fault_of_ours_does_not_cost_vllm_s_figures(ledger: Ledger, caplog: pytest.LogCaptureFixture):
    """It is logged once, and again after it had gone."""
    broken = [True]

    def look() -> Ledger:
        if broken:
            raise KeyError("a fault of ours")
        return ledger

    exposition = Exposition(PLAN, look)
    said = "/metrics shows only vLLM's own figures: KeyError: 'a fault of ours'"
    assert [exposition.safe_text() for _ in range(3)] == ["", "", ""]
    assert caplog.text.count(said) == 1
    broken.clear()
    assert exposition.safe_text() == exposition.text()
    broken.append(True)
    assert exposition.safe_text() == ""
    assert caplog.text.count(said) == 2


def test_openmetrics_and_names_are_understood(ledger: Ledger):
    """As prometheus_client's own exposition does."""
    ledger.hook("sink", "finished", 50.0).count(1)
    openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
    exposition = Exposition(PLAN, lambda: ledger)
    text = exposition.text(openmetrics=True)
    names = {family.name for family in openmetrics.text_string_to_metric_families(text + "# EOF\n")}
    assert {"vllm_graft_item_calls", "vllm_graft_item_processes", "vllm_graft_queue_wait_seconds"} <= names
    chosen = samples(exposition.text(names=["vllm_graft_item_calls_total"]))
    assert {name for name, _ in chosen} == {"vllm_graft_item_calls_total"}


ODD = 'a"b\\c\n<script>\x1b[2J'


def test_a_tenant_may_call_itself_anything(ledger: Ledger):
    """Nothing of a name gets out of its place: neither in the metrics, nor on the page, nor on a terminal."""
    assert ledger.home is not None
    StatisticsWriter("fair", ledger.home / "1.queue").write(0, acme(ODD))
    found = samples(Exposition(PLAN, lambda: ledger).text())
    values = {dict(labels)["value"] for name, labels in found if name.startswith("vllm_graft_queue_")}
    assert values == {ODD}
    rows = QueueSnapshot(1, 0, "fair", 0.0, (acme(ODD),)).as_dicts()
    shown = render_queues(rows)
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 2
    page = {"findings": [], "plan": {"hash": ""}, "model": "m", "processes": [], "queues": rows}
    assert "<script>" not in status_page(page)


def test_people_are_shown_the_busiest():
    """And told how many more there are."""
    rows = QueueSnapshot(
        1, 0, "fair", 0.0, tuple(LabelStatistics("tenant", f"t{number}", waiting=number) for number in range(30))
    ).as_dicts()
    lines = render_queues(rows).splitlines()
    assert lines[-1] == "and 10 more: --json has all of them"
    assert [line.split()[3] for line in lines[1:-1]] == [f"t{number}" for number in range(10, 30)]
    found = {"findings": [], "plan": {"hash": ""}, "model": "m", "processes": [], "queues": rows}
    assert "and 10 more" in status_page(found)
    assert render_queues([]) == ""
