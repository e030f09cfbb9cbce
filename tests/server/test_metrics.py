"""The queues' figures as Prometheus reads them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_graft.cli.queues import render_queues
from vllm_graft.ledger import Board, Figures, QueueFigures
from vllm_graft.server.metrics import QueueCollector
from vllm_graft.server.page import status_page

prometheus = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture(autouse=True)
def _no_board_here() -> Iterator[None]:
    before, Board.here = Board.here, None
    yield
    Board.here = before


def acme(value: str = "acme") -> Figures:
    row = Figures("tenant", value, waiting=3, running=2, refused=1, tokens=70, recent=70)
    for seconds in (0.05, 0.5, 130.0):
        row.waited(seconds)
    return row


def test_two_engines_show_beside_each_other(tmp_path: Path):
    """Under the number that vLLM gives them, whichever process asks."""
    for engine in (0, 1):
        board = Board("fair", tmp_path / f"{engine}.board", engine)
        board.publish(0, 0, 0.0)
        board.write(0, acme())
    registry = prometheus.CollectorRegistry()
    registry.register(QueueCollector(lambda: tmp_path))
    for engine in "01":
        labels = {"engine": engine, "by": "tenant", "value": "acme"}
        read = {
            name: registry.get_sample_value(f"vllm_graft_queue_{name}", labels)
            for name in ("waiting", "running", "admitted_total", "refused_total", "tokens_total", "token_share")
        }
        assert list(read.values()) == [3, 2, 3, 1, 70, 1.0]
        waits = "vllm_graft_queue_wait_seconds"
        edges = ("0.1", "0.5", "1.0", "120.0", "+Inf")
        found = [registry.get_sample_value(f"{waits}_bucket", {**labels, "le": edge}) for edge in edges]
        assert found == [1, 2, 2, 2, 3]
        assert registry.get_sample_value(f"{waits}_count", labels) == 3
        assert registry.get_sample_value(f"{waits}_sum", labels) == 130.55


def test_a_run_that_begins_later_is_read(tmp_path: Path):
    """A collector is registered once in a process; the folder may be known after that."""
    homes: list[Path | None] = [None]
    registry = prometheus.CollectorRegistry()
    registry.register(QueueCollector(lambda: homes[0]))
    labels = {"engine": "0", "by": "tenant", "value": "acme"}
    assert registry.get_sample_value("vllm_graft_queue_waiting", labels) is None
    Board("fair", tmp_path / "1.board").write(0, acme())
    homes[0] = tmp_path
    assert registry.get_sample_value("vllm_graft_queue_waiting", labels) == 3


ODD = 'a"b\\c\n<script>\x1b[2J'


def test_a_tenant_may_call_itself_anything(tmp_path: Path):
    """Nothing of a name gets out of its place: neither in the metrics, nor on the page, nor on a terminal."""
    Board("fair", tmp_path / "1.board").write(0, acme(ODD))
    registry = prometheus.CollectorRegistry()
    registry.register(QueueCollector(lambda: tmp_path))
    text = prometheus.generate_latest(registry).decode()
    parsed = list(parser.text_string_to_metric_families(text))
    assert {sample.labels["value"] for family in parsed for sample in family.samples} == {ODD}
    rows = QueueFigures(1, 0, "fair", 0.0, (acme(ODD),)).as_dicts()
    shown = render_queues(rows)
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 2
    found = {"findings": [], "plan": {"hash": ""}, "model": "m", "processes": [], "queues": rows}
    assert "<script>" not in status_page(found)


def test_people_are_shown_the_busiest():
    """And told how many more there are."""
    rows = QueueFigures(
        1, 0, "fair", 0.0, tuple(Figures("tenant", f"t{number}", waiting=number) for number in range(30))
    ).as_dicts()
    lines = render_queues(rows).splitlines()
    assert lines[-1] == "and 10 more: --json has all of them"
    assert [line.split()[3] for line in lines[1:-1]] == [f"t{number}" for number in range(10, 30)]
    found = {"findings": [], "plan": {"hash": ""}, "model": "m", "processes": [], "queues": rows}
    assert "and 10 more" in status_page(found)
    assert render_queues([]) == ""
