"""The command: what it prints, what it counts as vLLM's arguments, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_graft.testing.packages import lay_out, python_path


@pytest.fixture
def doctor(tmp_path: Path):
    """doctor(*words, **variables) -> the finished command, beside two laid-out plugins."""
    site = tmp_path / "site"
    entries = {"vllm.general_plugins": {"good": "good_plugin:register", "other": "good_plugin:register"}}
    lay_out(site, "good-package", entries, {"good_plugin": "print('IMPORTED')\ndef register(): ...\n"})

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": python_path(site), "GRAFT_CONFIG": "", **variables}
        env = {name: value for name, value in env.items() if value or name != "GRAFT_CONFIG"}
        command = [sys.executable, "-m", "vllm_graft.cli", "doctor", *words]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    return run


def test_a_sound_environment_is_shown_and_has_status_0(doctor):
    done = doctor()
    assert done.returncode == 0, done.stdout
    assert "good " in done.stdout
    assert "good-package" in done.stdout
    assert "error:" not in done.stdout
    assert "IMPORTED" not in done.stdout


def test_a_lost_plugin_is_named_with_its_fix_and_has_status_1(doctor):
    done = doctor(VLLM_PLUGINS="graft,good, other")
    assert done.returncode == 1
    assert "D002 error: plugin 'other'" in done.stdout
    assert "Next: write VLLM_PLUGINS=graft,good,other" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("other "))
    assert "D002" in row
    assert "VLLM_PLUGINS does not name it" in row


def test_json_has_plugins_and_findings_with_stable_keys(doctor):
    document = json.loads(doctor("--json", VLLM_PLUGINS="graft,good, other").stdout)
    assert set(document) == {"vllm", "python", "plugins", "findings"}
    (row,) = [row for row in document["plugins"] if row["name"] == "other"]
    assert set(row) == {"name", "group", "package", "target", "loads", "where", "codes", "idle"}
    assert (row["loads"], row["codes"]) == (False, ["D002"])
    assert {"D002"} <= {finding["code"] for finding in document["findings"]}


@pytest.mark.parametrize("folder", ["", "."])
def test_a_resolver_that_registers_nothing_is_idle(doctor, folder):
    variables = {"VLLM_LORA_RESOLVER_CACHE_DIR": folder, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    document = json.loads(doctor("--json", **variables).stdout)
    rows = {row["name"]: row for row in document["plugins"]}
    assert all(rows[name]["loads"] for name in ("lora_filesystem_resolver", "lora_hf_hub_resolver"))
    assert rows["lora_filesystem_resolver"]["idle"] == (folder == "")
    assert rows["lora_hf_hub_resolver"]["where"].endswith(
        "registers nothing: VLLM_LORA_RESOLVER_HF_REPO_LIST is not set"
    )
    shown = doctor(**variables).stdout
    assert next(line for line in shown.splitlines() if line.startswith("lora_hf_hub")).split()[3] == "idle"


def test_other_arguments_are_those_of_vllm(doctor):
    words = ("--enable-lora", "--api-server-count", "2")
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_LORA_RESOLVER_CACHE_DIR": "."}
    assert "D020 error" in doctor(*words, **variables).stdout
    assert "D020" not in doctor(**variables).stdout


def test_imports_run_the_plugins_in_children(doctor):
    done = doctor("--imports")
    assert "D010" not in done.stdout
    assert "importing plugins" in done.stderr


def test_a_server_that_does_not_answer_is_an_error_of_the_set_up(doctor):
    done = doctor("--url", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "no answer" in done.stderr
