"""The time of attention against a budget that follows from the bytes it reads."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from vllm_graft.bindings.attention import kernel_layers, layer_budget
from vllm_graft.bindings.attention.layer_budget import (
    EVERY,
    DeviceTimer,
    LayerBudget,
    MeteredCall,
    layer_budget_us,
    measure_bandwidth,
)
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.guard import OVERRUNS_IN_A_ROW
from vllm_graft.plan import PlanItem


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger()
    made.set_item("attention", "plain", "applied")
    return made


def test_the_budget_is_a_tenth_of_a_millisecond_or_what_the_bytes_take():
    assert layer_budget_us(1000, 4e12) == 100
    # 64 requests with windows of 4,096 tokens of 4,096 bytes, on an H200.
    assert layer_budget_us(64 * 4096 * 4096, 4.3e12) == pytest.approx(1.25 * 249.7 + 10, rel=1e-3)


def test_the_bandwidth_of_this_machine_is_plausible():
    assert 1e8 < measure_bandwidth(torch.device("cpu")) < 1e13


def figures(ledger: Ledger) -> dict[str, int]:
    state = ledger._items["plain"]
    return {figure.name: ledger.cells.cells[figure.cell] for figure in state.figures}


def test_what_is_over_budget_is_counted_and_reported_once(ledger: Ledger, caplog: pytest.LogCaptureFixture):
    """Nothing can take the place of a kernel while it serves."""
    budget = LayerBudget("plain", ledger, bandwidth=1e9)
    budget.note(1_000_000, 10_000_000)
    assert figures(ledger) == {
        "layers timed": 1,
        "layers over budget": 0,
        "us per layer": 1000,
        "us of budget per layer": 12510,
        "GB/s by a copy": 1,
    }
    for _ in range(OVERRUNS_IN_A_ROW + 50):
        budget.note(1_000_000, 1000)
    assert figures(ledger)["layers over budget"] == OVERRUNS_IN_A_ROW + 50
    for _ in range(256):
        budget.note(7_000, 1000)
    assert (figures(ledger)["us per layer"], figures(ledger)["us of budget per layer"]) == (7, 100)
    reports = [each.getMessage() for each in caplog.records if "in a row over budget" in each.getMessage()]
    assert len(reports) == 1
    assert "cannot be replaced while it serves" in reports[0]


def test_on_the_host_every_call_is_timed(ledger: Ledger):
    meter = ledger.hook("plain", "compact", 100.0)
    metered = MeteredCall(meter)
    assert [metered.run(lambda: 7, torch.device("cpu")) for _ in range(3)] == [7] * 3
    assert meter.reading().calls == 3


class FakeEvent:
    """An event of a device that is a second behind."""

    passed = False

    def __init__(self, **_: object) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return FakeEvent.passed

    def elapsed_time(self, other: object) -> float:
        return 0.25


def test_on_a_gpu_some_calls_are_timed_and_nothing_waits(monkeypatch: pytest.MonkeyPatch):
    """Events are read when they have passed, and not recorded into a graph that is being captured."""
    noted: list[tuple[int, int]] = []
    capturing = deque([True, *[False] * 3])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.popleft())
    monkeypatch.setattr(FakeEvent, "passed", False)
    empty = torch.empty
    monkeypatch.setattr(layer_budget, "time", SimpleNamespace(perf_counter_ns=lambda: pytest.fail("by events")))
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more))
    timer, gpu = DeviceTimer(lambda took, number: noted.append((took, number))), SimpleNamespace(type="cuda")
    for _ in range(2 * EVERY + 1):
        assert timer.run(lambda: "made", gpu, lambda: torch.tensor(5)) == "made"
    assert not noted
    FakeEvent.passed = True
    for _ in range(EVERY):
        timer.run(lambda: "made", gpu, lambda: torch.tensor(5))
    assert noted == [(250_000, 5)] * 2


@pytest.mark.parametrize("layers", [2, 12, 16, 24, 28, 32, 36, 40, 48, 62, 64, 80, 94, 126])
def test_on_a_gpu_every_layer_of_a_model_has_its_turn(layers: int):
    """A step calls the layers one after another; those with windows are shorter than the others."""
    assert {call * EVERY % layers for call in range(layers)} == set(range(layers))


def test_each_engine_of_a_process_has_a_budget_and_the_device_is_measured_once(monkeypatch: pytest.MonkeyPatch):
    """The next engine may have another record, as in a test suite: without its figures nothing would be shown."""
    measured, ledgers = [], [Ledger(), Ledger()]
    monkeypatch.setattr(kernel_layers, "measure_bandwidth", lambda device: measured.append(device) or 1e9)
    planned, item = kernel_layers.PlannedKernel(), PlanItem("attention", "plain", "m:P", "pkg", ("worker",))
    for ledger in ledgers:
        ledger.set_item("attention", "plain", "applied")
        monkeypatch.setattr(kernel_layers, "current", lambda ledger=ledger: ledger)
        config = SimpleNamespace(device_config=SimpleNamespace(device="cpu"))
        budget = planned._layer_budget(item, config)
        assert planned._layer_budget(item, config) is budget, "of all layers"
        budget.note(1000, 1000)
        assert figures(ledger)["layers timed"] == 1
    assert measured == [torch.device("cpu")]
