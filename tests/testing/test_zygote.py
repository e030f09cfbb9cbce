"""Processes forked from a zygote behave as plainly started ones: parent, streams, environment, exit status."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_graft.testing import zygote

TELL = "import json, os, sys; print(json.dumps([sys.argv, os.getppid(), os.getcwd(), 'colorsys' in sys.modules]))"


@pytest.fixture(scope="module", autouse=True)
def small_zygote() -> Iterator[None]:
    """A zygote of its own with one small module instead of vLLM's dependencies."""
    saved = dict(zygote._state)
    made, process = zygote.start(["colorsys"], os.environ)
    zygote._state.update(env={}, client=made)
    yield
    zygote._state.clear()
    zygote._state.update(saved)
    made.close()
    assert process.wait(10) == 0


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return zygote.run([sys.executable, *words], capture_output=True, text=True, timeout=60, **options)


def test_a_forked_process_is_a_child_of_the_one_that_asked(tmp_path: Path) -> None:
    done = run("-c", TELL, "one", "two", cwd=tmp_path)
    assert json.loads(done.stdout) == [["-c", "one", "two"], os.getpid(), str(tmp_path), True]


def test_a_plain_start_has_none_of_the_zygotes_modules() -> None:
    with zygote.suspended():
        done = run("-c", TELL)
    assert json.loads(done.stdout)[3] is False


@pytest.mark.plain_start
def test_the_marker_gives_a_plain_start() -> None:
    assert json.loads(run("-c", TELL).stdout)[3] is False


def test_a_script_and_a_module_are_the_main_module(tmp_path: Path) -> None:
    text = f"{TELL}\nprint(__name__, __spec__ and __spec__.name, sys.path[0])"
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    first, second = run(str(tmp_path / "program.py"), "x").stdout.splitlines()
    assert json.loads(first)[0] == [str(tmp_path / "program.py"), "x"]
    assert second == f"__main__ None {tmp_path}"
    first, second = run("-m", "program", "x", cwd=tmp_path).stdout.splitlines()
    assert json.loads(first)[0] == [str(tmp_path / "program.py"), "x"]
    assert second == f"__main__ program {tmp_path}"


def test_the_environment_is_the_one_that_was_passed(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("", encoding="utf-8")
    code = "import os, only_here; print(sorted(os.environ))"
    done = run("-c", code, env={"PYTHONPATH": str(tmp_path), "SOME": "thing"})
    assert done.stdout == "['PYTHONPATH', 'SOME']\n", done.stderr


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('not today')", 1, "not today\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import os; os._exit(7)", 7, ""),
        ("import atexit, sys; atexit.register(lambda: print('bye', file=sys.stderr)); sys.exit(2)", 2, "bye\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_it_ends_with_the_status_of_the_program(code: str, status: int, error: str) -> None:
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (status, error)


def test_an_error_has_its_traceback() -> None:
    done = run("-c", "1/0")
    assert done.returncode == 1
    assert done.stderr.endswith('File "<string>", line 1, in <module>\nZeroDivisionError: division by zero\n')


def test_threads_end_before_the_process_does() -> None:
    code = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('done'))).start()"
    assert run("-c", code).stdout == "done\n"


def test_a_session_of_its_own_and_signals() -> None:
    child = zygote.ForkedPopen(
        [sys.executable, "-c", "import os; print(os.getsid(0), flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert int(child.stdout.readline()) == child.pid
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == -signal.SIGTERM
    child.communicate()


def test_what_it_starts_is_forked_too_and_is_its_own_child(tmp_path: Path) -> None:
    text = (
        "import multiprocessing, os, subprocess, sys\n"
        "def work(queue):\n    queue.put((os.getppid(), 'colorsys' in sys.modules))\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue,))\n"
        "    child.start()\n"
        "    print(queue.get() == (os.getpid(), True))\n"
        "    child.join()\n"
        "    print(child.exitcode)\n"
        "    code = 'import os, sys; print(os.getppid(), \"colorsys\" in sys.modules)'\n"
        "    words = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.split()\n"
        "    print(words == [str(os.getpid()), 'True'])\n"
    )
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    done = run(str(tmp_path / "program.py"))
    assert done.stdout.split() == ["True", "0", "True"], done.stderr


def test_nothing_is_left_of_a_killed_process() -> None:
    code = "import os; print(os.getpgid(0), flush=True); os.kill(os.getpid(), 9)"
    done = run("-c", code, start_new_session=True)
    session = int(done.stdout)
    left = subprocess.run(["ps", "-s", str(session), "-o", "stat="], capture_output=True, text=True).stdout.split()
    assert [one for one in left if not one.startswith("Z")] == []


@pytest.mark.parametrize("words", [("-S", "-c", "pass"), ("-W", "error", "-c", "pass"), ("-V",)])
def test_options_of_the_interpreter_are_started_plainly(words: tuple[str, ...]) -> None:
    assert (client := zygote.client()) is not None
    assert client.can_fork(["-c", "pass"], os.environ)
    assert not client.can_fork(words, os.environ)
    assert run(*words).returncode == 0


def test_a_variable_that_is_read_by_an_import_is_read_again() -> None:
    done = run("-c", TELL, env={**os.environ, "HF_HUB_OFFLINE": "never"})
    assert json.loads(done.stdout)[3] is False


def test_a_zygote_that_would_import_vllm_refuses(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("", encoding="utf-8")
    (tmp_path / "friend.py").write_text("import vllm\n", encoding="utf-8")
    made, process = zygote.start(["friend"], {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert process.wait(10) == 1
    with pytest.raises(RuntimeError, match="zygote of the tests has ended"):
        made.fork(zygote.ForkRequest(["-c", "pass"], {}, "/", False, {}))


def test_our_own_zygote_holds_nothing_of_vllm_or_ours() -> None:
    names = zygote.dependencies(os.environ)
    assert "torch" in names
    assert [name for name in names if name.split(".")[0] in ("vllm", "vllm_graft")] == []


def test_a_zygote_is_started_by_the_first_process_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "_state", {"env": dict(os.environ)})
    monkeypatch.setattr(zygote, "dependencies", lambda env: ["colorsys"])
    assert json.loads(run("-c", TELL).stdout)[3] is True
    zygote.disable()
    assert json.loads(run("-c", TELL).stdout)[3] is False


def test_one_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        zygote.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.5)
