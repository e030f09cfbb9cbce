"""This process's record, on disk, after a fork, and read by others."""

import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest

from vllm_graft.errors import LedgerError
from vllm_graft.ledger import Ledger, folder, reading, runs
from vllm_graft.ledger.record import Record
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
    book = Ledger()
    book.begin_run(run, PLAN)
    book.set_item("patch", "everywhere", "applied")
    if role == "frontend":
        book.set_item("stats", "sink", "applied")
    roles: list[Role] = ["frontend", "engine", "worker"] if role == "frontend" else [role]
    book.open(Record.of_this_process(run, PLAN.hash, "m", roles, "0.32.0", "V1"))
    return book


def in_child(target: object, *args: object) -> multiprocessing.process.BaseProcess:
    child = multiprocessing.get_context("fork").Process(target=target, args=args)  # type: ignore[arg-type]
    child.start()
    child.join()
    return child


def test_a_running_process_is_seen_with_its_items_and_calls():
    """What is written is what status reads."""
    book = opened()
    meter = book.hook("sink", "finished", 50.0)
    meter.count(7_000)
    book.save()
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
    book = opened("engine")
    book.forget_items()
    assert book.record is not None
    book.record.items.clear()
    book.save()
    (view,) = runs()
    (finding,) = view.findings()
    assert (finding.code, finding.level) == ("S001", "error")
    assert finding.subject == "patch everywhere"
    assert f"(engine, pid {os.getpid()} on " in finding.where


def test_a_front_end_without_an_engine_is_not_proven():
    """Silence of a whole role is a finding, for as long as the server runs."""
    book = opened()
    assert book.record is not None
    book.record.roles.remove("engine")
    book.record.roles.remove("worker")
    book.save()
    assert [(finding.code, finding.where) for finding in runs()[0].findings()] == [
        ("S007", "engine"),
        ("S007", "worker"),
    ]


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
    book = opened()
    book.set_item("patch", "everywhere", state_name, "because")  # type: ignore[arg-type]
    book.save()
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


def test_a_process_taken_down_with_its_server_has_not_died():
    """vLLM kills children that are slow to end: their parent marks them first, and only those that still live."""
    book = opened()
    dead = in_child(_open_and_die)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_open_and_wait, args=(book,))
    child.start()
    deadline = time.monotonic() + 20
    while len(runs()[0].processes) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.pid is not None
    book.take_down([child.pid])
    child.kill()
    child.join()
    lives = {process.record.pid: process.life for process in runs()[0].processes}
    assert lives == {dead.pid: "died", os.getpid(): "running", child.pid: "ended"}


def test_a_killed_process_has_died_however_soon_its_parent_hears_of_it():
    """Its files close, which wakes the parent, before it is a zombie: taking it down then does not whitewash it."""
    book = opened()
    context = multiprocessing.get_context("fork")
    killed = []
    for _ in range(25):
        child = context.Process(target=_open_and_wait, args=(book,))
        child.start()
        deadline = time.monotonic() + 20
        while len(runs()[0].processes) < len(killed) + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        multiprocessing.connection.wait([child.sentinel])
        book.take_down([child.pid])
        child.join()
        killed.append(child.pid)
    lives = {process.record.pid: process.life for process in runs()[0].processes}
    assert lives == {os.getpid(): "running"} | dict.fromkeys(killed, "died")


def _open_and_wait(book: Ledger) -> None:
    book.forked()
    book.open(Record.of_this_process("run", PLAN.hash, "m", ["worker"], "0.32.0", "V1"))
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
    before = time.time() - folder.KEPT_S - 60
    for path in home.iterdir():
        os.utime(path, (before, before))
    assert runs() == []


def test_a_forked_child_does_not_count_into_its_parents_file():
    """The child lets go of the parent's memory before anything else."""
    book = opened()
    meter = book.hook("sink", "finished", 50.0)

    def child() -> None:
        book.forked()
        meter.count(1)
        os._exit(0 if meter.reading().calls == 1 else 1)

    pid = os.fork()
    if pid == 0:
        child()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert meter.reading().calls == 0


def test_a_process_of_another_container_is_unknown_rather_than_dead():
    """Process ids mean nothing across namespaces."""
    book = opened()
    assert book.record is not None
    book.record.namespace = "pid:[1]"
    book.save()
    assert book.home is not None
    view = reading.read_run(book.home)
    assert view is not None
    assert view.processes[0].life == "unknown"


def test_a_reused_process_id_is_not_the_process():
    """The kernel's start time tells them apart."""
    book = opened()
    assert book.record is not None
    book.record.started -= 1
    book.save()
    assert runs()[0].processes[0].life == "died"


def test_a_damaged_record_is_passed_over(state: Path):
    """A reader must not fail on half a file of a dying process."""
    opened()
    (home,) = folder.run_folders(state)
    (home / "99.json").write_text('{"run": ', encoding="utf-8")
    assert len(runs()[0].processes) == 1


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
    book = opened()
    book.hook("sink", "finished", 50.0).count(1)
    assert book.home is None
    view = book.view()
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
    book = opened()
    book.hook("sink", "finished", 50.0).count(1)
    assert runs()[0].processes[0].calls("sink") == 1


def test_the_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A record somebody else could have written proves nothing."""
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    theirs = folder.home_in(tmp_path / "shared")
    theirs.mkdir(parents=True)
    os.chown(theirs, 12345, 12345)
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path / "shared"))
    with pytest.raises(LedgerError, match="is not a folder of this user"):
        folder.state_folder()


def test_a_quarantined_item_keeps_its_error():
    """status shows what went wrong and when it was put aside."""
    book = opened()
    book.put_aside("sink", "ValueError: boom")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not runs()[0].processes[0].record.last_error:
        time.sleep(0.01)
    process = runs()[0].processes[0]
    assert process.record.item("sink").state == "quarantined"  # type: ignore[union-attr]
    assert process.record.last_error == "sink: is put aside, the server goes on without it: ValueError: boom"
