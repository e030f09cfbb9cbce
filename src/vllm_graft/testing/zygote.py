"""A zygote: fork test processes from a parent that has already imported what vLLM depends on.

Importing vLLM costs seconds of CPU in every process of every server, and most of that is torch, transformers and other
packages. The zygote imports those once. Each process that a test starts is then a fork of it, and so is each
process that vLLM itself starts by ``spawn``. The zygote never imports vllm, vllm_graft or a plugin: a forked process
imports those by itself, in the order and with the environment of a plain start, so what the tests prove stays true.

What differs from a plain start: ``/proc/PID/cmdline`` is the zygote's, processes share a hash seed, LD_PRELOAD has no
effect, ``gc.freeze`` and ``gc.unfreeze`` do nothing, and modules of other packages are in ``sys.modules`` from the
beginning. The marker ``plain_start`` keeps a test away from the zygote.

How a process gets its parent: the zygote is a child of the process that asks. It forks twice and the process in the
middle exits, so the kernel gives the new process to the nearest ancestor that takes in orphans ("subreaper"), which the
asking process is for that moment. ``waitpid`` and ``SIGCHLD`` then work as for any child.

This file is run as a program and imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_MOST_FDS: Final = 64
_HIGH_FD: Final = 500
"""Descriptors are moved up here before they are put at their final numbers."""


class ForkRequest(NamedTuple):
    """A process to fork: its command line after the interpreter, and what it inherits."""

    words: list[str]
    env: dict[str, str]
    cwd: str
    new_session: bool
    fds: dict[int, int]


class ZygoteClient:
    """A zygote as seen by its parent, reached through a socket."""

    def __init__(self, control: socket.socket, env: Mapping[str, str]) -> None:
        self._control = control
        self.settings = _import_settings(env)
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def usable(self) -> bool:
        """Tell whether this process is the zygote's parent, not a fork of it."""
        return self._owner == os.getpid()

    def can_fork(self, words: Sequence[str], env: Mapping[str, str]) -> bool:
        """Tell whether a process of this command line and environment may have the zygote's modules.

        The command line must be ``-m``, ``-c`` or a script, without options of the interpreter.
        """
        if not self.usable() or not words or _import_settings(env) != self.settings:
            return False
        if words[0] in ("-m", "-c"):
            return len(words) >= 2
        return not words[0].startswith("-") and os.path.isfile(words[0])

    def close(self) -> None:
        """Let the zygote end."""
        self._control.close()

    def fork(self, request: ForkRequest) -> int:
        """Start a process and return its id; it is a child of this process."""
        targets = list(request.fds)
        body = json.dumps([request.words, request.env, request.cwd, request.new_session, targets]).encode()
        answer = b""
        with self._lock, suppress(ConnectionError):
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._control, [struct.pack("!I", len(body))], [request.fds[one] for one in targets])
                self._control.sendall(body)
                answer = self._control.recv(4)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if len(answer) != 4:
            raise RuntimeError("the zygote of the tests has ended")
        return int(struct.unpack("!I", answer)[0])


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """``subprocess.Popen`` that forks from the zygote if there is one and it can, and otherwise starts plainly."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, *rest: Any) -> None:  # fmt: skip
        *_, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, gid, gids, uid, umask, session, group = (
            rest
        )
        zygote = client()
        environ = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        words = [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else []
        plain = (
            zygote is None
            or shell
            or preexec_fn is not None
            or any(one is not None for one in (gid, gids, uid))
            or umask != -1
            or group != -1
            or not words
            or executable not in (None, words[0])
            or words[0] != sys.executable
            or not zygote.can_fork(words[1:], environ)
        )
        if plain:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        assert zygote is not None
        fds = {0: p2cread, 1: c2pwrite, 2: errwrite}
        fds = {target: target if fd == -1 else fd for target, fd in fds.items()} | {fd: fd for fd in pass_fds}
        self.pid = zygote.fork(ForkRequest(words[1:], environ, os.fspath(cwd or os.getcwd()), bool(session), fds))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


_state: dict[str, Any] = {}


def enable(env: Mapping[str, str]) -> None:
    """Let ``ForkedPopen`` and ``run`` fork from a zygote, started in this environment when it is first needed."""
    if sys.platform != "linux":
        return  # only Linux can hand an orphan to a process of one's choice
    # Bytecode of modules that tests write, and write again within a second, would be stale.
    _state["env"] = {**env, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    _fork_spawned()


def disable() -> None:
    """Stop the zygote; processes are started plainly from here on."""
    _state.pop("env", None)
    if (client := _state.pop("client", None)) is not None:
        client.close()
        _state.pop("process").wait()


@contextmanager
def suspended() -> Iterator[None]:
    """Start processes plainly for a while."""
    env = _state.pop("env", None)
    try:
        yield
    finally:
        if env is not None:
            _state["env"] = env


@contextmanager
def used(other: ZygoteClient) -> Iterator[None]:
    """Fork from another zygote for a while, for instance from one in namespaces of its own."""
    if "env" not in _state:
        raise RuntimeError("processes are started plainly here, so none would be forked from this zygote")
    kept = _state.get("client")
    _state["client"] = other
    try:
        yield
    finally:
        if kept is None:
            del _state["client"]
        else:
            _state["client"] = kept


def client() -> ZygoteClient | None:
    """Return the zygote of this process, started on first use; None if there is none."""
    if "env" not in _state:
        return None
    if "client" not in _state:
        _state["client"], _state["process"] = start(dependencies(_state["env"]), _state["env"])
    found: ZygoteClient = _state["client"]
    return found if found.usable() else None


def dependencies(env: Mapping[str, str]) -> list[str]:
    """List the modules of other packages that vLLM imports: found by importing it, then kept in the cache folder."""
    from vllm_graft.files import cache_folder
    from vllm_graft.versions import vllm_version

    release = f"{vllm_version()}-python{sys.version_info[0]}.{sys.version_info[1]}"
    kept = cache_folder() / "zygote" / f"{release}.json"
    with suppress(OSError, ValueError):
        names: list[str] = json.loads(kept.read_text(encoding="utf-8"))
        return names
    done = subprocess.run([sys.executable, "-c", _LIST], env=dict(env), stdout=subprocess.PIPE, check=True, text=True)
    names = json.loads(done.stdout.splitlines()[-1])
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_name(f"{kept.name}.{os.getpid()}")
    part.write_text(json.dumps(names), encoding="utf-8")
    part.replace(kept)
    return names


_LIST: Final = """
import importlib, json, sys
from contextlib import suppress

for name in ("entrypoints.openai.api_server", "entrypoints.cli.main", "v1.engine.core", "entrypoints.llm"):
    with suppress(ImportError):
        importlib.import_module(f"vllm.{name}")
# prometheus_client chooses by a variable, when it is imported, whether processes share their metrics.
print(json.dumps([name for name in sys.modules if not name.startswith(("vllm", "__", "prometheus"))]))
"""


def start(
    modules: Sequence[str], env: Mapping[str, str], prefix: Sequence[str] = ()
) -> tuple[ZygoteClient, subprocess.Popen[bytes]]:
    """Start a zygote that imports these modules; return its client and its process.

    ``prefix`` is a command that executes the zygote in the same process, such as ``ip netns exec NAME``.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*prefix, sys.executable, os.path.abspath(__file__), str(theirs.fileno())],
            env=dict(env),
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(list(modules)).encode())
    process.stdin.close()
    return ZygoteClient(ours, env), process


def run(
    words: Sequence[str],
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Do what ``subprocess.run`` does, with a forked process if that is possible."""
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with ForkedPopen(words, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def install(zygote: ZygoteClient) -> None:
    """Let every ``subprocess`` and every ``multiprocessing`` spawn of this process fork from the zygote."""
    _state.update(env=None, client=zygote)
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    _fork_spawned()


def _fork_spawned() -> None:
    """Fork the processes that multiprocessing starts by ``spawn``, which is how vLLM starts its engines and workers."""
    from multiprocessing import util

    if "spawn" in _state:
        return
    plain = _state["spawn"] = util.spawnv_passfds

    def spawn(path: Any, args: Sequence[str], passfds: Sequence[int]) -> int:
        zygote, words = client(), [os.fsdecode(word) for word in args]
        # multiprocessing copies the interpreter's flags from this process: a fork has them already.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        if words[1 : 1 + len(flags)] == flags:
            del words[1 : 1 + len(flags)]
        # It imports nothing that the zygote could share.
        tracker = "resource_tracker" in " ".join(words)
        if zygote is None or tracker or not zygote.can_fork(words[1:], os.environ):
            return plain(path, args, passfds)
        fds = {0: 0, 1: 1, 2: 2} | {fd: fd for fd in passfds}
        return zygote.fork(ForkRequest(words[1:], dict(os.environ), os.getcwd(), False, fds))

    util.spawnv_passfds = spawn  # type: ignore[assignment]


def main() -> None:
    """Import the modules named on standard input, then fork a process for each request."""
    control = socket.socket(fileno=int(sys.argv[1]))
    names = json.load(sys.stdin)
    env = dict(os.environ)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    # The first entry is this file's folder, from which no forked process may import.
    del sys.path[0]
    base = [one for one in sys.path if one not in paths]
    for name in names:
        # One that is missing or fails here is imported, or fails, where it is needed.
        with suppress(Exception):
            importlib.import_module(name)
        if taken := {"vllm", "vllm_graft", "prometheus_client"} & sys.modules.keys():
            sys.exit(f"the zygote of the tests must not import {', '.join(taken)}, but {name} does")
    gc.collect()
    # Frozen objects are not looked at by the garbage collector, so their pages stay shared. They stay frozen: vLLM
    # freezes and unfreezes the heap for each engine, and would collect in all that was imported here.
    gc.freeze()
    gc.freeze = gc.unfreeze = _keep_frozen
    request = _serve(control)
    while True:
        _become(request, base)
        followed = _keep_zygote(request, env)
        if followed is None:
            break
        request = followed
    _exit_after(request.words)


def _keep_frozen() -> None:
    """Stand in for ``gc.freeze`` and ``gc.unfreeze`` in forked processes."""


def _serve(control: socket.socket) -> ForkRequest:
    """Fork for each request; return in the forked process only, with its request."""
    while True:
        head, fds, _, _ = socket.recv_fds(control, 4, _MOST_FDS)
        if len(head) != 4:
            os._exit(0)
        body, length = b"", struct.unpack("!I", head)[0]
        while len(body) < length:
            body += control.recv(length - len(body))
        words, env, cwd, session, targets = json.loads(body)
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            between = os.getpid()
            if pid := os.fork():
                # The process in the middle exits at once, so the kernel hands the new one to the subreaper.
                os.write(write, struct.pack("!I", pid))
                os._exit(0)
            for fd in (read, write, control.detach()):
                os.close(fd)
            # os.getppid() is the real parent from the first line of the program on.
            while os.getppid() == between:
                time.sleep(0.0005)
            return ForkRequest(words, env, cwd, session, dict(zip(targets, fds, strict=True)))
        os.close(write)
        answer = os.read(read, 4)
        os.close(read)
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)
        control.sendall(answer)


def _become(request: ForkRequest, base: Sequence[str]) -> None:
    """Take on the request's session, descriptors, environment and import path."""
    if request.new_session:
        os.setsid()
    import fcntl

    moved = {target: fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for target, fd in request.fds.items()}
    for fd in request.fds.values():
        os.close(fd)
    for target, fd in moved.items():
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
    # Whether an output can seek was decided when the zygote started, and a pipe in place of a file cannot.
    at_once = bool(request.env.get("PYTHONUNBUFFERED"))
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old, file = getattr(sys, name), open(fd, "wb", 0 if at_once else -1, closefd=False)  # noqa: SIM115
        lines = fd == 2 or os.isatty(fd)
        new = io.TextIOWrapper(file, old.encoding, old.errors, line_buffering=lines, write_through=at_once)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    entries = request.env.get("PYTHONPATH", "")
    sys.path[:] = [*(entries.split(os.pathsep) if entries else []), *base]
    importlib.invalidate_caches()
    # torch reads this when it is imported, and vLLM sets it for its workers.
    if (threads := request.env.get("OMP_NUM_THREADS", "")).isdigit() and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))


def _keep_zygote(request: ForkRequest, env: Mapping[str, str]) -> ForkRequest | None:
    """Fork a zygote for this process's own children; return None here, and the request in such a child."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork():
        theirs.close()
        install(ZygoteClient(ours, env))
        return None
    ours.close()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for target in request.fds:
        if target > 2:
            os.close(target)
    for target in (0, 1, 2):
        os.dup2(nowhere, target)
    return _serve(theirs)


def _exit_after(words: list[str]) -> None:
    """Run the program, then end as the interpreter does, but without tearing down modules that the zygote loaded."""
    import atexit
    import types

    status: object = 0
    module = types.ModuleType("__main__")
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["_graft_zygote"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    sys.orig_argv = [sys.executable, *words]
    try:
        # As the interpreter does with its command line.
        if words[0] == "-m":
            import runpy

            sys.argv = ["-m", *words[2:]]
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            exec(compile(words[1], "<string>", "exec"), module.__dict__)
        else:
            sys.argv = list(words)
            sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
            module.__file__ = words[0]
            with open(words[0], "rb") as file:
                code = compile(file.read(), words[0], "exec")
            exec(code, module.__dict__)
    except SystemExit as exit_:
        status = exit_.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(status or 0) & 0xFF)


def _import_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the zygote's modules read once, when they are imported."""
    return {name: value for name, value in env.items() if name.startswith(("HF_", "TRANSFORMERS_"))}


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
