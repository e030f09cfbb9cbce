"""Reading records that are damaged, strange or out of reach: nothing raises, nothing waits, each is a finding."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllm_graft.cli import main
from vllm_graft.errors import LedgerError
from vllm_graft.findings import Finding
from vllm_graft.ledger import LabelStatistics, Ledger, StatisticsWriter, folder, reading, runs
from vllm_graft.ledger.counters import SIZE
from vllm_graft.ledger.record import Record
from vllm_graft.plan import Plan, PlanItem

PLAN = Plan((PlanItem("stats", "sink", "m:D", "p", ("frontend",)),), model="m")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with one sound process: this one."""
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path / "state"))
    return opened()


def opened() -> Path:
    ledger = Ledger()
    ledger.begin_run("run", PLAN)
    ledger.set_item("stats", "sink", "applied")
    ledger.open(Record.of_this_process("run", PLAN.hash, "m", ["frontend"], "0.32.0", "V1"))
    ledger.hook("sink", "finished", 50.0).count(1)
    ledger.set_ready()
    assert ledger.home is not None
    return ledger.home


def codes(home: Path) -> list[str]:
    view = reading.read_run(home)
    assert view is not None
    return [finding.code for finding in view.findings()]


def only(home: Path) -> Finding:
    view = reading.read_run(home)
    assert view is not None
    (finding,) = view.findings()
    return finding


STRANGE: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a link": lambda path: path.symlink_to("/dev/zero"),
    "a socket": lambda path: bind(path),
    "a huge file": lambda path: (path.touch(), os.truncate(path, 10**12)),
    "an empty file": Path.touch,
}


def bind(path: Path) -> None:
    # The name of a socket has room for some 100 characters only.
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


@pytest.mark.parametrize("kind", STRANGE)
def test_what_lies_in_the_place_of_a_record_is_a_finding(home: Path, kind: str):
    """And the processes beside it are shown all the same."""
    STRANGE[kind](home / "4194999.json")
    found = only(home)
    assert (found.code, found.level, found.subject) == ("S018", "warning", "record run/4194999.json")
    assert found.what.startswith("cannot be read: ")
    assert len(runs()[0].processes) == 1


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("ending", [".cells", ".queue", "plan.json"])
def test_so_is_what_lies_in_the_place_of_another_file(home: Path, ending: str, kind: str):
    """Counters, the plan and the statistics of a queue."""
    path = home / (ending if ending == "plan.json" else f"{os.getpid()}{ending}")
    path.unlink(missing_ok=True)
    STRANGE[kind](path)
    assert codes(home) == ["S018"]


DAMAGE: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "cut": (lambda data: data.__delitem__(slice(len(data) // 2, None)), "bytes instead of"),
    "head": (lambda data: data.__setitem__(9, data[9] ^ 1), "the checksum of its head is wrong"),
    "load": (lambda data: data.__setitem__(128, data[128] ^ 1), "the checksum of its load is wrong"),
    "row": (lambda data: data.__setitem__(300, data[300] ^ 1), "the checksum of its row 0 is wrong"),
}


@pytest.mark.parametrize("part", DAMAGE)
def test_damaged_statistics_of_a_queue_are_a_finding(home: Path, part: str, capsys: pytest.CaptureFixture[str]):
    """The process beside them is shown all the same."""
    board = home / f"{os.getpid()}.queue"
    writer = StatisticsWriter("fair", board)
    writer.publish(5, 2, 0.5)
    writer.write(0, LabelStatistics("tenant", "acme"))
    assert codes(home) == []
    data = bytearray(board.read_bytes())
    spoil, said = DAMAGE[part]
    spoil(data)
    board.write_bytes(data)
    found = only(home)
    assert (found.code, found.level) == ("S018", "error")
    assert said in found.what
    assert main(["status"]) == 1
    assert f"record run/{board.name}" in capsys.readouterr().out
    assert len(runs()[0].processes) == 1


def test_the_record_of_a_living_process_is_worth_an_error(home: Path):
    """It proves nothing any more; that of a process that is gone did not matter much."""
    (home / f"{os.getppid()}.json").write_text("null")
    assert only(home).level == "error"


@pytest.mark.parametrize("text", ["null", "7", '"text"', "[]", "{}", "[" * 100_000, "{", "NaN", '{"items": 1e999}'])
@pytest.mark.parametrize("name", ["4194999.json", "plan.json"])
def test_a_file_that_is_no_record_is_a_finding(home: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]):
    """In the command's output too."""
    (home / name).write_text(text)
    assert codes(home) == ["S018"]
    assert main(["status"]) == (name == "plan.json")
    assert "S018" in capsys.readouterr().out


def test_a_run_without_a_sound_file_is_shown(home: Path, capsys: pytest.CaptureFixture[str]):
    """There was a server, and nobody can say how it is."""
    for path in home.iterdir():
        path.write_text("null")
    assert main(["status"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("S018") == 2
    assert main(["status", "--json"]) == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def paths(data: object, at: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [at, *(path for key, value in inner for path in paths(value, (*at, key)))]


MISSING = object()
"""In the place of a value: its key is taken out."""


def exchange(data: object, path: tuple[object, ...], value: object) -> object:
    if not path:
        return None if value is MISSING else value
    copy: object = json.loads(json.dumps(data))
    inner: object = copy
    for key in path[:-1]:
        inner = inner[key]  # type: ignore[index]
    if value is MISSING:
        del inner[path[-1]]  # type: ignore[attr-defined]
    else:
        inner[path[-1]] = value  # type: ignore[index]
    return copy


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize("name", ["record", "plan"])
def test_any_value_in_any_place_can_be_read_and_shown(home: Path, name: str, data: st.DataObject):
    """Whatever stands where, or is missing: it is read or it is a finding, and the command prints it."""
    sound = home / f"{os.getpid()}.json"
    if not (home / "sound").exists():
        (home / "sound").mkdir()
        for path in (sound, home / "plan.json"):
            path.rename(home / "sound" / path.name)
    for path in (home / "sound").iterdir():
        (home / path.name).write_bytes(path.read_bytes())
    target = sound if name == "record" else home / "plan.json"
    document = json.loads(target.read_text())
    if name == "record":
        document["stalls"] = [{"what": "waits", "since": 1.0, "where": "x.py:1", "item": ""}]
    else:
        document["findings"] = [Finding("P001", "warning", "a", "b", "c", "d").as_dict()]
    value = data.draw(st.just(MISSING) | VALUES)
    changed = exchange(document, data.draw(st.sampled_from(paths(document))), value)
    target.write_text(json.dumps(changed))
    assert main(["status", "--all"]) in (0, 1)
    assert main(["status", "--json"]) in (0, 1)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.binary(min_size=SIZE, max_size=SIZE))
@example(b"\xff" * SIZE)
def test_any_bytes_can_be_counters(home: Path, content: bytes):
    """Numbers without sense are shown; a file of another size is a finding."""
    (home / f"{os.getpid()}.cells").write_bytes(content)
    assert main(["status", "--all"]) in (0, 1)
    assert main(["status", "--json"]) in (0, 1)


def test_a_plan_without_an_item_is_damaged(home: Path):
    """Compared with it, no process would lack anything."""
    path = home / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "items": []}))
    assert (only(home).code, only(home).what) == ("S018", "cannot be read: it names nothing")


def test_a_record_without_a_role_is_damaged(home: Path):
    """A process without one would need no item."""
    path = home / f"{os.getpid()}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "roles": []}))
    assert only(home).what == "cannot be read: 'roles' is empty"


def test_counters_that_do_not_say_how_the_process_ended_are_damaged(home: Path):
    """Else a process that is gone would count as ended in order."""
    path = home / f"{os.getpid()}.cells"
    cells = bytearray(path.read_bytes())
    cells[:8] = (77).to_bytes(8, sys.byteorder)
    path.write_bytes(cells)
    assert only(home).what == "cannot be read: it does not say how the process ended"


def test_a_clock_that_was_set_back_hides_no_silence(home: Path):
    """For as many hours as it was."""
    path = home / f"{os.getpid()}.cells"
    cells = bytearray(path.read_bytes())
    cells[16:24] = int((time.time() + 3600) * 1000).to_bytes(8, sys.byteorder)
    path.write_bytes(cells)
    assert (only(home).code, only(home).what[:34]) == ("S016", "has given no sign of life for 3600")


def test_keys_of_a_newer_version_are_left_out(home: Path):
    """Two versions on one machine are no damage; another schema is said to be one."""
    path = home / f"{os.getpid()}.json"
    row = json.loads(path.read_text())
    path.write_text(json.dumps({**row, "colour": "green"}))
    assert codes(home) == []
    path.write_text(json.dumps({**row, "schema": 99}))
    assert "another version of vllm-graft wrote it (schema 99" in only(home).what


def test_a_folder_that_cannot_be_listed_is_said_to_be_so(home: Path):
    """Not that no server runs."""
    state = home.parent.parent
    home.parent.rename(state / "elsewhere")
    (state / "runs").write_text("")
    with pytest.raises(LedgerError, match=r"runs cannot be read: Not a directory"):
        runs()
    assert main(["status"]) == 2


@pytest.mark.parametrize("text", ["null", '{"since": null}', "[" * 100_000])
def test_a_damaged_record_of_a_dead_run_does_not_block_a_start(home: Path, text: str):
    """The next start clears it away with the rest of its run."""
    for pid in (4194998, 4194999):
        (home / f"{pid}.cells").write_bytes(bytes(SIZE))
    row = json.loads((home / f"{os.getpid()}.json").read_text())
    (home / f"{os.getpid()}.json").unlink()
    (home / "4194998.json").write_text(json.dumps({**row, "pid": 4194998}))
    (home / "4194999.json").write_text(text)
    assert "S018" in codes(home)
    ledger = Ledger()
    ledger.begin_run("next", PLAN)
    assert [found.name for found in folder.run_folders(home.parent.parent)] == ["next"]


WITHOUT_ENDPOINT = '{"items": [], "on_failure": "stop", "model": "m"}'


@pytest.mark.parametrize("key", [*json.loads(PLAN.to_json()), "findings.0.fix", "items.0.package"])
def test_a_plan_without_one_of_its_keys_does_not_block_a_start(home: Path, key: str):
    """A run that is dead is no reason to keep the next from starting, whatever its plan lacks."""
    dead = home.parent / "5-dead"
    dead.mkdir()
    document = {**PLAN.as_dict(), "findings": [Finding("P001", "warning", "a", "b", "c", "d").as_dict()]}
    path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
    (dead / "plan.json").write_text(json.dumps(exchange(document, path, MISSING)))
    Ledger().begin_run("next", PLAN)
    assert (home.parent / "next" / "plan.json").exists()


def test_a_plan_without_endpoint_is_a_finding(home: Path):
    """Not a traceback of the command."""
    (home / "plan.json").write_text(WITHOUT_ENDPOINT)
    assert only(home).what == "cannot be read: 'endpoint' is missing"
    assert main(["status"]) == 1


def test_a_run_that_cannot_be_judged_is_left_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """With a word in the log, and the start goes on."""
    monkeypatch.setattr(reading, "read_run", lambda home: {}["a fault of ours"])
    Ledger().begin_run("next", PLAN)
    assert {found.name for found in home.parent.iterdir()} == {"next", "run"}
    assert f"the records in {home} are left alone" in caplog.text


def test_a_fifo_does_not_hold_up_a_start(home: Path):
    """Nor does anything else that lies about."""
    os.mkfifo(home / "4194999.json")
    os.mkfifo(home / "4194999.queue")
    done = threading.Event()

    def start() -> None:
        Ledger().begin_run("next", PLAN)
        done.set()

    threading.Thread(target=start, daemon=True).start()
    assert done.wait(20)
