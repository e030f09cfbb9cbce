"""A module that ends the process while it is imported: commands say so, and import nothing twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_graft.testing.packages import lay_out, python_path

SINK = """
import os, pathlib, signal, time
from vllm_graft import StatSink, VLLMPatch, wrap
with pathlib.Path(os.environ["NOTES"]).open("a") as file:
    file.write(f"{__name__}\\n")
class Sink(StatSink):
    def finished(self, requests, batch): ...
class Patch(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="fatal"):
    @wrap
    def schedule(self, call, *a, **k): return call(*a, **k)
"""

FATAL = [
    ("os._exit(3)", "it ends the process with status 3"),
    ("os._exit(0)", "it ends the process with status 0"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "it is ended by SIGSEGV"),
    ("import ctypes; ctypes.string_at(0)", "it is ended by SIGSEGV"),
]


def started(folder: Path, ending: str, *words: str) -> subprocess.Popen[str]:
    """Start a command where two sinks are installed, and a patch whose module ends as said."""
    modules = {"good": SINK, "other": SINK, "bad": SINK + ending + "\n"}
    entries = {"good": "good:Sink", "fatal": "bad:Patch", "other": "other:Sink"}
    lay_out(folder / "site", "acme", {"vllm_graft.plugins": entries}, modules)
    (folder / "graft.toml").write_text('[defaults]\npatches = ["fatal"]\nstats = ["good", "other"]\n')
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(folder / "site"),
        "NOTES": str(folder / "notes"),
        "GRAFT_CONFIG": str(folder / "graft.toml"),
    }
    command = [sys.executable, "-m", "vllm_graft", *words]
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ran(folder: Path, ending: str, *words: str) -> tuple[int, str, str]:
    process = started(folder, ending, *words)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.mark.parametrize(("ending", "said"), FATAL)
def test_plan_and_lock_say_that_an_import_ends_the_process(ending: str, said: str, tmp_path: Path):
    """The item, its package and how it ended, as of any other module that cannot be imported."""
    whole = f"the item 'fatal' of acme cannot be imported from bad:Patch: ImportError: {said}"
    for words in (["plan", "--model", "m"], ["lock", "fatal", "--check"]):
        status, _, err = ran(tmp_path, ending, *words)
        assert status == 2
        assert whole in err
        assert "remove 'fatal' from the plan" in err


def test_the_other_items_are_still_listed(tmp_path: Path):
    """Those that are imported before the one that ends the process, and those after."""
    status, out, err = ran(tmp_path, "os._exit(5)", "items", "--json")
    assert status == 1, err
    document = json.loads(out)
    assert {"good", "other", "dry"} <= {row["name"] for row in document["items"]}
    (finding,) = document["findings"]
    assert (finding["code"], finding["subject"]) == ("P010", "item fatal")
    assert "it ends the process with status 5" in finding["what"]


def test_nothing_is_imported_twice_where_all_is_well(tmp_path: Path):
    """The output and the exit status are those of the command, and it ran once."""
    status, out, err = ran(tmp_path, "", "plan", "--model", "m", "--json")
    assert status == 0, err
    assert {item["name"] for item in json.loads(out)["items"]} == {"fatal", "good", "other"}
    assert sorted((tmp_path / "notes").read_text().split()) == ["bad", "good", "other"]


def test_a_signal_ends_both_processes(tmp_path: Path):
    """SIGTERM during an import that takes long; the status is the signal's."""
    process = started(tmp_path, "time.sleep(600)", "plan", "--model", "m")
    notes, deadline = tmp_path / "notes", time.monotonic() + 60
    while not notes.exists() or "bad" not in notes.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert len(children) == 1
    assert not Path(f"/proc/{children[0]}").exists()
    assert process.returncode == -signal.SIGTERM, (out, err)


def test_a_signal_right_after_the_fork_is_not_lost(tmp_path: Path):
    """Before the parent is ready to hand it on: it is handed on a moment later, and no child is left behind."""
    script = """
import os, signal, time
from vllm_graft.plan import import_checkpoint
wait = import_checkpoint._wait
import_checkpoint._wait = lambda *args: (time.sleep(1), wait(*args))[1]
import_checkpoint.checkpoint.start()
with import_checkpoint.checkpoint.importing("some_module"):
    print(os.getpid(), flush=True)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGTERM
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
