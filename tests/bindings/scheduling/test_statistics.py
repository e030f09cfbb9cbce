"""What is counted of a queue: against an obvious reference, with few rows, over time, and through vLLM's side of it."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.bindings.scheduling.admission_queue import AdmissionQueueAdapter
from vllm_graft.bindings.scheduling.clock import SteadyClock
from vllm_graft.bindings.scheduling.statistics import MAX_LABELS, UNLABELLED, StatisticsCollector, normalize_labels
from vllm_graft.contracts import AdmissionQueue, Load, Refusal, WaitingHeap, WaitingRequest
from vllm_graft.ledger import LabelStatistics, Ledger, StatisticsWriter
from vllm_graft.ledger.queue_statistics import EDGES, OTHERS, SHARE_WINDOW_S, VALUE_BYTES
from vllm_graft.plan import PlanItem

ITEM = PlanItem("scheduler", "labelled", "m:C", "p", ("engine",), {}, "graft.toml:2")


class Labelled(AdmissionQueue):
    """First come, first served; by class and tenant; a class above 4 is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = WaitingHeap()
        self.asked: Counter[str] = Counter()

    def push(self, request: WaitingRequest) -> None:
        self.heap.add(request.arrival, request)

    def peek(self) -> WaitingRequest:
        return self.heap.first()

    def pop(self) -> WaitingRequest:
        return self.heap.take()

    def remove(self, request: WaitingRequest) -> None:
        self.heap.discard(request)

    def admit(self, request: WaitingRequest, load: Load) -> Refusal | None:
        return Refusal("no such class") if request.priority > 4 else None

    def labels(self, request: WaitingRequest) -> dict[str, str]:
        self.asked[request.request_id] += 1
        return {"class": str(request.priority), "tenant": str(request.extra["tenant"])}


class Clock(SteadyClock):
    """Stands where a test puts it."""

    def tick(self) -> float:
        return self.now

    def from_wall_time(self, stamp: float) -> float:
        return stamp


def request(name: str, priority: int, tenant: str, arrival: float) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        priority=priority,
        arrival_time=arrival,
        num_prompt_tokens=1,
        max_tokens=1,
        sampling_params=SimpleNamespace(extra_args={"tenant": tenant}),
        cache_salt="",
        lora_request=None,
    )


def made(queue: AdmissionQueue | None = None) -> tuple[AdmissionQueueAdapter, StatisticsWriter, Clock, Ledger]:
    ledger, clock = Ledger(), Clock()
    ledger.set_item("scheduler", "labelled", "applied")
    held = AdmissionQueueAdapter(queue or Labelled(), ITEM, ledger, clock)
    writer = StatisticsWriter.here
    assert writer is not None
    clock.now = 1000.0
    return held, writer, clock, ledger


def shown(writer: StatisticsWriter) -> dict[tuple[str, str], LabelStatistics]:
    return {(row.label, row.value): row for row in writer.snapshot().rows}


@dataclass
class Told:
    """One request as the reference knows it."""

    labels: dict[str, str]
    arrival: float
    state: str = "waiting"
    wait: float | None = None
    tokens: int = 0


def expected(requests: list[Told], label: str, value: str) -> dict[str, object]:
    """The figures of one row, by looking at every request there ever was."""
    mine = [each for each in requests if each.labels[label] == value]
    waits = [each.wait for each in mine if each.wait is not None]
    states = Counter(each.state for each in mine)
    edges = (*EDGES, float("inf"))
    below = (0.0, *EDGES)
    return {
        "waiting": states["waiting"],
        "running": states["running"],
        "admitted": len(waits),
        "refused": states["refused"],
        "ended": sum(each.state == "ended" and each.wait is not None for each in mine),
        "aborted": sum(each.state == "ended" and each.wait is None for each in mine),
        "tokens": sum(each.tokens for each in mine),
        "wait_sum": pytest.approx(sum(waits)),
        "wait_max": pytest.approx(max(waits, default=0.0)),
        "buckets": [
            sum(low < wait <= high or (wait == 0.0 and low == 0.0) for wait in waits)
            for low, high in zip(below, edges, strict=True)
        ],
    }


ARRIVE = st.tuples(st.just("arrive"), st.integers(1, 5), st.sampled_from("abc"))
ACTIONS = st.one_of(
    ARRIVE,
    st.tuples(st.just("take"), st.just(False)),
    st.tuples(st.just("take"), st.booleans()),
    st.tuples(st.just("preempt"), st.integers(0, 3)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(
        st.just("step"),
        st.sampled_from([0.0, 0.01, 0.3, 1.0, 7.0, 150.0]),
        st.lists(st.integers(0, 2), min_size=4, max_size=4),
    ),
)


class Driver:
    """Does to the queue what vLLM's scheduler does, and tells the reference."""

    def __init__(self) -> None:
        self.queue = Labelled()
        self.held, self.writer, self.clock, _ = made(self.queue)
        self.told: dict[str, Told] = {}
        self.real: dict[str, SimpleNamespace] = {}
        self.ended: set[str] = set()

    def of(self, state: str) -> list[str]:
        return [name for name, each in self.told.items() if each.state == state]

    def arrive(self, priority: int, tenant: str) -> None:
        name = f"r{len(self.told)}"
        self.told[name] = Told({"class": str(priority), "tenant": tenant}, self.clock.now)
        self.real[name] = request(name, priority, tenant, self.clock.now)
        self.held.add_request(self.real[name])  # type: ignore[arg-type]
        if priority > 4:
            self.told[name].state = "refused"
            self.held.refused.pop(name)

    def take(self, back: bool) -> None:
        if not self.of("waiting"):
            return
        taken = self.held.pop_request()
        if back:
            self.held.prepend_request(taken)
        else:
            self.told[taken.request_id].state = "running"

    def preempt(self, number: int) -> None:
        for name in self.of("running")[number : number + 1]:
            self.held.prepend_request(self.real[name])  # type: ignore[arg-type]
            self.told[name].state = "waiting"

    def abort(self, number: int) -> None:
        for name in self.of("waiting")[number : number + 1]:
            self.held.remove_request(self.real[name])  # type: ignore[arg-type]
            self.told[name].state = "leaving"
            self.ended.add(name)

    def finish(self, number: int) -> None:
        # Those of the step that is being made end after it.
        running = [name for name in self.of("running") if self.told[name].wait is not None]
        for name in running[number : number + 1]:
            self.told[name].state = "leaving"
            self.ended.add(name)

    def step(self, seconds: float, numbers: Sequence[int] = (1,)) -> None:
        """Each running request is given as many tokens as its place in ``numbers`` says; with 0 it is left out."""
        self.clock.now += seconds
        tokens = {"stranger": 5} if numbers[0] == 2 else {}
        for place, name in enumerate(self.of("running")):
            told = self.told[name]
            told.wait = self.clock.now - told.arrival if told.wait is None else told.wait
            if number := numbers[place % len(numbers)]:
                told.tokens += number
                tokens[name] = number
        for name in self.ended:
            self.told[name].state = "ended"
        self.held.end_step(tokens, self.ended)
        self.ended = set()


@settings(max_examples=200, deadline=None)
@given(st.lists(ARRIVE, max_size=6), st.lists(ACTIONS, min_size=20, max_size=60))
def test_every_figure_is_what_looking_at_all_requests_gives(
    first: list[tuple[object, ...]], actions: list[tuple[object, ...]]
):
    """Whatever order requests arrive, are taken, handed back, preempted, aborted and finished in."""
    driver = Driver()
    for name, *given_ in first + actions:
        getattr(driver, str(name))(*given_)
    while driver.of("waiting"):
        driver.take(False)
    driver.step(0.7)
    while driver.of("running"):
        driver.finish(0)
    driver.step(0.1)
    found = shown(driver.writer)
    requests = list(driver.told.values())
    for label in ("class", "tenant"):
        values = {each.labels[label] for each in requests}
        assert {value for kind, value in found if kind == label} == values
        for value in values:
            wanted = expected(requests, label, value)
            assert {name: getattr(found[label, value], name) for name in wanted} == wanted
            row = found[label, value]
            assert row.admitted == row.ended
    assert set(driver.queue.asked.values()) <= {1}


@settings(max_examples=100, deadline=None)
@given(st.lists(ARRIVE, max_size=6), st.lists(ACTIONS, min_size=20, max_size=60))
def test_while_requests_run_what_is_shown_adds_up(first: list[tuple[object, ...]], actions: list[tuple[object, ...]]):
    """Half a second after anything has happened, the writer has it, though nobody has ended."""
    driver = Driver()
    for name, *given_ in first + actions:
        getattr(driver, str(name))(*given_)
    for _ in range(3):
        driver.step(0.6)
    requests = list(driver.told.values())
    for (label, value), row in shown(driver.writer).items():
        wanted = expected(requests, label, value)
        assert {name: getattr(row, name) for name in wanted} == wanted
        assert row.admitted + row.aborted + row.refused <= len(requests)


def test_a_request_that_is_put_back_is_not_admitted_until_it_stays():
    """Its wait is that to the admission it was let go on with."""
    held, writer, clock, _ = made()
    held.add_request(request("r", 1, "acme", 1000.0))  # type: ignore[arg-type]
    clock.now = 1004.0
    held.prepend_request(held.pop_request())
    held.end_step({}, ())
    clock.now = 1015.0
    real = held.pop_request()
    held.end_step({"r": 3}, ())
    clock.now = 1050.0
    held.prepend_request(real)
    held.end_step({}, ())
    held.pop_request()
    held.end_step({"r": 1}, ())
    clock.now = 1051.0
    held.end_step({}, ["r"])
    row = shown(writer)["tenant", "acme"]
    assert (row.admitted, row.ended, row.wait_sum, row.tokens) == (1, 1, 15.0, 4)
    assert row.buckets == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_the_load_is_published_in_every_step():
    """Of the end of the step: who it admitted waits no more."""
    held, writer, _, _ = made()
    for name in "abc":
        held.add_request(request(name, 1, "acme", 1000.0))  # type: ignore[arg-type]
    assert writer.load() == Load()
    held.pop_request()
    held.end_step({"a": 1}, ())
    assert writer.load() == Load(2, 0, 0.0)
    held.remove_requests([request("b", 1, "acme", 0.0), request("c", 1, "acme", 0.0)])  # type: ignore[list-item]
    held.end_step({}, ["a", "b", "c"])
    assert writer.load() == Load(0, 0, 0.0)


class Unlabelled(Labelled):
    labels = AdmissionQueue.labels  # type: ignore[assignment]


def test_requests_without_labels_are_counted_together():
    """In one row."""
    held, writer, _, ledger = made(Unlabelled())
    held.add_request(request("a", 1, "acme", 1000.0))  # type: ignore[arg-type]
    held.end_step({}, ())
    assert {kind: row.waiting for kind, row in shown(writer).items()} == {UNLABELLED[0]: 1}
    assert "labels" not in {hook.name for hook in ledger._items["labelled"].hooks}


class BadLabels(Labelled):
    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def labels(self, request: WaitingRequest) -> dict[str, str]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize("answer", [RuntimeError("no labels today"), None, ["class"]])
def test_a_queue_whose_labels_fail_is_put_aside_and_nothing_is_lost(answer: object):
    """They are the author's code like all other."""
    held, writer, _, ledger = made(BadLabels(answer))
    for name in "abc":
        held.add_request(request(name, 1, "acme", 1000.0))  # type: ignore[arg-type]
    assert ledger._items["labelled"].state == "quarantined"
    assert [held.pop_request().request_id for _ in range(3)] == ["a", "b", "c"]
    held.end_step({}, ())
    assert shown(writer)[UNLABELLED[0]].running == 3


def test_names_are_cut_and_odd_values_are_words():
    """Whatever an author gives as a label or a client as a tenant."""
    assert normalize_labels({"tenant": "x" * 1000, "class": 3, "": "nameless"}) == (
        ("tenant", "x" * VALUE_BYTES),
        ("class", "3"),
    )
    assert normalize_labels({}) == UNLABELLED


def waiting(name: str, arrival: float = 0.0) -> WaitingRequest:
    return WaitingRequest(name, 0, arrival, 1, 1)


def through(collector: StatisticsCollector, name: str, tenant: str, now: float, tokens: int = 1) -> None:
    """One request from its arrival to its end."""
    collector.add(waiting(name, now), (("tenant", tenant),))
    collector.start(name)
    collector.end_step(now, {name: tokens}, Load())
    collector.end(name)
    collector.end_step(now + 0.6, {}, Load())


def test_of_too_many_tenants_those_that_came_longest_ago_are_summed_up():
    """Nothing that was counted is lost; those who have requests here are kept."""
    writer = StatisticsWriter("fair")
    collector = StatisticsCollector(writer, rows=MAX_LABELS + 4)
    collector.add(waiting("stays"), (("tenant", "patient"),))
    for number in range(50):
        through(collector, f"r{number}", f"t{number}", 10.0 + number, tokens=2)
        found = {row.value: row for row in writer.snapshot().rows}
        assert len(found) <= 5
        assert sum(row.tokens for row in found.values()) == 2 * (number + 1)
        assert sum(row.recent for row in found.values()) == 2 * (number + 1)
        assert found["patient"].waiting == 1
        assert found[f"t{number}"].ended == 1
    assert sum(found[OTHERS].buckets) == found[OTHERS].admitted == found[OTHERS].ended == 47
    collector.end_step(10.0 + 3 * SHARE_WINDOW_S, {}, Load())
    collector.end_step(11.0 + 3 * SHARE_WINDOW_S, {}, Load())
    assert {row.recent for row in writer.snapshot().rows} == {0}


def test_a_flood_of_tenants_does_not_push_out_the_classes():
    """Though nobody of a class has come for long."""
    writer = StatisticsWriter("fair")
    collector = StatisticsCollector(writer, rows=8 * MAX_LABELS)
    for number in range(300):
        own = "1" if not number else "2"
        collector.add(waiting(f"r{number}"), (("tenant", f"t{number}"), ("class", own)))
        collector.end(f"r{number}")
        collector.end_step(10.0 + number, {}, Load())
    rows = writer.snapshot().rows
    assert {row.value: row.aborted for row in rows if row.label == "class"} == {"1": 1, "2": 299}
    assert sum(row.aborted for row in rows if row.label == "tenant") == 300


def test_where_every_row_has_requests_a_new_tenant_counts_with_the_others():
    """Until there is room again."""
    writer = StatisticsWriter("fair")
    collector = StatisticsCollector(writer, rows=MAX_LABELS + 2)
    for number in range(6):
        collector.add(waiting(f"r{number}"), (("tenant", f"t{number}"),))
    collector.end_step(10.0, {}, Load())
    assert {row.value: row.waiting for row in writer.snapshot().rows} == {"t0": 1, "t1": 1, OTHERS: 4}
    for number in range(6):
        collector.end(f"r{number}")
    collector.end_step(20.0, {}, Load())
    through(collector, "new", "t9", 30.0)
    found = {row.value: (row.aborted, row.ended) for row in writer.snapshot().rows}
    assert found["t9"] == (0, 1)
    assert sum(aborted for aborted, _ in found.values()) == 6


def test_only_so_many_labels_are_counted():
    """An author who makes up a label for each request does not push out the others."""
    writer = StatisticsWriter("fair")
    collector = StatisticsCollector(writer, rows=MAX_LABELS + 20)
    for number in range(30):
        collector.count_refusal(((f"label{number}", "x"), ("tenant", "acme")))
    collector.end_step(1.0, {}, Load())
    rows = writer.snapshot().rows
    assert len({row.label for row in rows}) == MAX_LABELS
    assert {row.value: row.refused for row in rows if row.label == "tenant"} == {"acme": 30}


def test_shares_are_those_of_the_last_minute():
    """What was served before is in the total and not in the share."""
    writer = StatisticsWriter("fair")
    collector = StatisticsCollector(writer)
    through(collector, "a", "old", 1000.0, tokens=700)
    through(collector, "b", "acme", 1000.0 + SHARE_WINDOW_S / 2, tokens=30)
    by_value = {row["value"]: row for row in writer.snapshot().as_dicts()}
    assert (by_value["old"]["share"], by_value["acme"]["share"]) == (0.9589, 0.0411)
    later = writer.snapshot().as_dicts(time.time() + SHARE_WINDOW_S + 1)
    assert {row["share"] for row in later} == {0.0}, "an engine that does nothing publishes nothing"
    through(collector, "c", "zeta", 1000.0 + 1.2 * SHARE_WINDOW_S, tokens=10)
    by_value = {row["value"]: row for row in writer.snapshot().as_dicts()}
    assert {value: (row["tokens"], row["share"]) for value, row in by_value.items()} == {
        "old": (700, 0.0),
        "acme": (30, 0.75),
        "zeta": (10, 0.25),
    }


def test_many_rows_are_written_in_several_steps_and_all_when_nothing_is_left():
    """A step does not pay for a thousand tenants at once."""
    writer = StatisticsWriter("fair")
    collector = StatisticsCollector(writer)
    for number in range(100):
        collector.add(waiting(f"r{number}"), (("tenant", f"t{number}"),))
    sizes = []
    for step in range(8):
        collector.end_step(10.0 + step / 100, {}, Load())
        sizes.append(len(writer.snapshot().rows))
    assert sizes == [16, 32, 48, 64, 80, 96, 100, 100]
    for number in range(100):
        collector.end(f"r{number}")
    collector.end_step(10.2, {}, Load())
    assert {row.aborted for row in writer.snapshot().rows} == {1}
