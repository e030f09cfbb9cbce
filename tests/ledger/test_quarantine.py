"""What other processes of a run have put aside, as a front end sees it."""

import threading
import time
from pathlib import Path

import pytest

from vllm_graft.ledger import Ledger
from vllm_graft.ledger import quarantine as module
from vllm_graft.ledger.quarantine import QuarantineReader
from vllm_graft.ledger.record import Record
from vllm_graft.plan import Plan


def opened(run: str) -> Ledger:
    """The ledger of a process with one sampler."""
    ledger = Ledger()
    ledger.begin_run(run, Plan())
    ledger.set_item("sampler", "dry", "applied")
    ledger.open(Record.of_this_process(run, "hash", "m", ["worker"], "0.32.0", "V1"))
    return ledger


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A process that records on this machine."""
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path))
    return opened("run-1")


class FrontEnd(Ledger):
    """Another process of the same run, which reads and has no sampler."""

    def __init__(self, home: Path | None) -> None:
        super().__init__()
        self._home = home

    @property
    def home(self) -> Path | None:
        return self._home


def test_a_front_end_hears_of_what_a_worker_puts_aside(worker: Ledger):
    """By the worker's record, as soon as it is written."""
    quarantine = QuarantineReader(FrontEnd(worker.home))
    assert quarantine.reasons() == {}
    worker.put_aside("dry", "RuntimeError: no such table")
    deadline = time.monotonic() + 10
    while not quarantine.reasons():
        assert time.monotonic() < deadline
    assert quarantine.reasons() == {"dry": "RuntimeError: no such table"}


def test_it_hears_of_what_a_lenient_start_went_on_without(worker: Ledger):
    """A request for it would otherwise be served without a word; the reason carries no control characters."""
    worker.set_item("sampler", "dry", "refused", "RuntimeError: no \x1b[2Jtable\n")
    worker.save()
    assert QuarantineReader(FrontEnd(worker.home)).reasons() == {"dry": r"RuntimeError: no \x1b[2Jtable\n"}


def test_it_hears_of_it_at_once(worker: Ledger):
    """Whoever has the answer to a request that cost a sampler may ask again within a millisecond."""
    asides = QuarantineReader(FrontEnd(worker.home), clock=lambda: 10**18)
    assert asides.reasons() == {}
    worker.save()
    assert asides.reasons() == {}, "no time has passed since the last look"
    worker.put_aside("dry", "RuntimeError: no such table")
    assert asides.reasons() == {"dry": "RuntimeError: no such table"}


def test_a_slow_disk_does_not_hold_an_engine_up(worker: Ledger, monkeypatch: pytest.MonkeyPatch):
    """Nor does a front end read a record before it is written."""
    asides = QuarantineReader(FrontEnd(worker.home), clock=lambda: 10**18)
    assert asides.reasons() == {}
    written = threading.Event()
    save = worker.save
    monkeypatch.setattr(worker, "save", lambda: (written.wait(10), save()))
    started = time.monotonic()
    worker.put_aside("dry", "raised")
    assert time.monotonic() - started < 5
    assert asides.reasons() == {}
    written.set()
    deadline = time.monotonic() + 10
    while not asides.reasons():
        assert time.monotonic() < deadline


def test_records_are_read_only_when_one_has_changed(worker: Ledger, monkeypatch: pytest.MonkeyPatch):
    """A look is paid for by every request that asks for a sampler."""
    reads: list[Path] = []
    read_run = module.read_run
    monkeypatch.setattr(module, "read_run", lambda home, **told: (reads.append(home), read_run(home, **told))[1])
    ahead = [10**9]
    quarantine = QuarantineReader(FrontEnd(worker.home), clock=lambda: time.time_ns() + ahead[0])
    for _ in range(100):
        quarantine.reasons()
    assert len(reads) == 1
    worker.save()
    ahead[0] += 10**9
    assert quarantine.reasons() == {}
    assert len(reads) == 2


def test_records_that_change_all_the_time_are_not_read_all_the_time(worker: Ledger, monkeypatch: pytest.MonkeyPatch):
    """A sampler that costs its requests an error each has a record that changes with each of them."""
    reads: list[Path] = []
    read_run = module.read_run
    monkeypatch.setattr(module, "read_run", lambda home, **told: (reads.append(home), read_run(home, **told))[1])
    moment = [10**18]
    quarantine = QuarantineReader(FrontEnd(worker.home), clock=lambda: moment[0])
    for _ in range(100):
        worker.save()
        quarantine.reasons()
        moment[0] += 10**6
    assert len(reads) == 2


def test_a_time_that_is_too_recent_to_trust_is_read_again(worker: Ledger, monkeypatch: pytest.MonkeyPatch):
    """File systems count in ticks: a second change in the same one would not show."""
    reads: list[Path] = []
    read_run = module.read_run
    monkeypatch.setattr(module, "read_run", lambda home, **told: (reads.append(home), read_run(home, **told))[1])
    moment = [10**8]
    quarantine = QuarantineReader(FrontEnd(worker.home), clock=lambda: moment[0])
    quarantine.reasons()
    moment[0] += 10**8
    quarantine.reasons()
    assert len(reads) == 2


def test_without_a_folder_a_process_knows_its_own(worker: Ledger):
    """An engine in the front end's process, on a machine where nothing can be written."""
    worker.put_aside("dry", "raised")
    assert QuarantineReader(worker).reasons() == {"dry": "raised"}
    assert QuarantineReader(FrontEnd(None)).reasons() == {}


def test_a_folder_that_is_gone_changes_nothing(worker: Ledger, tmp_path: Path):
    """Somebody cleared the temporary files: what was known still holds."""
    assert QuarantineReader(FrontEnd(tmp_path / "nowhere")).reasons() == {}
