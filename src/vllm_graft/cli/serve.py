"""``vllm-graft serve``: the real vLLM API server with the plan, watched from start to stop."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from vllm_graft.boot.env import plugins_fault
from vllm_graft.boot.startup_error import recorded_error_of
from vllm_graft.cli.status import render
from vllm_graft.errors import ConfigError, GraftError, SetupError, StartError
from vllm_graft.findings import Finding
from vllm_graft.launcher.models import embedded_model
from vllm_graft.launcher.server import ServerProcess
from vllm_graft.switches import PLUGINS_VARIABLE, disabled
from vllm_graft.text import printable
from vllm_graft.versions import vllm_version
from vllm_graft.vllm_arguments import VllmArguments

HELP = "start the vLLM API server with the plan (and the embedded model if none is named)"

_EMBEDDED_DEFAULTS = (
    ("--served-model-name", "smollm2-135m"),
    ("--dtype", "float32"),
    ("--max-model-len", "2048"),
)

_COMPILING = (
    *("--enforce-eager", "--no-enforce-eager", "--compilation-config", "--optimization-level"),
    *("-cc", "-O"),
)
"""Beginnings of vLLM's arguments that choose compilation; without one of them the embedded model is not compiled."""


_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that stop the server. It has a session of its own, so a closed terminal does not signal it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; everything else goes to vLLM."""
    parser.usage = "vllm-graft serve [--no-doctor] [MODEL] [any vLLM argument]"
    parser.add_argument("--no-doctor", action="store_true", help="start without the doctor's check of the set-up")
    parser.epilog = "All other arguments are handed to `vllm serve` as they are; see `vllm serve --help`."
    parser.set_defaults(takes_rest=True)


def run(args: argparse.Namespace) -> int:
    """Serve the named model, or the embedded one; return 1 if the doctor finds an error."""
    check_set_up()
    arguments = with_default_model(args.rest)
    if not args.no_doctor and not is_sound(arguments):
        return 1
    is_embedded = arguments != args.rest
    # A KV cache for a small machine: otherwise a CPU build takes half of the memory.
    cache = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")} if is_embedded else {}
    return watch(ServerProcess(arguments, env=cache))


def is_sound(arguments: Sequence[str]) -> bool:
    """Print what the doctor's cheap rules find before a start; return whether there is no error."""
    try:
        from vllm_graft.doctor import Environment, examine

        # The server is a `python -m`, which has the working directory on its path.
        here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]
        path = list(dict.fromkeys([*here, *filter(None, sys.path)]))
        findings = examine(Environment.gather(arguments, path=path, by_graft=True))
    except Exception as error:
        # A bug of our own, triggered by others' files, must not keep a server from starting.
        print(f"vllm-graft: the doctor failed, starting without it: {error!r}", file=sys.stderr)
        return True
    errors = [finding for finding in findings if finding.level == "error"]
    warnings = [finding for finding in findings if finding.level == "warning"]
    for finding in errors:
        print(finding.explain(), file=sys.stderr)
    for finding in warnings:
        print(printable(f"{finding.code} warning: {finding.subject}: {finding.what}"), file=sys.stderr)
    if errors:
        print("vllm-graft: nothing was started. Next: fix the above, or start with --no-doctor", file=sys.stderr)
    elif warnings:
        print("vllm-graft: starting anyway; `vllm-graft doctor` has the next steps", file=sys.stderr)
    return not errors


def watch(server: ServerProcess) -> int:
    """Start the server, print the status table once it is healthy, stop it cleanly on a signal."""
    if server.is_address_taken():
        fix = "give another --port, or stop that server"
        raise ConfigError(f"something answers on {server.url} already", where="--port", fix=fix)
    started = stopping = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        # Raised while the process is being made, it would leave a server that nothing knows of.
        if started:
            raise KeyboardInterrupt

    for each in _STOPPING:
        # nohup has a process ignore SIGHUP, and means it.
        if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, stop)
    try:
        server.start()
        started = True
        if stopping:
            raise KeyboardInterrupt
        try:
            server.wait_healthy(timeout_s=24 * 3600)
        except StartError as error:
            # Its processes may have recorded the reason.
            raise recorded_error_of(server.pid) or error from None
        view = server.run_view()
        if view is not None:
            print(render([view.as_dict()]), flush=True)
        elif disabled():
            print("vllm-graft: GRAFT_DISABLE is set; this is the stock server", flush=True)
        else:
            fix = "run `vllm-graft plan --model MODEL` in this folder: it says why"
            note = Finding("P004", "info", "plan", "is empty: this is the stock server", "", fix)
            print(note.explain(), flush=True)
        return _conclude(server, server.wait())
    except KeyboardInterrupt:
        # A second signal must not cut the first one's shutdown short and leave processes behind.
        for each in _STOPPING:
            signal.signal(each, signal.SIG_IGN)
        server.stop()
        print("vllm-graft: the server has stopped", file=sys.stderr)
        return 0
    finally:
        server.stop()


def _conclude(server: ServerProcess, status: int) -> int:
    """Print what ended a server; return the exit status, since vLLM's is 0 even if an engine died."""
    if status < 0:
        known = -status in signal.valid_signals()
        name = signal.Signals(-status).name if known else f"signal {-status}"
        print(f"vllm-graft: the server was ended by {name}", file=sys.stderr)
        status = 128 - status
    try:
        view = server.run_view()
    except GraftError as error:
        print(f"vllm-graft: {error}", file=sys.stderr)
        view = None
    died = [finding for finding in view.findings() if finding.code == "S006"] if view is not None else []
    for finding in died:
        print(finding.explain(), file=sys.stderr)
    return status or int(bool(died))


def check_set_up() -> None:
    """Refuse to start without vLLM, or with a ``VLLM_PLUGINS`` that turns us off before any code of ours runs."""
    fault = plugins_fault()
    if fault and not disabled():
        what = f"{fault}, so vLLM would not load vllm-graft and nothing of the plan would be active"
        fix = "add graft to it without blanks, or unset it; GRAFT_DISABLE=1 gives the stock server"
        raise ConfigError(what, where=PLUGINS_VARIABLE, fix=fix)
    if vllm_version() is None:
        raise SetupError("vLLM is not installed", where=sys.executable, fix="install a vLLM build for your hardware")


def with_default_model(arguments: list[str]) -> list[str]:
    """Return the arguments; if they name no model, with the embedded one and what it needs."""
    told = VllmArguments(tuple(arguments))
    if told.model or told.given("--model") or told.given("--config"):
        return list(arguments)
    model = embedded_model()
    added = [part for name, value in _EMBEDDED_DEFAULTS if not told.given(name) for part in (name, value)]
    if not told.any_begins(*_COMPILING):
        added.append("--enforce-eager")
    print(f"vllm-graft: no model named, serving the embedded one with {' '.join(added)}", file=sys.stderr)
    return [str(model), *arguments, *added]
