"""`vllm-graft serve` looks before it starts: the doctor's cheap rules over the arguments it was given.

What follows a sound set-up, the start itself, is tested in tests/boot/test_serve.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_graft.cli import main
from vllm_graft.testing import ServerProcess
from vllm_graft.testing.packages import lay_out, python_path

SCHEDULER = "from vllm.v1.core.sched.scheduler import Scheduler\nclass Mine(Scheduler): ...\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, and a working directory without a plan."""
    for name in ("VLLM_PLUGINS", "VLLM_CUSTOM_PATCHES", "GRAFT_CONFIG", "GRAFT_SIMULATE", "GRAFT_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of every server that would have been started."""
    calls: list[list[str]] = []

    def watch(server: ServerProcess) -> int:
        calls.append(server.arguments)
        return 0

    monkeypatch.setattr("vllm_graft.cli.serve.watch", watch)
    return calls


def test_a_sound_set_up_starts_without_a_word(site, started, capsys):
    assert main(["serve", "org/model", "--port", "1"]) == 0
    assert started == [["org/model", "--port", "1"]]
    assert capsys.readouterr().err == ""


def test_an_error_refuses_with_its_text_its_next_step_and_status_1(site, started, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "graft,missing")
    assert main(["serve", "org/model"]) == 1
    assert started == []
    said = capsys.readouterr().err
    assert "D001 error: plugin 'missing': VLLM_PLUGINS names it" in said
    assert "Next: install the package that offers it, or correct the name" in said
    assert said.splitlines()[-1] == ("vllm-graft: nothing was started. Next: fix the above, or start with --no-doctor")


def test_no_doctor_skips_it_and_is_not_handed_on(site, started, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "graft,missing")
    assert main(["serve", "org/model", "--no-doctor", "--port", "1"]) == 0
    assert started == [["org/model", "--port", "1"]]
    assert capsys.readouterr().err == ""


def test_the_rules_see_the_arguments_of_the_server(site, started, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert main(["serve", "org/model"]) == 0
    assert main(["serve", "org/model", "--api-server-count", "2"]) == 1
    assert "D020 error" in capsys.readouterr().err
    assert len(started) == 1


def test_a_scheduler_that_is_named_is_looked_at(site, started, capsys, monkeypatch):
    monkeypatch.setenv("GRAFT_SIMULATE", "1")
    lay_out(site, "mine", {}, {"mine_scheduler": SCHEDULER})
    assert main(["serve", "org/model", "--scheduler-cls", "mine_scheduler.Mine"]) == 0
    assert "D016 warning: scheduler mine_scheduler.Mine" in capsys.readouterr().err
    assert len(started) == 1


def test_warnings_are_one_line_each_and_the_server_starts(site, started, capsys, monkeypatch):
    lay_out(site, "mine", {"vllm.endpoint_plugins": {"routes": "mine:routes"}}, {"mine": "def routes(): ...\n"})
    assert main(["serve", "org/model"]) == 0
    assert len(started) == 1
    warning, last = capsys.readouterr().err.splitlines()
    assert warning.startswith("D006 warning: plugin 'routes' of mine: is not loaded")
    assert "Next:" not in warning
    assert last == "vllm-graft: starting anyway; `vllm-graft doctor` has the next steps"


def test_the_working_directory_counts_as_it_does_for_the_server(site, started, capsys, tmp_path):
    """`python -m`, by which the server runs, has it on the path, and a stale .egg-info there hides the package."""
    lay_out(site, "mine", {"vllm.general_plugins": {"mine": "mine:register"}}, {"mine": "def register(): ...\n"})
    stale = tmp_path / "here" / "mine.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    assert main(["serve", "org/model"]) == 1
    assert "D003 error: package mine" in capsys.readouterr().err


def test_the_plan_s_faults_are_found_before_anything_starts(site, started, capsys, tmp_path):
    (tmp_path / "here" / "graft.toml").write_text('[[profile]]\nmodel = "*large*"\nstats = ["reqest-log"]\n')
    assert main(["serve", "org/small"]) == 0
    assert main(["serve", "org/large"]) == 1
    assert (
        "D027 error: the plan: there is no item 'reqest-log' (did you mean 'request-log'?)" in capsys.readouterr().err
    )
    assert len(started) == 1


def test_a_doctor_that_fails_does_not_keep_a_server_from_starting(site, started, capsys, monkeypatch):
    def broken(*args: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("vllm_graft.doctor.examine", broken)
    assert main(["serve", "org/model"]) == 0
    assert len(started) == 1
    assert "the doctor failed, starting without it: RecursionError('too deep')" in capsys.readouterr().err


def test_a_refusal_takes_a_second_and_imports_neither_vllm_nor_a_plugin(tmp_path: Path):
    entries = {"vllm.general_plugins": {"mine": "mine:register"}, "vllm.platform_plugins": {"mine": "mine:missing"}}
    lay_out(tmp_path / "site", "mine", entries, {"mine": "print('IMPORTED')\ndef register(): ...\n"})
    env = {**os.environ, "PYTHONPATH": python_path(tmp_path / "site")}
    script = "import sys, vllm_graft.cli as c; print(c.main(sys.argv[1:]), {'vllm', 'torch'} & {*sys.modules})"
    command = [sys.executable, "-c", script, "serve", "org/model"]
    begun = time.monotonic()
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "1 set()\n"
    assert "D007 error: plugin 'mine' of mine" in done.stderr
    assert time.monotonic() - begun < 10
