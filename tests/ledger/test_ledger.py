"""This process's record, on disk, after a fork, and read by others."""

import contextlib
import errno
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_graft.errors import LedgerError
from vllm_graft.ledger import LabelStatistics, Ledger, comparison, folder, reading, runs
from vllm_graft.ledger.record import Headless, Record
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.points import Role

PLAN = Plan(
    (
        PlanItem("patch", "everywhere", "m:C", "p", ("frontend", "engine", "worker")),
        PlanItem("stats", "sink", "m:D", "p", ("frontend",)),
    ),
    model="m",
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records of our own."""
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path / "state"))
    return folder.home_in(tmp_path / "state")


def opened(role: Role = "frontend", run: str = "run") -> Ledger:
    ledger = Ledger()
    ledger.begin_run(run, PLAN)
    ledger.set_item("patch", "everywhere", "applied")
    if role == "frontend":
        ledger.set_item("stats", "sink", "applied")
    roles: list[Role] = ["frontend", "engine", "worker"] if role == "frontend" else [role]
    ledger.open(Record.of_this_process(run, PLAN.hash, "m", roles, "0.32.0", "V1"))
    return ledger


def in_child(target: object, *args: object) -> multiprocessing.process.BaseProcess:
    child = multiprocessing.get_context("fork").Process(target=target, args=args)  # type: ignore[arg-type]
    child.start()
    child.join()
    return child


def test_a_running_process_is_seen_with_its_items_and_calls():
    """What is written is what status reads."""
    ledger = opened()
    meter = ledger.hook("sink", "finished", 50.0)
    meter.count(7_000)
    ledger.save()
    (view,) = runs()
    (process,) = view.processes
    assert process.life == "running"
    assert process.calls("sink") == 1
    assert process.readings["sink"]["finished"].max_us == 7.0
    assert view.findings() == []
    assert json.dumps(view.as_dict())


def test_the_folder_and_the_files_are_the_owners_alone(state: Path):
    """Records name models and errors: nobody else's business."""
    opened()
    for path in (state, *state.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_a_missing_item_is_an_error_that_names_the_process():
    """A record without a planned item is worse than no record."""
    ledger = opened("engine")
    ledger.forget_items()
    assert ledger.record is not None
    ledger.record.items.clear()
    ledger.save()
    (view,) = runs()
    (finding,) = view.findings()
    assert (finding.code, finding.level) == ("S001", "error")
    assert finding.subject == "patch everywhere"
    assert f"(engine, pid {os.getpid()} on " in finding.where


def opened_alone() -> Ledger:
    """A front end of which no engine and no worker has reported."""
    ledger = opened()
    assert ledger.record is not None
    ledger.record.roles.remove("engine")
    ledger.record.roles.remove("worker")
    ledger.save()
    return ledger


def test_a_front_end_without_an_engine_is_not_proven():
    """Silence of a whole role is a finding, for as long as the server runs."""
    opened_alone().set_ready()
    assert [(finding.code, finding.level, finding.where) for finding in runs()[0].findings()] == [
        ("S007", "error", "engine"),
        ("S007", "error", "worker"),
    ]
    assert "check that vllm-graft is installed there" in runs()[0].findings()[0].fix


def test_a_server_that_starts_is_not_blamed():
    """Its engine has not reported because it is not there yet."""
    opened_alone()
    found = runs()[0].findings()
    assert {(finding.code, finding.level, finding.fix) for finding in found} == {
        ("S007", "warning", "wait until the server has started")
    }
    assert found[0].what == "no engine process has reported yet: the server is still starting"


def headless(kind: Headless, since: float = 0.0) -> Ledger:
    """The process that starts a node without a front end, so many seconds ago."""
    ledger = opened_alone()
    assert ledger.record is not None
    ledger.record.headless = kind
    ledger.record.since -= since
    ledger.save()
    return ledger


@pytest.mark.parametrize(("age", "level"), [(0, "warning"), (comparison.REPORT_S + 1, "error")])
def test_a_headless_node_is_not_starting_for_ever(age: float, level: str):
    """It has no client that would say that the engine is there, so silence counts after a while."""
    headless("engines", age)
    found = runs()[0].findings()
    assert {(finding.code, finding.where, finding.level) for finding in found} == {
        ("S007", "engine", level),
        ("S007", "worker", level),
    }


def test_a_headless_node_of_workers_expects_no_engine():
    """That is on another node."""
    headless("workers", comparison.REPORT_S + 1)
    assert [(finding.code, finding.where) for finding in runs()[0].findings()] == [("S007", "worker")]


def test_a_headless_node_has_started_when_its_engine_runs():
    """However long the model takes to load; what is not in use then is an error."""
    ledger = headless("engines", 10 * comparison.REPORT_S)
    front = ledger.read_all_processes()[0][0]
    item = {"point": "scheduler", "name": "fair", "state": "armed", "reason": "nothing has used it yet"}
    plan = Plan((PlanItem("scheduler", "fair", "m:Q", "p", ("engine",)),), model="m")
    engine = {**front, "pid": 1, "roles": ["engine"], "headless": "", "plan": plan.hash, "items": [item]}
    for ready, level in ((False, "warning"), (True, "error")):
        found = comparison.findings_of([{**front, "plan": plan.hash}, {**engine, "ready": ready}], plan)
        assert [(finding.code, finding.level) for finding in found] == [("S008", level)]


def test_an_engine_that_is_gone_is_said_to_be_gone():
    """Not that nothing is installed there."""
    opened_alone().set_ready()
    dead = in_child(_open_as_engine_and_die)
    found = {(finding.code, finding.where): finding for finding in runs()[0].findings()}
    engine = found["S007", "engine"]
    assert engine.what == f"lost every engine process: {dead.name} (pid {dead.pid}) died"
    assert "installed" not in engine.fix


def _open_as_engine_and_die() -> None:
    opened("engine")
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_item_that_fails_where_it_is_not_needed_is_a_finding_too():
    """A queue's ``admit`` is called in API servers, and the queue is planned for engines."""
    front = opened("frontend").read_all_processes()[0][0]
    plan = Plan((*PLAN, PlanItem("scheduler", "fair", "m:Q", "p", ("engine",))), model="m")
    item = {"point": "scheduler", "name": "fair", "state": "quarantined", "reason": "boom"}
    row = front | {"roles": ["frontend"], "plan": plan.hash, "items": [*front["items"], item]}
    assert [(found.code, found.subject) for found in comparison.missing([row], plan)] == [("S005", "scheduler fair")]
    item["state"] = "applied"
    assert comparison.missing([row], plan) == []


def test_an_engine_that_ended_beside_another_is_an_error_while_the_server_runs():
    """The other one would hide that half of them are gone; in a server that has ended too, nothing is wrong."""
    front = opened("frontend").read_all_processes()[0][0] | {"roles": ["frontend"]}
    one = front | {"pid": 1, "roles": ["engine", "worker"], "name": "EngineCore_DP0"}
    two = one | {"pid": 2, "life": "ended", "name": "EngineCore_DP1"}
    (found,) = comparison.findings_of([front, one, two], PLAN)
    assert (found.code, found.level, found.what) == ("S006", "error", "ended, but its server goes on")
    assert "EngineCore_DP1" in found.subject
    assert comparison.findings_of([each | {"life": "ended"} for each in (front, one, two)], PLAN) == []


def test_a_process_that_is_asked_says_its_own_queue_and_leaves_the_others_to_them():
    """An engine or worker stands still while it answers: a thousand tenants of each engine would take a while."""
    ledger = opened_alone()
    in_child(_publish_as_engine_and_die)
    theirs, mine = ledger.rows()
    assert (theirs["queue"], mine["queue"]) == ([], [])
    ledger.queue_statistics("fair").write(0, LabelStatistics("tenant", "acme", waiting=3))
    theirs, mine = ledger.rows()
    assert theirs["queue"] == []
    assert [row["value"] for row in mine["queue"]] == ["acme"]
    theirs, mine = ledger.read_all_processes()[0]
    assert [row["value"] for row in theirs["queue"]] == ["globex"], "a front end shows those of its machine"


def _publish_as_engine_and_die() -> None:
    opened("engine").queue_statistics("fair").write(0, LabelStatistics("tenant", "globex", waiting=1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_full_disk_is_said_to_be_full(monkeypatch: pytest.MonkeyPatch):
    """It is why nothing was recorded."""
    opened_alone().set_ready()
    monkeypatch.setattr(folder, "disk_full_reason", lambda place: "the disk of /x is full")
    (finding, _) = runs()[0].findings()
    assert finding.what == "has no record of any engine process: the disk of /x is full"
    assert "free space there" in finding.fix


class SmallDisk:
    """A disk with room for two processes; where this user may not mount one, the calls that would notice."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self._patch = monkeypatch
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
        self.mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0

    def fill(self) -> None:
        """Use up the rest."""
        if not self.mounted:
            self._patch.setattr(os, "posix_fallocate", self._refuse)
            self._patch.setattr(folder, "_fill", self._fill)
            self._patch.setattr(folder, "disk_full_reason", lambda place: f"the disk of {place} is full")
            return
        with (self.place / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Have room again."""
        if not self.mounted:
            self._patch.undo()
            self._patch.setenv("GRAFT_STATE_DIR", str(self.place))
            return
        (self.place / "filling").unlink()

    def _refuse(self, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _fill(self, path: Path, flags: int, data: bytes) -> None:
        if flags or path.stat().st_size < len(data):
            self._refuse()
        path.write_bytes(data)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """A small disk for the records."""
    (tmp_path / "small").mkdir()
    made = SmallDisk(tmp_path / "small", monkeypatch)
    monkeypatch.setenv("GRAFT_STATE_DIR", str(made.place))
    yield made
    if made.mounted:
        # Counters stay mapped for as long as this process lives.
        subprocess.run(["umount", "--lazy", str(made.place)], check=True)


def test_a_quarantine_is_recorded_on_a_full_disk(disk: SmallDisk):
    """The record has room to spare, and is written in place."""
    ledger = opened()
    disk.fill()
    ledger.put_aside("sink", "ValueError: boom")
    ledger.save()
    assert [finding.code for finding in runs()[0].findings()] == ["S005"]
    disk.free()
    ledger.save()
    assert [finding.code for finding in runs()[0].findings()] == ["S005"]


def test_a_record_that_cannot_be_written_is_a_finding_until_it_is(disk: SmallDisk):
    """What does not fit in its place either shows as out of date, and is written once there is room."""
    ledger = opened()
    disk.fill()
    ledger.set_item("stats", "sink", "quarantined", "x" * 20_000)
    ledger.save()
    stale = {finding.code: finding for finding in runs()[0].findings()}
    assert "S005" not in stale
    assert stale["S019"].level == "error"
    assert "could not write its record, so what is shown may be out of date: No space left" in stale["S019"].what
    disk.free()
    ledger.retry()
    assert [finding.code for finding in runs()[0].findings()] == ["S005"]


def test_a_process_that_could_not_record_itself_does_so_later(disk: SmallDisk):
    """A full disk at the start hides a server only for as long as it is full."""
    disk.fill()
    ledger = opened()
    assert runs() == []
    live = ledger.view()
    assert live is not None
    assert live.unsaved == f"the disk of {folder.home_in(disk.place)} is full"
    (finding,) = [each for each in comparison.findings_of([live.as_dict(live=True)], PLAN) if each.code == "S019"]
    assert finding.level == "warning", "what the process says itself is right"
    disk.free()
    ledger.retry()
    assert [process.life for process in runs()[0].processes] == ["running"]
    assert runs()[0].findings() == []


@pytest.mark.parametrize("what", ["state", "run", "files"])
def test_records_that_somebody_removed_are_written_again(state: Path, what: str):
    """As a cleaner of temporary folders does; counters and figures go on, and the plan is there too."""
    ledger = opened()
    ledger.hook("sink", "finished", 50.0).count(7_000)
    row = LabelStatistics("tenant", "acme", waiting=3)
    ledger.queue_statistics("fair").write(0, row)
    assert ledger.home is not None
    if what == "files":
        for path in ledger.home.iterdir():
            path.unlink()
    else:
        shutil.rmtree(state if what == "state" else ledger.home)
    ledger.retry()
    (view,) = runs()
    assert view.findings() == []
    assert view.plan.hash == PLAN.hash
    assert view.processes[0].calls("sink") == 1
    figures = view.processes[0].queue
    assert figures is not None
    assert [(each.value, each.waiting) for each in figures.rows] == [("acme", 3)]
    ledger.hook("sink", "finished").count(1)
    assert runs()[0].processes[0].calls("sink") == 2


def test_a_folder_that_somebody_removed_is_said_to_be_gone():
    """Until it is there again: processes that died before are in no record any more."""
    ledger = opened()
    assert ledger.home is not None
    assert ledger.read_all_processes()[1] == []
    shutil.rmtree(ledger.home)
    (row,), (finding,) = ledger.read_all_processes()
    assert (row["life"], finding.code, finding.level) == ("running", "S018", "warning")
    assert finding.what.startswith("is gone: running processes write theirs again")
    ledger.retry()
    assert ledger.read_all_processes()[1] == []


def test_a_plan_that_somebody_removed_is_written_again_by_any_process(monkeypatch: pytest.MonkeyPatch):
    """A launcher of several API servers waits for them, and may be held up: they have the plan too."""
    ledger = opened()
    assert ledger.home is not None
    ledger._own_run = None
    (ledger.home / reading.PLAN_FILE).unlink()
    ledger.retry()
    assert [finding.code for finding in runs()[0].findings()] == ["S018"], "nobody here has it"
    monkeypatch.setenv("GRAFT_PLAN", PLAN.to_json())
    ledger.retry()
    (view,) = runs()
    assert (view.findings(), view.plan.hash) == ([], PLAN.hash)


def test_a_record_alone_is_written_again_over_counters_that_stay():
    """The file of counters is mapped: it must not be made anew while it is there."""
    ledger = opened()
    assert ledger.home is not None
    counters = ledger.home / f"{os.getpid()}.cells"
    before = counters.stat().st_ino
    (ledger.home / f"{os.getpid()}.json").unlink()
    ledger.retry()
    assert len(runs()[0].processes) == 1
    assert counters.stat().st_ino == before


def test_a_record_that_cannot_be_written_again_is_said_once(state: Path, caplog: pytest.LogCaptureFixture):
    """And the process goes on."""
    ledger = opened()
    shutil.rmtree(state)
    state.write_text("")
    for _ in range(3):
        ledger.retry()
    assert caplog.text.count("is gone and cannot be written again") == 1
    view = ledger.view()
    assert view is not None
    assert view.unsaved
    state.unlink()
    ledger.retry()
    assert len(runs()) == 1


@pytest.mark.parametrize(
    ("state_name", "code", "level"),
    [
        ("refused", "S002", "error"),
        ("late", "S003", "error"),
        ("dead", "S004", "error"),
        ("quarantined", "S005", "warning"),
    ],
)
def test_every_bad_state_has_a_code_and_a_next_step(state_name: str, code: str, level: str):
    """The reason travels with the finding."""
    ledger = opened()
    ledger.set_item("patch", "everywhere", state_name, "because")  # type: ignore[arg-type]
    ledger.save()
    (finding,) = runs()[0].findings()
    assert (finding.code, finding.level) == (code, level)
    assert finding.what == f"is {state_name}: because"
    assert finding.fix


def test_a_killed_process_stays_visible_as_died():
    """Its counters too."""
    child = in_child(_open_and_die)
    assert child.exitcode == -signal.SIGKILL
    (view,) = runs()
    assert [process.life for process in view.processes] == ["died"]
    assert view.processes[0].calls("sink") == 3
    assert [finding.code for finding in view.findings()] == ["S006"]


def _open_and_die() -> None:
    meter = opened().hook("sink", "finished", 50.0)
    for _ in range(3):
        meter.count(1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_ends_in_order_is_not_shown():
    """Nothing to worry about."""
    child = in_child(opened)
    assert child.exitcode == 0
    assert runs() == []


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3), SystemExit("no model")])
def test_a_process_that_an_error_ends_has_died(error: BaseException):
    """multiprocessing runs finalizers even then, which is no order; what it was is told."""
    in_child(_open_and_raise, error)
    (view,) = runs()
    assert [process.life for process in view.processes] == ["died"]
    (finding,) = view.findings()
    assert finding.code == "S006"
    assert finding.what.startswith(f"crashed: {type(error).__name__}: {error} at {__file__}:")


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0), KeyboardInterrupt()])
def test_a_process_that_was_asked_to_end_has_ended(error: BaseException):
    """vLLM's own handlers of SIGTERM and SIGINT raise these."""
    in_child(_open_and_raise, error)
    assert runs() == []


def _open_and_raise(error: BaseException) -> None:
    opened()
    raise error


def test_who_was_asked_to_end_may_end_by_an_error():
    """A worker that is gone already makes its engine fail in the middle of an orderly shutdown."""
    in_child(_open_and_end_and_raise)
    assert runs() == []


def _open_and_end_and_raise() -> None:
    opened().mark_asked_to_stop()
    raise RuntimeError("worker gone")


def test_taking_a_process_down_does_not_undo_its_failure():
    """The front end hears of a failed engine from the engine itself, and then stops it."""
    ledger = opened()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_open_fail_and_wait, args=(ledger,))
    child.start()
    deadline = time.monotonic() + 20
    while not any(each.life == "died" for each in runs()[0].processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.pid is not None
    ledger.mark_stopped([child.pid])
    child.kill()
    child.join()
    lives = {process.record.pid: process.life for process in runs()[0].processes}
    assert lives == {os.getpid(): "running", child.pid: "died"}


def _open_fail_and_wait(ledger: Ledger) -> None:
    ledger.forked()
    ledger.open(Record.of_this_process("run", PLAN.hash, "m", ["engine"], "0.32.0", "V1"))
    ledger.fail("RuntimeError: boom")
    time.sleep(60)


def test_a_worker_that_never_became_ready_has_died():
    """vLLM's worker_main catches what goes wrong before its loop, and ends with status 0."""
    in_child(_open_unfinished)
    assert [finding.what for finding in runs()[0].findings()] == ["crashed: it was never ready"]


def _open_unfinished() -> None:
    opened().unfinished = "it was never ready"


def test_a_process_taken_down_with_its_server_has_not_died():
    """vLLM kills children that are slow to end: their parent marks them first, and only those that still live."""
    ledger = opened()
    dead = in_child(_open_and_die)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_open_and_wait, args=(ledger,))
    child.start()
    deadline = time.monotonic() + 20
    while len(runs()[0].processes) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.pid is not None
    ledger.mark_stopped([child.pid])
    child.kill()
    child.join()
    lives = {process.record.pid: process.life for process in runs()[0].processes}
    assert lives == {dead.pid: "died", os.getpid(): "running", child.pid: "ended"}


def test_a_killed_process_has_died_however_soon_its_parent_hears_of_it():
    """Its files close, which wakes the parent, before it is a zombie: taking it down then does not whitewash it."""
    ledger = opened()
    context = multiprocessing.get_context("fork")
    killed = []
    for _ in range(25):
        child = context.Process(target=_open_and_wait, args=(ledger,))
        child.start()
        deadline = time.monotonic() + 20
        while len(runs()[0].processes) < len(killed) + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        multiprocessing.connection.wait([child.sentinel])
        ledger.mark_stopped([child.pid])
        child.join()
        killed.append(child.pid)
    lives = {process.record.pid: process.life for process in runs()[0].processes}
    assert lives == {os.getpid(): "running"} | dict.fromkeys(killed, "died")


def _open_and_wait(ledger: Ledger) -> None:
    ledger.forked()
    ledger.open(Record.of_this_process("run", PLAN.hash, "m", ["worker"], "0.32.0", "V1"))
    time.sleep(60)


def test_a_new_start_clears_the_servers_that_are_gone(state: Path):
    """An unclean end is visible until the next start."""
    in_child(_open_and_die)
    assert len(runs()) == 1
    Ledger().begin_run("next", PLAN)
    assert runs() == []
    assert [home.name for home in folder.run_folders(state)] == ["next"]


def test_a_new_start_leaves_running_servers_alone():
    """Two servers on one machine."""
    opened(run="first")
    Ledger().begin_run("second", PLAN)
    assert [view.run for view in runs()] == ["first"]


def test_old_records_are_forgotten_after_a_day(state: Path):
    """Even those whose processes cannot be judged from here."""
    in_child(_open_and_die)
    (home,) = folder.run_folders(state)
    before = time.time() - folder.RETENTION_S - 60
    for path in home.iterdir():
        os.utime(path, (before, before))
    assert runs() == []


@pytest.mark.parametrize(("beats", "stays"), [(True, True), (False, False)])
def test_a_server_of_another_container_lives_by_its_signs_of_life(state: Path, beats: bool, stays: bool):
    """On tmpfs counting through a memory map leaves the times of files as they were at the start."""
    ledger = opened()
    assert ledger.record is not None
    ledger.record.namespace = "pid:[1]"
    ledger.save()
    if beats:
        ledger.beat()
    (home,) = folder.run_folders(state)
    before = time.time() - folder.RETENTION_S - 60
    for path in home.iterdir():
        os.utime(path, (before, before))
    assert bool(runs()) == stays
    reading.sweep(state)
    assert home.exists() == stays


def test_a_forked_child_does_not_count_into_its_parents_file():
    """The child lets go of the parent's memory before anything else."""
    ledger = opened()
    meter = ledger.hook("sink", "finished", 50.0)

    def child() -> None:
        ledger.forked()
        meter.count(1)
        os._exit(0 if meter.reading().calls == 1 else 1)

    pid = os.fork()
    if pid == 0:
        child()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert meter.reading().calls == 0


def test_a_process_of_another_container_is_unknown_rather_than_dead():
    """Process ids mean nothing across namespaces."""
    ledger = opened()
    assert ledger.record is not None
    ledger.record.namespace = "pid:[1]"
    ledger.save()
    assert ledger.home is not None
    view = reading.read_run(ledger.home)
    assert view is not None
    assert view.processes[0].life == "unknown"


def test_a_reused_process_id_is_not_the_process():
    """The kernel's start time tells them apart."""
    ledger = opened()
    assert ledger.record is not None
    ledger.record.started -= 1
    ledger.save()
    assert runs()[0].processes[0].life == "died"


def test_a_folder_that_cannot_be_used_is_an_error_when_it_was_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """GRAFT_STATE_DIR is an order, not a hint."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(LedgerError, match=r"GRAFT_STATE_DIR: the folder .* cannot be made"):
        folder.state_folder(create=True)
    folder.home_in(tmp_path).write_text("")
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path))
    with pytest.raises(LedgerError, match="GRAFT_STATE_DIR: "):
        folder.state_folder(create=True)


def test_without_any_writable_folder_the_record_stays_in_memory(monkeypatch: pytest.MonkeyPatch):
    """A read-only container without shared memory still counts and reports."""
    monkeypatch.delenv("GRAFT_STATE_DIR")
    monkeypatch.setattr(folder, "_candidates", lambda: iter([Path("/proc/nowhere")]))
    ledger = opened()
    ledger.hook("sink", "finished", 50.0).count(1)
    assert ledger.home is None
    view = ledger.view()
    assert view is not None
    assert view.calls("sink") == 1


def test_a_user_without_home_or_rights_has_records_too(monkeypatch: pytest.MonkeyPatch):
    """As in a container that runs as nobody, in a folder it cannot write."""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    for name in ("GRAFT_STATE_DIR", "XDG_RUNTIME_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    somebody = 54321
    child = in_child(_open_as, somebody)
    assert child.exitcode == 0
    home = Path(tempfile.gettempdir()) / f"vllm-graft-{somebody}"
    try:
        assert home.stat().st_uid == somebody
        assert len(list(home.glob("runs/*/[0-9]*.json"))) == 1
    finally:
        shutil.rmtree(home)


def _open_as(user: int) -> None:
    os.setgid(user)
    os.setuid(user)
    os.chdir("/")
    ledger = opened()
    ledger.hook("sink", "finished", 50.0).count(1)
    assert runs()[0].processes[0].calls("sink") == 1


def test_the_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A record somebody else could have written proves nothing."""
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    theirs = folder.home_in(tmp_path / "shared")
    theirs.mkdir(parents=True)
    os.chown(theirs, 12345, 12345)
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path / "shared"))
    with pytest.raises(LedgerError, match="is not a directory owned by this user"):
        folder.state_folder()


def test_a_quarantine_needs_no_thread(monkeypatch: pytest.MonkeyPatch):
    """A plugin that used up all threads is put aside all the same, and the engine goes on."""
    ledger = opened()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ledger.put_aside("sink", "ValueError: boom")
    assert [finding.code for finding in runs()[0].findings()] == ["S005"]


def test_a_quarantined_item_keeps_its_error():
    """status shows what went wrong and when it was put aside."""
    ledger = opened()
    ledger.put_aside("sink", "ValueError: boom")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not runs()[0].processes[0].record.last_error:
        time.sleep(0.01)
    process = runs()[0].processes[0]
    assert process.record.item("sink").state == "quarantined"  # type: ignore[union-attr]
    assert process.record.last_error == "sink: is put aside; the server continues without it: ValueError: boom"
