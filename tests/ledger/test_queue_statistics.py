"""What an engine publishes: read by others while it is written, after a crash, across a fork, and without a folder."""

import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_graft.contracts import Load
from vllm_graft.ledger import LabelStatistics, Ledger, Record, StatisticsReader, StatisticsWriter
from vllm_graft.ledger import queue_statistics as module
from vllm_graft.ledger.queue_statistics import EDGES, OTHERS, truncate

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _no_writer_here() -> Iterator[None]:
    before, StatisticsWriter.here = StatisticsWriter.here, None
    yield
    StatisticsWriter.here = before


def row(value: str, number: int = 1) -> LabelStatistics:
    """A row in which every figure is the same number, so that two halves of different rows would show."""
    return LabelStatistics("tenant", value, *[number] * 8, float(number), float(number), [number] * (len(EDGES) + 1))


def numbers(figures: LabelStatistics) -> set[float]:
    names = ("waiting", "running", "admitted", "refused", "ended", "aborted", "tokens", "recent")
    return {getattr(figures, name) for name in (*names, "wait_sum", "wait_max")} | set(figures.buckets)


def test_what_is_published_is_read(tmp_path: Path):
    """The load of two engines is their sum; the figures come with the pid and the name of the queue."""
    one = StatisticsWriter("fair", tmp_path / "1.queue")
    two = StatisticsWriter("fair", tmp_path / "2.queue")
    assert StatisticsReader(tmp_path).load() == Load()
    one.publish(5, 2, 0.5)
    two.publish(7, 3, 1.5)
    assert StatisticsReader(tmp_path).load() == Load(12, 5, 2.0)
    one.write(0, row("acme", 3))
    one.write(999, row(OTHERS, 4))
    one.write(1, row("gone"))
    one.write(1, None)
    first, second = StatisticsReader(tmp_path).queues()
    assert (first.pid, first.item) == (os.getpid(), "fair")
    found = {each.value: numbers(each) for each in (*first.rows, *second.rows)}
    assert found == {"acme": {3}, OTHERS: {4}}


def test_an_engine_that_appears_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once the reader looks again; and one whose folder is gone is not there."""
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    reader = StatisticsReader(tmp_path)
    assert reader.load() == Load()
    StatisticsWriter("fair", tmp_path / "1.queue").publish(5, 2, 0.5)
    assert reader.load() == Load()
    clock[0] += 1.1
    assert reader.load() == Load(5, 2, 0.5)
    # The same process begins anew: what it wrote before is not taken for what it writes now.
    StatisticsWriter("fair", tmp_path / "1.queue").publish(1, 1, 0.0)
    assert reader.load() == Load(5, 2, 0.5)
    clock[0] += 1.1
    assert reader.load() == Load(1, 1, 0.0)
    (tmp_path / "1.queue").unlink()
    clock[0] += 1.1
    assert reader.load() == Load()
    assert StatisticsReader(tmp_path / "nowhere").load() == Load()


def test_an_engine_that_ended_in_order_counts_no_more(tmp_path: Path):
    """Though its process lives on."""
    writer = StatisticsWriter("fair", tmp_path / "1.queue")
    writer.publish(5, 2, 0.5)
    writer.write(0, row("acme"))
    assert StatisticsReader(tmp_path).load() == Load(5, 2, 0.5)
    writer.end()
    assert StatisticsReader(tmp_path).load() == Load()
    assert StatisticsReader(tmp_path).queues() == []


def _publish_and_die(path: Path) -> None:
    writer = StatisticsWriter("fair", path)
    writer.publish(5, 2, 0.5)
    writer.write(0, row("acme", 9))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_crashed_engine_waits_for_nothing_and_its_figures_stay(tmp_path: Path):
    """Its load counts for ten seconds at most; what it had counted can still be read."""
    child = FORK.Process(target=_publish_and_die, args=(tmp_path / "1.queue",))
    child.start()
    child.join()
    assert StatisticsReader(tmp_path).load(time.time()) == Load(5, 2, 0.5)
    assert StatisticsReader(tmp_path).load(time.time() + module.RECENT_S) == Load()
    (found,) = StatisticsReader(tmp_path).queues()
    assert found.pid == child.pid
    assert [numbers(each) for each in found.rows] == [{9}]


def test_an_idle_engine_is_right_however_long_ago_it_stepped(tmp_path: Path):
    """It publishes nothing while nothing happens."""
    StatisticsWriter("fair", tmp_path / "1.queue").publish(3, 1, 2.5)
    assert StatisticsReader(tmp_path).load(time.time() + 3600) == Load(3, 1, 2.5)


def _publish_for_ever(path: Path, ready: object) -> None:
    writer = StatisticsWriter("fair", path)
    number = 0
    while True:
        number += 1
        writer.publish(number, number, float(number))
        writer.write(0, row("acme", number))
        if number == 1:
            ready.set()  # type: ignore[attr-defined]


def test_a_reader_never_sees_half_of_what_is_written(tmp_path: Path):
    """However often it reads while another process writes without a pause."""
    ready = FORK.Event()
    child = FORK.Process(target=_publish_for_ever, args=(tmp_path / "1.queue", ready), daemon=True)
    child.start()
    try:
        assert ready.wait(30)
        reader = StatisticsReader(tmp_path)
        seen: set[int] = set()
        until = time.monotonic() + 60
        while len(seen) < 50 and time.monotonic() < until:
            for load in (reader.load() for _ in range(1000)):
                assert load.waiting == load.running == load.rate
                seen.add(load.waiting)
            for each in reader.queues()[0].rows:
                assert len(numbers(each)) == 1
                seen.add(each.tokens)
    finally:
        child.kill()
        child.join()
    assert len(seen) >= 50


def test_what_is_half_written_for_good_is_left_out(tmp_path: Path):
    """A process that was killed between two bytes does not hold a reader up."""
    writer = StatisticsWriter("fair", tmp_path / "1.queue")
    writer.publish(5, 2, 0.5)
    writer.write(0, row("acme"))
    writer.write(1, row("zeta"))
    path = tmp_path / "1.queue"
    data = bytearray(path.read_bytes())
    struct.pack_into("=q", data, module._LOAD_AT, 6)
    data[module._ROWS_AT + 200] ^= 1
    path.write_bytes(data)
    reader = StatisticsReader(tmp_path)
    assert reader.load() == Load()
    assert [each.value for each in reader.queues()[0].rows] == ["zeta"]
    path.write_bytes(b"short")
    assert StatisticsReader(tmp_path).queues() == []


def _opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv("GRAFT_STATE_DIR", str(folder))
    ledger = Ledger()
    ledger.open(Record.of_this_process("run", "hash", "model", ["engine"], "0.32.0", "V1"))
    return ledger


def test_a_fork_does_not_write_into_its_parents_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has one in memory, which begins empty."""
    ledger = _opened(tmp_path, monkeypatch)
    writer = ledger.queue_statistics("fair")
    writer.publish(5, 2, 0.5)
    pid = os.fork()
    if not pid:
        ledger.forked()
        before = writer.load()
        writer.publish(9, 9, 9.0)
        os._exit(0 if before == Load() and writer.load() == Load(9, 9, 9.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert StatisticsReader(ledger.home).load() == Load(5, 2, 0.5)


def test_a_ledger_that_is_closed_has_no_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The process may live on and begin another run."""
    ledger = _opened(tmp_path, monkeypatch)
    ledger.queue_statistics("fair").publish(5, 2, 0.5)
    home = ledger.home
    ledger.close()
    assert StatisticsReader(home).load() == Load()


def test_without_a_folder_the_engine_of_this_process_is_read():
    """And where it has none, nothing is known."""
    reader = StatisticsReader(None)
    assert reader.load() == Load()
    assert reader.queues() == []
    writer = Ledger().queue_statistics("fair")
    writer.publish(5, 2, 0.5)
    writer.write(0, row("acme"))
    assert reader.load() == Load(5, 2, 0.5)
    assert [each.value for each in reader.queues()[0].rows] == ["acme"]


def test_a_board_that_cannot_be_made_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A full disk is no reason to stop an engine."""
    ledger = _opened(tmp_path, monkeypatch)

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    writer = ledger.queue_statistics("fair")
    writer.publish(5, 2, 0.5)
    assert writer.load() == Load(5, 2, 0.5)
    assert "cannot be published: no space left on device" in caplog.text


@pytest.mark.parametrize(
    ("text", "kept"),
    [("acme", "acme"), ("x" * 40, "x" * 32), ("é" * 20, "é" * 16), ("a\0b", "a b"), ("a\ud800", "a?"), ("", "")],
)
def test_names_are_cut_to_what_fits(text: str, kept: str):
    """They are clients' words: any length, any character."""
    assert truncate(text, 32) == kept
    packed = LabelStatistics.unpack(LabelStatistics("tenant", kept).pack())
    assert packed is not None
    assert packed.value == kept


def test_percentiles_are_the_upper_ends_of_buckets_and_never_more_than_the_longest():
    """None while nobody was admitted."""
    figures = LabelStatistics("class", "1")
    assert figures.percentile(0.99) is None
    for seconds in (0.05, 0.3, 0.3, 1.5):
        figures.add_wait(seconds)
    assert (figures.percentile(0.5), figures.percentile(0.99)) == (0.5, 1.5)
    figures.add_wait(500.0)
    assert figures.percentile(0.99) == figures.wait_max == 500.0
    assert figures.buckets == [1, 2, 0, 1, 0, 0, 0, 0, 0, 0, 1]


def test_a_file_that_is_cut_short_ends_no_reader(tmp_path: Path):
    """A reader that had the file mapped would be ended by a bus error."""
    path = tmp_path / "1.queue"
    writer = StatisticsWriter("fair", path)
    writer.publish(5, 2, 0.5)
    writer.write(0, row("acme", 3))
    reader = StatisticsReader(tmp_path)
    assert reader.load() == Load(5, 2, 0.5)
    os.truncate(path, 0)
    assert reader.load() == Load()
    assert [queue.rows for queue in reader.queues()] == [()]
