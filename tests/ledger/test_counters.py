"""Counting and timing against a budget."""

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_graft.ledger import Cells, Guard, Meter
from vllm_graft.ledger.counters import HOOKS, read_block, read_cells
from vllm_graft.ledger.guard import OVERRUNS_IN_A_ROW, reason_of


def test_a_call_is_an_overrun_only_beyond_the_budget():
    """At the budget is within it."""
    meter = Meter(Cells(), "hook", 50.0)
    assert meter.count(50_000) is False
    assert meter.count(50_001) is True
    reading = meter.reading()
    assert (reading.calls, reading.overruns, reading.max_us) == (2, 1, 50.001)


def test_without_a_budget_nothing_overruns():
    """A hook without a budget is measured all the same."""
    meter = Meter(Cells(), "hook", None)
    assert meter.count(10**9) is False
    assert meter.reading().overruns == 0
    assert meter.reading().max_us == 10**6


def test_percentiles_come_from_the_histogram():
    """Ninety-nine quick calls and one slow one: the median is quick, the slow one shows at the end."""
    meter = Meter(Cells(), "hook", 128.0)
    for _ in range(98):
        meter.count(1_000)
    meter.count(3_000)
    meter.count(10_000_000)
    reading = meter.reading()
    assert reading.p50_us == 1.0
    assert reading.p99_us == 4.0
    assert reading.max_us == 10_000.0


def test_the_same_key_gives_the_same_counters():
    """Asked for twice, a hook goes on counting."""
    cells = Cells()
    Meter(cells, "hook", 1.0).count(5)
    assert Meter(cells, "hook", 1.0).reading().calls == 1
    assert Meter(cells, "other", 1.0).reading().calls == 0


def test_more_hooks_than_blocks_share_the_last_block():
    """Running out of blocks must not write beyond the memory."""
    cells = Cells()
    places = [cells.allot(str(index)) for index in range(HOOKS + 50)]
    assert len(set(places)) == HOOKS
    Meter(cells, str(HOOKS + 49), 1.0).count(1)


def test_counters_in_a_file_are_read_by_others_and_survive_their_process(tmp_path: Path):
    """A process killed without warning leaves what it counted."""
    path = tmp_path / "1.cells"
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_count_and_die, args=(path,))
    child.start()
    child.join()
    assert child.exitcode == -9
    cells = read_cells(path)
    assert cells is not None
    assert read_block(cells, Cells().allot("hook"), 1.0).calls == 7
    assert path.stat().st_mode & 0o077 == 0


def _count_and_die(path: Path) -> None:
    meter = Meter(Cells(path), "hook", 1.0)
    for _ in range(7):
        meter.count(10)
    os.kill(os.getpid(), 9)


def test_counts_made_before_the_file_is_known_are_carried_over(tmp_path: Path):
    """Counting begins before a process knows its folder."""
    cells = Cells()
    meter = Meter(cells, "hook", 1.0)
    meter.count(1)
    cells.move(tmp_path / "1.cells")
    meter.count(1)
    assert meter.reading().calls == 2


def fallback(value: int) -> str:
    return f"fallback {value}"


def test_a_guard_passes_results_through_and_counts():
    """A healthy plugin is simply called."""
    told: list[str] = []
    meter = Meter(Cells(), "hook", 10**6)
    guard = Guard(lambda value: f"plugin {value}", fallback, meter, told.append)
    assert guard(3) == "plugin 3"
    assert meter.reading().calls == 1
    assert told == []


def test_a_plugin_that_raises_is_put_aside_at_once():
    """The caller gets the fallback's answer, and the plugin is never called again."""
    told: list[str] = []
    calls: list[int] = []

    def plugin(value: int) -> str:
        calls.append(value)
        raise ValueError("boom")

    meter = Meter(Cells(), "hook", 10**6)
    guard = Guard(plugin, fallback, meter, told.append)
    assert [guard(1), guard(2)] == ["fallback 1", "fallback 2"]
    assert calls == [1]
    assert len(told) == 1
    assert "ValueError: boom at " in told[0]
    assert "test_counters.py" in told[0]
    assert meter.reading().errors == 1


def test_a_plugin_that_overruns_again_and_again_is_put_aside(monkeypatch: pytest.MonkeyPatch):
    """A slow phase is forgiven, a slow plugin is not."""
    clock = iter(range(0, 10**12, 60_000))
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    told: list[str] = []
    guard = Guard(lambda value: f"plugin {value}", fallback, Meter(Cells(), "hook", 50.0), told.append)
    answers = [guard(index) for index in range(OVERRUNS_IN_A_ROW + 1)]
    assert answers[-2] == f"plugin {OVERRUNS_IN_A_ROW - 1}"
    assert answers[-1] == f"fallback {OVERRUNS_IN_A_ROW}"
    assert told == ["100 calls in a row over the budget of 50 us (mean 60 us, max 60 us)"]


def test_one_quick_call_forgives_the_slow_ones_before_it(monkeypatch: pytest.MonkeyPatch):
    """Only overruns in a row count."""
    ticks = (tick for n in range(1, 400) for tick in (n * 10**6, n * 10**6 + (60_000 if n % 50 else 10)))
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(ticks))
    guard = Guard(lambda value: value, lambda value: -1, Meter(Cells(), "hook", 50.0), print)
    assert [guard(index) for index in range(300)] == list(range(300))


def call_times(monkeypatch: pytest.MonkeyPatch, seconds: list[float], pause: float = 0.0) -> None:
    """Make the clock of a guard show these durations, call after call."""

    def ticks() -> Iterator[int]:
        now = 10**9
        for each in seconds:
            yield now
            now += int(each * 1e9)
            yield now
            now += int(pause * 1e9)

    clock = ticks()
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))


def calls_until_aside(monkeypatch: pytest.MonkeyPatch, seconds: list[float], pause: float = 0.0) -> tuple[int, str]:
    """How many calls of these durations a plugin gets with a budget of 500 us, and why not more."""
    call_times(monkeypatch, seconds, pause)
    told: list[str] = []
    guard = Guard(lambda: None, lambda: None, Meter(Cells(), "hook", 500.0), told.append)
    for number, _ in enumerate(seconds, start=1):
        guard()
        if told:
            return number, told[0]
    return len(seconds), ""


@pytest.mark.process
@pytest.mark.parametrize(
    ("ends", "status"),
    [(lambda: None, 0), (sys.exit, 0), (lambda: sys.exit(3), 3), (lambda: sys.exit("no"), 1), (lambda: 1 / 0, 1)],
)
def test_a_child_that_a_plugin_forks_does_not_go_on_in_its_place(
    ends: Callable[[], object], status: int, capfd: pytest.CaptureFixture[str]
):
    """A copy of an engine that lives on answers the same requests a second time."""
    told: list[str] = []
    children: list[int] = []

    def plugin(value: int) -> str:
        children.append(os.fork())
        if not children[-1]:
            ends()
        return f"plugin {value}"

    guard = Guard(plugin, fallback, Meter(Cells(), "hook", None), told.append)
    assert guard(3) == "plugin 3"
    os.write(1, f"{os.getpid()} goes on\n".encode())
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == status
    assert capfd.readouterr().out == f"{os.getpid()} goes on\n"
    assert told == []


@pytest.mark.parametrize(
    ("seconds", "pause", "calls", "reason"),
    [
        ([2.0] * 9, 0.0, 3, "3 calls each took more than 1 s over the budget of 500 us (mean 2000000 us, "),
        ([10.0] * 9, 60.0, 3, "3 calls each took more than 1 s over the budget of 500 us (mean 10000000 us, "),
        ([2.0, 0.01] * 9, 0.0, 5, "3 calls each took more than 1 s over the budget of 500 us (mean "),
        ([2.0, 0.0001] * 9, 0.0, 9, "5 calls each took more than 1 s over the budget of 500 us (mean "),
        ([*[0.0001] * 900, 2.0, 2.0, *[0.0001] * 9, *[2.0] * 9], 0.0, 914, "5 calls each took more than 1 s over"),
        ([0.9] * 9, 0.0, 3, "its last calls together took 1.0 s over the budget of 500 us (mean "),
        ([0.3] * 99, 0.01, 4, "its last calls together took 1.2 s over the budget of 500 us (mean "),
        ([0.0001, 0.05] * 99, 0.01, 44, "its last calls together took 1.0 s over the budget of 500 us (mean "),
        ([3.0, *[0.0001] * 60], 0.0, 61, ""),
        ([3.0, 3.0, *[0.0001] * 60], 0.0, 62, ""),
        ([0.9, 0.9, *[0.0001] * 60], 0.0, 62, ""),
        ([3.0, *[0.0001] * 60] * 4, 0.0, 244, ""),
        ([0.02, *[0.0001] * 60] * 9, 0.01, 549, ""),
        ([3.0, 0.0001] * 3, 700.0, 6, ""),
    ],
    ids=[
        "sleeps",
        "sleeps-now-and-then",
        "sleeps-or-is-slow",
        "sleeps-half-the-time",
        "sleeps-later",
        "nearly-sleeps",
        "slow",
        "slow-half-the-time",
        "one-pause",
        "compiles-for-two-shapes",
        "compiles-fast-for-two-shapes",
        "compiles-for-four-shapes-over-time",
        "hiccups",
        "rare-pauses",
    ],
)
def test_a_plugin_that_costs_far_more_than_its_budget_is_put_aside_soon(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], pause: float, calls: int, reason: str
):
    """Time counts, not only calls; a machine that stood still for a moment is not the plugin's fault."""
    number, why = calls_until_aside(monkeypatch, seconds, pause)
    assert number == calls
    assert why.startswith(reason) if reason else why == ""


class Unspeakable(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise SystemExit("no")

    __repr__ = __str__


def cancel() -> None:
    """Raise what ends an asyncio task."""
    from asyncio import CancelledError

    raise CancelledError


def throw(error: BaseException) -> Callable[[], None]:
    def plugin() -> None:
        raise error

    return plugin


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (functools.partial(sys.exit, 3), "SystemExit: 3"),
        (throw(SystemExit()), "SystemExit: "),
        (throw(KeyboardInterrupt()), "KeyboardInterrupt: "),
        (throw(GeneratorExit()), "GeneratorExit: "),
        (cancel, "CancelledError: "),
        (throw(Unspeakable()), "Unspeakable: (its message cannot be shown: str() raised SystemExit)"),
        (throw(ValueError("x" * 9999)), f"ValueError: {'x' * 500}..."),
    ],
    ids=["sys.exit", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "cancelled", "unspeakable", "endless"],
)
def test_whatever_a_plugin_raises_is_its_own_failure(plugin: Callable[[], None], said: str):
    """What would end the process, and what cannot be shown, puts the plugin aside like any exception."""
    told: list[str] = []
    guard = Guard(plugin, lambda: "instead", Meter(Cells(), "hook", 10**6), told.append)
    assert [guard(), guard()] == ["instead", "instead"]
    (reason,) = told
    assert reason.startswith(said)


def test_a_signal_that_arrives_in_a_plugin_is_not_its_failure():
    """Ctrl-C and a supervisor's SIGTERM still end the process; the plugin is still trusted."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(0)

    def plugin(number: signal.Signals) -> None:
        os.kill(os.getpid(), number)
        while True:
            threading.Event().wait(0.01)

    told: list[str] = []
    guard = Guard(plugin, print, Meter(Cells(), "hook", 10**6), told.append)
    before = signal.signal(signal.SIGTERM, leave), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit):
            guard(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            guard(signal.SIGINT)
        signal.signal(signal.SIGINT, functools.partial(leave))
        with pytest.raises(SystemExit):
            guard(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert told == []
    assert guard.aside == ""


def test_a_reason_names_the_place():
    """File and line of the innermost frame."""
    with pytest.raises(OSError, match="gone") as caught:
        throw(OSError("gone"))()
    assert reason_of(caught.value).startswith(f"OSError: gone at {__file__}:")


def test_a_reason_can_be_sent():
    """An exception may repeat an unpaired surrogate, which neither JSON nor msgpack takes as it is."""
    reason_of(ValueError("half \ud800")).encode()
    assert reason_of(ValueError("half \ud800, größe 🙂")) == r"ValueError: half \ud800, größe 🙂"
