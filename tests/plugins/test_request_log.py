"""request-log: every finished request becomes a line, off the event loop, and trouble is not hidden."""

import json
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from vllm_graft.contracts import BatchRecord, RequestRecord
from vllm_graft.errors import ConfigError
from vllm_graft.plugins.stats.request_log import RequestLog

BATCH = BatchRecord(0, 1, 0, 1, 0, 0.1)


def request(name: str) -> RequestRecord:
    return RequestRecord(name, "stop", 3, 5, 0, 0.1, 0.2, 0.3, 0.6)


def test_finished_requests_become_lines(tmp_path: Path):
    """One line of JSON each, in their order; a batch without any writes nothing."""
    sink = RequestLog({"path": str(tmp_path / "log.jsonl")})
    sink.finished([request("a"), request("b")], BATCH)
    sink.finished([], BATCH)
    sink.close()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["request_id"] for row in rows] == ["a", "b"]
    assert rows[0]["generated_tokens"] == 5


def test_what_there_was_no_room_for_is_counted(tmp_path: Path):
    """The last line says how many are missing."""
    sink = RequestLog({"path": str(tmp_path / "log.jsonl"), "queue": 2})
    sink.finished([request(str(number)) for number in range(5)], BATCH)
    sink.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"dropped": 3}


def test_the_file_is_its_owners_alone(tmp_path: Path):
    """Who asks what is nobody else's business; a file that is there keeps its rights."""
    before = os.umask(0)
    try:
        RequestLog({"path": str(tmp_path / "log.jsonl")}).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "log.jsonl").stat().st_mode) == 0o600
    (tmp_path / "log.jsonl").chmod(0o640)
    RequestLog({"path": str(tmp_path / "log.jsonl")}).close()
    assert stat.S_IMODE((tmp_path / "log.jsonl").stat().st_mode) == 0o640


@pytest.mark.parametrize("is_read", [False, True])
def test_a_fifo_is_refused_at_once(tmp_path: Path, is_read: bool):
    """Whether or not somebody reads it: its reader may go away or fall asleep at any time."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    with pytest.raises(ConfigError, match=r"fifo is a FIFO or a socket.* Next: name a file"):
        RequestLog({"path": str(path)})
    with pytest.raises(ConfigError, match="names a FIFO or a socket"):
        RequestLog.check_machine({"path": str(path)})
    if reader is not None:
        os.close(reader)


@pytest.mark.parametrize("happens", ["renamed", "removed"])
def test_a_file_that_is_rotated_is_begun_anew(tmp_path: Path, happens: str):
    """Else lines would go to a file that nobody reads any more."""
    path = tmp_path / "log.jsonl"
    sink = RequestLog({"path": str(path)})
    sink.finished([request("a")], BATCH)
    deadline = time.monotonic() + 30
    while not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    path.rename(tmp_path / "log.1") if happens == "renamed" else path.unlink()
    sink.finished([request("b")], BATCH)
    sink.close()
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == ["b"]


def test_a_folder_that_is_removed_is_raised_where_it_is_noticed(tmp_path: Path):
    """The sink is put aside, instead of seeming to log."""
    (tmp_path / "logs").mkdir()
    sink = RequestLog({"path": str(tmp_path / "logs" / "log.jsonl")})
    shutil.rmtree(tmp_path / "logs")
    sink.finished([request("a")], BATCH)
    sink.close()
    with pytest.raises(ConfigError, match=r"cannot be written: .*No such file"):
        sink.finished([], BATCH)


def test_a_full_disk_is_raised_where_it_is_noticed():
    """The sink is then put aside with the reason, instead of logging nothing under the name of a log."""
    sink = RequestLog({"path": "/dev/full"})
    sink.finished([request("a")], BATCH)
    sink.close()
    with pytest.raises(OSError, match="No space left"):
        sink.finished([], BATCH)


@pytest.mark.parametrize(
    ("options", "complaint"), [({"path": "/nowhere/x"}, "cannot be written"), ({"queue": 0}, "at least 1")]
)
def test_bad_options_are_refused(options: dict, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the option's name and the next step."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=complaint) as caught:
        RequestLog(options)
    assert "of request-log" in str(caught.value)
    assert "Next: " in str(caught.value)
