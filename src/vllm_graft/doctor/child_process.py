"""A child process in a session of its own, which ends with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_TAIL_BYTES: Final = 16_384  # the part of the output that is kept: a plugin in a loop may print gigabytes


@dataclass(frozen=True, slots=True)
class ChildExit:
    """The end of a child: its status as subprocess has it, None for a timeout; and the end of its output."""

    status: int | None
    output: str

    @property
    def signal(self) -> str:
        """The name of the signal that ended it; empty if none did."""
        if self.status is None or self.status >= 0:
            return ""
        try:
            return signal.Signals(-self.status).name
        except ValueError:
            return f"signal {-self.status}"

    @property
    def last_line(self) -> str:
        """The last line of its output, cut to fit a sentence."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1][:200] if lines else ""

    def describe(self) -> str:
        """Say how it ended, for a child that should not have."""
        if self.status is None:
            return "does not come to an end"
        return f"is ended by {self.signal}" if self.signal else f"ends the process with status {self.status}"


def run(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> ChildExit:
    """Run a command without input until it ends or times out, and kill everything it started."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environ),
        # A session of its own: by its number the processes are found that a plugin leaves behind.
        start_new_session=True,
    )
    assert child.stdout is not None
    stream, tail = child.stdout, bytearray()

    def keep_tail() -> None:
        with contextlib.suppress(OSError, ValueError):
            while chunk := os.read(stream.fileno(), 65_536):
                tail.extend(chunk)
                del tail[:-_TAIL_BYTES]

    reader = threading.Thread(target=keep_tail, daemon=True)
    reader.start()
    status: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(timeout_s)
    finally:
        for pid in _family(child.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if child.poll() is None:
            child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
        reader.join(5)
        if not reader.is_alive():
            stream.close()
    return ChildExit(status, bytes(tail).decode("utf-8", errors="replace"))


def run_task(
    command: Sequence[str], task: Mapping[str, object], environ: Mapping[str, str], timeout_s: float
) -> tuple[ChildExit, dict[str, Any]]:
    """Run a command on a file with a task as JSON, in whose place it writes its report, and return the report."""
    with tempfile.TemporaryDirectory(prefix="vllm-graft-") as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        ended = run([*command, str(file)], environ, timeout_s)
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            report = {}
    return ended, report


def _family(first: int) -> list[int]:
    """Return a process, its descendants and its session's processes, by /proc if there is one."""
    kin: dict[int, tuple[int, int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            kin[int(file.parent.name)] = int(fields[1]), int(fields[3])
    found = [pid for pid, (_, session) in kin.items() if session == first or pid == first]
    for pid in found:
        found += [one for one, (parent, _) in kin.items() if parent == pid and one not in found]
    return found
